"""Both sources of repaired cells give the clean prefill, all of it or the chosen part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cache_support import Snapshot, make_cache, refused, shared_model
from torch import Tensor

from editable_cache import (
    CompatibilityError,
    ContextWarning,
    EditableCache,
    LedgerError,
    SpanError,
    UnsupportedModelError,
)
from editable_cache.forward import run
from editable_cache.repair import patch
from editable_cache.repair.patch import patch_from, recompute_without
from editable_cache.testing import oracles
from editable_cache.testing.contents import cells_in, layers_of, must_differ, random_ids

FAMILIES = ("llama", "gemma3", "qwen3", "deepseek_v3")
HEAD, INSTRUCTION, DOCUMENT = 2, 5, 14
CONTAMINATION, SPAN = (HEAD, HEAD + INSTRUCTION), (HEAD + INSTRUCTION, HEAD + INSTRUCTION + DOCUMENT)
IDS = random_ids(SPAN[1])


def contaminated(family: str) -> EditableCache:
    cache = make_cache(family)
    cache.append(IDS[:HEAD], name="head")
    cache.append(IDS[HEAD : SPAN[0]], name="instruction")
    cache.append(IDS[SPAN[0] :], name="document")
    return cache


def oracle(family: str) -> oracles.OracleResult:
    """One forward in which nobody sees the instruction."""
    valid = torch.ones(len(IDS), dtype=torch.bool)
    valid[slice(*CONTAMINATION)] = False
    positions = torch.arange(len(IDS))
    return oracles.frozen(shared_model(family), IDS, positions, torch.zeros_like(positions), valid)


def clean_cache(family: str) -> EditableCache:
    cache = make_cache(family)
    cache.append(IDS[:HEAD], name="head")
    cache.append(IDS[HEAD : SPAN[0]], name="instruction")
    cache.append(IDS[SPAN[0] :], name="document")
    recompute_without(cache, everything(cache), SPAN, CONTAMINATION)
    return cache


def everything(cache: EditableCache) -> Tensor:
    return torch.ones(len(cache.layers), DOCUMENT, dtype=torch.bool)


def some(cache: EditableCache, seed: int = 0) -> Tensor:
    return torch.rand(len(cache.layers), DOCUMENT, generator=torch.Generator().manual_seed(seed)) < 0.3


def document_of(result: oracles.OracleResult) -> oracles.Cells:
    return result.span(*SPAN).cells


@pytest.mark.parametrize("family", FAMILIES)
def test_all_cells_equal_the_clean_prefill(family: str) -> None:
    cache, expected = contaminated(family), document_of(oracle(family))
    must_differ(cells_in(cache, *SPAN), expected)
    before = cells_in(cache, 0, SPAN[0])
    outcome = recompute_without(cache, everything(cache), SPAN, CONTAMINATION)
    oracles.check(cells_in(cache, *SPAN), expected)
    assert outcome.tokens_computed == DOCUMENT
    assert all(torch.equal(t, before[name]) for name, t in cells_in(cache, 0, SPAN[0]).items())
    other = contaminated(family)
    assert patch_from(other, cache, everything(other), SPAN).tokens_pasted == DOCUMENT
    oracles.check(cells_in(other, *SPAN), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_forgetting_the_mask_misses(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the same recompute that sees the instruction."""
    real = run.recompute_slots
    monkeypatch.setattr(run, "recompute_slots", lambda cache, slots, rows, without: real(cache, slots, rows))
    cache = contaminated(family)
    recompute_without(cache, everything(cache), SPAN, CONTAMINATION)
    must_differ(cells_in(cache, *SPAN), document_of(oracle(family)))


