"""`Skill`: a chunk under a name, compiled once and kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from editable_cache.adapters import measured
from editable_cache.adapters.wrappers import inner_model
from editable_cache.chunk import KVChunk
from editable_cache.errors import CompatibilityError
from editable_cache.forward.precompile import precompile
from editable_cache.forward.text import TextOrIds
from editable_cache.ops.merge import merged
from editable_cache.published import PublishedChunk

if TYPE_CHECKING:
    from editable_cache.hub.publish import SkillInfo


@dataclass(frozen=True, eq=False, repr=False)
class Skill(PublishedChunk):
    """A text, compiled once and kept.

    Make one with ``Skill.precompile``, put it anywhere with ``EditableCache.splice``, share it with ``push_to_hub``.
    """

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

    @classmethod
    def merge(cls, chunks: Sequence[KVChunk], *, name: str) -> Skill:
        """Put chunks side by side into one, without a model.

        A splice of the result leaves the cells of a cache, and what its ledger says about each of them, as splicing
        ``chunks`` one after the other does, both with ``seam_tokens=0``; it makes one segment. A seam is computed at
        the start of the whole only: the parts never see each other.

        Args:
            chunks: of one model, in order; merged ones give their parts. Not changed, and nothing is shared with them.
            name: what the skill is called.

        Returns:
            A skill whose ``provenance`` lists the parts. The first part stays where it was compiled, the keys of the
            others are turned to the positions behind it. In 16 bits that rounds those keys once more than splicing one
            after the other does, by up to half a unit in the last place.

        Raises:
            CompatibilityError: if the chunks come from different models, say nothing about how their cells rotate, or
                act on recurrent or compressed layers, which need a live seam: splice those one after the other.
            SpanError: if there is no token in any of them.
        """
        alone = chunks[0] if len(chunks) == 1 else None
        return cls._of(merged(chunks, name), alone.text if isinstance(alone, PublishedChunk) else None)

    @classmethod
    def from_cartridge(cls, folder: str | Path, *, model: nn.Module, tokenizer: Any = None, name: str) -> Skill:
        """Read a PEFT cartridge (``peft.CartridgeConfig``): keys and values that were trained, not made from tokens.

        Its ids are unknown (-1), so that nothing can compute its cells again or check them: a splice has no seam before
        them, ``recompute`` and ``verify`` refuse. It can be spliced anywhere, moved, removed, saved and published.

        Args:
            folder: as PEFT's ``save_pretrained`` wrote it; only ``adapter_config.json`` and
                ``adapter_model.safetensors`` are read, and ``peft`` need not be installed.
            model: the base model, in whose dtype the cells are kept; the chunk's provenance says where that is another
                than the file's.
            name: what the skill is called.

        Raises:
            ArtifactError: for a missing, damaged or pickled file, or numbers that are not finite.
            CompatibilityError: if it was trained for cells of another shape.
            UnsupportedModelError: if the self-test can't prove how the model's cells move.

        Warns:
            TrustWarning: if it was trained for a model of another repository than ``model`` comes from.
        """
        from editable_cache.hub.cartridge import read_cartridge

        if measured(inner_model(model)).has_states:
            raise CompatibilityError(
                f"from_cartridge: a PEFT cartridge holds keys and values only; expected a model without recurrent or "
                f"compressed layers, got {type(inner_model(model)).__name__}, whose states it does not say."
            )
        empty = precompile(model, tokenizer, torch.empty(0, dtype=torch.int64), name=name, prefix="")
        return cls._of(read_cartridge(folder, empty), None)

    def save_cartridge(self, folder: str | Path) -> None:
        """Write the skill as a PEFT cartridge, which ``PeftModel.from_pretrained(base_model, folder)`` loads.

        Its keys are turned to positions 0 to ``len(self) - 1``; ids, text and provenance are not part of that format.
        PEFT 0.21's own ``generate`` drops a cartridge with transformers 5.24, because it passes the cache under its old
        name; its ``forward`` reads it.

        Raises:
            CompatibilityError: if the format can't hold the cells: latent attention, keys of indexers, layers of
                different shapes, recurrent or compressed layers, images on several axes, active adapters.
            ArtifactError: if the folder can't be written, or without ``peft`` (``editable-cache[peft]``).
        """
        from editable_cache.hub.cartridge import write_cartridge

        write_cartridge(self, folder)

    @staticmethod
    def search(
        query: str | None = None,
        *,
        base_model: str | None = None,
        author: str | None = None,
        limit: int = 20,
        token: str | bool | None = None,
    ) -> tuple[SkillInfo, ...]:
        """Find skills on the Hub, most downloaded first.

        Args:
            query: words of the repository's name.
            base_model: only skills for this model (``"HuggingFaceTB/SmolLM2-135M-Instruct"``).
            author: only those of this user or organization.
            limit: how many at most.

        Raises:
            ArtifactError: if the Hub can't be asked.
        """
        from editable_cache.hub.publish import search

        return tuple(search(query, base_model=base_model, author=author, limit=limit, token=token))
