"""Rotary embeddings whose frequencies follow the length of the context."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from editable_cache.adapters import host
from editable_cache.spec import PositionLimit

LENGTH_DEPENDENT = frozenset({"dynamic", "longrope"})
"""Rope types whose frequencies change once the context is longer than the original limit. Every forward renews their
buffers, so the self-test stays below the limit, which it takes from the config.
"""


def length_limit(config: Any) -> PositionLimit | None:
    """The first position from which on the frequencies of this config's rotary embedding change, or None if they never
    do. A forward that reaches it uses other frequencies for all of its tokens.
    """
    text = host.text_config(config)
    rope = getattr(text, "rope_parameters", None) or {}
    for section in (rope, *(section for section in rope.values() if isinstance(section, Mapping))):
        if section.get("rope_type") in LENGTH_DEPENDENT:
            original = section.get("original_max_position_embeddings")
            original = original or getattr(text, "original_max_position_embeddings", None)
            original = original or getattr(text, "max_position_embeddings", None) or 2**31
            return PositionLimit(int(original), f"rope_type {section['rope_type']!r}, original_max_position_embeddings")
    return None


def renewed_buffers(model: nn.Module) -> frozenset[int]:
    """Buffers (by ``id``) that a forward renews: they say nothing about who the model is, their originals do."""
    if length_limit(model.config) is None:
        return frozenset()
    return frozenset(
        id(buffer)
        for name, buffer in model.named_buffers()
        if name.endswith("inv_freq") and not name.endswith("original_inv_freq")
    )
