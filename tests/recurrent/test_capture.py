"""A chunk that was captured and composed equals the THREADED oracle; leaving out any part of it is seen."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from recurrent_models import CONFIGS, Spliced, build, cache_factory, ids, largest_error, positions, splice
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import LinearAttentionLayer

from editable_cache import SpanError, UnsupportedModelError
from editable_cache.adapters.continuation import continuation, run_in_steps, step_tokens
from editable_cache.adapters.transitions import Captured, capture
from editable_cache.ops import relative_error
from editable_cache.testing.threaded import ThreadedResult, tensors, threaded

TOLERANCE = 1e-4
VISIBLE = 1e-3
PREFIX, CHUNK, QUERY, HEAD, TAIL, BASE = 13, 21, 5, 3, 2, 1
START, BODY = BASE + PREFIX, CHUNK - HEAD - TAIL

FORMS = {
    "matrix": {"qwen3_next", "qwen3_5_text", "olmo_hybrid", "kimi_linear", "bailing_hybrid", "lara_mini"},
    "replace": {"lfm2", "zaya"},
}
"""By the recurrence that each model type is documented to have; the others are diagonal."""


@functools.cache
def judged(name: str) -> Any:
    model = build(name)
    return continuation(model, ids(12, 5), positions(1, 12), cache_factory=cache_factory(model))


@functools.cache
def captured(name: str) -> Captured:
    model = build(name)
    return capture(
        model,
        ids(CHUNK, 2),
        positions(START, CHUNK),
        head=HEAD,
        tail=TAIL,
        cache_factory=cache_factory(model),
        step=step_tokens(judged(name)),
    )


@functools.cache
def reference(name: str) -> ThreadedResult:
    step = step_tokens(judged(name))
    return threaded(build(name), ids(PREFIX, 1), ids(CHUNK, 2), ids(QUERY, 3), head=HEAD, tail=TAIL, step=step)


def spliced(name: str, without: str = "") -> Spliced:
    parts = ids(PREFIX, 1), ids(CHUNK, 2), ids(QUERY, 3)
    step = step_tokens(judged(name))
    return splice(build(name), captured(name), parts, head=HEAD, tail=TAIL, step=step, without=without)


@pytest.mark.parametrize("name", CONFIGS)
def test_composed_equals_threaded(name: str) -> None:
    ours, theirs = spliced(name), reference(name)
    assert largest_error(ours.body, theirs.body) <= TOLERANCE
    assert largest_error(ours.end, theirs.end) <= TOLERANCE
    assert relative_error(ours.logits, theirs.logits[:, -1]) <= TOLERANCE


PARTS = [(name, part) for name in CONFIGS for part in ("state", "offset", "factor", "conv")]
NOTHING_TO_LEAVE_OUT = {
    ("lfm2", "state"),
    ("lfm2", "offset"),
    ("lfm2", "factor"),
    ("zaya", "state"),
    ("zaya", "factor"),
}
"""No state outlives the body; LFM2 has none at all."""


@pytest.mark.parametrize(("name", "without"), [each for each in PARTS if each not in NOTHING_TO_LEAVE_OUT])
def test_leaving_out_a_part_is_seen(name: str, without: str) -> None:
    """The live state (chunk state only), the chunk's state (prefix kept), the factor (1 instead), the window."""
    ours, theirs = spliced(name, without=without), reference(name)
    assert largest_error(ours.end, theirs.end) > VISIBLE
    assert relative_error(ours.logits, theirs.logits[:, -1]) > TOLERANCE


@pytest.mark.parametrize("name", CONFIGS)
def test_form_and_cost(name: str) -> None:
    alone = captured(name)
    form = next((form for form, names in FORMS.items() if name in names), "diagonal")
    assert {each.form for each in alone.transitions.values()} == {form}
    assert all(value <= TOLERANCE for value in alone.errors.values())
    if form == "matrix":
        shape = next(iter(alone.transitions.values())).offset.shape  # type: ignore[union-attr]
        assert alone.num_forwards == 6 + -(-shape[-2] // shape[-1])
    else:
        assert alone.num_forwards == (3 if name == "lfm2" else 6)
    again = capture(
        build(name),
        ids(CHUNK, 2),
        positions(START, CHUNK),
        head=HEAD,
        tail=TAIL,
        cache_factory=cache_factory(build(name)),
        step=step_tokens(judged(name)),
        mixers=alone.mixers,
        forms={slot: each.form for slot, each in alone.transitions.items()},
    )
    assert again.num_forwards == alone.num_forwards - (2 if form == "matrix" else 1)
    assert {slot: each.form for slot, each in again.transitions.items()} == {
        slot: each.form for slot, each in alone.transitions.items()
    }


@pytest.mark.parametrize("name", ["bamba", "falcon_h1", "zamba2", "granitemoehybrid", "nemotron_h", "mamba2"])
def test_mamba_2_needs_one_number_for_each_head(name: str) -> None:
    for each in captured(name).transitions.values():
        assert list(each.factor.shape) == [1, 6, 1, 1]  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["bamba", "jamba", "qwen3_next", "kimi_linear"])
