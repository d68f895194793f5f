"""`Skill`: a chunk under a name, compiled once and kept."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from torch import nn

from editable_cache.adapters import identify
from editable_cache.chunk import KVChunk
from editable_cache.errors import CompatibilityError
from editable_cache.forward.compose import require_compatible
from editable_cache.forward.precompile import precompile
from editable_cache.forward.text import TextOrIds
from editable_cache.hub.chunk_store import load_chunk, save_chunk


@dataclass(frozen=True, eq=False, repr=False)
class Skill(KVChunk):
    """A named chunk with the text it was compiled from (for people; the ids are the truth).

    Make one with ``Skill.precompile``, put it anywhere with ``EditableCache.splice``.
    """

    text: str | None = None

    @classmethod
    def precompile(
        cls,
        model: nn.Module,
        tokenizer: Any,
        content: TextOrIds,
        *,
        name: str,
        prefix: TextOrIds | None = None,
        head_tokens: int | None = None,
        tail_tokens: int | None = None,
    ) -> Skill:
        """Compute the cells of a text by itself.

        Args:
            model: in evaluation mode; not changed.
            tokenizer: needed for text; its digest is recorded.
            content: the text without a BOS in front, or ids as they are.
            name: what the skill is called; its segment's name when spliced.
            prefix: what the chunk sees before it while it is compiled; its own cells are dropped. By default the BOS
                token where the tokenizer puts one in front of every text, because attention leans on it; ``""``
                compiles alone.
            head_tokens, tail_tokens: for models with recurrent layers, how many tokens at the start (by default as many
                as their convolutions look back) and at the end (4 by default) run live when the skill is spliced; the
                tokens between are composed at a cost that does not depend on their number.

        Raises:
            UnsupportedModelError: if the self-test can't prove how the model's cells move.
            SpanError: if the text does not fit the model's positions.
        """
        chunk = precompile(
            model,
            tokenizer,
            content,
            name=name,
            prefix=prefix,
            head_tokens=head_tokens,
            tail_tokens=tail_tokens,
        )
        return cls._of(chunk, content if isinstance(content, str) else None)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the skill to a folder: one safetensors file and one JSON manifest; the old contents stay valid until
        the end.

        Raises:
            ArtifactError: if the folder can't be written.
        """
        save_chunk(self, folder, text=self.text)

    @classmethod
    def from_pretrained(cls, folder: str | Path, *, model: nn.Module | None = None, tokenizer: Any = None) -> Skill:
        """Read a skill; its cells are memory-mapped.

        Args:
            folder: written by ``save_pretrained``.
            model, tokenizer: checked against the producer if given; a splice checks again.

        Raises:
            ArtifactError: for a missing, damaged, truncated or unknown file.
            CompatibilityError: if it was compiled by another model.
        """
        chunk, text = load_chunk(folder)
        if model is not None:
            require_compatible(identify(model, tokenizer), chunk, f"{folder}")
        return cls._of(chunk, text)

    @classmethod
    def _of(cls, chunk: KVChunk, text: str | None) -> Skill:
        if not chunk.name:
            raise CompatibilityError(f"A skill needs a name, got {chunk.name!r}; a chunk without one is a KVChunk.")
        return cls(**{field.name: getattr(chunk, field.name) for field in fields(KVChunk)}, text=text)
