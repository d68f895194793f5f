"""Small things that several test files share."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from editable_cache import EditableCache, EditableCacheError, Skill
from editable_cache.adapters import host
from editable_cache.cache import Ledger
from editable_cache.testing.tiny_models import tiny_model, tiny_tokenizer

POLICY = "If the order is pending the agent must not refund it.\n"


def shared_model(family: str = "llama", **kwargs: Any) -> Any:
    """One tiny model of a family for all tests that leave it unchanged."""
    return _model(family, **kwargs)


_model = functools.cache(tiny_model)


def shared_tokenizer(*, add_bos: bool = False) -> Any:
    return _tokenizer(add_bos)


@functools.cache
def _tokenizer(add_bos: bool) -> Any:
    return tiny_tokenizer(add_bos=add_bos)


def policy(family: str = "llama", **kwargs: Any) -> Skill:
    return _policy(family, **kwargs)


@functools.cache
def _policy(family: str, **kwargs: Any) -> Skill:
    return Skill.precompile(shared_model(family, **kwargs), shared_tokenizer(), POLICY, name="policy")


def some_ids(count: int = 12, *, batch: int = 1, seed: int = 1) -> Tensor:
    return torch.randint(5, 300, (batch, count), generator=torch.Generator().manual_seed(seed))


def make_cache(family: str = "llama", **kwargs: Any) -> EditableCache:
    return EditableCache(shared_model(family, **kwargs), tokenizer=shared_tokenizer())


def make_context(family: str = "llama", **kwargs: Any) -> EditableCache:
    """A cache with a prefilled head, a spliced policy, a segment with two fields, and a question."""
    cache = make_cache(family, **kwargs)
    cache.append("You are a support agent.\n", name="system")
    cache.splice(policy(family, **kwargs))
    cache.append("order_status: {status} \nchannel: {channel} \n", name="order", fields=dict(ORDER))
    cache.append("the customer asked for the refund.\n", name="question")
    return cache


ORDER = {"status": "pending", "channel": "web"}


def generate(cache: Any, ids: Tensor, *, model: Any = None, **kwargs: Any) -> Any:
    """Greedy by default, with logits of every step."""
    model = shared_model() if model is None else model
    options = {
        "attention_mask": torch.ones_like(ids),
        host.cache_argument(model): cache,
        "max_new_tokens": 6,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
        "output_scores": True,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers warns about options of other decoding modes
        return model.generate(ids, **{**options, **kwargs})


def forward(cache: Any, ids: Tensor, *, model: Any = None, **kwargs: Any) -> Tensor:
    """Logits of a plain call, as a user writes it."""
    model = shared_model() if model is None else model
    with torch.no_grad():
        logits: Tensor = model(input_ids=ids, **{host.cache_argument(model): cache}, **kwargs).logits
    return logits


def go_on(cache: EditableCache, content: Any = "", **kwargs: Any) -> Tensor:
    """Greedy ids from here, whole sequence."""
    inputs = cache.inputs(content)
    out = generate(cache, inputs["input_ids"], model=cache.model, attention_mask=inputs["attention_mask"], **kwargs)
    return out.sequences


def assert_same_output(actual: Any, expected: Any, tolerance: float = 2e-5) -> None:
    """Same tokens, and the same logits and scores at every step, relative to the largest logit."""
    assert torch.equal(actual.sequences, expected.sequences)
    for name in ("logits", "scores"):
        mine, theirs = getattr(actual, name), getattr(expected, name)
        assert len(mine) == len(theirs)
        for step, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            seen = torch.isfinite(b)
            assert torch.equal(seen, torch.isfinite(a)), f"{name} step {step}"
            error = (a[seen].float() - b[seen].float()).abs().max() / b[seen].float().abs().max()
            assert error <= tolerance, f"{name} of step {step}: error {error:.2e}"


class Snapshot:
    """Every stored bit of a cache and its ledger, to be held against the same cache later."""

    def __init__(self, cache: EditableCache) -> None:
        cache.adopt()
        self.ledger: Ledger = cache.ledger
        self.layers = [
            {name: tensor.detach().clone() for name, tensor in layer.view().items()} for layer in cache.editable_layers
        ]
        self.pristine = [{name: t.clone() for name, t in layer.pristine.items()} for layer in cache.editable_layers]

    def check(self, cache: EditableCache) -> None:
        assert cache.ledger.same(self.ledger), "the ledger changed"
        for idx, layer in enumerate(cache.editable_layers):
            assert layer.length == len(self.ledger)
            for what, mine, kept in (
                ("cells", layer.view(), self.layers[idx]),
                ("pristine", dict(layer.pristine), self.pristine[idx]),
            ):
                assert mine.keys() == kept.keys(), f"layer {idx} {what}"
                for name, tensor in kept.items():
                    assert torch.equal(mine[name], tensor), f"layer {idx} {what} {name} changed"


@contextmanager
def refused(
    cache: EditableCache, kind: type[EditableCacheError], builtin: type[Exception], *words: str
) -> Iterator[None]:
    """What runs inside must raise ``kind`` (also a ``builtin``) naming all ``words``, and leave the cache as it was."""
    before = Snapshot(cache)
    with pytest.raises(kind) as caught:
        yield
    assert isinstance(caught.value, EditableCacheError)
    assert isinstance(caught.value, builtin)
    message = str(caught.value)
    assert len(message) > 40, message
    for word in words:
        assert word in message, f"{word!r} is missing in: {message}"
    before.check(cache)


@contextmanager
def failing_at(module: Any, nth: int = 1, error: type[BaseException] = RuntimeError) -> Iterator[list[int]]:
    """Let ``module`` raise in its ``nth`` and every later call; yields a list with the count of calls."""
    calls = [0]

    def hook(*_: Any) -> None:
        calls[0] += 1
        if calls[0] >= nth:
            raise error("interrupted on purpose")

    handle = module.register_forward_hook(hook)
    try:
        yield calls
    finally:
        handle.remove()


@functools.cache
def chunked_prefill_starts_over() -> bool:
    """Whether this transformers, in chunked prefill behind a filled cache, feeds the prompt from its start again."""
    ids, stock = some_ids(12), DynamicCache()
    forward(stock, ids[:, :7])
    generate(stock, ids, prefill_chunk_size=5, max_new_tokens=1)
    return stock.get_seq_length() != 12
