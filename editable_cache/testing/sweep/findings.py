"""What accumulates while one model is examined."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor
from transformers import PreTrainedModel

from editable_cache.adapters import probe
from editable_cache.errors import CompatibilityError, LedgerError, SpanError, UnsupportedModelError
from editable_cache.spec import ModelSpec
from editable_cache.testing import oracles, zoo
from editable_cache.testing.sweep.row import TOLERANCE, VISIBLE

REFUSALS = (UnsupportedModelError, SpanError, CompatibilityError, LedgerError)
"""Errors by which the library says no."""


class Texts(NamedTuple):
    """Ids of a prefix, a chunk and a tail, int64 ``[n]`` each."""

    prefix: Tensor
    chunk: Tensor
    tail: Tensor

    @property
    def joined(self) -> Tensor:
        """All of them."""
        return torch.cat(self)


def texts_for(model: PreTrainedModel, seed: int = 0) -> Texts:
    """Random texts: all longer than a window of the zoo, the prefix a whole number of its attention blocks."""
    ids = zoo.ids_for(model, 38, 11 + seed)
    return Texts(ids[:16], ids[16:30], ids[30:])


@dataclass
class Findings:
    """Errors, controls, operations and refusals, by name, in the order in which they were found."""

    errors: dict[str, float] = field(default_factory=dict)
    controls: dict[str, float] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    unproven: list[str] = field(default_factory=list)
    operations: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)

    def compare(
        self, name: str, actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], allowed: float = TOLERANCE
    ) -> None:
        """Hold a result against its reference."""
        error = worst(actual, expected)
        self.errors[name] = max(error, self.errors.get(name, 0.0))
        if not error <= allowed and name not in self.wrong:
            self.wrong.append(name)

    def control(self, name: str, actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
        """Hold a result that is wrong on purpose against the reference."""
        error = worst(actual, expected)
        self.controls[name] = error
        if not error >= VISIBLE:
            self.unproven.append(f"control {name!r} is not seen: {error:.1e}")

    def attempt(self, operation: str, action: Callable[[], object]) -> bool:
        """Carry out an operation; a refusal is noted. Returns whether it was carried out."""
        try:
            action()
        except REFUSALS as refusal:
            self.refuse(operation, refusal)
            return False
        if operation not in self.operations:
            self.operations.append(operation)
        return True

    def refuse(self, operation: str, refusal: Exception) -> None:
        """Note a refusal with its first reasons."""
        reasons = getattr(refusal, "reasons", ())
        told = "; ".join(map(str, reasons[:2])) if reasons else str(refusal).split("\n")[0]
        self.refused[operation] = told[:300]


def worst(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Largest relative error over tensors by name; infinite where names or shapes differ."""
    if actual.keys() != expected.keys() or not expected:
        return math.inf
    if any(actual[name].shape != expected[name].shape for name in expected):
        return math.inf
    return max(oracles.relative_error(actual[name], expected[name]) for name in expected)


@contextmanager
def remembered(model: PreTrainedModel, spec: ModelSpec) -> Iterator[None]:
    """Let the library believe that its self-test had found ``spec``."""
    with mock.patch.object(probe, "measure", return_value=spec):
        probe._specs.pop(model, None)
        yield
    probe._specs.pop(model, None)