def test_two_chunks_merged_are_one_after_the_other(name: str) -> None:
    """The merged map of two bodies is the map of one body, where nothing lies between them."""
    model, step = build(name), step_tokens(judged(name))
    alone = captured(name)
    cut = HEAD + BODY // 2
    arguments: dict[str, Any] = {"cache_factory": cache_factory(model), "step": step_tokens(judged(name))}
    chunk, places = ids(CHUNK, 2), positions(START, CHUNK)
    first = capture(model, chunk, places, head=HEAD, tail=CHUNK - cut, **arguments)
    second = capture(model, chunk, places, head=cut, tail=TAIL, **arguments)
    assert step in (None, 1)
    for slot, whole in alone.transitions.items():
        merged = first.transitions[slot].then(second.transitions[slot])
        state = torch.randn(whole.offset.shape)  # type: ignore[union-attr]
        assert relative_error(merged.apply(state), whole.apply(state)) <= TOLERANCE
        assert relative_error(first.transitions[slot].apply(state), whole.apply(state)) > VISIBLE
        assert merged.conv is second.transitions[slot].conv


@pytest.mark.parametrize("name", ["bamba", "qwen3_next", "lara_mini"])
def test_the_oracle_threads_the_state_of_the_first_layer_exactly(name: str) -> None:
    """Inputs of layer 0 are embeddings: behind a head that fills its window its state is that of a plain prefill.

    An anchor of the oracle outside of itself. Deeper states are approximate, and so is this one behind a short head.
    """
    model, chunk = build(name), ids(CHUNK, 2)
    plain = DynamicCache(config=model.config)
    tokens = torch.cat([ids(PREFIX, 1), chunk[:, : HEAD + BODY]], dim=1)
    run_in_steps(model, tokens, positions(BASE, tokens.shape[1]), plain, step=None)
    expected, body = tensors(plain), reference(name).body
    short = threaded(model, ids(PREFIX, 1), chunk, ids(QUERY, 3), head=1, tail=TAIL).body
    assert relative_error(body["0.recurrent.0"], expected["0.recurrent.0"]) <= TOLERANCE
    assert relative_error(body["2.recurrent.0"], expected["2.recurrent.0"]) > VISIBLE
    assert relative_error(short["0.recurrent.0"], expected["0.recurrent.0"]) > VISIBLE


@pytest.mark.parametrize("name", ["bamba", "jamba", "qwen3_next"])
def test_states_of_16_bit_models_are_float32_and_pass(name: str) -> None:
    source = build(name)
    model = type(source)._from_config(source.config, attn_implementation="eager", dtype=torch.bfloat16).eval()
    model.load_state_dict(source.state_dict())
    alone = capture(
        model,
        ids(CHUNK, 2),
        positions(START, CHUNK),
        head=HEAD,
        cache_factory=cache_factory(model),
        step=step_tokens(continuation(model, ids(12, 5), positions(1, 12), cache_factory=cache_factory(model))),
    )
    assert all(each.offset.dtype == torch.float32 for each in alone.transitions.values())  # type: ignore[union-attr]
    assert max(alone.errors.values()) <= TOLERANCE


class _Squashing(LinearAttentionLayer):
    """Not affine in its state."""

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        return super().update_recurrent_state(torch.tanh(recurrent_states), state_idx, **kwargs)


class _Narrow(LinearAttentionLayer):
    """Keeps its state in 16 bits."""

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        return super().update_recurrent_state(recurrent_states.bfloat16(), state_idx, **kwargs)


@pytest.mark.parametrize("layer", [_Squashing, _Narrow])
@pytest.mark.parametrize("name", ["bamba", "qwen3_next"])
def test_what_is_not_affine_is_refused(name: str, layer: type[LinearAttentionLayer]) -> None:
    model = build(name)

    def other() -> DynamicCache:
        cache = DynamicCache(config=model.config)
        cache.layers[0] = layer()
        return cache

    with pytest.raises(UnsupportedModelError, match="not affine") as refusal:
        capture(
            model,
            ids(CHUNK, 2),
            positions(START, CHUNK),
            head=HEAD,
            cache_factory=other,
            step=step_tokens(judged(name)),
        )
    assert [reason.what for reason in refusal.value.reasons] == ["layer 0, state 0"]
    assert "error" in refusal.value.reasons[0].got


@pytest.mark.parametrize(("head", "tail"), [(0, 0), (3, CHUNK - 3), (CHUNK + 1, 0), (3, -1)])
def test_chunks_too_short_for_head_and_tail_are_refused(head: int, tail: int) -> None:
    model = build("bamba")
    with pytest.raises(SpanError, match="keep the chunk live"):
        capture(
            model,
            ids(CHUNK, 2),
            positions(START, CHUNK),
            head=head,
            tail=tail,
            cache_factory=cache_factory(model),
            step=step_tokens(judged("bamba")),
        )


@pytest.mark.parametrize(("name", "least"), [("jamba", 1), ("zamba2", 2)])
def test_one_token_is_no_body_where_decoding_differs(name: str, least: int) -> None:
    def captured_from(num_body: int) -> Captured:
        model, num_tokens = build(name), HEAD + num_body
        arguments: dict[str, Any] = {"cache_factory": cache_factory(model), "step": step_tokens(judged(name))}
        return capture(model, ids(num_tokens, 2), positions(START, num_tokens), head=HEAD, **arguments)

    assert max(captured_from(least).errors.values()) <= TOLERANCE
    with pytest.raises(SpanError, match=f"and {least} between"):
        captured_from(least - 1)


def test_a_model_without_recurrent_layers_has_no_transitions() -> None:
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2
    )
    model = LlamaForCausalLM(config).eval()
    judgement = continuation(model, ids(12, 5), positions(1, 12), cache_factory=cache_factory(model))
    alone = capture(
        model,
        ids(9, 2),
        positions(1, 9),
        head=1,
        cache_factory=cache_factory(model),
        step=step_tokens(judgement),
    )
    assert alone.transitions == {}
    assert alone.num_forwards == 3
    assert judgement.multi_token_ok
    assert judgement.single_token_ok
