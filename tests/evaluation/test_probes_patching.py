"""Patched caches, heads and streams against plain forwards of stock transformers."""

from __future__ import annotations

import pytest
import torch
from probe_items import items, situation, subject
from torch import Tensor
from transformers import DynamicCache

from editable_cache.adapters import host
from editable_cache.errors import TaskError, UnsupportedModelError
from editable_cache.evaluation.probes.locality import prefix_deviation
from editable_cache.evaluation.probes.onward import Edit, continued, continued_heads
from editable_cache.evaluation.probes.pairs import Pair, Situation
from editable_cache.evaluation.probes.patching import Patcher
from editable_cache.evaluation.probes.prefill import Prefilled, Prefills
from editable_cache.evaluation.probes.subject import Subject
from editable_cache.testing import oracles
from editable_cache.testing.tiny_models import tiny_model, tiny_tokenizer

FAMILIES = ("llama", "qwen3", "gemma3", "gemma2", "cohere", "glm")
TOLERANCE = 2e-5


def off(found: Tensor, expected: Tensor) -> float:
    """Error relative to the largest logit."""
    return float((found - expected).abs().max() / expected.abs().max())


def stock(model: Subject, base: Prefilled, other: Prefilled, mask: Tensor) -> Tensor:
    """Logits of a stock cache that holds ``other``'s cells where the mask is set, by a plain call of the model."""
    cache: DynamicCache = host.full_cache(model.model.config)
    for index, (mine, theirs) in enumerate(zip(base.cells, other.cells, strict=True)):
        keys, values = (torch.where(mask[None, None, :, None], theirs[n], mine[n]) for n in ("keys", "values"))
        cache.update(keys.clone(), values.clone(), index)
    last = base.length - 1
    with torch.no_grad():
        found: Tensor = model.model(
            input_ids=base.ids[None, last:],
            position_ids=torch.tensor([[last]]),
            **{host.cache_argument(model.model): cache},
        ).logits
    return found[0, -1]


@pytest.mark.parametrize("family", FAMILIES)
def test_everything_patched_is_the_other_prompt_and_nothing_is_the_base(family: str) -> None:
    pair = situation(family=family).field_pair
    model = subject(family)
    nothing = torch.zeros(pair.base.length - 1, dtype=torch.bool)
    found = Patcher(model, pair.base).logits(pair.other, torch.stack([nothing, ~nothing]))
    base, other = (oracles.full(model.model, each.ids).logits[0, -1] for each in (pair.base, pair.other))
    assert off(found[0], base) < TOLERANCE
    assert off(found[1], other) < TOLERANCE
    assert off(found[0], other) > 100 * TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_a_patched_row_is_a_stock_cache_with_these_cells_whatever_stands_beside_it(family: str) -> None:
    pair = situation(family=family).field_pair
    model = subject(family)
    masks = torch.rand((5, pair.base.length - 1), generator=torch.Generator().manual_seed(0)) < 0.3
    patcher = Patcher(model, pair.base, most_rows=3)
    found = patcher.logits(pair.other, masks)
    expected = torch.stack([stock(model, pair.base, pair.other, mask) for mask in masks])
    assert off(found, expected) < TOLERANCE
    assert off(found, expected.roll(1, 0)) > 100 * TOLERANCE
    assert torch.equal(patcher.logits(pair.other, masks), found), "rows are written back"


def test_layers_out_of_order_and_cells_of_an_unrelated_prompt_recover_nothing() -> None:
    pair = situation().field_pair
    strangers = (situation("gated", number=number).prompt("new") for number in range(1, 8))
    everything = torch.ones((1, pair.base.length - 1), dtype=torch.bool)
    patcher = Patcher(subject(), pair.base)
    reverse = Prefilled(**{**vars(pair.other), "cells": pair.other.cells[::-1]})
    assert abs(pair.recovery(float(pair.gap(patcher.logits(reverse, everything))[0])) - 1) > 0.1
    stranger = next(prompt for prompt in strangers if prompt.length == pair.base.length)
    assert abs(pair.recovery(float(pair.gap(patcher.logits(stranger, everything))[0])) - 1) > 0.1


