"""Bad input: a library error that names thing, expected, got and next move; cache and ledger stay bit-identical."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cache_support import (
    POLICY,
    Snapshot,
    forward,
    generate,
    make_cache,
    make_context,
    policy,
    refused,
    shared_model,
    shared_tokenizer,
    some_ids,
)

from editable_cache import (
    CompatibilityError,
    ContextWarning,
    EditableCache,
    EditableCacheError,
    FieldError,
    LedgerError,
    Skill,
    SpanError,
    UnsupportedModelError,
)
from editable_cache.testing.tiny_models import tiny_model, tiny_tokenizer

Case = tuple[Any, type[EditableCacheError], tuple[str, ...]]

SPANS: dict[str, Case] = {
    "empty": (lambda c, f: f((5, 5)), SpanError, ("0 <= start < stop <=", "(5, 5)")),
    "reversed": (lambda c, f: f((8, 5)), SpanError, ("(8, 5)",)),
    "negative": (lambda c, f: f((-3, 5)), SpanError, ("(-3, 5)",)),
    "beyond": (lambda c, f: f((5, 999)), SpanError, ("999",)),
    "reversed_slice": (lambda c, f: f(slice(8, 5)), SpanError, ("(8, 5)",)),
    "step": (lambda c, f: f(slice(2, 8, 2)), SpanError, ("step",)),
    "unknown_segment": (lambda c, f: f("nowhere"), SpanError, ("'nowhere'", "'system'")),
    "wrong_kind": (lambda c, f: f(3.5), SpanError, ("float", "3.5")),
    "three": (lambda c, f: f((1, 2, 3)), SpanError, ("(start, stop)",)),
}

TAKERS: dict[str, Any] = {
    "remove": lambda c: c.remove,
    "reposition": lambda c: lambda where: c.reposition(where, to=0),
    "extract": lambda c: c.extract,
    "recompute": lambda c: c.recompute,
}


@pytest.mark.parametrize("taker", TAKERS)
@pytest.mark.parametrize("case", SPANS)
def test_spans(case: str, taker: str) -> None:
    call, kind, words = SPANS[case]
    cache = make_context()
    with refused(cache, kind, ValueError, taker if case != "unknown_segment" else "segment", *words):
        call(cache, TAKERS[taker](cache))


CASES: dict[str, Case] = {
    "splice_slot": (lambda c: c.splice(policy(), at=999, name="x"), SpanError, ("at=", "999")),
    "splice_negative_slot": (lambda c: c.splice(policy(), at=-1, name="x"), SpanError, ("at=", "-1")),
    "splice_seam": (lambda c: c.splice(policy(), seam_tokens=-1, name="x"), SpanError, ("seam_tokens", "-1")),
    "splice_position_back": (lambda c: c.splice(policy(), position=3, name="x"), SpanError, ("position", "got 3")),
    "splice_both": (lambda c: c.splice(policy(), at=3, position=80, name="x"), SpanError, ("position=", "at=")),
    "splice_far": (lambda c: c.splice(policy(), position=131_070, name="x"), SpanError, ("max_position", "131072")),
    "splice_same_name": (lambda c: c.splice(policy()), SpanError, ("Duplicate", "'policy'")),
    "splice_text": (lambda c: c.splice("some text"), CompatibilityError, ("KVChunk", "str", "precompile")),
    "splice_none": (lambda c: c.splice(None), CompatibilityError, ("KVChunk", "NoneType")),
    "append_same_name": (lambda c: c.append("x", name="system"), SpanError, ("Duplicate", "'system'")),
    "append_none": (lambda c: c.append(None), EditableCacheError, ("token ids", "NoneType")),
    "append_ragged": (lambda c: c.append([[1, 2], [3]]), EditableCacheError, ("token ids", "list")),
    "append_floats": (lambda c: c.append([1.5, 2.0]), EditableCacheError, ("integers", "float")),
    "append_bools": (lambda c: c.append(torch.tensor([True])), EditableCacheError, ("integers", "bool")),
    "append_3d": (lambda c: c.append(torch.ones(1, 2, 3).long()), EditableCacheError, ("[1, 2, 3]",)),
    "append_big_id": (lambda c: c.append([5, 320]), SpanError, ("[0, 320)", "320")),
    "append_negative_id": (lambda c: c.append([5, -1]), SpanError, ("[0, 320)", "-1")),
    "append_rows": (lambda c: c.append(["a", "b"]), SpanError, ("one text", "got 2")),
    "insert_slot": (lambda c: c.insert("x", 999), SpanError, ("at=", "999")),
    "insert_big_id": (lambda c: c.insert([999], 5), SpanError, ("[0, 320)", "999")),
    "insert_same_name": (lambda c: c.insert("x", 5, name="system"), SpanError, ("Duplicate",)),
    "insert_in_field": (lambda c: c.insert("xy", _inside(c)), SpanError, ("'status'", "cut")),
    "splice_in_field": (lambda c: c.splice(policy(), _inside(c), name="x"), SpanError, ("'status'", "cut")),
    "remove_half_field": (lambda c: c.remove((6, _inside(c))), SpanError, ("'status'", "cut")),
    "move_both": (lambda c: c.reposition("order", to=0, position=3), SpanError, ("to=", "position=")),
    "move_nowhere": (lambda c: c.reposition("order"), SpanError, ("to=", "position=")),
    "move_out": (lambda c: c.reposition("order", to=999), SpanError, ("999",)),
    "move_negative": (lambda c: c.reposition("order", position=-4), SpanError, (">= 0", "-4")),
    "move_far": (lambda c: c.reposition("order", position=131_071), SpanError, ("max_position",)),
    "mask_float": (lambda c: c.recompute(torch.ones(len(c.ledger))), SpanError, ("bool mask", "float32")),
    "mask_long": (lambda c: c.recompute(torch.ones(len(c.ledger)).long()), SpanError, ("bool mask", "int64")),
    "mask_short": (lambda c: c.recompute(torch.ones(3).bool()), SpanError, ("bool mask", "[3]")),
    "mask_layers": (lambda c: c.recompute(torch.ones(4, len(c.ledger)).bool()), SpanError, ("[4, ",)),
    "field_unknown": (lambda c: c.refresh_field("nope", "x"), FieldError, ("'nope'", "'status'", "append")),
    "field_empty": (lambda c: c.refresh_field("status", ""), FieldError, ("'status'", "at least one token")),
    "field_number": (lambda c: c.refresh_field("status", 7), FieldError, ("'status'", "7")),
    "erratum_unknown": (lambda c: c.erratum("nope", "x"), FieldError, ("'nope'",)),
    "erratum_empty": (lambda c: c.erratum("status", ""), FieldError, ("at least one token",)),
    "erratum_template": (lambda c: c.erratum("status", "x", template="no slot"), FieldError, ("{value}", "no slot")),
    "edit_method": (lambda c: c.edit("status", "x", method="magic"), FieldError, ("'magic'", "suffix")),
    "edit_cells": (lambda c: c.edit("status", "x", cells=(1, 2)), FieldError, ("cells=", "selective")),
    "edit_role": (lambda c: c.edit("status", "x", method="suffix", role="user"), FieldError, ("role=", "suffix")),
    "edit_bad_cells": (
        lambda c: c.edit("status", "delivered now", method="selective", cells=(5, 999)),
        SpanError,
        ("999",),
    ),
    "template_missing": (lambda c: c.append("a {x} b", fields={"y": "1"}), FieldError, ("['y']", "['x']")),
    "template_extra": (lambda c: c.append("a {x} {z} b", fields={"x": "1"}), FieldError, ("['x', 'z']",)),
    "template_without": (lambda c: c.append("plain", fields={"x": "1"}), FieldError, ("['x']", "[]")),
    "template_format": (lambda c: c.append("a {x:>5} b", fields={"x": "1"}), FieldError, ("{x}",)),
    "template_brace": (lambda c: c.append("a {x b", fields={"x": "1"}), FieldError, ("{{",)),
    "template_ids": (lambda c: c.append([1, 2], fields={"x": "1"}), FieldError, ("template text", "list")),
    "template_shared": (lambda c: c.append("or{x}er \n", fields={"x": "d"}), FieldError, ("neighbours", "'{x}'")),
    "template_again": (lambda c: c.append("a {status} b", fields={"status": "x"}), FieldError, ("Duplicate",)),
    "sync_empty": (lambda c: c.sync(""), SpanError, ("at least one token", "reset()")),
    "sync_big_id": (lambda c: c.sync([5, 999]), SpanError, ("[0, 320)", "999")),
    "rollback": (lambda c: c.rollback("never"), SpanError, ("'never'",)),
    "crop": (lambda c: c.crop(3), SpanError, ("crop(-3)",)),
    "inputs_big_id": (lambda c: c.inputs([999]), SpanError, ("[0, 320)", "999")),
    "slots": (lambda c: c.segment("system").slots(3, 2), SpanError, ("'system'", "3, 2")),
    "chunk_slice": (lambda c: policy().slice(5, 2), SpanError, ("5, 2",)),
}


def _inside(cache: EditableCache) -> int:
    cache.edit("status", "delivered now at last", method="in_place")  # several tokens
    start, stop = cache.field("status").spans[0]
    assert stop - start > 1
    return start + 1


@pytest.mark.parametrize("case", CASES)
def test_refusals(case: str) -> None:
    call, kind, words = CASES[case]
    cache = make_context()
    if case in ("insert_in_field", "splice_in_field", "remove_half_field"):
        _inside(cache)  # before the snapshot
    with refused(cache, kind, ValueError, *words):
        call(cache)
    cache.append("and on it goes")
    forward(cache, some_ids(2))


@pytest.mark.parametrize("content", ["", [], torch.empty(0, dtype=torch.int64)], ids=["text", "list", "tensor"])
def test_nothing_is_nothing(content: Any) -> None:
    cache = make_context()
    before = Snapshot(cache)
    for outcome in (cache.append(content), cache.insert(content, 5)):
        assert outcome.tokens_computed == 0
        assert outcome.notes
    empty = Skill.precompile(shared_model(), shared_tokenizer(), content, name="empty")
    assert cache.splice(empty).tokens_pasted == 0
    assert cache.splice(empty, at=3).tokens_pasted == 0
    before.check(cache)


def test_a_value_that_joins_its_neighbour() -> None:
    cache = make_cache()
    cache.append("st{x} \nrest\n", fields={"x": " 1"})
    with refused(cache, FieldError, ValueError, "'x'", "atus"):
        cache.refresh_field("x", "atus")  # "status" is one token


def test_empty_caches_say_what_is_missing() -> None:
    for call, words in (
        (lambda c: c.inputs(""), "inputs"),
        (lambda c: c.verify(), "verify"),
        (lambda c: c.next_token_logits(), "next_token_logits"),
        (lambda c: EditableCache.stack([c]), "stack"),
        (lambda c: c.remove((0, 1)), "remove"),
        (lambda c: c.extract((0, 1)), "extract"),
    ):
        with refused(cache := make_cache(), EditableCacheError, ValueError, words):
            call(cache)


def _other(change: Any, **kwargs: Any) -> Any:
    model = tiny_model("llama", **kwargs)
    with torch.no_grad():
        change(model)
    return model


PRODUCERS: dict[str, tuple[Any, str]] = {
    "seed": (lambda: tiny_model("llama", seed=9), "weights"),
    "norm": (lambda: _other(lambda m: m.model.norm.weight[3].add_(0.05)), "weights"),
    "layer_norm": (lambda: _other(lambda m: m.model.layers[2].input_layernorm.weight[63].add_(0.05)), "weights"),
    "key": (lambda: _other(lambda m: m.model.layers[1].self_attn.k_proj.weight[7, 9].add_(0.05)), "weights"),
    "embedding": (lambda: _other(lambda m: m.model.embed_tokens.weight[41, 3].add_(0.05)), "weights"),
    "swapped_rows": (lambda: _other(_swap_rows), "weights"),
    "frequency": (lambda: _other(lambda m: m.model.rotary_emb.inv_freq.mul_(2)), "rotary"),
    "dtype": (lambda: tiny_model("llama", dtype=torch.bfloat16), "dtype"),
    "scaling": (lambda: tiny_model("llama_linear"), "rotary"),
    "family": (lambda: tiny_model("qwen3"), "model_type"),
    "window": (lambda: tiny_model("mistral"), "model_type"),
}


def _swap_rows(model: Any) -> None:
    weight = model.model.embed_tokens.weight
    weight[[10, 11]] = weight[[11, 10]]


@pytest.mark.parametrize("case", PRODUCERS)
@pytest.mark.parametrize("way", ["end", "middle"])
def test_a_chunk_of_another_model(case: str, way: str) -> None:
    make, fact = PRODUCERS[case]
    chunk = Skill.precompile(make(), shared_tokenizer(), POLICY, name="foreign")
    cache = make_context()
    with refused(cache, CompatibilityError, ValueError, "foreign", fact, "Skill.precompile", "expected"):
        cache.splice(chunk, at=None if way == "end" else 5)
    with pytest.raises(CompatibilityError) as caught:
        cache.splice(chunk)
    assert fact in {reason.what for reason in caught.value.reasons}


def test_a_chunk_of_weights_changed_afterwards_and_changed_back() -> None:
    """Weights in place, config in place: the identity is taken anew; the same weights again are accepted again."""
    model = tiny_model("llama")
    cache = EditableCache(model, tokenizer=shared_tokenizer())
    cache.append("You are a support agent.\n")
    skill = Skill.precompile(model, shared_tokenizer(), POLICY, name="policy")
    kept = model.model.norm.weight.detach().clone()
    with torch.no_grad():
        model.model.norm.weight[5] += 0.05
    with refused(cache, CompatibilityError, ValueError, "weights"):
        cache.splice(skill)
    with torch.no_grad():
        model.model.norm.weight.copy_(kept)
    model.config.rope_parameters = {**model.config.rope_parameters, "rope_theta": 5e5}
    with refused(cache, CompatibilityError, ValueError, "config"):
        cache.splice(skill)
    model.config.rope_parameters = {**model.config.rope_parameters, "rope_theta": 10_000.0}
    cache.splice(skill)


def test_a_chunk_of_another_tokenizer() -> None:
    cache, chunk = make_context(), Skill.precompile(shared_model(), tiny_tokenizer(add_bos=True), POLICY, name="x")
    with refused(cache, CompatibilityError, ValueError, "tokenizer"):
        cache.splice(chunk)
    # ids without a tokenizer are ids: nothing to compare
    cache.splice(Skill.precompile(shared_model(), None, shared_tokenizer()(POLICY)["input_ids"], name="ids"))


def test_a_chunk_of_another_layer_count() -> None:
    model = tiny_model("llama")
    model.model.layers = model.model.layers[:2]
    model.config.num_hidden_layers = 2
    with refused(cache := make_cache(), CompatibilityError, ValueError, "config"):
        cache.splice(Skill.precompile(model, shared_tokenizer(), POLICY, name="short"))


def test_a_context_beyond_the_models_positions() -> None:
    model = tiny_model("llama")
    model.config.max_position_embeddings = 64
    cache = EditableCache(model, tokenizer=shared_tokenizer())
    cache.append(some_ids(50)[0])
    chunk = Skill.precompile(model, None, some_ids(14)[0], name="fits")
    longer = Skill.precompile(model, None, some_ids(15)[0], name="too long")
    for call in (
        lambda: cache.splice(longer),
        lambda: cache.splice(longer, at=5),
        lambda: cache.append(some_ids(15)[0]),
        lambda: cache.insert(some_ids(15)[0], 5),
        lambda: cache.sync(some_ids(65)[0]),
        lambda: cache.sync(torch.cat((some_ids(15, seed=5)[0], some_ids(50)[0])), approximate=True),
        lambda: Skill.precompile(model, None, some_ids(65)[0], name="x"),
    ):
        with refused(cache, SpanError, ValueError, "64", "max_position_embeddings"):
            call()
    cache.splice(chunk)
    assert len(cache.ledger) == 64


def test_a_model_whose_cells_cannot_be_moved() -> None:
    cache, model = EditableCache(shared_model("gpt2")), shared_model("gpt2")
    forward(cache, some_ids(12), model=model)
    for call in (
        lambda: Skill.precompile(model, None, some_ids(5)[0], name="x"),
        lambda: cache.remove((4, 6)),
        lambda: cache.reposition((4, 6), to=2),
    ):
        with refused(cache, UnsupportedModelError, NotImplementedError, "layer 0"):
            call()


def test_a_cache_without_a_model_names_what_needs_one() -> None:
    cache = EditableCache(config=shared_model().config, tokenizer=shared_tokenizer())
    forward(cache, some_ids(12))
    for name, call in {
        "append": lambda: cache.append("x"),
        "splice": lambda: cache.splice(policy()),
        "insert": lambda: cache.insert("x", 5),
        "reposition": lambda: cache.reposition((4, 6), to=2),
        "recompute": lambda: cache.recompute((4, 6)),
        "verify": lambda: cache.verify(),
        "extract": lambda: cache.extract((4, 6)),
    }.items():
        with refused(cache, EditableCacheError, Exception):
            call()
        assert name


@pytest.mark.parametrize("rows", [2, 3])
def test_wrong_batches(rows: int) -> None:
    cache = make_cache()
    forward(cache, some_ids(8, batch=rows))
    for call in (
        lambda: forward(cache, some_ids(2, batch=5)),
        lambda: forward(cache, some_ids(2, batch=1)),
        lambda: generate(cache, some_ids(8, batch=1)),
        lambda: generate(cache, some_ids(8, batch=5)),
    ):
        with refused(cache, LedgerError, ValueError, f"{rows} rows", "batch_select_indices"):
            call()
    for call in (
        lambda: cache.extract((2, 4)),
        lambda: cache.sync([5, 6]),
        lambda: cache.append(["a"] * (rows + 1)),
        lambda: cache.inputs(["a"] * (rows + 1)),
    ):
        with refused(cache, EditableCacheError, ValueError, str(rows)):
            call()


def test_stacking_caches_of_different_models() -> None:
    cache, other = make_context(), EditableCache(tiny_model("llama", seed=3))
    forward(other, some_ids(4), model=other.model)
    for caches in ([], [cache, other], [cache, make_cache()]):
        with refused(cache, SpanError, ValueError, "stack"):
            EditableCache.stack(caches)


def test_a_second_bos_in_the_middle_is_told() -> None:
    tokenizer = shared_tokenizer(add_bos=True)
    cache = EditableCache(shared_model(), tokenizer=tokenizer)
    own_bos = Skill.precompile(shared_model(), tokenizer, tokenizer(POLICY)["input_ids"], name="bos")
    cache.splice(own_bos, name="first")  # at slot 0 it belongs there
    with pytest.warns(ContextWarning, match="second BOS"):
        cache.splice(own_bos)
