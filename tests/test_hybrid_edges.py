"""Recurrent layers in unusual use: failures half-way, batches, chunks that do not fit, other ways to generate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from editable_cache import CompatibilityError, EditableCache, Skill, UnsupportedModelError
from editable_cache.cache import Segment
from editable_cache.chunk import KVChunk, Recurrence
from editable_cache.forward.append import add
from editable_cache.forward.outcome import operating
from editable_cache.testing import oracles, zoo
from editable_cache.testing.contents import cells_in, must_differ, recurrent_in


class _InterruptError(Exception):
    pass


@contextmanager
def failing(model: nn.Module) -> Iterator[None]:
    """Every forward of ``model`` fails in its last linear layer."""

    def fail(*_: object) -> None:
        raise _InterruptError

    last = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
    handle = last.register_forward_hook(fail)
    try:
        yield
    finally:
        handle.remove()


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return zoo.build("falcon_h1")


@pytest.fixture(scope="module")
def ids(model: PreTrainedModel) -> Tensor:
    return zoo.ids_for(model, 60, seed=1)


def filled(model: PreTrainedModel, *parts: Tensor) -> EditableCache:
    cache = EditableCache(model)
    for part in parts:
        cache.append(part)
    return cache


def contents(cache: EditableCache) -> dict[str, Tensor]:
    """Everything that a later operation starts from, marks too."""
    marked = {
        f"mark {slot} layer {i} {kind} {j}": tensor.clone()
        for slot, states in cache.marks.items()
        for i, value in enumerate(states)
        for kind, part in (("conv", value.conv), ("recurrent", value.recurrent))
        for j, tensor in part.items()
        if tensor is not None
    }
    return {"ids": cache.token_ids.float(), **cells_in(cache), **recurrent_in(cache), **marked}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() >= expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def assert_full(cache: EditableCache, ids: Tensor) -> None:
    assert cache.token_ids[0].tolist() == ids.tolist()
    assert cache.model is not None
    plain = oracles.full(cache.model, ids, torch.arange(len(ids)))  # type: ignore[arg-type]
    expected = {"logits": plain.logits[:, -1], **plain.cells, **plain.states}
    oracles.check({"logits": cache.next_token_logits(), **cells_in(cache), **recurrent_in(cache)}, expected, 1e-4)


@pytest.mark.parametrize("name", ["falcon_h1", "mamba2", "lfm2"])
def test_a_crop_that_fails_half_way_changes_nothing(name: str) -> None:
    """The tokens behind the last kept state run again in a crop; where nothing is stored by token, a half crop would
    not even be noticed."""
    model = zoo.build(name)
    ids = zoo.ids_for(model, 30, seed=1)
    cache = filled(model, ids[:10], ids[10:20])
    before = contents(cache)
    with failing(model), pytest.raises(_InterruptError):
        cache.crop(-3)
    assert_same(contents(cache), before)
    cache.crop(-3)
    must_differ(recurrent_in(cache), recurrent_in(filled(model, ids[:20])))
    oracles.check(recurrent_in(cache), recurrent_in(filled(model, ids[:17])))


def test_a_covered_prompt_that_fails_half_way_changes_nothing(model: PreTrainedModel, ids: Tensor) -> None:
    """``generate`` goes back behind the last token of a covered prompt before it runs it."""
    cache = filled(model, ids[:10], ids[10:20])
    before = contents(cache)
    with failing(model), pytest.raises(_InterruptError):
        model.generate(ids[None, :18], past_key_values=cache, max_new_tokens=2)  # type: ignore[operator]
    assert_same(contents(cache), before)
    assert all(layer.undo is None for layer in cache.editable_layers)


def test_a_batch_that_fails_leaves_the_kept_states_of_one_row(model: PreTrainedModel, ids: Tensor) -> None:
    cache = filled(model, ids[:10], ids[10:20])
    before = contents(cache)
    with failing(model), pytest.raises(_InterruptError):
        model(ids[20:23].expand(3, -1), past_key_values=cache)
    assert_same(contents(cache), before)
    cache.remove((12, 14))
    assert_full(cache, torch.cat((ids[:12], ids[14:20])))


@pytest.mark.parametrize("name", ["llama", "falcon_h1"])
def test_a_batch_that_fails_leaves_the_token_that_waits(name: str) -> None:
    model = zoo.build(name)
    ids = zoo.ids_for(model, 20, seed=1)
    cache = EditableCache(model)
    out = model.generate(**cache.inputs(ids[:10]), past_key_values=cache, max_new_tokens=3)  # type: ignore[operator]
    with failing(model), pytest.raises(_InterruptError):
        model(ids[10:13].expand(3, -1), past_key_values=cache)
    cache.append(ids[10:13])
    assert_full(cache, torch.cat((out[0], ids[10:13])))


def test_layers_reset_by_hand_forget_the_kept_states(model: PreTrainedModel, ids: Tensor) -> None:
    cache = filled(model, ids[:10], ids[10:20])
    for layer in cache.layers:
        layer.reset()
    cache.append(ids[30:55])
    cache.remove((20, 22))
    assert_full(cache, torch.cat((ids[30:50], ids[52:55])))


def test_states_born_in_inference_mode_go_on_outside(model: PreTrainedModel, ids: Tensor) -> None:
    with torch.inference_mode():
        cache = filled(model, ids[:10])
        model(ids[None, 10:14], past_key_values=cache)
    cache.append(ids[14:20])
    cache.remove((4, 6))
    assert_full(cache, torch.cat((ids[:4], ids[6:20])))


@pytest.mark.parametrize("name", ["lfm2", "inkling_text"])
def test_drafts_are_taken_back_where_stock_takes_them_back(name: str) -> None:
    """Layers with nothing but a convolution window: transformers crops its own layers there."""
    model = zoo.build(name)
    ids = zoo.ids_for(model, 20, seed=1)
    prompt = torch.cat((ids[:12], ids[:12], ids[:5]))
    options = {"max_new_tokens": 10, "do_sample": False}
    plain = model.generate(prompt[None], **options)  # type: ignore[operator]
    cache = filled(model, prompt[:10])
    drafted = model.generate(  # type: ignore[operator]
        **cache.inputs(prompt[10:]), past_key_values=cache, prompt_lookup_num_tokens=4, **options
    )
    assert drafted.tolist() == plain.tolist()
    assert_full(cache, plain[0, : len(cache.token_ids[0])])
    assert DynamicCache(config=model.config).is_croppable is EditableCache(config=model.config).is_croppable is False


@pytest.mark.parametrize("name", ["mamba", "falcon_mamba", "mamba2"])
def test_a_cache_of_states_only_counts_its_tokens(name: str) -> None:
    """transformers can't ask such a cache for its length, and feeds the whole prompt again."""
    model = zoo.build(name)
    ids = zoo.ids_for(model, 20, seed=1)
    options = {"max_new_tokens": 5, "do_sample": False}
    plain = model.generate(ids[None], **options)  # type: ignore[operator]
    for count in (20, 19):
        cache = filled(model, ids[:count])
        assert cache.get_seq_length() == count
        out = model.generate(**cache.inputs(ids[count:]), past_key_values=cache, **options)  # type: ignore[operator]
        assert out.tolist() == plain.tolist()


