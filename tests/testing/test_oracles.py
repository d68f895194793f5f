"""The oracles agree where they must, differ where they must, and each check can fail."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from editable_cache.adapters import host
from editable_cache.testing import oracles, tolerance
from editable_cache.testing.tiny_models import (
    FAMILIES,
    REFUSED_FAMILIES,
    SLIDING_WINDOW,
    TINY_FAMILIES,
    VOCAB_SIZE,
    tiny_config,
    tiny_model,
    tiny_tokenizer,
)

LENGTH = 24
CHUNK = slice(5, 17)  # longer than the window
FAR = 90_000
VISIBLE = 1e-2
"""Relative change below which two answers count as the same by accident."""

CASES = [
    pytest.param(family, attention, id=f"{family}-{attention}")
    for family in TINY_FAMILIES
    for attention in FAMILIES[family].attention
]
SLIDING_FAMILIES = ("mistral", "gemma2", "gemma3")
MIXED_FAMILIES = ("gemma2", "gemma3")
NOPE_LAYERS = {"smollm3": (1, 3)}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tiny matrices gain nothing from a second thread, and wait long for it where cores are shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@functools.cache
def model_of(family: str, attention: str | None = None) -> PreTrainedModel:
    return tiny_model(family, attn_implementation=attention)


@functools.cache
def document() -> tuple[Tensor, Tensor]:
    """Ids and positions [n]; nobody may write into them."""
    ids = torch.randint(5, VOCAB_SIZE, (LENGTH,), generator=torch.Generator().manual_seed(1))
    return ids, torch.arange(LENGTH)


def chunk_groups() -> Tensor:
    groups = torch.zeros(LENGTH, dtype=torch.long)
    groups[CHUNK] = 1
    return groups


def must_differ(actual: oracles.States, expected: oracles.States, tolerance: float = VISIBLE) -> None:
    with pytest.raises(AssertionError, match="relative error"):
        oracles.check(actual, expected, tolerance)


@pytest.mark.parametrize(("family", "attention"), CASES)
class TestAgreement:
    def test_frozen_without_groups_is_full(self, family: str, attention: str) -> None:
        model, (ids, positions) = model_of(family, attention), document()
        expected = oracles.full(model, ids, positions)
        oracles.check(oracles.frozen(model, ids, positions, torch.zeros(LENGTH)), expected)
        oracles.check(oracles.frozen(model, ids, positions, torch.ones(LENGTH)), expected)
        moved = oracles.frozen(model, ids, positions + (positions >= 12), torch.zeros(LENGTH))
        must_differ(moved, expected)

    def test_frozen_with_a_chunk_is_not_full(self, family: str, attention: str) -> None:
        model, (ids, positions) = model_of(family, attention), document()
        expected = oracles.full(model, ids, positions)
        actual = oracles.frozen(model, ids, positions, chunk_groups())
        must_differ(actual.logits[:, -1], expected.logits[:, -1], 1e-3)
        before = [keys[..., : CHUNK.start, :] for keys in actual.keys]
        oracles.check(before, [keys[..., : CHUNK.start, :] for keys in expected.keys])

    def test_frozen_chunk_is_iso(self, family: str, attention: str) -> None:
        model, (ids, positions) = model_of(family, attention), document()
        whole = oracles.frozen(model, ids, positions, chunk_groups())
        inside = whole.span(CHUNK.start, CHUNK.stop)
        oracles.check(inside, oracles.iso(model, ids[CHUNK], positions[CHUNK]))
        must_differ(inside.keys, oracles.iso(model, ids[CHUNK], positions[CHUNK] + 1).keys)

    def test_frozen_is_a_splice_made_by_hand(self, family: str, attention: str) -> None:
        model, (ids, positions) = model_of(family, attention), document()
        suffix = slice(CHUNK.stop, None)
        expected = oracles.frozen(model, ids, positions, chunk_groups()).logits[:, suffix]
        prefix = oracles.full(model, ids[: CHUNK.start])

        def spliced(shift: int) -> Tensor:
            chunk = oracles.iso(model, ids[CHUNK], positions[CHUNK] + shift)
            layers = zip(prefix.keys, chunk.keys, prefix.values, chunk.values, strict=True)
            cache = DynamicCache([(torch.cat([k, ck], -2), torch.cat([v, cv], -2)) for k, ck, v, cv in layers])
            with torch.no_grad():
                return model(
                    input_ids=ids[None, suffix],
                    position_ids=positions[None, suffix],
                    attention_mask=torch.ones(1, LENGTH, dtype=torch.long),
                    **{host.cache_argument(model): cache},
                ).logits

        oracles.check(spliced(0), expected)
        must_differ(spliced(1), expected, 1e-3)

    def test_cells_all_selected_is_full(self, family: str, attention: str) -> None:
        model, (ids, positions) = model_of(family, attention), document()
        expected = oracles.full(model, ids, positions)
        noise = [torch.randn_like(keys) for keys in expected.keys]
        everything = torch.ones(len(noise), LENGTH, dtype=torch.bool)
        oracles.check(oracles.cells(model, ids, positions, noise, noise, everything), expected)
        everything[0, 3] = False  # one cell of noise: sliding layers too must notice
        must_differ(oracles.cells(model, ids, positions, noise, noise, everything), expected)

    def test_cells_none_selected_is_cached(self, family: str, attention: str) -> None:
        model, (ids, positions) = model_of(family, attention), document()
        cached = oracles.frozen(model, ids, positions, chunk_groups())
        nothing = torch.zeros(LENGTH, dtype=torch.bool)
        actual = oracles.cells(model, ids, positions, cached.keys, cached.values, nothing)
        for actuals, expecteds in ((actual.keys, cached.keys), (actual.values, cached.values)):
            assert all(torch.equal(a, e) for a, e in zip(actuals, expecteds, strict=True))
        # The suffix reads the frozen chunk, so its logits are those of FROZEN, not those of FULL.
        suffix = slice(CHUNK.stop, None)
        oracles.check(actual.logits[:, suffix], cached.logits[:, suffix])
        must_differ(actual.logits[:, suffix], oracles.full(model, ids, positions).logits[:, suffix], 1e-3)

    def test_cells_of_any_mask_keep_a_clean_cache(self, family: str, attention: str) -> None:
        model, (ids, positions) = model_of(family, attention), document()
        clean = oracles.full(model, ids, positions)
        mask = torch.rand(len(clean.keys), LENGTH, generator=torch.Generator().manual_seed(2)) < 0.5
        oracles.check(oracles.cells(model, ids, positions, clean.keys, clean.values, mask), clean)
        # On a stale cache unselected layers keep it, and layer 0 depends on ids and positions only.
        stale = oracles.frozen(model, ids, positions, chunk_groups())
        mask = torch.zeros_like(mask)
        mask[0] = True
        actual = oracles.cells(model, ids, positions, stale.keys, stale.values, mask)
        oracles.check(actual.keys[0], clean.keys[0])
        assert all(torch.equal(a, e) for a, e in zip(actual.keys[1:], stale.keys[1:], strict=True))
        must_differ(actual.keys, clean.keys)

    def test_cells_suffix_recompute_after_a_change_is_full(self, family: str, attention: str) -> None:
        model, (ids, positions) = model_of(family, attention), document()
        stale = oracles.full(model, ids, positions)
        changed = ids.clone()
        changed[10] = (ids[10] + 1) % VOCAB_SIZE
        expected = oracles.full(model, changed, positions)
        suffix = positions >= 10
        oracles.check(oracles.cells(model, changed, positions, stale.keys, stale.values, suffix), expected)
        late = positions >= 11
        must_differ(oracles.cells(model, changed, positions, stale.keys, stale.values, late), expected)

    def test_iso_moves_keys_only(self, family: str, attention: str) -> None:
        model, (ids, positions) = model_of(family, attention), document()
        here = oracles.iso(model, ids[CHUNK], positions[CHUNK])
        there = oracles.iso(model, ids[CHUNK], positions[CHUNK] + 37)
        oracles.check(there.logits, here.logits)
        oracles.check(there.values, here.values)
        for layer_idx, (a, e) in enumerate(zip(there.keys, here.keys, strict=True)):
            if layer_idx in NOPE_LAYERS.get(family, ()):
                oracles.check(a, e)
            else:
                must_differ(a, e)


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_positions_may_be_far_and_have_gaps(family: str) -> None:
    model, (ids, positions) = model_of(family), document()
    gaps = positions + FAR * (positions >= 12)
    expected = oracles.full(model, ids, gaps)
    oracles.check(oracles.frozen(model, ids, gaps, torch.zeros(LENGTH)), expected)
    must_differ(oracles.full(model, ids, positions), expected)


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_iso_behind_a_prefix_is_the_tail_of_full(family: str) -> None:
    model, (ids, positions) = model_of(family), document()
    expected = oracles.full(model, ids, positions)
    actual = oracles.iso(model, ids[9:], positions[9:], ids[:9])
    oracles.check(actual.logits, expected.logits[:, 9:])
    oracles.check(actual.keys, [keys[..., 9:, :] for keys in expected.keys])
    must_differ(oracles.iso(model, ids[9:], positions[9:]).logits, expected.logits[:, 9:])


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_pads_are_seen_by_nobody(family: str) -> None:
    model, (ids, positions) = model_of(family), document()
    valid = positions >= 4
    real = positions[4:] - 4
    padded = oracles.frozen(model, ids, (positions - 4).clamp(min=0), torch.zeros(LENGTH), valid)
    expected = oracles.full(model, ids[4:], real)
    oracles.check(padded.logits[:, 4:], expected.logits)
    oracles.check(
        padded.keys,
        [torch.cat([p[..., :4, :], e], -2) for p, e in zip(padded.keys, expected.keys, strict=True)],
    )
    unmarked = oracles.frozen(model, ids, (positions - 4).clamp(min=0), torch.zeros(LENGTH))
    must_differ(unmarked.logits[:, 4:], expected.logits)


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_window_is_that_of_slot_distance(family: str) -> None:
    model, (_, positions) = model_of(family), document()
    distance = positions[:, None] - positions[None, :]
    causal = (distance >= 0).long()
    window = causal * (distance < SLIDING_WINDOW)
    got = oracles.masks(model, torch.ones(LENGTH, LENGTH, dtype=torch.bool))
    assert isinstance(got, dict) == (family in MIXED_FAMILIES)
    if family in MIXED_FAMILIES:
        assert torch.equal((got["full_attention"][0, 0] == 0).long(), causal)
        assert torch.equal((got["sliding_attention"][0, 0] == 0).long(), window)
    else:
        assert torch.equal((got[0, 0] == 0).long(), window if family in SLIDING_FAMILIES else causal)


@pytest.mark.parametrize("family", SLIDING_FAMILIES)
def test_plain_causal_mask_would_lose_the_window(family: str) -> None:
    model, (ids, positions) = model_of(family), document()
    causal = torch.full((LENGTH, LENGTH), torch.finfo(torch.float32).min).triu(1)[None, None]
    with torch.no_grad():
        logits = model(input_ids=ids[None], position_ids=positions[None], attention_mask=causal).logits
    must_differ(logits, oracles.full(model, ids, positions).logits)


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_early_token_matters_for_the_last_logits(family: str) -> None:
    model, (ids, positions) = model_of(family), document()
    changed = ids.clone()
    changed[6] = (ids[6] + 1) % VOCAB_SIZE
    logits = oracles.full(model, ids, positions).logits
    must_differ(oracles.full(model, changed, positions).logits[:, -1], logits[:, -1])
    assert 1.0 < logits.std() < 5.0


@pytest.mark.parametrize("family", REFUSED_FAMILIES)
def test_refused_family_runs_in_stock_transformers(family: str) -> None:
    ids, _ = document()
    model = model_of(family)
    with torch.no_grad():
        assert model(input_ids=ids[None]).logits.isfinite().all()
    assert FAMILIES[family].refused_because


@pytest.mark.parametrize("family", FAMILIES)
def test_model_is_reproducible_and_never_ends(family: str) -> None:
    state = torch.get_rng_state()
    first, again, other = tiny_model(family), tiny_model(family), tiny_model(family, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert not first.training
    for a, b, c in zip(first.parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert a.ndim < 2 or not torch.equal(a, c)
    assert first.config.eos_token_id is None
    assert first.generation_config.eos_token_id is None


@pytest.mark.parametrize("family", FAMILIES)
def test_config_leaves_the_table_alone(family: str) -> None:
    before = copy.deepcopy(FAMILIES[family])
    first = tiny_config(family).to_dict()
    assert FAMILIES[family] == before
    assert tiny_config(family).to_dict() == first


def test_unknown_family_names_the_known_ones() -> None:
    with pytest.raises(KeyError, match="llama_yarn"):
        tiny_model("lama")


def test_cells_refuses_states_of_another_shape() -> None:
    model, (ids, positions) = model_of("llama"), document()
    cached = oracles.full(model, ids, positions)
    with pytest.raises(ValueError, match="layers x 24 tokens"):
        oracles.cells(model, ids, positions, cached.keys, cached.values, torch.ones(LENGTH - 1))
    short = [keys[..., 1:, :] for keys in cached.keys]
    with pytest.raises(ValueError, match="expected cached states"):
        oracles.cells(model, ids, positions, short, short, torch.ones(LENGTH))


def test_check_names_layer_place_and_values() -> None:
    expected = [torch.ones(1, 2, 3, 4) for _ in range(3)]
    actual = [states.clone() for states in expected]
    actual[1][0, 1, 2, 3] = 1.5
    with pytest.raises(AssertionError, match=r"keys layer 1: .*\(0, 1, 2, 3\): got 1.5, expected 1"):
        oracles.check(actual, expected, what="keys")
    actual[1][0, 0, 0, 0] = float("nan")
    with pytest.raises(AssertionError, match=r"inf .*\(0, 0, 0, 0\)"):
        oracles.check(actual, expected, what="keys", tolerance=10.0)
    with pytest.raises(ValueError, match="got 2 tensors, expected 3"):
        oracles.check(actual[:2], expected)
    with pytest.raises(TypeError, match="got Tensor, expected list"):
        oracles.check(actual[0], expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_neox"])
def test_forward_budget_admits_another_path_and_refuses_a_wrong_one(family: str, dtype: torch.dtype) -> None:
    ids, positions = document()
    low_model, exact_model = tiny_model(family, dtype=dtype), tiny_model(family, dtype=torch.float64)
    exact_model.load_state_dict(low_model.state_dict())
    exact = oracles.full(exact_model, ids, positions)
    budget = tolerance.forward_budget(oracles.full(low_model, ids, positions), exact)
    # Another path: eager attention with explicit masks.
    other_model = tiny_model(family, dtype=dtype, attn_implementation="eager")
    other = oracles.frozen(other_model, ids, positions, torch.zeros(LENGTH))
    wrong = oracles.frozen(other_model, ids, positions + (positions >= 12), torch.zeros(LENGTH))
    for states in ("keys", "values"):
        layers = zip(getattr(other, states), getattr(exact, states), budget[states], strict=True)
        for layer_idx, layer in enumerate(layers):
            tolerance.check_budget(*layer, what=f"{states} layer {layer_idx}")
    tolerance.check_budget(other.logits, exact.logits, budget["logits"][0])
    with pytest.raises(AssertionError, match="budget"):
        tolerance.check_budget(wrong.logits, exact.logits, budget["logits"][0])


def test_rounding_budget_admits_two_roundings_and_refuses_one_position() -> None:
    exact_model = tiny_model("llama", dtype=torch.float64)
    ids, positions = document()
    exact = oracles.iso(exact_model, ids, positions).keys[0]
    budget = tolerance.rounding_budget(exact, torch.bfloat16, roundings=2)
    tolerance.check_budget((exact.bfloat16() * 1.1).bfloat16() / 1.1, exact, budget)
    shifted = oracles.iso(exact_model, ids, positions + 1).keys[0]
    with pytest.raises(AssertionError, match="budget"):
        tolerance.check_budget(shifted, exact, budget)
    with pytest.raises(ValueError, match="use float64"):
        tolerance.rounding_budget(exact.bfloat16(), torch.bfloat16)


class TestTokenizer:
    @pytest.mark.parametrize(
        "text",
        ["", "order_status: pending", "naïve — 日本 😀\u200d\n\t\x00  x ", "<|im_start|>user\nhi<|im_end|>"],
    )
    def test_round_trip_with_offsets(self, text: str) -> None:
        tokenizer = tiny_tokenizer()
        encoding = tokenizer(text, return_offsets_mapping=True)
        assert tokenizer.decode(encoding["input_ids"]) == text
        assert all(token_id < VOCAB_SIZE for token_id in encoding["input_ids"])
        covered = {index for start, end in encoding["offset_mapping"] for index in range(start, end)}
        assert covered == set(range(len(text)))

    def test_special_tokens_and_template(self) -> None:
        tokenizer = tiny_tokenizer(add_bos=True)
        assert len(tokenizer) <= VOCAB_SIZE
        assert len({tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id}) == 3
        assert tokenizer("refund")["input_ids"][0] == tokenizer.bos_token_id
        assert tiny_tokenizer()("refund")["input_ids"][0] != tokenizer.bos_token_id
        turns = [{"role": "user", "content": "hi"}]
        rendered = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        assert rendered == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
