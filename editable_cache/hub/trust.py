"""What in a stranger's skill deserves a look: a skill from a stranger is a prompt from a stranger."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from torch import Tensor

from editable_cache.chunk import Provenance


class ControlToken(NamedTuple):
    """A token inside a chunk that controls a model instead of being text.

    Attributes:
        slot: where it stands in the chunk; negative in front of it, in a prefix that only its cells have seen.
        token_id: its id.
        text: how its tokenizer shows it.
    """

    slot: int
    token_id: int
    text: str


def control_tokens(
    token_ids: Tensor, provenance: Provenance, special: Mapping[int, str], bos: Collection[int] | None = None
) -> tuple[ControlToken, ...]:
    """The control tokens of a chunk and of what it was compiled behind, in order.

    Args:
        token_ids: of the chunk, ``[n]``.
        provenance: of the chunk.
        special: control tokens of a tokenizer, by id.
        bos: tokens that count for nothing where they stand alone in front of a chunk, as a BOS token does; None for
            any token.
    """
    prefixes = [provenance.prefix_ids, *(part.prefix_ids for part in provenance.parts)]
    told = [ids for ids in prefixes if len(ids) != 1 or (bos is not None and ids[0] not in bos)]
    seen = [(idx - len(ids), each) for ids in told for idx, each in enumerate(ids)]
    found = [*seen, *enumerate(token_ids.tolist())]
    return tuple(ControlToken(slot, each, special[each]) for slot, each in found if each in special)
