"""An unedited `EditableCache` gives what `DynamicCache` gives: the same tokens and, step by step, the same logits."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from cache_support import (
    Snapshot,
    assert_same_output,
    chunked_prefill_starts_over,
    failing_at,
    forward,
    generate,
    make_cache,
    shared_model,
    some_ids,
)
from torch import Tensor
from transformers import DynamicCache
from transformers.generation.streamers import BaseStreamer

from editable_cache import EditableCache, LedgerError
from editable_cache.adapters import host
from editable_cache.testing.tiny_models import FAMILIES, TINY_FAMILIES, tiny_model

MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 0.8, "top_k": 20},
    "beams": {"num_beams": 3},
    "beam_sampling": {"num_beams": 2, "do_sample": True},
    "several": {"do_sample": True, "num_return_sequences": 3},
    "beams_several": {"num_beams": 3, "num_return_sequences": 2},
    "prompt_lookup": {"prompt_lookup_num_tokens": 3},
    "chunked_prefill": {"prefill_chunk_size": 5},
}

MAKERS = {
    "model": lambda model: EditableCache(model),
    "config": lambda model: EditableCache(config=model.config),
    "bare": lambda model: EditableCache(),
}


def run(cache: Any, ids: Tensor, **kwargs: Any) -> Any:
    torch.manual_seed(7)
    return generate(cache, ids, **kwargs)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("mode", MODES)
def test_every_decoding_mode(mode: str, make: str) -> None:
    ids, model = some_ids(12), shared_model()
    expected = run(DynamicCache(), ids, **MODES[mode])
    cache = MAKERS[make](model)
    actual = run(cache, ids, **MODES[mode])
    assert_same_output(actual, expected)
    if make == "model":
        assert cache.verify().ok
        if cache.ledger.batch == len(actual.sequences):
            assert torch.equal(cache.token_ids, actual.sequences[:, :-1])


@pytest.mark.parametrize("held", [1, 7, 11, 12])
@pytest.mark.parametrize("mode", MODES)
def test_a_prefilled_single_row_feeds_every_mode(mode: str, held: int) -> None:
    """huggingface/transformers#27449: stock transformers raises where beams meet a batch-1 cache."""
    ids = some_ids(12)
    expected = run(DynamicCache(), ids, **MODES[mode])
    cache = make_cache()
    cache.append(ids[0, :held])
    if mode == "chunked_prefill" and chunked_prefill_starts_over():
        with pytest.raises(LedgerError, match=f"from slot {min(held, 11)} on"):
            run(cache, ids, **MODES[mode])
        assert cache.token_ids.tolist() == ids[:, :held].tolist()
    else:
        assert_same_output(run(cache, ids, **MODES[mode]), expected, 1e-4)
    assert cache.verify().ok


def test_a_prefilled_single_row_feeds_a_batch_of_beams() -> None:
    ids = some_ids(12).repeat(2, 1)
    ids[1, 9:] = some_ids(3, seed=9)
    expected = run(DynamicCache(), ids, num_beams=2)
    cache = make_cache()
    cache.append(ids[0, :8])
    assert_same_output(run(cache, ids, num_beams=2), expected, 1e-4)
    assert cache.ledger.batch == 4
    assert cache.verify().ok
    # negative control: the shared part must really be shared
    wrong = make_cache()
    wrong.append(ids[0, :8])
    ids[1, 3] += 1
    with pytest.raises(LedgerError, match="slot 3 of row 1"):
        run(wrong, ids, num_beams=2)


def test_the_comparison_sees_one_wrong_position() -> None:
    """Negative control of this file: one position off is far outside of the tolerance."""
    ids = some_ids(12)
    expected = run(DynamicCache(), ids)
    cache = make_cache()
    cache.append(ids[0, :6])
    cache.splice(cache.extract((4, 6)), position=7, seam_tokens=0)
    cache.remove((4, 6), close_gap=False)
    assert torch.equal(cache.token_ids, ids[:, :6])
    with pytest.raises(AssertionError):
        assert_same_output(run(cache, ids), expected, 1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("family", "attention"), [(name, kind) for name, row in FAMILIES.items() for kind in row.attention]
)
def test_left_padded_batch_in_every_family(family: str, attention: str, dtype: torch.dtype) -> None:
    """Refused families too: a model whose cells cannot be moved still has its drop-in cache."""
    model = shared_model(family, dtype=dtype, attn_implementation=attention)
    ids = some_ids(14, batch=2)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    # A stock cache made without a config keeps every token too: in 16 bits a window cut off rounds otherwise.
    stock = DynamicCache() if family in TINY_FAMILIES else DynamicCache(config=model.config)
    beams = 3 if dtype == torch.float32 else 1
    options = {"model": model, "attention_mask": mask, "max_new_tokens": 6, "num_beams": beams}
    expected = run(stock, ids, **options)
    cache = EditableCache(model)
    assert_same_output(run(cache, ids, **options), expected, 1e-5)
    if family in TINY_FAMILIES:
        assert cache.verify().ok
        if beams == 1:
            assert torch.equal(cache.token_ids[1], expected.sequences[1, :-1])


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3"])
@pytest.mark.parametrize("mode", MODES)
def test_sliding_models_past_the_window(family: str, mode: str) -> None:
    """The stock cache keeps 7 tokens of a window of 8, ours all of them: the mask must make them equal."""
    model, ids = shared_model(family), some_ids(20)
    options = {} if mode == "prompt_lookup" else MODES[mode]
    expected = run(DynamicCache(config=model.config), ids, model=model, max_new_tokens=10, **options)
    cache = EditableCache(model)
    actual = run(cache, ids, model=model, max_new_tokens=10, **MODES[mode])
    if mode == "prompt_lookup":
        assert torch.equal(actual.sequences, expected.sequences)
    else:
        assert_same_output(actual, expected, 1e-4)
    assert cache.layers[0].keys.shape[-2] == cache.get_seq_length()
    assert cache.verify().ok


