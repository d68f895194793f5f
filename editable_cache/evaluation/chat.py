"""A user's turn around context and question, where the tokenizer has a chat template."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

_CONTENT = "\u2063content\u2063"


def turn(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """What stands before and behind a user's turn whose answer comes next; both empty without a chat template.

    Reasoning templates are asked for an answer without thinking (``enable_thinking=False``), the others ignore that.
    """
    if not getattr(tokenizer, "chat_template", None):
        return "", ""
    messages = [{"role": "user", "content": _CONTENT}]
    whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, enable_thinking=False)
    before, _, after = str(whole).partition(_CONTENT)
    bos = tokenizer.bos_token
    if bos and before.startswith(bos):
        first = tokenizer("a").input_ids
        if first and first[0] == tokenizer.bos_token_id:  # the tokenizer writes it itself
            before = before[len(bos) :]
    return before, after
