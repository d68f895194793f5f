"""`Row`: what the sweep found out about one model type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Verdict = Literal["rotation", "position-free", "hybrid", "state only", "compressed", "refused", "not built", "failed"]

TOLERANCE = 1e-4
"""Largest relative error, float32, of anything that is called certified."""

VISIBLE = 1e-3
"""Least relative error of a negative control: a wrong answer must be this far off, or the comparison proves nothing."""


@dataclass(frozen=True)
class TensorFacts:
    """What the self-test found about the tensors of one name that move alike.

    Attributes:
        name: of the tensor in its cache layer.
        moves: ``"same"``, ``"counter"``, the layout of its rotation (``"half"``, ``"interleaved"``), or ``"not
            explained"`` where cells can't be moved.
        start, stop: the rotated channels of the head; 0 and 0 where nothing rotates.
        frequency_sets: number of distinct frequency tables among them.
        layers: number of layers that hold it.
    """

    name: str
    moves: str
    start: int
    stop: int
    frequency_sets: int
    layers: int


@dataclass(frozen=True)
class Row:
    """One model type.

    Attributes:
        name: of the zoo.
        verdict: ``"rotation"``, ``"position-free"``, ``"hybrid"``, ``"state only"``, ``"compressed"``, ``"refused"``
            (cells can't be moved), ``"not built"`` (no small model runs on text), ``"failed"`` (killed, or an error
            that is no refusal).
        certified: every comparison holds and every negative control fails.
        errors: largest relative error of each comparison with a stock reference.
        controls: the same error after something was made wrong on purpose.
        wrong: comparisons that do not hold though no operation refused: wrong in silence.
        unproven: what else stands against calling it certified.
        operations: what was carried out and compared.
        refused: operations that the library refuses, with its reason for each.
        reasons: what the self-test found against moving cells.
        tensors: what the cache holds and how it moves.
        positions, mask_form, limit, step_tokens: as in ``ModelSpec``.
        model_class, parameters: the model that was examined, and its size.
        seconds: wall time, building included.
    """

    name: str
    verdict: Verdict
    certified: bool = False
    errors: Mapping[str, float] = field(default_factory=dict)
    controls: Mapping[str, float] = field(default_factory=dict)
    wrong: tuple[str, ...] = ()
    unproven: tuple[str, ...] = ()
    operations: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()
    tensors: tuple[TensorFacts, ...] = ()
    positions: str = ""
    mask_form: str = ""
    limit: str = ""
    step_tokens: int | None = None
    model_class: str = ""
    parameters: int = 0
    seconds: float = 0.0

    @property
    def exact(self) -> dict[str, float]:
        """The errors that must be within `TOLERANCE`: all but those of the model itself far away."""
        far = ("drift", "ISO +100000")
        return {name: e for name, e in self.errors.items() if name.endswith("first layer") or not name.startswith(far)}

    def to_dict(self) -> dict[str, Any]:
        """A form that JSON takes."""
        return asdict(self)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Row:
        """The row of such a form."""
        lists = {name: tuple(content[name]) for name in ("wrong", "unproven", "operations", "reasons")}
        return cls(**{**content, **lists, "tensors": tuple(TensorFacts(**facts) for facts in content["tensors"])})
