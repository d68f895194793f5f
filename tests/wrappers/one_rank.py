"""One process of a tensor-parallel group: run by test_tensor_parallel.py, with the folder of a model as argument."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

warnings.simplefilter("ignore")
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import pytest  # noqa: E402
import torch  # noqa: E402
from cache_support import forward  # noqa: E402
from torch import distributed  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from transformers import AutoModelForCausalLM, DynamicCache  # noqa: E402
from wrapper_support import CHUNK, HEAD, check_edits, check_generate, check_splice  # noqa: E402

from editable_cache import CompatibilityError, EditableCache, Skill  # noqa: E402
from editable_cache.adapters import identify, weights_state  # noqa: E402
from editable_cache.testing import oracles  # noqa: E402


def main(folder: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    split = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto", dtype=torch.float32).eval()
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    split.generation_config.eos_token_id = whole.generation_config.eos_token_id = None
    assert isinstance(split.model.layers[0].self_attn.k_proj.weight, DTensor)

    stock = DynamicCache()
    forward(stock, CHUNK[None], model=split)
    cache = EditableCache(split)
    cache.append(HEAD)
    skill = Skill.precompile(split, None, CHUNK, name="s")
    cache.splice(skill, seam_tokens=0)
    heads = whole.config.num_key_value_heads // 2
    assert cache.layers[0].keys.shape[1] == stock.layers[0].keys.shape[1] == heads  # the heads of this rank only
    expected = oracles.iso(whole, CHUNK, torch.arange(len(CHUNK)) + len(HEAD))
    for mine in range(2):  # this rank's heads, and as a control the other's
        keys = [layer.view(len(HEAD))["keys"] for layer in cache.editable_layers]
        wanted = [k[:, heads * mine : heads * (mine + 1)] for k in expected.keys]
        if mine == rank:
            oracles.check(keys, wanted)
        else:
            with pytest.raises(AssertionError):
                oracles.check(keys, wanted)
    check_edits(cache)
    check_edits(check_generate(split, whole))
    check_splice(split, split)

    replica = torch.nn.parallel.DistributedDataParallel(whole)
    check_edits(check_splice(replica, whole))
    check_edits(check_generate(whole, whole))
    seen = EditableCache(replica)
    forward(seen, HEAD[None], model=replica)
    assert torch.equal(seen.token_ids[0], HEAD)

    # a chunk is a part of one: neither the whole model nor the other rank may take it
    assert weights_state(split) == weights_state(split)
    weights: list[str | None] = [None, None]
    distributed.all_gather_object(weights, identify(split).weights)
    assert len({*weights, identify(whole).weights}) == 3
    plain = EditableCache(whole)
    plain.append(HEAD)
    with pytest.raises(CompatibilityError):
        plain.splice(skill)
    with torch.no_grad():
        split.model.layers[1].self_attn.k_proj.weight.to_local()[3] += 1
    with pytest.raises(CompatibilityError, match="weights"):
        cache.splice(skill)
    print(f"rank {rank} is right", flush=True)
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
