"""Models whose positions are slots, blocks of attention beside padding, and functions that show far away only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from editable_cache import EditableCache, Skill, SpanError, UnsupportedModelError
from editable_cache.adapters import measured
from editable_cache.testing import oracles, zoo
from editable_cache.testing.contents import cells_in
from editable_cache.testing.tiny_models import tiny_model


def filled(model: PreTrainedModel, *parts: Tensor) -> EditableCache:
    cache = EditableCache(model)
    for part in parts:
        cache.append(part)
    return cache


@pytest.mark.parametrize("name", ["bart", "roformer"])
def test_rows_of_different_lengths_where_the_slot_tells(name: str) -> None:
    """A shorter row would go on at the slot behind its padding, and its tokens were computed at slots from 0 on."""
    model = zoo.build(name)
    ids = zoo.ids_for(model, 30, seed=1)
    short, long = filled(model, ids[:5]), filled(model, ids[10:21])
    with pytest.raises(UnsupportedModelError, match="padding would be counted"):
        EditableCache.stack([short, long])
    both = EditableCache.stack([long, long])
    both.append(ids[25:30])
    oracles.check(cells_in(both.unstack()[1]), cells_in(filled(model, ids[10:21], ids[25:30])))


@pytest.mark.parametrize("name", ["bloom", "mpt", "mamba2", "jamba"])
def test_padding_in_front_is_no_gap_where_only_distances_count(name: str) -> None:
    """ALiBi and attention without positions: a chunk can be spliced into rows of different lengths."""
    model = zoo.build(name)
    ids = zoo.ids_for(model, 60, seed=1)
    chunk = Skill.precompile(model, None, ids[30:45], name="chunk")
    both = EditableCache.stack([filled(model, ids[:5]), filled(model, ids[10:21])])
    both.splice(chunk)
    both.append(ids[50:55])
    for row, start in zip(both.unstack(), (ids[:5], ids[10:21]), strict=True):
        alone = filled(model, start)
        alone.splice(chunk)
        alone.append(ids[50:55])
        oracles.check({"logits": row.next_token_logits()}, {"logits": alone.next_token_logits()})


def test_blocks_begin_behind_the_padding_of_each_row() -> None:
    """Llama 4: transformers counts its blocks from the first token of a row."""
    model = zoo.build("llama4_text")
    ids = zoo.ids_for(model, 40, seed=1)
    starts = (ids[:5], ids[10:21])
    both = EditableCache.stack([filled(model, start, ids[30:37]) for start in starts])
    length = len(both.token_ids[0])
    both.recompute((length - 6, length - 2))
    for row, start in zip(both.unstack(), starts, strict=True):
        oracles.check(cells_in(row), cells_in(filled(model, start, ids[30:37])))


@pytest.mark.parametrize("name", ["bloom", "roformer", "bart"])
def test_next_logits_where_chosen_cells_cannot_run_again(name: str) -> None:
    model = zoo.build(name)
    ids = zoo.ids_for(model, 14, seed=1)
    cache = filled(model, ids[:9], ids[9:])
    before = {key: value.clone() for key, value in cells_in(cache).items()}
    oracles.check(cache.next_token_logits(), oracles.full(model, ids).logits[:, -1])
    assert all(torch.equal(value, before[key]) for key, value in cells_in(cache).items())
    assert cache.verify().ok


@pytest.mark.skipif("dory" not in zoo.model_types(), reason="this transformers does not know it")
def test_verify_where_a_model_adds_layers_while_it_runs() -> None:
    model = zoo.build("dory")
    cache = filled(model, zoo.ids_for(model, 12, seed=1))
    assert cache.verify().ok


def _bent(model: Any, angle: Callable[[Tensor], Tensor]) -> None:
    """Let the rotary embedding turn by ``angle(positions)`` instead of the positions, unknown to the config."""
    rotary = model.model.rotary_emb

    def forward(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        half = angle(position_ids.float())[..., None] * rotary.inv_freq
        whole = torch.cat((half, half), dim=-1)
        return whole.cos().to(x.dtype), whole.sin().to(x.dtype)

    rotary.forward = forward


def _hotter(model: Any, slots: int) -> None:
    """Let attention scale its queries once the cache holds ``slots`` tokens, unknown to the config."""
    for layer in model.model.layers:
        attention = layer.self_attn

        def forward(*args: Any, _attention: Any = attention, _own: Any = attention.forward, **kwargs: Any) -> Any:
            cache: Any = kwargs.get("cache", kwargs.get("past_key_values"))
            plain = _attention.scaling
            _attention.scaling = plain * (2 if cache.get_seq_length(_attention.layer_idx) >= slots else 1)
            try:
                return _own(*args, **kwargs)
            finally:
                _attention.scaling = plain

        attention.forward = forward


FAR: dict[str, Callable[[Any], None]] = {
    "other frequencies from position 600 on": lambda m: _bent(m, lambda p: p.where(p < 600, 300 + p / 2)),
    "other frequencies once a text is longer than 600": lambda m: _bent(m, lambda p: p / (2 if p.max() > 600 else 1)),
    "scaled queries from slot 64 on": lambda m: _hotter(m, 64),
}


@pytest.mark.parametrize("change", FAR)
def test_what_no_config_names_and_shows_far_away_only(change: str) -> None:
    model = tiny_model("llama")
    model.config.max_position_embeddings = 4096
    FAR[change](model)
    assert measured(model).against_moving
    plain = tiny_model("llama")
    plain.config.max_position_embeddings = 4096
    _bent(plain, lambda p: p)
    assert not measured(plain).against_moving


@pytest.mark.parametrize("shorten", ["crop", "sync", "remove", "generate"])
def test_what_is_left_of_a_long_text_is_stale(shorten: str) -> None:
    """LongRoPE turns all of a text by other frequencies once it passes the limit, and what comes next by the first."""
    model = zoo.build("phi3:longrope")
    limit = measured(model).limit
    assert limit is not None
    ids = zoo.ids_for(model, limit.value + 30, seed=1)
    cache = filled(model, ids[: limit.value + 10])
    assert not cache.ledger.stale
    kept = ids[:50]
    if shorten == "crop":
        cache.crop(50 - len(cache.token_ids[0]))
    elif shorten == "sync":
        cache.sync(torch.cat((kept, ids[-5:])))
    elif shorten == "remove":
        cache.remove(slice(50, None))
    else:
        model.generate(kept[None], past_key_values=cache, max_new_tokens=1)  # type: ignore[operator]
    assert cache.ledger.stale[0].start == 0
    assert "frequencies beyond position" in cache.ledger.stale[0].cause
    cache.recompute(slice(None))
    assert not cache.ledger.stale
    oracles.check(cells_in(cache), cells_in(filled(model, cache.token_ids[0])))


def test_part_of_a_long_text_is_not_computed_or_cut_out_alone() -> None:
    model = zoo.build("phi3:longrope")
    limit = measured(model).limit
    assert limit is not None
    cache = filled(model, zoo.ids_for(model, limit.value + 10, seed=1))
    before = cells_in(cache)
    with pytest.raises(SpanError, match="other frequencies"):
        cache.recompute((5, 9))
    with pytest.raises(SpanError, match="expected positions below"):
        cache.extract((5, 15))
    assert all(torch.equal(value, before[key]) for key, value in cells_in(cache).items())
    cache.recompute((limit.value, limit.value + 4))
    oracles.check(cells_in(cache), before)


def test_a_self_test_that_could_not_run_is_not_remembered() -> None:
    """It may have lacked memory for a moment."""
    model = tiny_model("llama")

    def fail(*_: object) -> None:
        raise MemoryError

    handle = model.lm_head.register_forward_hook(fail)
    assert measured(model).against_continuing
    handle.remove()
    assert not measured(model).against_continuing
    filled(model, torch.arange(10, 20))