def test_masks_by_layer_are_of_that_layer() -> None:
    pair, model = situation().field_pair, subject()
    layers, tokens = model.num_layers, pair.base.length - 1
    masks = torch.zeros((2, layers, tokens), dtype=torch.bool)
    masks[0, 1] = True
    found = Patcher(model, pair.base).logits(pair.other, masks)
    mixed = tuple(pair.other.cells[i] if i == 1 else cells for i, cells in enumerate(pair.base.cells))
    donor = Prefilled(**{**vars(pair.other), "cells": mixed})
    expected = stock(model, pair.base, donor, torch.ones(tokens, dtype=torch.bool))
    assert off(found[0], expected) < TOLERANCE
    assert off(found[1], expected) > 10 * TOLERANCE


def test_cells_of_another_length_are_refused() -> None:
    pair, model = situation().field_pair, subject()
    other = situation("trigger").prompt("old")
    assert other.length != pair.base.length
    with pytest.raises(TaskError, match=f"cells and masks of {pair.base.length - 1} tokens"):
        Patcher(model, pair.base).logits(other, torch.ones((1, pair.base.length - 1), dtype=torch.bool))


@pytest.mark.parametrize("family", FAMILIES)
def test_one_head_adds_its_own_part_of_the_projection(family: str) -> None:
    pair, model = situation(family=family).field_pair, subject(family)
    patcher = Patcher(model, pair.base)
    sources = Patcher(model, pair.other, most_rows=1).head_outputs()
    own = patcher.head_outputs()
    masks = torch.zeros((3, model.num_layers, model.num_heads), dtype=torch.bool)
    masks[1, 1, 2], masks[2] = True, True
    found = patcher.heads(sources, masks)
    assert off(found[0], pair.base.logits) < TOLERANCE
    assert off(found[2], pair.other.logits) < TOLERANCE, "all heads: the last token's own embedding is the same"
    cut = slice(2 * model.head_dim, 3 * model.head_dim)
    change = model.projections[1].weight[:, cut] @ (sources[1][cut] - own[1][cut])
    assert off(found[1], _adding(model, pair.base, 1, change)) < TOLERANCE
    assert off(found[1], _adding(model, pair.base, 1, -change)) > 10 * TOLERANCE


def _adding(model: Subject, base: Prefilled, layer: int, change: Tensor) -> Tensor:
    """Logits of a whole plain forward in which something is added to a projection's output at the last token."""

    def hook(_module: torch.nn.Module, _args: object, output: Tensor) -> Tensor:
        return torch.cat((output[:, :-1], output[:, -1:] + change), dim=1)

    handle = model.projections[layer].register_forward_hook(hook)
    with torch.no_grad():
        found: Tensor = model.model(input_ids=base.ids[None]).logits[0, -1]
    handle.remove()
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_the_stream_read_on_from_a_token_is_a_whole_forward_with_that_change(family: str) -> None:
    pair, model = situation(family=family).field_pair, subject(family)
    slot = int(pair.base.anchors[-4])
    vector = 30 * torch.randn(pair.base.stream.shape[-1], generator=torch.Generator().manual_seed(0))
    edits = [Edit(1, 0 * vector), Edit(1, vector), Edit(2, vector)]
    found = continued(model, pair.base, slot, edits)
    assert off(found[0], pair.base.logits) < TOLERANCE
    for row, layer in ((1, 1), (2, 2)):
        expected = _streamed(model, pair.base, layer, slot, vector)
        assert off(found[row], expected) < TOLERANCE
        assert off(found[3 - row], expected) > 10 * TOLERANCE


