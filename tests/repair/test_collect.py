"""Traces against the same numbers computed by hand from what eager attention returns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cache_support import Snapshot, make_cache, refused, shared_tokenizer
from torch import Tensor

from editable_cache import (
    CompatibilityError,
    ContextWarning,
    EditableCache,
    LedgerError,
    SpanError,
    UnsupportedModelError,
)
from editable_cache.adapters import host
from editable_cache.forward import run
from editable_cache.repair import collect
from editable_cache.repair.collect import PrefillTracer, Traced, compare, probe
from editable_cache.repair.patch import recompute_without
from editable_cache.testing.contents import random_ids
from editable_cache.testing.oracles import check, relative_error
from editable_cache.testing.tiny_models import tiny_model

CONTAMINATION, DOCUMENT = (2, 7), (7, 27)
IDS = random_ids(27)
QUERY = random_ids(6, seed=9)
FAMILIES = ("llama", "qwen3", "gemma3", "gemma2", "deepseek_v3")
FIELDS = ("inflow", "attention_to_contamination", "attention_received", "key_norm", "value_norm", "hidden_norm")


def traced(model: Any, *, pieces: int = 1) -> tuple[EditableCache, Traced]:
    cache = EditableCache(model, tokenizer=shared_tokenizer())
    cache.append(IDS[: CONTAMINATION[0]])
    cache.append(IDS[slice(*CONTAMINATION)], name="instruction")
    tracer = PrefillTracer(cache, CONTAMINATION)
    with tracer.recording():
        for piece in IDS[slice(*DOCUMENT)].chunk(pieces):
            cache.append(piece)
    return cache, tracer.finish()


class ByHand:
    """Attention, values and W_O of one eager forward over everything, layer by layer."""

    def __init__(self, family: str, ids: Tensor) -> None:
        model: Any = tiny_model(family, attn_implementation="eager")
        cache = {host.cache_argument(model): host.full_cache(model.config)}
        with torch.no_grad():
            out = model(input_ids=ids[None], output_attentions=True, output_hidden_states=True, **cache)
        self.weights = [w[0] for w in out.attentions]
        self.hidden = [h[0].norm(dim=-1) for h in out.hidden_states[:-1]]
        self.cells = host.cache_in(cache).layers
        self.output = [layer.self_attn.o_proj.weight.detach() for layer in model.model.layers]

    def contribution(self, layer: int, weights: Tensor, span: tuple[int, int]) -> Tensor:
        """``weights [heads, n, slots]`` times the values of ``span``, through W_O: ``[n, hidden]``."""
        values = self.cells[layer].values[0][:, slice(*span)]
        values = values.repeat_interleave(len(weights) // len(values), dim=0)
        return (weights @ values).transpose(0, 1).flatten(1) @ self.output[layer].T


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_prefill_trace_by_hand(family: str) -> None:
    trace, hand = traced(tiny_model(family))[1].trace, ByHand(family, IDS)
    (low, high), (start, stop) = CONTAMINATION, DOCUMENT
    for layer in range(len(hand.weights)):
        weights = hand.weights[layer][:, start:stop]
        inflow = hand.contribution(layer, weights[..., low:high], (low, high)).norm(dim=-1)
        hidden = hand.hidden[layer][start:stop]
        check(trace.inflow[layer], inflow / hidden)
        check(trace.hidden_norm[layer], hidden)
        check(trace.attention_to_contamination[layer], weights[..., low:high].sum(-1).mean(0))
        for j in range(start, stop):
            later = hand.weights[layer][:, j + 1 :, j].mean() if j + 1 < stop else torch.zeros(())
            assert abs(float(trace.attention_received[layer, j - start] - later)) < 1e-5
        cells = hand.cells[layer]
        check(trace.value_norm[layer], cells.values[0].transpose(0, 1).flatten(1)[-20:].norm(dim=-1))
        check(trace.key_norm[layer], cells.keys[0].transpose(0, 1).flatten(1)[-20:].norm(dim=-1))
    assert torch.equal(trace.token_ids, IDS[start:])
    assert torch.equal(trace.distance, torch.arange(20))


@pytest.mark.parametrize("family", FAMILIES)
def test_eager_and_sdpa_agree(family: str) -> None:
    eager_cache, eager = traced(tiny_model(family, attn_implementation="eager"))
    cache, other = traced(tiny_model(family))
    for name in FIELDS:
        check(getattr(other.trace, name), getattr(eager.trace, name), 1e-4, name)
    one, two = probe(eager_cache, QUERY, DOCUMENT), probe(cache, QUERY, DOCUMENT)
    check(one.attention, two.attention)
    check(one.readout, two.readout)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_pieces_do_not_matter(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(family)
    cache, whole = traced(model)
    asked = probe(cache, QUERY, DOCUMENT)
    monkeypatch.setattr(collect, "CHUNK_QUERIES", 3)
    monkeypatch.setattr(run, "PREFILL_TOKENS", 4)
    cache, other = traced(model, pieces=3)
    for name in FIELDS:
        check(getattr(other.trace, name), getattr(whole.trace, name), 1e-4, name)
    check(probe(cache, QUERY, DOCUMENT).readout, asked.readout)


def test_another_span_gives_another_trace() -> None:
    """Negative control."""
    model = tiny_model("llama")
    cache = EditableCache(model)
    cache.append(IDS[:7])
    tracer = PrefillTracer(cache, (0, 5))
    with tracer.recording():
        cache.append(IDS[7:])
    other = tracer.finish().trace
    expected = traced(model)[1].trace
    assert relative_error(other.inflow, expected.inflow) > 1e-2
    assert relative_error(other.attention_received, expected.attention_received) < 1e-5


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_neox"])
def test_tracing_does_not_change_what_is_computed(family: str) -> None:
    cache, _ = traced(tiny_model(family))
    plain = EditableCache(cache.model, tokenizer=shared_tokenizer())
    for span in ((0, 2), (2, 7), (7, 27)):
        plain.append(IDS[slice(*span)])
    for mine, theirs in zip(cache.editable_layers, plain.editable_layers, strict=True):
        assert all(torch.equal(t, theirs.view()[name]) for name, t in mine.view().items())


def test_probe_by_hand() -> None:
    cache, _ = traced(tiny_model("llama"))
    before = Snapshot(cache)
    found, hand = probe(cache, QUERY, DOCUMENT), ByHand("llama", torch.cat([IDS, QUERY]))
    before.check(cache)
    start, stop = DOCUMENT
    for layer, all_weights in enumerate(hand.weights):
        weights = all_weights[:, stop:, start:stop]
        check(found.attention[layer], weights.mean((0, 1)))
        for j in range(stop - start):
            taken = hand.contribution(layer, weights[..., j : j + 1], (start + j, start + j + 1)).sum(0)
            assert abs(float(found.readout[layer, j] - taken.norm())) < 1e-4 * float(found.readout[layer].max())


def test_compare_by_hand() -> None:
    cache, _ = traced(tiny_model("llama"))
    clean = cache.fork()
    recompute_without(clean, torch.ones(3, 20, dtype=torch.bool), DOCUMENT, CONTAMINATION)
    with pytest.warns(ContextWarning):
        clean.remove("instruction", close_gap=False)
    found = compare(cache, clean, QUERY, DOCUMENT)
    for layer, (mine, theirs) in enumerate(zip(cache.editable_layers, clean.editable_layers, strict=True)):
        for name, got in (("keys", found.key_deviation), ("values", found.value_deviation)):
            difference = mine.view()[name][0, :, 7:] - theirs.view()[name][0, :, 2:]
            check(got[layer] + 1, difference.transpose(0, 1).flatten(1).norm(dim=-1) + 1)
    assert not found.key_deviation[0].gt(1e-4).any()
    assert found.key_deviation[1].gt(1e-2).all()
    check(found.attention, probe(clean, QUERY, (2, 22)).attention)
    other = make_cache()
    other.append(IDS)
    with pytest.raises(CompatibilityError, match="same model"):
        compare(cache, other, QUERY, DOCUMENT)


def test_delimiters() -> None:
    tokenizer = shared_tokenizer()
    cache = make_cache()
    ids = torch.tensor(tokenizer("agent. the\nrefund, <|im_end|>")["input_ids"])
    marks = collect.delimiters(cache, ids, tokenizer).tolist()
    pairs = [(tokenizer.decode([i]), mark) for i, mark in zip(ids.tolist(), marks, strict=True)]
    assert {text for text, mark in pairs if mark} == {".", "\n", ",", "<|im_end|>"}
    assert not collect.delimiters(cache, ids).any()


def test_what_was_taken_back_is_not_in_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    expected = traced(model)[1].trace
    cache = EditableCache(model)
    cache.append(IDS[:7])
    tracer = PrefillTracer(cache, CONTAMINATION)
    other = EditableCache(model)
    with tracer.recording():
        monkeypatch.setattr(run, "lengthened", None)
        with pytest.raises(TypeError):
            cache.append(random_ids(9, seed=5))
        monkeypatch.undo()
        other.append(random_ids(30, seed=4))  # another cache of the same model
        cache.append(IDS[7:])
        same_length = EditableCache(model)
        same_length.append(random_ids(7, seed=6))
        same_length.append(random_ids(20, seed=7))
    found = tracer.finish().trace
    for name in FIELDS:
        check(getattr(found, name), getattr(expected, name))


def test_a_trace_with_holes_is_refused() -> None:
    cache = make_cache()
    cache.append(IDS[:7])
    tracer = PrefillTracer(cache, CONTAMINATION)
    with tracer.recording():
        pass
    with pytest.raises(LedgerError, match="none that stayed"):
        tracer.finish()
    with tracer.recording():
        cache.append(IDS[7:12])
    cache.append(IDS[12:])
    with pytest.raises(LedgerError, match="not all of the document"):
        tracer.finish()


def test_bad_input() -> None:
    cache = make_cache()
    cache.append(IDS)
    for span in ((3, 3), (-1, 4), (5, 28), (9, 4)):
        with refused(cache, SpanError, ValueError, "0 <= start < stop <= 27"):
            PrefillTracer(cache, span)
        with refused(cache, SpanError, ValueError, "0 <= start < stop <= 27"):
            probe(cache, QUERY, span)
    for query in (QUERY[:0], QUERY[None]):
        with refused(cache, SpanError, ValueError, "at least one token"):
            probe(cache, query, DOCUMENT)
    with refused(cache, SpanError, ValueError, "token ids in"):
        probe(cache, QUERY + 10_000, DOCUMENT)
    rows = EditableCache.stack([cache, cache])
    with refused(rows, SpanError, ValueError, "one row, got 2"):
        PrefillTracer(rows, CONTAMINATION)
    with refused(rows, SpanError, ValueError, "one row, got 2"):
        probe(rows, QUERY, DOCUMENT)
    hybrid = make_cache("falcon_h1")
    hybrid.append(IDS)
    for call in (lambda: PrefillTracer(hybrid, CONTAMINATION), lambda: probe(hybrid, QUERY, DOCUMENT)):
        with pytest.raises(UnsupportedModelError, match="recurrent state"):
            call()


def test_a_query_beyond_the_model() -> None:
    model: Any = tiny_model("llama")
    model.config.max_position_embeddings = 30
    cache = EditableCache(model)
    cache.append(IDS)
    with refused(cache, SpanError, ValueError, "max_position_embeddings"):
        probe(cache, QUERY, DOCUMENT)


def test_attention_outside_the_interface_is_told() -> None:
    cache = make_cache("bloom")
    cache.append(IDS[:7])
    tracer = PrefillTracer(cache, CONTAMINATION)
    with tracer.recording():
        cache.append(IDS[7:])
    with pytest.raises(UnsupportedModelError, match="was not seen"):
        tracer.finish()
    with refused(cache, UnsupportedModelError, NotImplementedError, "was not seen"):
        probe(cache, QUERY, DOCUMENT)