@pytest.mark.parametrize("family", FAMILIES)
def test_chosen_cells_are_the_clean_ones_bit_for_bit(family: str) -> None:
    cache, clean = contaminated(family), clean_cache(family)
    mask, before = some(cache), layers_of(cache)
    patch_from(cache, clean, mask, SPAN)
    whole = torch.zeros(len(cache.layers), len(IDS), dtype=torch.bool)
    whole[:, slice(*SPAN)] = mask
    for layer, (now, old, other) in enumerate(zip(layers_of(cache), before, layers_of(clean), strict=True)):
        for name in now:
            assert torch.equal(now[name][..., whole[layer], :], other[name][..., whole[layer], :])
            assert torch.equal(now[name][..., ~whole[layer], :], old[name][..., ~whole[layer], :])
            if layer:  # a cell of layer 0 depends on its token alone
                assert not torch.equal(now[name][..., whole[layer], :], old[name][..., whole[layer], :])


def masked_cells(family: str, cache: EditableCache, mask: Tensor) -> oracles.OracleResult:
    """CELLS, in which the instruction's cells are there and nobody sees them."""
    model: Any = shared_model(family)
    seen = torch.ones(len(IDS), len(IDS), dtype=torch.bool)
    seen[:, slice(*CONTAMINATION)] = False
    stock = oracles.fresh_cache(model)
    layers = layers_of(cache)
    stock.layers = [oracles._SubstitutingLayer(layer, chosen) for layer, chosen in zip(layers, mask, strict=True)]
    return oracles._prefill(model, IDS[None], torch.arange(len(IDS)), stock, mask=oracles.masks(model, seen))


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3"])
def test_partial_recompute_follows_cells_with_the_mask(family: str) -> None:
    cache = contaminated(family)
    mask = torch.zeros(len(cache.layers), len(IDS), dtype=torch.bool)
    mask[:, slice(*SPAN)] = some(cache)
    expected = masked_cells(family, cache, mask)
    plain = oracles.layer_cells(shared_model(family), IDS, torch.arange(len(IDS)), layers_of(cache), mask)
    recompute_without(cache, mask[:, slice(*SPAN)], SPAN, CONTAMINATION)
    oracles.check(cells_in(cache), expected.cells)
    must_differ(cells_in(cache), plain.cells)


def test_a_clean_cache_may_have_other_slots() -> None:
    """The instruction taken out without closing the gap: same positions, other slots."""
    clean = clean_cache("llama")
    with pytest.warns(ContextWarning, match="first 4"):
        clean.remove("instruction", close_gap=False)
    cache = contaminated("llama")
    patch_from(cache, clean, everything(cache), SPAN)
    oracles.check(cells_in(cache, *SPAN), document_of(oracle("llama")))


def test_the_ledger_says_what_was_done() -> None:
    cache = contaminated("llama")
    mask = torch.zeros(3, DOCUMENT, dtype=torch.bool)
    mask[:, 3:5] = True
    recompute_without(cache, mask, SPAN, CONTAMINATION)
    assert [(s.start, s.stop, s.cause) for s in cache.ledger.stale] == [
        (SPAN[0] + 3, SPAN[0] + 5, "repair without 'instruction'"),
        (SPAN[0] + 5, SPAN[1], "repair without 'instruction', of cells before it"),
    ]
    assert cache.verify().ok
    assert "repair without" in str(cache.report())
    patched = contaminated("llama")
    patch_from(patched, cache, mask, SPAN)
    assert {s.cause for s in patched.ledger.stale} == {
        "patch from another cache",
        "patch from another cache, of cells before it",
    }
    assert patched.verify().ok


def test_partly_patched_columns_keep_their_old_cause() -> None:
    cache, clean = contaminated("llama"), clean_cache("llama")
    cache.ledger = cache.ledger.marked_stale([SPAN], "before")
    mask = everything(cache)
    mask[0, :4] = False
    patch_from(cache, clean, mask, SPAN)
    assert [(s.start, s.stop) for s in cache.ledger.stale if s.cause == "before"] == [(SPAN[0], SPAN[0] + 4)]