def _streamed(model: Subject, base: Prefilled, layer: int, slot: int, vector: Tensor) -> Tensor:
    def hook(_module: torch.nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        changed = args[0].clone()
        changed[:, slot] += vector
        return (changed, *args[1:])

    handle = model.blocks[layer].register_forward_pre_hook(hook)
    with torch.no_grad():
        found: Tensor = model.model(input_ids=base.ids[None]).logits[0, -1]
    handle.remove()
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_streams_are_those_of_transformers_and_attention_and_mlp_add_up(family: str) -> None:
    model, prompt = subject(family), situation(family=family).prompt("old")
    with torch.no_grad():
        states = model.model(input_ids=prompt.ids[None], output_hidden_states=True).hidden_states
    for layer in range(model.num_layers):  # the last of transformers' states is behind the final norm
        assert off(prompt.stream[layer], states[layer][0, prompt.anchors]) < TOLERANCE
    assert off(prompt.stream[1], states[2][0, prompt.anchors]) > 10 * TOLERANCE
    assert len(model.writers) == model.num_layers
    rest = prompt.stream[1:] - prompt.stream[:-1] - prompt.attention
    mlp = _outputs(model, prompt, rest)
    assert off(rest[0], mlp) < TOLERANCE
    assert off(prompt.attention[0], mlp) > 10 * TOLERANCE


def _outputs(model: Subject, prompt: Prefilled, like: Tensor) -> Tensor:
    """What the first block's MLP adds: its own output, or that of the norm behind it, whichever is nearer."""
    kept: list[Tensor] = []
    block = model.blocks[0]
    names = [name for name, _ in block.named_children() if name in ("mlp", "post_feedforward_layernorm")]
    handles = [
        getattr(block, name).register_forward_hook(lambda _m, _a, output: kept.append(output[0])) for name in names
    ]
    with torch.no_grad():
        model.model(input_ids=prompt.ids[None])
    for handle in handles:
        handle.remove()
    return kept[-1][prompt.anchors]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_lens_behind_the_last_block_is_the_model(family: str) -> None:
    model, prompt = subject(family), situation(family=family).prompt("old")
    found = model.lens(prompt.stream[-1, -1])
    assert torch.equal(found.argsort()[-5:], prompt.logits.argsort()[-5:])
    assert not torch.equal(model.lens(prompt.stream[1, -1]).argsort()[-5:], prompt.logits.argsort()[-5:])


def test_a_cache_with_something_else_than_keys_and_values_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="more than keys and values") as refusal:
        Subject.of(tiny_model("falcon_h1").eval(), tiny_tokenizer())
    assert refusal.value.reasons


def test_what_stands_before_the_change_is_the_same_to_the_bit() -> None:
    pair: Pair = situation().field_pair
    assert prefix_deviation(pair) == 0.0
    late = Pair(pair.base, pair.other, pair.base_id, pair.other_id, pair.changed + 9)
    assert prefix_deviation(late) > 1e-3


def test_prefills_are_forgotten_beyond_their_room_and_come_back_the_same() -> None:
    tight = Situation(subject(), items("gated", 1)[0], Prefills(most_bytes=1))
    first = tight.prompt("old")
    assert tight.prompt("old") is first
    tight.prompt("new")
    again = tight.prompt("old")
    assert again is not first
    assert torch.equal(again.cells[1]["keys"], first.cells[1]["keys"])


def test_heads_at_an_earlier_token_are_replaced_there_and_read_on() -> None:
    pair, model = situation().field_pair, subject()
    anchor = len(pair.base.anchors) - 4
    slot = int(pair.base.anchors[anchor])
    masks = torch.zeros((2, model.num_layers, model.num_heads), dtype=torch.bool)
    masks[1, 1, 2] = True
    found = continued_heads(model, pair.base, slot, pair.other.heads[:, anchor], masks)
    cut = slice(2 * model.head_dim, 3 * model.head_dim)
    change = pair.other.heads[1, anchor, cut] - pair.base.heads[1, anchor, cut]

    def hook(_module: torch.nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        changed = args[0].clone()
        changed[:, slot, cut] += change
        return (changed, *args[1:])

    handle = model.projections[1].register_forward_pre_hook(hook)
    expected = oracles.full(model.model, pair.base.ids).logits[0, -1]
    handle.remove()
    assert off(found[0], pair.base.logits) < TOLERANCE
    assert off(found[1], expected) < TOLERANCE
    assert off(found[0], expected) > 2 * off(found[1], expected)
