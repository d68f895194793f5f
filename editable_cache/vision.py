"""`VisionChunk`: an image with the marks around it, compiled once and kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from editable_cache.chunk import KVChunk
from editable_cache.errors import CompatibilityError, SpanError
from editable_cache.forward.images import precompile_images
from editable_cache.forward.text import TextOrIds, adds_bos, encode
from editable_cache.published import PublishedChunk

BORDER = "\u241f"
"""A character that no template puts anywhere by itself."""


@dataclass(frozen=True, eq=False, repr=False)
class VisionChunk(PublishedChunk):
    """The cells of an image, put anywhere with ``EditableCache.splice``.

    ``images`` holds a digest of the pixels: the placeholder ids of all images are equal, their cells are not. A prompt
    that carries another image than the cache is refused. Saved without the pixels.
    """

    _of_images: ClassVar[bool] = True

    @classmethod
    def precompile(
        cls,
        model: nn.Module,
        processor: Any,
        image: Any,
        *,
        name: str,
        text: str | None = None,
        prefix: TextOrIds | None = None,
    ) -> VisionChunk:
        """Compute the cells of an image by itself, at positions of the model's own numbering.

        Args:
            model: in evaluation mode; not changed.
            processor: the model's processor, or None where ``image`` holds ready tensors.
            image: what the processor takes as an image, or a list of them; or its output for one text: ``input_ids``
                ``[1, num_tokens]``, ``pixel_values`` and what else the model takes.
            name: what the chunk is called; its segment's name when spliced.
            text: how the prompt shows the image, for example ``"<|vision_start|><|image_pad|><|vision_end|>"``; what
                the chat template puts in place of one image by default.
            prefix: what the chunk sees before it while it is compiled, as for ``Skill.precompile``.

        Raises:
            UnsupportedModelError: if the self-test can't prove how the model's cells move (models that read prompts in
                both directions, like PaliGemma), if images are no cells of tokens (Mllama), or if the model numbers
                their tokens otherwise than from where they start (HunYuan-VL).
            SpanError: without an image, or if it does not fit the model's positions.
        """
        tokenizer = getattr(processor, "tokenizer", None)
        if processor is None:
            if not isinstance(image, Mapping):
                raise SpanError(
                    f"precompile: expected tensors by name (input_ids, pixel_values, ...) without a processor, got "
                    f"{type(image).__name__}; pass the model's processor to compile an image."
                )
            inputs: Mapping[str, Any] = image
        else:
            text = markup(processor) if text is None else text
            inputs = processor(text=[text], images=image, return_tensors="pt", add_special_tokens=False)
        if prefix is None and tokenizer is not None and adds_bos(tokenizer):
            prefix = [tokenizer.bos_token_id]
        seen = torch.empty(0, dtype=torch.int64) if prefix is None else encode(tokenizer, prefix, first=False)
        return cls._of(precompile_images(model, tokenizer, inputs, name=name, prefix_ids=seen), text)

    @classmethod
    def _of(cls, chunk: KVChunk, text: str | None) -> VisionChunk:
        if not chunk.name or not chunk.images:
            raise CompatibilityError(
                f"A vision chunk needs a name and an image, got {chunk.name!r} and {len(chunk.images)} images; read a "
                "chunk of text with Skill.from_pretrained."
            )
        return super()._of(chunk, text)


def markup(processor: Any) -> str:
    """What a processor's chat template puts in place of one image: its placeholder with the marks around it.

    Raises:
        SpanError: if the template does not say it.
    """
    border = {"type": "text", "text": BORDER}
    turn = {"role": "user", "content": [border, {"type": "image"}, border]}
    parts = str(processor.apply_chat_template([turn], tokenize=False)).split(BORDER)
    if len(parts) != 3 or not parts[1].strip():
        raise SpanError(
            "precompile: this processor's chat template does not tell how a prompt shows an image (it moves images to "
            "the front); pass text=, for example text='<image>'."
        )
    return parts[1]
