"""Key covariance, causal tracing and LoRA on tiny random models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from editable_cache.comparison.blocks import Blocks, keys_of
from editable_cache.comparison.covariance import fingerprint, key_covariances, text_ids
from editable_cache.comparison.lora import LoraSettings, lora
from editable_cache.comparison.request import Prompt
from editable_cache.comparison.trace import causal_trace, mean_effects
from editable_cache.errors import ResultsError, TaskError, UnsupportedModelError
from editable_cache.ops import checksum
from editable_cache.testing.tiny_models import tiny_model, tiny_tokenizer

IDS = torch.randint(300, (600,), generator=torch.Generator().manual_seed(3))


def checksums(model: nn.Module) -> dict[str, str]:
    return {name: checksum(value) for name, value in model.state_dict().items()}


# -- covariance


def test_the_covariance_is_the_mean_outer_product_of_the_inputs() -> None:
    """Against the inputs of a plain forward over each window, uncentred, in float64."""
    blocks = Blocks.of(tiny_model("llama"))
    found = key_covariances(blocks, IDS, (0, 2))
    seen: list[torch.Tensor] = []
    handle = blocks.projections[2].register_forward_pre_hook(lambda _, args: seen.append(args[0][0].double()))
    with torch.no_grad():
        for window in IDS.split(256):
            blocks.model(input_ids=window[None], use_cache=False)
    handle.remove()
    keys = torch.cat(seen)
    assert keys.shape == (600, 96)
    torch.testing.assert_close(found[2].matrix, keys.T @ keys / 600, rtol=1e-5, atol=1e-7)
    assert found[2].tokens == 600
    centred = (keys - keys.mean(0)).T @ (keys - keys.mean(0)) / 600
    assert float((found[2].matrix - centred).abs().max()) > 1e-2 * float(centred.abs().max())
    assert float((found[2].matrix - found[0].matrix).abs().max()) > 1e-2


def test_a_bos_is_read_and_not_counted() -> None:
    blocks = Blocks.of(tiny_model("llama"))
    plain, led = (key_covariances(blocks, IDS[:120], (0,), bos=bos)[0] for bos in (None, 7))
    assert led.tokens == 120
    keys = keys_of(blocks, torch.tensor([[7, *IDS[:120].tolist()]]), (0,))[0][0, 1:].double()
    torch.testing.assert_close(led.matrix, keys.T @ keys / 120, rtol=1e-5, atol=1e-7)
    assert float((led.matrix - plain.matrix).abs().max()) > 1e-4


def test_a_covariance_is_kept_and_known_again(tmp_path: Path) -> None:
    blocks = Blocks.of(tiny_model("llama"))
    first = key_covariances(blocks, IDS, (1,), folder=tmp_path)[1]
    (path,) = tmp_path.iterdir()
    assert path.stem == fingerprint(blocks, IDS, 1)
    again = key_covariances(blocks, IDS, (1,), folder=tmp_path)[1]
    assert torch.equal(first.matrix, again.matrix)
    assert again.seconds == pytest.approx(first.seconds, abs=1e-3)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ResultsError, match="delete it"):
        key_covariances(blocks, IDS, (1,), folder=tmp_path)


def test_another_text_layer_or_weight_is_another_covariance() -> None:
    blocks = Blocks.of(tiny_model("llama"))
    changed = IDS.clone()
    changed[0] += 1
    names = {fingerprint(blocks, IDS, 1), fingerprint(blocks, changed, 1), fingerprint(blocks, IDS, 2),
             fingerprint(blocks, IDS, 1, bos=7)}  # fmt: skip
    assert len(names) == 4
    with torch.no_grad():
        blocks.projections[0].weight[0, 0] += 1
    assert fingerprint(blocks, IDS, 1) not in names


def test_too_little_text_is_refused() -> None:
    blocks = Blocks.of(tiny_model("llama"))
    with pytest.raises(TaskError, match="at least 96 tokens"):
        key_covariances(blocks, IDS[:95], (1,))
    with pytest.raises(TaskError, match="expected a text of 50 tokens"):
        text_ids(tiny_tokenizer(), ["short"], 50)
    assert text_ids(tiny_tokenizer(), ["a text\n\nof two parts"] * 9, 30).shape == (30,)


# -- tracing


def test_tracing_finds_the_only_layer_that_carries_the_subject() -> None:
    """A model whose blocks add nothing but one MLP: what it adds can only come back there."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=6,
                                         num_attention_heads=2, num_key_value_heads=2)).eval()  # fmt: skip
    blocks = Blocks.of(model)
    with torch.no_grad():
        for layer, block in enumerate(blocks.layers):
            part: Any = block
            part.self_attn.o_proj.weight.zero_()
            blocks.projections[layer].weight.mul_(400.0 if layer == 4 else 0.0)
    prompt = Prompt((3, 11, 25), (1, 3))
    with torch.no_grad():
        answer = int(model(input_ids=torch.tensor([prompt.ids])).logits[0, -1].argmax())
    trace = causal_trace(blocks, prompt, answer, window=1, samples=8)
    assert trace.spoiled < 0.8 * trace.clean
    assert int(mean_effects([trace]).argmax()) == 4
    others = trace.effects[[0, 1, 2, 3, 5]]
    assert float(others.abs().max()) < 1e-6
    elsewhere = causal_trace(blocks, Prompt((3, 11, 25), (0, 1)), answer, window=1)
    assert abs(elsewhere.spoiled - elsewhere.clean) < 1e-6  # noise where the answer does not come from


