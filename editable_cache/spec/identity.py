"""Who made a chunk: the facts of a model that decide what its keys and values are, and circumstances worth telling."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any

from editable_cache.errors import Reason

MOST_REASONS = 32
"""Fields of a config that are told when they differ: a stranger's config can have any number of them."""


@dataclass(frozen=True)
class ModelIdentity:
    """Everything that two models must share before one may use the other's cells.

    Attributes:
        model_type: the config's ``model_type``.
        config: the config fields that affect keys and values, as JSON with sorted keys.
        weights: digest of every parameter and buffer (see ``adapters.fingerprint``).
        adapters: digest of the active PEFT adapters with scales; empty when none is active.
        rotary: digest of the frequencies that the model holds now.
        dtype: dtype of the stored cells.
        tokenizer: digest of the vocabulary, or an empty string where no tokenizer took part (token ids were given).
    """

    model_type: str
    config: str
    weights: str
    adapters: str
    rotary: str
    dtype: str
    tokenizer: str = ""

    def to_dict(self) -> dict[str, str]:
        """Plain JSON form."""
        return asdict(self)


@dataclass(frozen=True)
class Origin:
    """Circumstances of a compilation, for people, for search and for other programs.

    None of them decides whether cells fit a model; ``ModelIdentity`` does. Empty where unknown.

    Attributes:
        repo: repository of the model on the Hub.
        revision: commit of that repository.
        tokenizer: repository of the tokenizer on the Hub.
        special_ids: special tokens that occur in the chunk, or had stood in front of it, as pairs of id and text.
        attention: the attention implementation that computed the cells (``"sdpa"``, ``"eager"``, ...).
        adapters: active PEFT adapters, as pairs of name and scale.
        versions: pairs of library and version.
        rounded_weights: digest of the weights rounded to bfloat16: equal for one set of weights in several dtypes.
    """

    repo: str = ""
    revision: str = ""
    tokenizer: str = ""
    special_ids: tuple[tuple[int, str], ...] = ()
    attention: str = ""
    adapters: tuple[tuple[str, float], ...] = ()
    versions: tuple[tuple[str, str], ...] = ()
    rounded_weights: str = ""


def compare(wanted: ModelIdentity, found: ModelIdentity) -> tuple[Reason, ...]:
    """List every fact in which ``found`` (a chunk's producer) differs from ``wanted`` (the model at hand).

    A tokenizer is compared only where both sides name one: ids, not text, are what a chunk holds. A config field that
    only one side has, and that is null or false there, is the same as none: versions of transformers add such fields.
    """
    reasons: list[Reason] = []
    for field in fields(ModelIdentity):
        want, have = getattr(wanted, field.name), getattr(found, field.name)
        if field.name == "tokenizer" and not (want and have):
            continue
        if want == have:
            continue
        if field.name == "config":
            differing = list(_config_reasons(want, have))
            reasons += differing[:MOST_REASONS]
            if len(differing) > MOST_REASONS:
                reasons.append(Reason("config", "the same", f"{len(differing) - MOST_REASONS} more fields that differ"))
        else:
            reasons.append(Reason(field.name, want or "none", have or "none"))
    return tuple(reasons)


def _config_reasons(want: str, have: str) -> Iterator[Reason]:
    wanted, found = _config_fields(want), _config_fields(have)
    for name in sorted(wanted.keys() | found.keys()):
        values = wanted.get(name), found.get(name)
        if not (name in wanted and name in found) and all(value is None or value is False for value in values):
            continue
        pair = [json.dumps(config[name]) if name in config else "no such field" for config in (wanted, found)]
        if pair[0] != pair[1]:
            yield Reason(f"config.{ascii(name)[1:-1][:100]}", pair[0][:200], pair[1][:200])


def _config_fields(text: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except ValueError:
        content = None
    return content if isinstance(content, dict) else {"": text}
