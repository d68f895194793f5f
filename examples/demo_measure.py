"""What the demo measures: next-token logits of a plain prefill, how near others are, and the time to a first token."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Paired(NamedTuple):
    """Medians of two things that were timed in turns, and the median of their ratios."""

    slow_ms: float
    fast_ms: float
    ratio: float


def plain_prefill(model: Any, ids: Tensor) -> Tensor:
    """Logits after the last of ``ids`` ``[1, num_tokens]``, by stock transformers in one forward: ``[vocab]``."""
    with torch.no_grad():
        return model(input_ids=ids.to(model.device), use_cache=False).logits[0, -1].float()


def first_token(model: Any, inputs: dict[str, Tensor], cache: Any) -> Tensor:
    """The next token by ``generate``."""
    given = {} if cache is None else {"past_key_values": cache}
    return model.generate(**inputs, **given, max_new_tokens=1, do_sample=False)[0, -1]


def full_prefill_first_token(model: Any, ids: Tensor) -> Tensor:
    """The next token with a fresh ``DynamicCache`` that has to compute everything."""
    return first_token(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, None)


def cosine(one: Tensor, other: Tensor) -> float:
    """Cosine between two logit vectors."""
    return float(torch.cosine_similarity(one.double(), other.double(), dim=-1))


def kl(reference: Tensor, other: Tensor) -> float:
    """Kullback-Leibler divergence of ``other``'s next-token distribution from ``reference``'s, in nats."""
    wanted, got = reference.double().log_softmax(-1), other.double().log_softmax(-1)
    return float((wanted.exp() * (wanted - got)).sum().clamp_min(0))


def time_paired(slow: Callable[[], Any], fast: Callable[[], Any], rounds: int) -> Paired:
    """Run both in turns; the caller has checked before that they give the same answer."""
    pairs = [(_milliseconds(slow), _milliseconds(fast)) for _ in range(rounds)]
    return Paired(
        statistics.median(s for s, _ in pairs),
        statistics.median(f for _, f in pairs),
        statistics.median(s / f for s, f in pairs),
    )


def _milliseconds(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return (time.perf_counter() - started) * 1e3
