"""Everything that a stock cache layer holds, by path: for layers that are kept as a whole, whatever is in them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

Path = tuple[str, ...]
"""``("keys",)`` for an attribute, ``("entry_count", "indexer")`` for what stands in a dict by that name."""

Leaves = Mapping[Path, Any]
"""Tensors, numbers, flags and None of one layer, by path."""


def leaves_of(layer: Any) -> dict[Path, Any]:
    """What stands in the attributes of a layer, and in its dicts; nothing is copied."""
    found: dict[Path, Any] = {}
    for name, value in vars(layer).items():
        if isinstance(value, dict):
            found |= {(name, str(key)): each for key, each in value.items()}
        else:
            found[name,] = value
    return found


def set_leaves(layer: Any, leaves: Leaves) -> None:
    """Put ``leaves`` into a layer as they are; dicts are made anew, attributes that are not named stay."""
    dicts: dict[str, dict[str, Any]] = {}
    for path, value in leaves.items():
        if len(path) == 1:
            setattr(layer, path[0], value)
        else:
            dicts.setdefault(path[0], {})[path[1]] = value
    for name, values in dicts.items():
        setattr(layer, name, values)


def copied(leaves: Leaves) -> dict[Path, Any]:
    """The same with tensors of their own; what was one tensor under two names stays one."""
    clones: dict[int, Tensor] = {}

    def copy(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) not in clones:
            clones[id(value)] = value.detach().clone()
        return clones[id(value)]

    return {path: copy(value) for path, value in leaves.items()}


def tensors_of(leaves: Leaves) -> dict[Path, Tensor]:
    """The tensors with a row for each row of the batch, each once: of two names for one tensor the first."""
    found: dict[Path, Tensor] = {}
    seen: set[int] = set()
    for path, value in leaves.items():
        if isinstance(value, Tensor) and value.dim() and id(value) not in seen:
            seen.add(id(value))
            found[path] = value
    return found
