"""Reading JSON that a stranger wrote: every value is checked, every key is known, every count is bounded."""

from __future__ import annotations

import math
import unicodedata
from typing import Any

from editable_cache.errors import ArtifactError

MOST_TOKENS = 4 * 2**20
MOST_ENTRIES = 65_536
MOST_CHARACTERS = 4_096
MOST_NAME = 200
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

    def text(self, key: str, *, most: int = MOST_CHARACTERS) -> str:
        """A text of at most ``most`` characters that can be written as UTF-8."""
        value = self.take(key)
        self.require(
            isinstance(value, str) and len(value) <= most and _is_utf8(value), key, f"text up to {most}", value
        )
        return str(value)

    def optional_text(self, key: str, *, most: int = MOST_CHARACTERS) -> str | None:
        """A text, or null."""
        if self._values.get(key, "") is None:
            return self.take(key)  # type: ignore[no-any-return]
        return self.text(key, most=most)

    def integer(self, key: str, low: int, high: int) -> int:
        """An integer of ``[low, high]``."""
        value = self.take(key)
        self.require(type(value) is int and low <= value <= high, key, f"an integer of {low} to {high}", value)
        return int(value)

    def integers(self, key: str, low: int, *, most: int = MOST_TOKENS) -> list[int]:
        """At most ``most`` integers of ``[low, 2**62)``."""
        values = self.items(key, most=most)
        fine = all(type(value) is int and low <= value < 2**62 for value in values)
        self.require(fine, key, f"integers >= {low}", values)
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
        return Section(self.take(key), f"{self.where}: {key}")

    def optional_section(self, key: str) -> Section | None:
        """An object, or null."""
        value = self.take(key)
        return None if value is None else Section(value, f"{self.where}: {key}")

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
            raise ArtifactError(f"{self.where}: {what}: expected {expected}, got {_short(got)}.")


def is_name(name: str | None) -> bool:
    """Whether a chunk can be called so: it can be printed anywhere, and nothing takes it for a path."""
    if not name or len(name) > MOST_NAME or name.startswith("."):
        return False
    return not any(unicodedata.category(char).startswith("C") or char in "/\\" for char in name)


def read_name(facts: Section) -> str | None:
    """The name of a chunk, or null."""
    name = facts.optional_text("name")
    facts.require(name is None or is_name(name), "name", NAME, name)
    return name


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _short(value: Any) -> str:
    if isinstance(value, (list, dict)) and len(value) > 8:
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, str) and len(value) > 80:
        return f"{value[:80]!r}... of {len(value)} characters"
    return repr(value)[:120]
