"""Which tokenizer: a digest of what maps text to ids, made anew when that changes."""

from __future__ import annotations

import hashlib
import json
import weakref
from typing import Any, NamedTuple

PROBES = (
    "Hello, World! HELLO wORLD",
    "0123456789 3.14 1,000,000 2025-01-31",
    "  two  spaces\tand\n\nlines \r\n ",
    "na\u00efve cafe\u0301 \u00c0\u00c9\u00ce stra\u00dfe \u0130 \ufb01",
    "\u65e5\u672c\u8a9e \u0440\u0443\u0441 \U0001f642 \u200b",
    "can't don't <tag> snake_case camelCase https://a.b/c?d=e&f=1 {}[]()#@%^*+=~`|\\",
    "the unbelievable transformation of internationalized tokenizers",
)
"""Texts whose ids tell what a tokenizer written in Python does: case, digits, accents, scripts, spaces, merges."""

MOST_ENTRIES, ENTRIES_PER_PROBE = 2_000, 50
"""How much of a vocabulary is tokenized as text too, and how much of it at a time."""


class _Known(NamedTuple):
    state: tuple[Any, ...]
    next_id: int
    digest: str


_digests: weakref.WeakKeyDictionary[Any, _Known] = weakref.WeakKeyDictionary()


def tokenizer_digest(tokenizer: Any) -> str:
    """Digest of what maps text to ids, 16 hexadecimal digits; padding and truncation do not count.

    Of a Rust tokenizer it is of everything that it is made of. Of one written in Python it is of its class, its
    vocabulary and the ids of probe texts, the first 2,000 entries of the vocabulary among them.

    Remembered until tokens are added, the normalizer, pre-tokenizer, post-processor or special tokens change, or a
    plain attribute of a tokenizer written in Python. A token of the vocabulary that is added again, and not as a
    special one, is not noticed afterwards.
    """
    state, known = _state(tokenizer), _digests.get(tokenizer)
    if known is None or known.state != state or _has(tokenizer, known.next_id):
        next_id = 1 + max(tokenizer.get_vocab().values(), default=-1)
        content = json.dumps(_content(tokenizer), sort_keys=True)
        _digests[tokenizer] = known = _Known(state, next_id, hashlib.sha256(content.encode()).hexdigest()[:16])
    return known.digest


def _backend(tokenizer: Any) -> Any:
    return getattr(tokenizer, "backend_tokenizer", None)


def _state(tokenizer: Any) -> tuple[Any, ...]:
    """What is cheap to read and changes with the digest, but for the number of tokens."""
    backend = _backend(tokenizer)
    if backend is None:
        plain = ((key, value) for key, value in vars(tokenizer).items() if isinstance(value, (bool, int, float, str)))
        return (len(tokenizer), *plain)
    parts = (backend.normalizer, backend.pre_tokenizer, backend.post_processor)
    return (id(backend), *map(repr, parts), backend.encode_special_tokens, repr(tokenizer.special_tokens_map))


def _has(tokenizer: Any, next_id: int) -> bool:
    """Whether a token was added: counting those of a large vocabulary takes longer than to look for the next."""
    backend = _backend(tokenizer)
    return backend is not None and backend.id_to_token(next_id) is not None


def _content(tokenizer: Any) -> Any:
    backend = _backend(tokenizer)
    if backend is not None:
        maps = json.loads(backend.to_str())
        # left behind by the last call with padding= or truncation=
        return {key: maps[key] for key in maps if key not in ("padding", "truncation")}
    vocabulary = tokenizer.get_vocab()
    entries = sorted(vocabulary, key=lambda entry: (vocabulary[entry], entry))[:MOST_ENTRIES]
    texts = [" ".join(entries[at : at + ENTRIES_PER_PROBE]) for at in range(0, len(entries), ENTRIES_PER_PROBE)]
    return {
        "class": type(tokenizer).__name__,
        "vocabulary": vocabulary,
        "ids": [tokenizer.encode(text, add_special_tokens=False) for text in (*PROBES, *texts)],
        "with special tokens": tokenizer.encode(PROBES[0]),
    }