def test_a_window_is_put_back_whole() -> None:
    blocks = Blocks.of(tiny_model("llama"))
    trace = causal_trace(blocks, Prompt((3, 11, 25), (1, 3)), 40, window=5, samples=2)
    assert trace.restored.shape == (3,)
    assert torch.unique(trace.restored).numel() == 1  # all windows hold all three layers


# -- LoRA


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_lora_flips_the_answer_and_leaves_no_trace(family: str) -> None:
    model = tiny_model(family)
    ids, target = (5, 9, 23, 40, 7), 33
    before, names = checksums(model), [name for name, _ in model.named_modules()]
    with torch.no_grad():
        plain = model(input_ids=torch.tensor([ids])).logits
    assert int(plain[0, -1].argmax()) != target
    settings = LoraSettings(learning_rate=3e-2, steps=60)
    with lora(model, ids, target, settings=settings) as edit:
        assert edit.flipped
        assert edit.losses[-1] < edit.losses[0]
        with torch.no_grad():
            assert int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()) == target
        assert any("lora_A" in name for name, _ in model.named_modules())
    assert checksums(model) == before
    assert [name for name, _ in model.named_modules()] == names
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert "peft_config" not in vars(model)
    with torch.no_grad():
        assert torch.equal(model(input_ids=torch.tensor([ids])).logits, plain)


def test_lora_is_removed_after_an_exception_and_can_come_again() -> None:
    model = tiny_model("llama")
    before = checksums(model)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="inside"), lora(model, (1, 2), 3, settings=LoraSettings(steps=1)):
            raise RuntimeError("inside")
        assert checksums(model) == before


def test_lora_says_when_it_did_not_flip() -> None:
    with lora(tiny_model("llama"), (5, 9, 23), 33, settings=LoraSettings(steps=0)) as edit:
        assert not edit.flipped
        assert len(edit.losses) == 1


def test_lora_draws_no_random_number_of_others() -> None:
    model, state = tiny_model("llama"), torch.random.get_rng_state()
    with lora(model, (1, 2), 3, settings=LoraSettings(steps=1)):
        assert torch.equal(torch.random.get_rng_state(), state)


def test_lora_refuses_adapters_and_empty_prompts() -> None:
    model = tiny_model("llama")
    with pytest.raises(TaskError), lora(model, (), 3):
        pass
    with lora(model, (1, 2), 3, settings=LoraSettings(steps=1)):
        with pytest.raises(UnsupportedModelError, match="adapters"), lora(model, (1, 2), 3):
            pass
        with pytest.raises(UnsupportedModelError, match=r"mlp\.down_proj"):
            Blocks.of(model)
