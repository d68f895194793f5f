"""One item put to one model: the context in a cache, the question behind it, the decision read at the last token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from editable_cache.adapters import host
from editable_cache.editable import EditableCache
from editable_cache.errors import TaskError
from editable_cache.evaluation.chat import turn
from editable_cache.evaluation.tasks import Item, answered
from editable_cache.forward.run import forward_at_end, next_token_logits

CHAIN_TOKENS = 64
"""A chain of thought and its answer must end within this many tokens."""

CONTEXT, QUESTION = "context", "question"
"""Names of the two segments."""


@dataclass(frozen=True)
class Decision:
    """What a model said.

    Attributes:
        logits: float32 ``[vocab]`` of the token that decides; None with a chain of thought.
        gap: logit of the new value's answer minus that of the old one's, where there are logits.
        value: the value whose answer was given: in direct mode the likelier of the two, but a function call in JSON is
            generated and parsed, as is what follows a chain of thought; None if it parses as neither.
        text: what was generated, if anything was.
        tokens: how many tokens were generated.
    """

    logits: Tensor | None
    gap: float | None
    value: str | None
    text: str = ""
    tokens: int = 0


class Asking:
    """An item with the texts and ids that one model needs.

    Args:
        model: a causal language model in evaluation mode.
        tokenizer: its own; a chat template is used where there is one.

    Raises:
        TaskError: if the two answers begin with the same token, or one has none, so that no single token decides.
    """

    def __init__(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, item: Item) -> None:
        self.model, self.tokenizer, self.item = model, tokenizer, item
        before, after = turn(tokenizer)
        self.template = before.replace("{", "{{").replace("}", "}}") + item.template()
        self.question = item.question + after
        ids = self._ids(self.question)
        if item.mode == "direct":
            ids += self._ids(item.prefix)
        self.question_ids = torch.tensor(ids)
        first = [self._ids(item.answers[value])[:1] for value in (item.old, item.new)]
        if not all(first) or not all(text.strip() for text in item.answers.values()):
            raise TaskError(
                f"Item {item.key}: expected answers of at least one token that are not blank, got {item.answers}; "
                "write what follows the prefix."
            )
        (self.old_id,), (self.new_id,) = first
        if self.old_id == self.new_id:
            raise TaskError(
                f"Item {item.key}: expected answers that begin with different tokens, got {item.answers} with the same "
                f"first token {tokenizer.decode([self.old_id])!r}."
            )

    def held(self, value: str) -> EditableCache:
        """A cache that has read the context with this value."""
        cache = EditableCache(self.model, tokenizer=self.tokenizer)
        cache.append(self.template, name=CONTEXT, fields={self.item.field: value})
        return cache

    def ask(self, cache: EditableCache) -> EditableCache:
        """Append the question to ``cache``, which is changed; returns it."""
        cache.append(self.question_ids, name=QUESTION)
        return cache

    def unasked(self, cache: EditableCache) -> EditableCache:
        """A fork without the question, to which something can be added before it is asked again."""
        fork = cache.fork()
        fork.remove(QUESTION)
        return fork

    def read(self, cache: EditableCache) -> Tensor:
        """Logits float32 ``[vocab]`` behind the last token, which is computed anew on what stands before it.

        Its own cells in ``cache`` are not read, so it does not matter whether they are stale; nothing is written.
        """
        if cache.state_layers:
            return next_token_logits(cache)[0].float()
        last, twin = len(cache.ledger) - 1, cache.fork()
        for layer in twin.editable_layers:
            layer.truncate(last)
        places, ids = cache.ledger.places(slice(last, None)), cache.ledger.ids[:, last:]
        return forward_at_end(twin, ids, places, cache.ledger.valid)[0].float()

    def decide(self, cache: EditableCache) -> Decision:
        """The decision of a cache that holds context and question. The cache is not changed."""
        if self.item.mode == "direct":
            logits = self.read(cache)
            gap = float(logits[self.new_id] - logits[self.old_id])
            if not self.item.prefix.startswith("{"):
                return Decision(logits, gap, self.item.new if gap > 0 else self.item.old)
            text, count = self._said(cache)
            return Decision(logits, gap, answered(self.item, text), text, count)
        text, count = self._said(cache)
        return Decision(None, None, answered(self.item, text), text, count)

    def _said(self, cache: EditableCache) -> tuple[str, int]:
        fork = cache.fork()
        fork.remove((len(fork.ledger) - 1, len(fork.ledger)))
        return self.generate(fork, cache.token_ids[0, -1:])

    def generate(self, cache: EditableCache, ids: Tensor, max_new_tokens: int = CHAIN_TOKENS) -> tuple[str, int]:
        """Greedy continuation of a cache by ``ids`` and what follows; returns the text and its number of tokens."""
        inputs = cache.inputs(ids)
        length = inputs["input_ids"].shape[1]
        model: Any = self.model
        found = model.generate(
            **inputs,
            **{host.cache_argument(self.model): cache},
            max_new_tokens=max_new_tokens,
            do_sample=False,
            pad_token_id=self.tokenizer.pad_token_id or self.tokenizer.eos_token_id,
        )[0, length:]
        return str(self.tokenizer.decode(found, skip_special_tokens=True)), len(found)

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)