class _WrongAssistant:
    """A tiny model of the same vocabulary whose every proposal is wrong for the main model."""

    def __new__(cls, main: Any) -> Any:
        assistant = tiny_model("llama", seed=5)
        with torch.no_grad():
            assistant.lm_head.weight.copy_(-main.lm_head.weight)
        return assistant


@pytest.mark.parametrize("kind", ["other", "same", "wrong"])
@pytest.mark.parametrize("held", [0, 7, 12])
def test_assisted_decoding(kind: str, held: int) -> None:
    """huggingface/transformers#31644, #30312: rollback off by one, or the assistant got the main model's cache."""
    model, ids = shared_model(), some_ids(12)
    assistant = {"other": lambda: tiny_model("llama", seed=5), "same": lambda: tiny_model("llama")}.get(
        kind, lambda: _WrongAssistant(model)
    )()
    expected = run(DynamicCache(), ids, max_new_tokens=10)
    cache = make_cache()
    if held:
        cache.append(ids[0, :held])
    actual = run(cache, ids, max_new_tokens=10, assistant_model=assistant)
    assert_same_output(actual, expected, 1e-4)
    assert torch.equal(cache.token_ids, actual.sequences[:, :-1])
    assert cache.verify().ok
    assert "generate" not in assistant.__dict__  # the assistant stays a stock model with its own stock cache
    assert not assistant._forward_hooks


@pytest.mark.parametrize("name", host.CACHE_NAMES)
def test_both_names_of_the_argument(name: str) -> None:
    model, ids = shared_model(), some_ids(12)
    if name not in {"past_key_values", host.cache_argument(model)}:
        pytest.skip(f"this transformers does not know {name}=")
    expected = run(DynamicCache(), ids)
    cache = make_cache()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the old name is deprecated
        with torch.no_grad():
            model(ids[:, :5], **{name: cache})
            model(ids[:, 5:9], **{name: cache})
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False, **{name: cache}
        )
    assert torch.equal(out, expected.sequences)
    assert torch.equal(cache.token_ids, out[:, :-1])


def test_positional_arguments_reach_the_cache() -> None:
    model, ids, cache = shared_model(), some_ids(12), make_cache()
    with torch.no_grad():
        logits = model(ids, None, None, cache).logits
    assert torch.equal(cache.token_ids, ids)
    assert torch.allclose(logits, forward(DynamicCache(), ids))


def test_a_streamer_sees_every_token() -> None:
    class Collect(BaseStreamer):
        def __init__(self) -> None:
            self.seen: list[int] = []
            self.lengths: list[int] = []

        def put(self, value: Tensor) -> None:
            self.seen += value.reshape(-1).tolist()
            self.lengths.append(cache.token_ids.shape[1])

        def end(self) -> None:
            self.seen.append(-1)

    ids, cache, streamer = some_ids(12), make_cache(), Collect()
    out = run(cache, ids, streamer=streamer)
    assert streamer.seen == [*out.sequences[0].tolist(), -1]
    assert streamer.lengths == [0, 12, 13, 14, 15, 16, 17]


def test_embeddings_are_recorded_as_unknown() -> None:
    model, ids, cache = shared_model(), some_ids(12), make_cache()
    with torch.no_grad():
        embeds = model.get_input_embeddings()(ids)
        logits = model(inputs_embeds=embeds, **{host.cache_argument(model): cache}).logits
    assert torch.allclose(logits, forward(DynamicCache(), ids))
    assert cache.token_ids.tolist() == [[-1] * 12]
    for refused in (cache.verify, lambda: cache.recompute((3, 5)), lambda: cache.inputs("x"), cache.next_token_logits):
        with pytest.raises(LedgerError, match="unknown"):
            refused()
    assert torch.allclose(
        forward(cache, ids[:, :2]), forward(DynamicCache(), torch.cat((ids, ids[:, :2]), 1))[:, 12:], atol=1e-5
    )


@pytest.mark.parametrize("nth", [1, 2, 5])
@pytest.mark.parametrize("mode", ["greedy", "beams", "several", "prompt_lookup", "chunked_prefill"])
@pytest.mark.parametrize("held", [0, 7, 12, 15])
def test_generate_that_fails_leaves_the_cache_as_it_was(held: int, mode: str, nth: int) -> None:
    if held and mode == "chunked_prefill" and chunked_prefill_starts_over():
        pytest.skip("this transformers feeds the prompt from its start again, which is refused before any layer runs")
    ids, cache = some_ids(12), make_cache()
    if held:
        cache.append(torch.cat((ids[0], ids[0, :3]))[:held])
    before = Snapshot(cache)
    with failing_at(shared_model().model.layers[1], nth) as calls, pytest.raises(RuntimeError, match="on purpose"):
        run(cache, ids, **MODES[mode], max_new_tokens=8)
    assert calls[0] >= nth
    before.check(cache)
    expected = run(DynamicCache(), ids, **MODES[mode])
    assert_same_output(run(cache, ids, **MODES[mode]), expected, 1e-4)
