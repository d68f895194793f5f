"""The judge: how near a repaired cache is to the clean one, over 16 teacher-forced tokens of an answer.

The instruction is out of the cache when it is judged, the query is formed without it, and the tokens are the clean
cache's own greedy answer. A recovery is ``1 - distance / distance of no repair``: 0 for no repair, 1 for the clean
cache, negative for what makes things worse.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from editable_cache import EditableCache
from editable_cache.adapters import host
from repair.cases import Case, Setup

ANSWER_TOKENS = 16

NOTHING = 1e-4
"""Share of the largest distance of any layer below which a layer counts as clean from the start."""


@dataclass(frozen=True)
class Reading:
    """What the model says at the answer's tokens.

    Attributes:
        logits: float32 ``[num_tokens, vocab]``.
        hidden: residual stream behind each block ``[num_layers, num_tokens, hidden_size]``.
        attention: output of each attention ``[num_layers, num_tokens, hidden_size]``.
    """

    logits: Tensor
    hidden: Tensor
    attention: Tensor

    @functools.cached_property
    def normalizer(self) -> Tensor:
        """Logarithm of the sum of exponentials of each token's logits, float64 ``[num_tokens]``."""
        highest = self.logits.amax(-1, keepdim=True)
        return highest[:, 0].double() + (self.logits - highest).exp().sum(-1, dtype=torch.float64).log()

    @functools.cached_property
    def probabilities(self) -> Tensor:
        """float32 ``[num_tokens, vocab]``."""
        return self.logits.softmax(-1)


class Judge:
    """Judges caches of one case (without the instruction) by one query."""

    def __init__(self, chosen: Setup, case: Case, query: Tensor, tokens: int = ANSWER_TOKENS) -> None:
        self._model, self._query = chosen.model, query
        self.clean_cache, self.contaminated_cache = case.without(case.clean), case.without(case.contaminated)
        self._answer = self._greedy(tokens)
        self.clean = self.read(self.clean_cache)
        self._started = distances(self.read(self.contaminated_cache), self.clean)

    def read(self, cache: EditableCache) -> Reading:
        """Run query and answer behind a fork of the cache."""
        ids = torch.cat([self._query, self._answer[:-1]])
        kept = len(self._answer)
        with _attention_outputs(self._model, kept) as outputs, torch.no_grad():
            found = self._model(
                input_ids=ids[None],
                **{host.cache_argument(self._model): cache.fork()},
                position_ids=_positions(cache, len(ids)),
                logits_to_keep=kept,
                output_hidden_states=True,
            )
        hidden = torch.stack([state[0, -kept:] for state in found.hidden_states[1:]])
        return Reading(found.logits[0].float(), hidden, torch.stack(outputs))

    def score(self, cache: EditableCache, mask: Tensor) -> dict[str, Any]:
        """Recoveries of a repaired cache; ``mask`` is what was repaired, for the local recovery."""
        found = distances(self.read(cache), self.clean)
        result: dict[str, Any] = {}
        for name in ("kl", "l2", "cosine"):
            result[name] = 1 - found[name] / self._started[name]
        result["agreement"] = found["agreement"]
        hidden = 1 - found["hidden"] / self._started["hidden"]
        result["local"] = self._local(found["attention"], mask)
        result["hidden"] = [round(value, 4) for value in hidden.tolist()]
        return result

    def _local(self, distance: Tensor, mask: Tensor) -> float | None:
        """Recovery of the attention's output at the layers that were repaired, by their number of repaired cells.

        Layers without contamination (the lowest, whose cells know their token only) have nothing to recover.
        """
        started = self._started["attention"]
        weight = mask.sum(1).double() * (started > NOTHING * started.max())
        if not float(weight.sum()):
            return None
        return float(((1 - distance / started.clamp_min(1e-30)) * weight).sum() / weight.sum())

    @property
    def start(self) -> dict[str, float]:
        """Distances and agreement without any repair."""
        return {name: float(self._started[name]) for name in ("kl", "l2", "cosine", "agreement")}

    def _greedy(self, tokens: int) -> Tensor:
        cache, ids, answer = self.clean_cache.fork(), self._query, []
        for _ in range(tokens):
            with torch.no_grad():
                found = self._model(
                    input_ids=ids[None],
                    **{host.cache_argument(self._model): cache},
                    position_ids=_positions(cache, len(ids)),
                    logits_to_keep=1,
                )
            ids = found.logits[0, -1].argmax()[None]
            answer.append(ids)
        return torch.cat(answer)


def distances(reading: Reading, clean: Reading) -> dict[str, Any]:
    """Distances between two readings: means over the tokens of the KL divergence from the clean one (nats), of the L2
    norm of centred logits and of one minus their cosine; share of equal top tokens; norms per block over all tokens.
    """
    ours, theirs = reading.logits, clean.logits
    weighted = (clean.probabilities * (theirs - ours)).sum(-1, dtype=torch.float64)
    a, b = ours - ours.mean(-1, keepdim=True), theirs - theirs.mean(-1, keepdim=True)
    difference = _norm(a - b)
    norms = _norm(a), _norm(b)
    # 1 - cosine without the cancellation of nearly equal vectors
    unlike = (difference**2 - (norms[0] - norms[1]) ** 2) / (2 * norms[0] * norms[1])
    return {
        "kl": float((weighted - clean.normalizer + reading.normalizer).mean()),
        "l2": float(difference.mean()),
        "cosine": float(unlike.mean()),
        "agreement": float((ours.argmax(-1) == theirs.argmax(-1)).double().mean()),
        "hidden": (reading.hidden - clean.hidden).double().flatten(1).norm(dim=1),
        "attention": (reading.attention - clean.attention).double().flatten(1).norm(dim=1),
    }


def _norm(rows: Tensor) -> Tensor:
    return rows.square().sum(-1, dtype=torch.float64).sqrt()


def _positions(cache: EditableCache, count: int) -> Tensor:
    first = int(cache.positions.max()) + 1
    return torch.arange(first, first + count)[None]


@contextmanager
def _attention_outputs(model: Any, kept: int) -> Iterator[list[Tensor]]:
    """Outputs of each layer's attention at the last ``kept`` tokens, in the order of the layers."""
    found: list[Tensor] = []
    layers = model.get_decoder().layers
    handles = [
        layer.self_attn.register_forward_hook(lambda _module, _given, out: found.append(out[0][0, -kept:]))
        for layer in layers
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
