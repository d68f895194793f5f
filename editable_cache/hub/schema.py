"""Reading JSON that a stranger wrote: every value is checked, every key is known, every count is bounded."""

from __future__ import annotations

import math
import re
import reprlib
import unicodedata
from typing import Any

from editable_cache.errors import ArtifactError

MOST_TOKENS = 2**20
MOST_ENTRIES = 65_536
MOST_CHARACTERS = 4_096
MOST_NAME = 200
MOST_NUMBER = 2**31
"""Ids, positions and sizes stay below: sums of several still fit into 64 bits."""

WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")
"""What the tensor of a cache layer can be called."""

NAME = f"1 to {MOST_NAME} printable characters without slashes and without a dot in front"


class Section:
    """One JSON object, taken apart key by key; what nobody took is refused.

    Every method raises ``ArtifactError`` for a missing key or a value of another kind.

    Attributes:
        where: file and path of the object, for messages.
    """

    def __init__(self, values: Any, where: str) -> None:
        if not isinstance(values, dict):
            raise ArtifactError(f"{where}: expected an object, got {_short(values)}.")
        self._values = dict(values)
        self.where = where

    def take(self, key: str) -> Any:
        """The value of ``key``, unchecked."""
        if key not in self._values:
            raise ArtifactError(f"{self.where}: expected a key {key!r}, got only {_short(sorted(self._values))}.")
        return self._values.pop(key)

    def text(self, key: str, *, most: int = MOST_CHARACTERS, printable: bool = True) -> str:
        """A text of at most ``most`` characters, without any that steer a terminal unless ``printable`` is False."""
        value = self.take(key)
        fine = isinstance(value, str) and len(value) <= most and (not printable or is_printable(value))
        self.require(fine, key, f"{'printable ' * printable}text of up to {most} characters", value)
        return str(value)

    def optional_text(self, key: str, *, most: int = MOST_CHARACTERS, printable: bool = True) -> str | None:
        """A text, or null."""
        if self._values.get(key, "") is None:
            return self.take(key)  # type: ignore[no-any-return]
        return self.text(key, most=most, printable=printable)

    def integer(self, key: str, low: int, high: int) -> int:
        """An integer of ``[low, high]``."""
        value = self.take(key)
        self.require(type(value) is int and low <= value <= high, key, f"an integer of {low} to {high}", value)
        return int(value)

    def integers(self, key: str, low: int, *, most: int = MOST_TOKENS) -> list[int]:
        """At most ``most`` integers of ``[low, 2**31)``."""
        values = self.items(key, most=most)
        fine = all(type(value) is int and low <= value < MOST_NUMBER for value in values)
        self.require(fine, key, f"integers of {low} to {MOST_NUMBER - 1}", values)
        return values

    def numbers(self, key: str) -> list[float]:
        """Finite numbers."""
        values = self.items(key)
        fine = all(type(value) in (int, float) and math.isfinite(value) for value in values)
        self.require(fine, key, "finite numbers", values)
        return [float(value) for value in values]

    def items(self, key: str, *, most: int = MOST_ENTRIES) -> list[Any]:
        """A list, its items unchecked."""
        values = self.take(key)
        self.require(isinstance(values, list) and len(values) <= most, key, f"a list of up to {most}", values)
        return list(values)

    def section(self, key: str) -> Section:
        """An object."""
        return Section(self.take(key), f"{self.where}: {_short(key)}")

    def optional_section(self, key: str) -> Section | None:
        """An object, or null."""
        value = self.take(key)
        return None if value is None else Section(value, f"{self.where}: {_short(key)}")

    def sections(self, key: str) -> list[Section]:
        """A list of objects."""
        return [Section(value, f"{self.where}: {key}[{idx}]") for idx, value in enumerate(self.items(key))]

    def keys(self) -> list[str]:
        """The keys that nobody took yet."""
        self.require(len(self._values) <= MOST_ENTRIES, "keys", f"up to {MOST_ENTRIES}", len(self._values))
        return list(self._values)

    def choice(self, key: str, choices: tuple[Any, ...]) -> Any:
        """One of ``choices``."""
        value = self.take(key)
        fine = any(type(value) is type(choice) and value == choice for choice in choices)
        self.require(fine, key, f"one of {list(choices)}", value)
        return value

    def done(self) -> None:
        """Refuse keys that nobody took: a program that knows more than this one must say so by its version."""
        self.require(not self._values, "keys", "no others", sorted(self._values))

    def require(self, condition: bool, what: str, expected: str, got: Any) -> None:
        """Raise ``ArtifactError`` unless ``condition``."""
        if not condition:
            raise ArtifactError(f"{self.where}: {what[:100]!r}: expected {expected}, got {_short(got)}.")


def is_printable(text: str) -> bool:
    """Whether a text can be shown anywhere: no control characters, no change of direction, no lone surrogates."""
    return text.isprintable() or not any(unicodedata.category(char) in _STEERING for char in text)


def printable(text: str) -> str:
    """The text with what can't be shown written as escapes."""
    if is_printable(text):
        return text
    return "".join(char if is_printable(char) else ascii(char)[1:-1] for char in text)


def is_name(name: str | None) -> bool:
    """Whether a chunk can be called so: it can be printed anywhere, and nothing takes it for a path."""
    if not name or len(name) > MOST_NAME or name.startswith("."):
        return False
    return not any(unicodedata.category(char).startswith("C") or char in "/\\" for char in name)


def read_name(facts: Section) -> str | None:
    """The name of a chunk, or null."""
    name = facts.optional_text("name", printable=False)
    facts.require(name is None or is_name(name), "name", NAME, name)
    return name


_STEERING = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
_bounded = reprlib.Repr()
_bounded.maxstring = _bounded.maxother = 80
_bounded.maxlevel = 3


def _short(value: Any) -> str:
    if isinstance(value, (list, dict)) and len(value) > 8:
        return f"a {type(value).__name__} of {len(value)}"
    return ascii(value) if type(value) is int else _bounded.repr(value).encode("ascii", "backslashreplace").decode()
