"""The last token that `generate` returns was never fed: what comes next must not lose it."""

from __future__ import annotations

import pytest
import torch

from editable_cache import EditableCache, Skill, SpanError
from editable_cache.adapters import host
from editable_cache.testing import oracles
from editable_cache.testing.tiny_models import tiny_model, tiny_tokenizer

PROMPT = torch.arange(3, 15)


@pytest.fixture
def model():
    return tiny_model("gemma3")


def answered(model, tokens: int = 4) -> tuple[EditableCache, torch.Tensor]:
    cache = EditableCache(model, tokenizer=tiny_tokenizer())
    sequence = model.generate(
        PROMPT[None], max_new_tokens=tokens, do_sample=False, **{host.cache_argument(model): cache}
    )
    return cache, sequence


def check_full(model, cache: EditableCache, ids: torch.Tensor) -> None:
    assert cache.token_ids.tolist() == ids.tolist()
    expected = oracles.full(model, ids)
    for layer, keys in zip(cache.editable_layers, expected.keys, strict=True):
        oracles.check(layer.keys, keys, what="keys")


@pytest.mark.parametrize("tokens", [1, 4])
def test_append_feeds_it_first(model, tokens):
    cache, sequence = answered(model, tokens)
    assert cache.token_ids.tolist() == sequence[:, :-1].tolist()
    cache.append([20, 21])
    check_full(model, cache, torch.cat((sequence, torch.tensor([[20, 21]])), dim=1))


def test_append_without_it_would_be_another_context(model):
    """The control: what stock transformers, and this cache before it remembered, would go on from."""
    cache, sequence = answered(model)
    cache.append([20, 21])
    with pytest.raises(AssertionError):
        check_full(model, cache, torch.cat((sequence[:, :-1], torch.tensor([[20, 21]])), dim=1))


def test_inputs_contain_it(model):
    cache, sequence = answered(model)
    assert cache.inputs([20])["input_ids"].tolist() == [[*sequence[0].tolist(), 20]]
    out = model.generate(**cache.inputs(), max_new_tokens=2, do_sample=False, **{host.cache_argument(model): cache})
    longer = model.generate(PROMPT[None], max_new_tokens=6, do_sample=False)
    assert out.tolist() == longer.tolist()


def test_splice_at_the_end_feeds_it_first(model):
    cache, sequence = answered(model)
    cache.splice(Skill.precompile(model, None, [30, 31, 32], name="s"), seam_tokens=0)
    assert cache.token_ids[0].tolist() == [*sequence[0].tolist(), 30, 31, 32]
    assert cache.verify().ok


def test_edits_in_the_middle_leave_it_waiting(model):
    cache, sequence = answered(model)
    cache.remove((4, 6))
    cache.insert([40], 5)
    cache.append([20])
    assert cache.token_ids[0, -2:].tolist() == [int(sequence[0, -1]), 20]


def test_an_erratum_comes_behind_it(model):
    cache = EditableCache(model, tokenizer=tiny_tokenizer())
    cache.append("status: {s} .\n", fields={"s": "pending"})
    cache.erratum("s", "delivered")
    out = model.generate(**cache.inputs(), max_new_tokens=1, do_sample=False, **{host.cache_argument(model): cache})
    cache.erratum("s", "lost")
    length = out.shape[1]
    assert cache.token_ids[0, :length].tolist() == out[0].tolist()
    assert [erratum.value for erratum in cache.field("s").errata] == ["delivered", "lost"]


def test_it_goes_along_with_forks_checkpoints_and_files(model, tmp_path):
    cache, sequence = answered(model)
    cache.checkpoint()
    twin = cache.fork()
    cache.save_pretrained(tmp_path)
    loaded = EditableCache.from_pretrained(tmp_path, model=model)
    cache.append([20])
    cache.rollback()
    for held in (cache, twin, loaded):
        held.append([21])
        assert held.token_ids[0].tolist() == [*sequence[0].tolist(), 21]


def test_crop_and_a_bare_forward_let_it_go(model):
    cache, sequence = answered(model)
    cache.crop(-1)
    cache.append([20])
    assert cache.token_ids[0].tolist() == [*sequence[0, :-2].tolist(), 20]
    cache, sequence = answered(model)
    with torch.no_grad():
        model(torch.tensor([[20]]), **{host.cache_argument(model): cache})
    cache.append([21])
    assert cache.token_ids[0].tolist() == [*sequence[0, :-1].tolist(), 20, 21]


def test_a_failed_append_keeps_it(model):
    cache, sequence = answered(model)
    with pytest.raises(SpanError):
        cache.append([10**6])
    cache.append([20])
    assert cache.token_ids[0].tolist() == [*sequence[0].tolist(), 20]


def test_stack_and_unstack(model):
    first, sequence = answered(model)
    second, _ = answered(model, 2)
    stacked = EditableCache.stack([first, second])
    rows = stacked.unstack()
    rows[0].append([20])
    assert rows[0].token_ids[0].tolist() == [*sequence[0].tolist(), 20]
    second.append("")
    with pytest.raises(SpanError, match="append"):
        EditableCache.stack([first, second])
