"""What a chunk costs on hybrids of six layers: bytes, and time of a splice against a prefill. Used by `hybrids.py`."""

from __future__ import annotations

import copy
from typing import Any

import torch
from timing import milliseconds, paired, ratios
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel

from editable_cache import EditableCache, Skill
from editable_cache.testing import oracles
from editable_cache.testing.contents import cells_in, must_differ, recurrent_in
from editable_cache.testing.threaded import named_cells, threaded
from editable_cache.testing.zoo import weights

PREFIX = 256
CHUNKS = (64, 256, 1024)
VOCAB_SIZE = 1000
LINEAR, FULL = "linear_attention", "full_attention"
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gated delta net": (
        "qwen3_next",
        {
            "layer_types": [LINEAR, LINEAR, FULL] * 2,
            "mlp_only_layers": list(range(6)),
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 4,
        },
    ),
    "Mamba-2": (
        "bamba",
        {
            "attn_layer_indices": [2, 5],
            "mamba_n_heads": 8,
            "mamba_d_head": 64,
            "mamba_d_state": 64,
            "mamba_n_groups": 1,
        },
    ),
}


def cost(*, quick: bool) -> dict[str, Any]:
    """Bytes and times for each model and chunk length, outputs verified first."""
    found: dict[str, Any] = {"prefix_tokens": PREFIX, "hidden_size": 256, "layers": 6, "models": {}}
    for name, (model_type, values) in list(MODELS.items())[: 1 if quick else None]:
        config = AutoConfig.for_model(model_type, **{**COMMON, **values})
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        weights.draw(model, name, 0)
        model.requires_grad_(False)
        found["models"][name] = {
            str(tokens): measure(model, tokens, rounds=3 if quick else 15) for tokens in CHUNKS[: 2 if quick else None]
        }
    return found


def measure(model: PreTrainedModel, tokens: int, *, rounds: int) -> dict[str, Any]:
    """One chunk length: the chunk is appended, run by stock transformers, and spliced, taking turns."""
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(VOCAB_SIZE, (PREFIX + tokens + 4,), generator=generator)
    prefix, chunk, query = ids.split((PREFIX, tokens, 4))
    skill = Skill.precompile(model, None, chunk, name="chunk")
    assert skill.recurrence is not None
    start, stock = EditableCache(model), DynamicCache(config=model.config)
    start.append(prefix)
    _run(model, prefix, stock, at=0)
    verify(model, start, stock, skill, query)
    ready: dict[str, Any] = {}

    def prepare() -> None:
        ready.update(append=start.fork(), splice=start.fork(), stock=copy.deepcopy(stock))

    seconds = paired(
        {
            "stock": lambda: _run(model, chunk, ready["stock"], at=PREFIX, logits_to_keep=1),
            "append": lambda: ready["append"].append(chunk),
            "splice": lambda: ready["splice"].splice(skill),
        },
        rounds=rounds,
        prepare=prepare,
    )
    cells = skill.nbytes - skill.recurrence.nbytes
    return {
        "tokens_run_live": skill.recurrence.head + skill.recurrence.tail,
        "transition_bytes": skill.recurrence.nbytes,
        "cell_bytes": cells,
        "transitions_are_as_large_as_the_cells_of_tokens": round(skill.recurrence.nbytes / (cells / tokens), 1),
        "stock_prefill": milliseconds(seconds["stock"]),
        "append": milliseconds(seconds["append"]),
        "splice": milliseconds(seconds["splice"]),
        "stock_over_splice": ratios(seconds["stock"], seconds["splice"]),
        "append_over_splice": ratios(seconds["append"], seconds["splice"]),
    }


def verify(model: PreTrainedModel, start: EditableCache, stock: Any, skill: Skill, query: Tensor) -> None:
    """The appended chunk equals a stock prefill, the spliced one the THREADED oracle, and the two differ.

    Raises:
        AssertionError: otherwise.
    """
    assert skill.recurrence is not None
    appended, spliced, plain = start.fork(), start.fork(), copy.deepcopy(stock)
    appended.append(skill.token_ids)
    spliced.splice(skill)
    _run(model, skill.token_ids, plain, at=PREFIX)
    answers = [_run(model, query, cache, at=PREFIX + len(skill)) for cache in (appended, spliced, plain)]
    oracles.check(answers[0], answers[2])
    live = {"head": skill.recurrence.head, "tail": skill.recurrence.tail, "base": 0}
    result = threaded(model, start.token_ids, skill.token_ids[None], query[None], **live)
    expected = {"logits": result.logits, **named_cells(result.end)}
    oracles.check({"logits": answers[1], **cells_in(spliced), **recurrent_in(spliced)}, expected)
    must_differ(answers[0], result.logits)


def _run(model: PreTrainedModel, ids: Tensor, cache: Any, *, at: int, **options: Any) -> Tensor:
    """Logits of a stock forward. Positions are given: Bamba counts from 0 on a filled stock cache without them."""
    logits: Tensor = model(
        ids[None], position_ids=torch.arange(at, at + len(ids))[None], past_key_values=cache, **options
    ).logits
    return logits
