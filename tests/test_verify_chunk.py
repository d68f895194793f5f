"""`PublishedChunk.verify`: cells that are what their ids give, and cells that are not, one at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from editable_cache import CompatibilityError, EditableCache, KVChunk, Skill, SpanError
from editable_cache.chunk import ImageSpan, Provenance
from editable_cache.forward.verify_chunk import TOLERANCES, verify_chunk
from editable_cache.ops.quantize import Storage
from editable_cache.testing.tiny_models import tiny_model, tiny_tokenizer

TEXT = "If the order is pending the agent must not refund it; if it is delivered the agent may refund the customer."
FAMILIES = ("llama", "gemma3", "deepseek_v3", "falcon_h1", "bloom", "smollm3")


def compiled(family: str = "llama", text: str = TEXT, **options: Any) -> Skill:
    return Skill.precompile(tiny_model(family), tiny_tokenizer(), text, name="skill", **options)


def with_cell(chunk: Skill, change: Callable[[Tensor], None], *, layer: int = -1, name: str = "values") -> Skill:
    """The chunk with one tensor of one layer changed in a copy."""
    layers = [dict(states) for states in chunk.layers]
    name = name if name in layers[layer] else next(iter(layers[layer]))
    layers[layer][name] = layers[layer][name].clone()
    change(layers[layer][name])
    return replace(chunk, layers=tuple(layers))


def nudge(slot: int, by: float = 0.05) -> Callable[[Tensor], None]:
    def change(tensor: Tensor) -> None:
        tensor[0, 0, slot, 1] += by

    return change


@pytest.mark.parametrize("prefix", ["", "You are a support agent."])
@pytest.mark.parametrize("family", FAMILIES)
def test_sound_chunks_are_ok_and_one_changed_number_is_not(family: str, prefix: str) -> None:
    chunk, model = compiled(family, prefix=prefix), tiny_model(family)
    found = chunk.verify(model, tiny_tokenizer(), num_tokens=7, seed=1)
    assert found.ok, found
    assert found.precision == "float32"
    assert found.slots[0] == 0
    whole = family in ("falcon_h1", "bloom")  # states; no mask over chosen cells
    assert len(found.slots) == (len(chunk) if whole else 7)
    slot = found.slots[3]
    wrong = with_cell(chunk, nudge(slot)).verify(model, num_tokens=7, seed=1)
    assert not wrong.ok
    assert wrong.worst_error > 10 * wrong.tolerance
    assert str(wrong).startswith("WRONG")
    assert f"slot {slot}" in wrong.worst_at or whole


def test_the_sample_depends_on_the_seed_and_forgeries_elsewhere_pass() -> None:
    chunk, model = compiled(), tiny_model("llama")
    slots = [chunk.verify(model, num_tokens=5, seed=seed).slots for seed in (1, 1, 2)]
    assert slots[0] == slots[1] != slots[2]
    last = len(chunk) - 1
    assert last not in slots[0]
    assert with_cell(chunk, nudge(last)).verify(model, num_tokens=5, seed=1).ok  # what a sample can't see
    assert not with_cell(chunk, nudge(last)).verify(model, num_tokens=len(chunk)).ok


def test_ids_that_are_not_those_of_the_cells() -> None:
    chunk, model = compiled(), tiny_model("llama")
    ids = chunk.token_ids.clone()
    ids[0] += 1
    assert not replace(chunk, token_ids=ids).verify(model, num_tokens=4).ok
    assert not replace(chunk, provenance=Provenance("precompiled", (5, 6))).verify(model, num_tokens=4).ok


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_number_is_wrong(value: float) -> None:
    found = with_cell(compiled(), lambda tensor: tensor[0, 0, 0].fill_(value)).verify(tiny_model("llama"), num_tokens=4)
    assert not found.ok
    assert found.worst_error == math.inf


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_parts_of_a_merged_chunk_are_checked_one_by_one(family: str) -> None:
    model = tiny_model(family)
    merged = Skill.merge([compiled(family, prefix="You are"), compiled(family, text=TEXT[:60])], name="both")
    found = verify_chunk(model, merged, 9)
    assert found.ok, found
    second = merged.provenance.parts[1].start
    assert {0, second} <= set(found.slots)
    assert not with_cell(merged, nudge(second)).verify(model, num_tokens=9).ok
    unmerged = replace(merged, provenance=Provenance("precompiled", merged.provenance.parts[0].prefix_ids))
    assert not unmerged.verify(model, num_tokens=9).ok  # the second part had not seen the first


@pytest.mark.parametrize("storage", ["int8", "fp8"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_storage_in_8_bits_has_its_own_tolerance(family: str, storage: Storage, tmp_path: Path) -> None:
    compiled(family).save_pretrained(tmp_path, storage=storage)
    chunk, model = Skill.from_pretrained(tmp_path), tiny_model(family)
    found = chunk.verify(model, num_tokens=4)
    assert found.ok, found
    assert (found.precision, found.tolerance) == (storage, TOLERANCES[storage])
    assert found.worst_error > 1e-3
    assert len(found.slots) == len(chunk)  # all: nothing is read behind rounded cells
    assert not with_cell(chunk, lambda tensor: tensor[:, :, 5].mul_(1.5)).verify(model, num_tokens=4).ok
    unsaid = replace(chunk, provenance=replace(chunk.provenance, note=""))
    assert not unsaid.verify(model, num_tokens=4).ok


def test_16_bits(tmp_path: Path) -> None:
    model = tiny_model("llama", dtype=torch.bfloat16)
    chunk = Skill.precompile(model, tiny_tokenizer(), TEXT, name="skill")
    found = chunk.verify(model)
    assert found.ok, found
    assert (found.precision, found.tolerance) == ("16 bits", 5e-2)
    assert not with_cell(chunk, lambda tensor: tensor[:, :, 0].mul_(1.2)).verify(model).ok
    compiled().save_pretrained(tmp_path)
    converted = Skill.from_pretrained(tmp_path, model=model, dtype="bfloat16")
    found = converted.verify(model)
    assert found.ok, found
    assert found.precision == "converted"


@pytest.mark.parametrize("storage", ["int8", "fp8"])
def test_what_went_through_several_has_the_largest_tolerance(storage: Storage, tmp_path: Path) -> None:
    worst = 0.0
    for seed in (0, 1):
        single = Skill.precompile(tiny_model("llama", seed=seed), tiny_tokenizer(), TEXT, name="skill")
        single.save_pretrained(tmp_path, storage=storage)
        model = tiny_model("llama", seed=seed, dtype=torch.bfloat16)
        chunk = Skill.from_pretrained(tmp_path, model=model, dtype="bfloat16")
        assert [note.split()[0] for note in chunk.provenance.note.split("; ")] == ["stored", "converted"]
        found = chunk.verify(model)
        assert found.ok, found
        assert (found.precision, found.tolerance) == ("converted", max(TOLERANCES.values()))
        worst = max(worst, found.worst_error)
        assert not with_cell(chunk, lambda tensor: tensor[:, :, 5].mul_(1.5)).verify(model).ok
    assert worst > TOLERANCES["int8"]  # what 8 bits alone allow


def test_the_margin_of_converted_cells() -> None:
    assert TOLERANCES["converted"] >= 2 * 9.9e-2  # measured: SmolLM2-135M, float32 to bfloat16, 884 tokens


def test_transitions_of_recurrent_layers_are_compared_too() -> None:
    chunk, model = compiled("falcon_h1"), tiny_model("falcon_h1")
    assert chunk.recurrence is not None
    key = next(iter(chunk.recurrence.transitions))
    transition = chunk.recurrence.transitions[key]
    assert transition.offset is not None
    forged = replace(transition, offset=transition.offset * 1.01)
    recurrence = replace(chunk.recurrence, transitions={**chunk.recurrence.transitions, key: forged})
    found = replace(chunk, recurrence=recurrence).verify(model)
    assert not found.ok
    assert found.worst_at.endswith("transitions.offset")


def test_an_extracted_chunk_is_checked_behind_what_it_had_seen() -> None:
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    cache = EditableCache(model, tokenizer=tokenizer)
    cache.append("You are a support agent.\n")
    cache.append(TEXT, name="text")
    found = verify_chunk(model, cache.extract("text"), 6)
    assert found.ok, found
    cache.insert(" not", 3)
    stale = verify_chunk(model, cache.extract("text"), 6)
    assert not stale.ok
    assert stale.undecided[0].got.startswith("stale: ")
    assert str(stale).startswith("undecided")


def undecidable() -> dict[str, KVChunk]:
    chunk = compiled()
    return {
        "trained": replace(chunk, provenance=Provenance("trained")),
        "unknown ids": replace(chunk, token_ids=torch.full_like(chunk.token_ids, -1)),
        "image": replace(chunk, images=(ImageSpan(2, 4, "digest"),)),
        "note": replace(chunk, provenance=chunk.provenance.noted("something else")),
        "empty": chunk.slice(0, 0),
    }


@pytest.mark.parametrize("name", ["trained", "unknown ids", "image", "note", "empty"])
def test_what_cannot_be_decided_is_never_ok(name: str) -> None:
    found = verify_chunk(tiny_model("llama"), undecidable()[name])
    assert not found.ok
    assert found.undecided
    assert found.slots == ()


def test_refusals() -> None:
    chunk = compiled()
    for model in (tiny_model("gemma3"), tiny_model("llama", seed=1), tiny_model("llama", dtype=torch.bfloat16)):
        with pytest.raises(CompatibilityError, match="verify") as caught:
            chunk.verify(model)
        assert caught.value.reasons
    with pytest.raises(CompatibilityError, match="tokenizer"):
        chunk.verify(tiny_model("llama"), tiny_tokenizer(add_bos=True))
    with pytest.raises(SpanError, match="num_tokens"):
        chunk.verify(tiny_model("llama"), num_tokens=0)


def test_nothing_is_changed() -> None:
    chunk, model = compiled(), tiny_model("llama")
    copies = [{name: tensor.clone() for name, tensor in states.items()} for states in chunk.layers]
    chunk.verify(model)
    assert chunk.equal_cells(replace(chunk, layers=tuple(copies)))


@pytest.mark.parametrize("storage", ["original", "int8", "fp8"])
def test_on_a_real_model(smollm2: tuple[Any, Any], storage: Storage, tmp_path: Path) -> None:
    model, tokenizer = smollm2
    Skill.precompile(model, tokenizer, TEXT * 3, name="skill").save_pretrained(tmp_path, storage=storage)
    chunk = Skill.from_pretrained(tmp_path)
    assert chunk.verify(model, tokenizer).ok
    assert not with_cell(chunk, lambda tensor: tensor[:, :, 0].mul_(1.5), layer=10).verify(model).ok
