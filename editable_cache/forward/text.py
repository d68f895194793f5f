"""From text to ids, with the tokens of each field found through the tokenizer's offsets."""

from __future__ import annotations

import string
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from editable_cache.errors import EditableCacheError, FieldError, TokenBoundaryWarning

TextOrIds = str | Sequence[int] | Tensor

Template = tuple[tuple[str, str | None], ...]
"""Pieces ``(literal text, name of the field behind it or None)``."""

CONTEXT_TOKENS = 8


class Encoded(NamedTuple):
    """Ids ``[num_tokens]`` and, for each field, the spans of tokens that hold its value."""

    ids: Tensor
    spans: dict[str, tuple[tuple[int, int], ...]]


def encode(tokenizer: Any, text_or_ids: TextOrIds, *, first: bool) -> Tensor:
    """Ids ``[num_tokens]`` of a text, or given ids as they are.

    Args:
        tokenizer: needed for text.
        text_or_ids: text, a list of ids, or an id tensor ``[n]`` or ``[1, n]``.
        first: the text starts the context, so the tokenizer puts in front what it always does (BOS).

    Raises:
        EditableCacheError: for text without a tokenizer, or ids of the wrong shape or kind.
    """
    if isinstance(text_or_ids, str):
        if not text_or_ids and not first:
            return torch.empty(0, dtype=torch.int64)
        ids = require_tokenizer(tokenizer, "text")(text_or_ids, add_special_tokens=first)["input_ids"]
        return torch.tensor(ids, dtype=torch.int64)
    try:
        ids = torch.as_tensor(text_or_ids)
    except (TypeError, ValueError, RuntimeError) as error:
        raise _TokenError(
            f"token ids: expected text, a list of integers or an id tensor, got {type(text_or_ids).__name__}: {error}."
        ) from error
    if ids.dim() == 2 and ids.shape[0] == 1:
        ids = ids[0]
    if ids.dim() != 1 or (ids.numel() and (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool)):
        raise _TokenError(f"token ids: expected integers of shape [n] or [1, n], got {ids.dtype} {list(ids.shape)}.")
    return ids.detach().cpu().long()


class _TokenError(EditableCacheError, ValueError):
    """Text or ids that can't be used."""


def require_tokenizer(tokenizer: Any, what: str) -> Any:
    """``tokenizer``, or an error that says how to give one."""
    if tokenizer is None:
        raise _TokenError(
            f"{what}: expected a tokenizer, got none; make the cache with EditableCache(model, tokenizer=tokenizer)."
        )
    return tokenizer


def parse_template(template: str, fields: Mapping[str, str]) -> Template:
    """Split ``"status: {status}\\n"`` into pieces.

    Raises:
        FieldError: if template and ``fields`` do not name the same fields, a placeholder has a format, or a value is
            empty.
    """
    try:
        parsed = list(string.Formatter().parse(template))
    except ValueError as error:
        raise FieldError(f"template: {error}; write a literal brace as '{{{{' or '}}}}'.") from error
    for _, name, form, conversion in parsed:
        if name is not None and (not name.isidentifier() or form or conversion):
            raise FieldError(
                f"template: expected placeholders like '{{name}}', got '{{{name}}}'; format the value before."
            )
    named = {name for _, name, _, _ in parsed if name is not None}
    if named != set(fields):
        raise FieldError(
            f"template: expected the fields {sorted(fields)}, got placeholders for {sorted(named)}; name each field "
            f"once in "
            "fields= and at least once in the text as '{name}'."
        )
    for name, value in fields.items():
        if not isinstance(value, str) or not value:
            raise FieldError(f"Field {name!r}: expected a text of at least one token, got {value!r}.")
    return tuple((literal, name) for literal, name, _, _ in parsed)


def fill(template: Template, values: Mapping[str, str]) -> str:
    """The text of a template."""
    return "".join(literal + (values[name] if name is not None else "") for literal, name in template)


