"""`Skill`: a chunk under a name, compiled once and kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from editable_cache.forward.precompile import precompile
from editable_cache.forward.text import TextOrIds
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
