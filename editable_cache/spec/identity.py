"""Who made a chunk: the facts of a model that decide what its keys and values are."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

from editable_cache.errors import Reason


@dataclass(frozen=True)
class ModelIdentity:
    """Everything that two models must share before one may use the other's cells.

    Attributes:
        model_type: the config's ``model_type``.
        config: digest of the config fields that affect keys and values.
        weights: digest of every parameter and buffer (see ``adapters.fingerprint``).
        adapters: active PEFT adapters with scales, as text; empty when none is active.
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


def compare(wanted: ModelIdentity, found: ModelIdentity) -> tuple[Reason, ...]:
    """List every fact in which ``found`` (a chunk's producer) differs from ``wanted`` (the model at hand).

    A tokenizer is compared only where both sides name one: ids, not text, are what a chunk holds.
    """
    reasons = []
    for field in fields(ModelIdentity):
        want, have = getattr(wanted, field.name), getattr(found, field.name)
        if field.name == "tokenizer" and not (want and have):
            continue
        if want != have:
            reasons.append(Reason(field.name, want or "none", have or "none"))
    return tuple(reasons)
