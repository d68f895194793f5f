"""Tokens that control a model instead of being text."""

from __future__ import annotations

from typing import Any


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """The control tokens of a tokenizer by id: those that it calls special, and added ones that its chat template uses.

    The second kind (``<tool_call>``, ``<think>``) is text to a tokenizer, and means something to its model.
    """
    if tokenizer is None:
        return {}
    added: dict[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    template = str(getattr(tokenizer, "chat_template", None) or "")
    found = {
        idx: str(token)
        for idx, token in added.items()
        if token.special or (str(token).strip() and str(token) in template)
    }
    return found | dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
