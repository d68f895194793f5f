"""What a weight edit is asked for: at the end of a prompt, another continuation, because of one subject."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from editable_cache.errors import TaskError


@dataclass(frozen=True)
class Prompt:
    """Token ids, and where in them the subject stands, ``(start, end)``."""

    ids: tuple[int, ...]
    subject: tuple[int, int]

    def __post_init__(self) -> None:
        """Raise ``TaskError`` if the subject is empty or outside."""
        start, end = self.subject
        if not 0 <= start < end <= len(self.ids):
            raise TaskError(f"Prompt: expected a subject within {len(self.ids)} tokens, got {start} to {end}.")

    @property
    def last(self) -> int:
        """Index of the subject's last token, where ROME reads the key."""
        return self.subject[1] - 1

    def followed_by(self, ids: tuple[int, ...]) -> Prompt:
        """The same with more ids behind it."""
        return Prompt(self.ids + ids, self.subject)


@dataclass(frozen=True)
class Request:
    """One edit.

    Attributes:
        prompts: the prompt alone first, then in other contexts; the edit has to hold in all of them.
        target: ids of the wanted continuation.
        keyed: further contexts of the subject, of which only the key is read: they cost a part of the lower layers.
        essence: a prompt such as ``"{subject} is a"``, whose continuation is to stay as it is; None if nothing is.
    """

    prompts: tuple[Prompt, ...]
    target: tuple[int, ...]
    essence: Prompt | None = None
    keyed: tuple[Prompt, ...] = ()

    def __post_init__(self) -> None:
        """Raise ``TaskError`` if there is no prompt or no target."""
        if not self.prompts or not self.target:
            raise TaskError(
                f"Request: expected a prompt and a target, got {len(self.prompts)} prompts and "
                f"{len(self.target)} target ids."
            )


def prompt_of(tokenizer: PreTrainedTokenizerBase, before: str, subject: str, after: str) -> Prompt:
    """A prompt from its text; the subject's tokens are those that share a character with it.

    Raises:
        TaskError: if the subject is empty or the tokenizer can't tell where its tokens stand in the text.
    """
    if not subject or not tokenizer.is_fast:
        raise TaskError(
            f"Prompt: expected a subject and a fast tokenizer, got {subject!r}, {type(tokenizer).__name__}."
        )
    found = tokenizer(before + subject + after, return_offsets_mapping=True)
    low, high = len(before), len(before) + len(subject)
    held = [i for i, (start, end) in enumerate(found["offset_mapping"]) if start < high and end > low]
    if not held:
        raise TaskError(f"Prompt: no token of {before + subject + after!r} holds the subject {subject!r}.")
    return Prompt(tuple(found["input_ids"]), (held[0], held[-1] + 1))


def request_of(
    tokenizer: PreTrainedTokenizerBase,
    template: str,
    subject: str,
    target: str,
    *,
    prefixes: Sequence[str] = (),
    keyed: Sequence[str] = (),
) -> Request:
    """A factual edit: ``template`` has ``{}`` where the subject stands, ``target`` is a word, with its leading space.

    Args:
        prefixes: words before the prompt, behind which the edit has to hold too.
        keyed: more of them, behind which only the key is read.

    Raises:
        TaskError: if the template has no place for the subject.
    """
    before, found, after = template.partition("{}")
    if not found:
        raise TaskError(f"Request: expected '{{}}' in the template, got {template!r}.")
    prompts, more = (
        tuple(prompt_of(tokenizer, prefix + before, subject, after) for prefix in words)
        for words in (("", *prefixes), keyed)
    )
    target_ids = tokenizer(target, add_special_tokens=False).input_ids
    return Request(prompts, tuple(target_ids), prompt_of(tokenizer, "", subject, " is a"), more)


def random_prefixes(text: str, count: int, *, words: tuple[int, int] = (4, 9), seed: int = 0) -> list[str]:
    """Runs of words from a text, each closed as a sentence: contexts in which a subject may stand.

    Raises:
        TaskError: if the text is too short.
    """
    found = text.split()
    if len(found) <= words[1]:
        raise TaskError(f"Prefixes: expected a text of more than {words[1]} words, got {len(found)}.")
    rng = random.Random(seed)
    prefixes = []
    for _ in range(count):
        length = rng.randint(*words)
        start = rng.randrange(len(found) - length)
        prefixes.append(" ".join(found[start : start + length]).rstrip(".,;:") + ". ")
    return prefixes