@pytest.mark.parametrize("name", ["mamba", "falcon_mamba"])
def test_padding_of_a_batch_scales_nothing_behind_it(name: str) -> None:
    """Mamba multiplies new tokens by any mask that it is given, also one over tokens that went before."""
    model = zoo.build(name)
    ids = zoo.ids_for(model, 40, seed=1)
    both = EditableCache.stack([filled(model, ids[:5]), filled(model, ids[10:21])])
    both.append(ids[30:35])
    for row, start in zip(both.unstack(), (ids[:5], ids[10:21]), strict=True):
        oracles.check(recurrent_in(row), recurrent_in(filled(model, start, ids[30:35])))


@pytest.mark.parametrize("name", ["falcon_h1", "qwen3_next", "lfm2", "mamba2"])
def test_padding_behind_tokens_is_refused(name: str) -> None:
    """It would be folded into the states of the shorter row."""
    model = zoo.build(name)
    ids = zoo.ids_for(model, 40, seed=1)
    both = EditableCache.stack([filled(model, ids[:9]), filled(model, ids[10:19])])
    before = contents(both)
    rows, valid = torch.stack((ids[20:25], ids[30:35])), torch.ones((2, 5), dtype=torch.bool)
    valid[1, :2] = False
    with pytest.raises(UnsupportedModelError, match="folded into the recurrent state"), operating(both, "x") as tally:
        add(both, None, tally, rows, Segment("rows", 0, 0, "prefilled"), valid=valid)
    assert_same(contents(both), before)


Change = Callable[[Recurrence], Recurrence]


def first(recurrence: Recurrence, **changes: object) -> Recurrence:
    """The same with something of its first transition replaced."""
    key, transition = next(iter(recurrence.transitions.items()))
    return replace(recurrence, transitions={**recurrence.transitions, key: replace(transition, **changes)})  # type: ignore[arg-type]


CHANGES: dict[str, Change] = {
    "a layer is missing": lambda r: replace(r, transitions=dict(list(r.transitions.items())[1:])),
    "another layer": lambda r: replace(r, transitions={**r.transitions, (99, 0): r.transitions[0, 0]}),
    "another state": lambda r: replace(r, transitions={**r.transitions, (0, 7): r.transitions[0, 0]}),
    "not a number": lambda r: first(r, offset=r.transitions[0, 0].offset * float("nan")),  # type: ignore[operator]
    "fewer heads": lambda r: first(r, offset=r.transitions[0, 0].offset[:, :1]),  # type: ignore[index]
    "a factor of another shape": lambda r: first(r, factor=torch.ones(1, 1, 1, 3)),
    "a shorter window": lambda r: first(r, conv=r.transitions[0, 0].conv[..., :1]),  # type: ignore[index]
    "fewer channels": lambda r: first(r, conv=r.transitions[0, 0].conv[:, :2]),  # type: ignore[index]
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_chunk_that_does_not_fit_the_states_is_refused(model: PreTrainedModel, ids: Tensor, change: str) -> None:
    good: KVChunk = Skill.precompile(model, None, ids[10:40], name="chunk")
    assert good.recurrence is not None
    bad = replace(good, recurrence=CHANGES[change](good.recurrence))
    cache = filled(model, ids[:10])
    before = contents(cache)
    with pytest.raises(CompatibilityError):
        cache.splice(bad)
    assert_same(contents(cache), before)
    cache.splice(good)


def test_verify_sees_states_that_are_no_numbers(model: PreTrainedModel, ids: Tensor) -> None:
    cache = filled(model, ids[:10])
    cache.splice(Skill.precompile(model, None, ids[10:40], name="chunk"))
    cache.append(ids[40:44])
    assert cache.verify().ok
    cache.state_layers[0].recurrent_states[0].fill_(float("nan"))  # type: ignore[attr-defined]
    assert not cache.verify().ok


@pytest.mark.parametrize("name", ["minimax", "rwkv"])
def test_a_model_that_uses_no_stock_cache_is_refused(name: str) -> None:
    model = zoo.build(name)
    with pytest.raises(UnsupportedModelError, match="prefill into a DynamicCache"):
        EditableCache(model).append(zoo.ids_for(model, 8, seed=1))