def encode_template(tokenizer: Any, template: Template, values: Mapping[str, str], *, first: bool) -> Encoded:
    """Tokenize a template as one text and find the tokens of each value by their character offsets.

    White space right before the value belongs to it: whether it makes a token of its own depends on the value.

    Raises:
        FieldError: if a value shares a token with neighbouring text, or has no token of its own.
        EditableCacheError: if the tokenizer gives no offsets.
    """
    text, places = _places(template, values)
    tokenizer = require_tokenizer(tokenizer, "fields")
    if not getattr(tokenizer, "is_fast", False):
        raise _TokenError(
            f"fields: expected a fast tokenizer, which reports character offsets, got {type(tokenizer).__name__}; "
            "load it with use_fast=True."
        )
    encoding = tokenizer(text, add_special_tokens=first, return_offsets_mapping=True)
    offsets = encoding["offset_mapping"]
    spans: dict[str, list[tuple[int, int]]] = {}
    for name, start, stop in places:
        first_space = len(text[:start].rstrip())
        inside = [i for i, (low, high) in enumerate(offsets) if low < stop and first_space < high and low < high]
        while inside and offsets[inside[0]][0] < first_space and offsets[inside[0]][1] <= start:
            inside.pop(0)  # white space that the text before the value shares
        if not inside:
            raise FieldError(f"Field {name!r}: the value {values[name]!r} has no token of its own in {text!r}.")
        before, after = text[offsets[inside[0]][0] : start], text[stop : offsets[inside[-1]][1]]
        if before.strip() or after.strip():
            shared = text[offsets[inside[0]][0] : offsets[inside[-1]][1]]
            raise FieldError(
                f"Field {name!r}: expected the value {values[name]!r} in tokens of its own, got one shared with its "
                f"neighbours in {shared!r}; put a space before '{{{name}}}' and a space or line break behind it."
            )
        spans.setdefault(name, []).append((inside[0], inside[-1] + 1))
    ids = torch.tensor(encoding["input_ids"], dtype=torch.int64)
    return Encoded(ids, {name: tuple(found) for name, found in spans.items()})


def _places(template: Template, values: Mapping[str, str]) -> tuple[str, list[tuple[str, int, int]]]:
    text, places = "", []
    for literal, name in template:
        text += literal
        if name is not None:
            places.append((name, len(text), len(text) + len(values[name])))
            text += values[name]
    return text, places


def boundary_ok(tokenizer: Any, left: str | Tensor, right: str) -> bool:
    """Whether ``left`` and ``right`` tokenize apart as they do joined.

    Args:
        left: text, or ids that stand before (their last few are looked at).
        right: text.
    """
    if not isinstance(left, str):
        left = str(tokenizer.decode(left[-CONTEXT_TOKENS:], clean_up_tokenization_spaces=False))
    apart = [
        *tokenizer(left, add_special_tokens=False)["input_ids"],
        *tokenizer(right, add_special_tokens=False)["input_ids"],
    ]
    return bool(apart == tokenizer(left + right, add_special_tokens=False)["input_ids"])


def warn_at_boundary(tokenizer: Any, left: Tensor, right: str) -> None:
    """Warn where a text does not continue the ids before it as the joined text would."""
    left = left[-CONTEXT_TOKENS:]
    if bool((left < 0).any()):
        return  # unknown ids: nobody can tell
    if len(left) and right and not boundary_ok(tokenizer, left, right):
        end = tokenizer.decode(left[-2:], clean_up_tokenization_spaces=False)
        warnings.warn(
            f"The tokens of ...{end!r} and {right[:12]!r}... are not those of the joined text: the model sees a "
            "prompt that no tokenizer would make. Put the space at the start of the right part, or join the texts "
            "first.",
            TokenBoundaryWarning,
            stacklevel=4,
        )


def adds_bos(tokenizer: Any) -> bool:
    """Whether a plain encode puts a BOS token in front."""
    bos = getattr(tokenizer, "bos_token_id", None)
    return bos is not None and tokenizer("a")["input_ids"][:1] == [bos]
