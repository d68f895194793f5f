"""What in a stranger's skill deserves a look: a skill from a stranger is a prompt from a stranger."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor


class ControlToken(NamedTuple):
    """A token inside a chunk that controls a model instead of being text.

    Attributes:
        slot: where it stands in the chunk.
        token_id: its id.
        text: how its tokenizer shows it.
    """

    slot: int
    token_id: int
    text: str


def control_tokens(token_ids: Tensor, special: Mapping[int, str]) -> tuple[ControlToken, ...]:
    """The control tokens among ``token_ids`` ``[n]``, in order; ``special`` names those of a tokenizer."""
    ids = token_ids.tolist()
    return tuple(ControlToken(idx, each, special[each]) for idx, each in enumerate(ids) if each in special)