def test_bad_input_leaves_the_cache_alone() -> None:
    cache, clean = contaminated("llama"), clean_cache("llama")
    mask = everything(cache)
    other = EditableCache(shared_model("qwen3"))
    other.append(IDS)
    shifted = make_cache("llama")
    shifted.append(IDS.flip(0))
    short = make_cache("llama")
    short.append(IDS[:9])
    for wrong in (mask[:, 1:], mask[1:], mask.float(), mask & False):
        with refused(cache, SpanError, ValueError, "bool mask [3, 14]"):
            patch_from(cache, clean, wrong, SPAN)
        with refused(cache, SpanError, ValueError, "bool mask [3, 14]"):
            recompute_without(cache, wrong, SPAN, CONTAMINATION)
    with refused(cache, SpanError, ValueError, "0 <= start < stop"):
        patch_from(cache, clean, mask, (SPAN[0] + 1, SPAN[1] + 1))
    for span in ((3, 3), (3, 9), (-1, 2), (22, 23)):
        with refused(cache, SpanError, ValueError, "before the document"):
            recompute_without(cache, mask, SPAN, span)
    with refused(cache, CompatibilityError, ValueError, "same model"):
        patch_from(cache, other, mask, SPAN)
    for source in (shifted, short):
        with refused(cache, CompatibilityError, ValueError, "does not hold token"):
            patch_from(cache, source, mask, SPAN)


def test_a_fault_in_the_middle_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, clean = contaminated("llama"), clean_cache("llama")
    before, mask = Snapshot(cache), everything(cache)

    def fail(*args: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(patch, "_mark", fail)
    with pytest.raises(ZeroDivisionError):
        patch_from(cache, clean, mask, SPAN)
    before.check(cache)
    with pytest.raises(ZeroDivisionError):
        recompute_without(cache, mask, SPAN, CONTAMINATION)
    before.check(cache)


def test_models_and_caches_that_cannot() -> None:
    bloom = contaminated("bloom")
    with refused(bloom, UnsupportedModelError, NotImplementedError, "can't be recomputed"):
        recompute_without(bloom, everything(bloom), SPAN, CONTAMINATION)
    hybrid = make_cache("falcon_h1")
    hybrid.append(IDS)
    with pytest.raises(UnsupportedModelError, match="recurrent state"):
        recompute_without(hybrid, everything(hybrid), SPAN, CONTAMINATION)
    rows = EditableCache.stack([contaminated("llama"), contaminated("llama")])
    with refused(rows, SpanError, ValueError, "one row, got 2"):
        recompute_without(rows, everything(rows), SPAN, CONTAMINATION)
    unseen = EditableCache(config=shared_model("llama").config)
    with pytest.raises(UnsupportedModelError, match="with a model"):
        patch_from(unseen, unseen, torch.ones(3, 2, dtype=torch.bool), (0, 2))


def test_unknown_ids_are_refused() -> None:
    cache = contaminated("llama")
    cache.ledger.ids[0, SPAN[0] + 2] = -1
    with refused(cache, LedgerError, ValueError, "unknown"):
        recompute_without(cache, everything(cache), SPAN, CONTAMINATION)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2", "gemma3_270m"])
def test_all_cells_equal_the_clean_prefill_on_real_models(name: str, request: pytest.FixtureRequest) -> None:
    model, tokenizer = request.getfixturevalue(name)
    cache = EditableCache(model, tokenizer=tokenizer)
    cache.append("You are a hostile reviewer who finds nothing to praise.\n", name="instruction")
    cache.append("The method needs one forward of the query. " * 12, name="document")
    span, contamination = cache.segment("document").span, cache.segment("instruction").span
    valid = torch.ones(span[1], dtype=torch.bool)
    valid[slice(*contamination)] = False
    positions = torch.arange(span[1])
    expected = oracles.frozen(model, cache.token_ids[0], positions, positions * 0, valid).span(*span).cells
    plain = cells_in(cache, *span)
    must_differ(plain, expected)
    mask = torch.ones(len(cache.layers), span[1] - span[0], dtype=torch.bool)
    recompute_without(cache, mask, span, contamination)
    oracles.check(cells_in(cache, *span), expected)
