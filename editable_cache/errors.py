"""The error tree. Every class is also a builtin kind, so that generic handlers keep working.

A message names the thing, what was expected, what was found, and the next move. A refusal carries its reasons as data.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Reason:
    """One fact behind a refusal.

    Attributes:
        what: the fact that was compared or measured, for example ``"weights"`` or ``"layer 3 keys"``.
        expected: what it should have been, as text.
        got: what was found, as text.
    """

    what: str
    expected: str
    got: str

    def __str__(self) -> str:
        return f"{self.what}: expected {self.expected}, got {self.got}"


class EditableCacheError(Exception):
    """Root of every error that this library raises on purpose."""


class SpanError(EditableCacheError, ValueError):
    """A span of slots is empty, reversed, out of range, cuts a field, or names an unknown segment."""


class FieldError(EditableCacheError, ValueError):
    """A field is unknown, defined twice, missing in its template, or shares a token with its neighbour."""


class LedgerError(EditableCacheError, ValueError):
    """Ids, mask, positions or layer lengths disagree with what the cache recorded."""


class CompatibilityError(EditableCacheError, ValueError):
    """A chunk comes from another model, weights, adapter, dtype, rope setting or tokenizer.

    Attributes:
        reasons: every fact that differs.
    """

    def __init__(self, message: str, reasons: tuple[Reason, ...] = ()) -> None:
        super().__init__("\n  - ".join([message, *map(str, reasons)]))
        self.reasons = reasons


class UnsupportedModelError(EditableCacheError, NotImplementedError):
    """The self-test could not prove how this model's cache moves, or the operation needs what it lacks.

    Attributes:
        reasons: the measurements or facts behind the refusal.
    """

    def __init__(self, message: str, reasons: tuple[Reason, ...] = ()) -> None:
        super().__init__("\n  - ".join([message, *map(str, reasons)]))
        self.reasons = reasons


class BusyError(EditableCacheError, RuntimeError):
    """The cache was touched while a forward or ``generate`` is using it."""


class ArtifactError(EditableCacheError, OSError):
    """A skill or cache on disk is missing, damaged, truncated, or of an unknown format."""


class TaskError(EditableCacheError, ValueError):
    """A task, arm or measure is unknown, an item list is empty, or a model can't take the decisions it is asked for."""


class ResultsError(EditableCacheError, ValueError):
    """Results on disk are damaged, or come from another version, model or setting than what they are asked to join."""


class TokenBoundaryWarning(UserWarning):
    """Two texts tokenize differently together than apart, so the ids are not those of the joined text."""


class TrustWarning(UserWarning):
    """Something in a stranger's skill deserves a look: control tokens, or a text that is not what the ids say."""


class ContextWarning(UserWarning):
    """The edit is carried out, but the context it leaves is one that models are known to read badly."""
