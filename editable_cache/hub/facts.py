"""Facts of a chunk as JSON, and back: who made it, how it rotates, what it had seen."""

from __future__ import annotations

import json
import math
from typing import Any

from editable_cache.chunk import Part, Provenance
from editable_cache.hub.schema import MOST_NAME, Section, is_printable, printable, read_name
from editable_cache.spec import LayerSpec, ModelIdentity, Origin, RotarySpec, TensorSpec

HOW = ("precompiled", "extracted", "merged", "trained")
MOST_DIM = 2**20
MOST_NODES, MOST_DEPTH, MOST_CONFIG = 16_384, 12, 2**20
"""Values in the config of a model, how deep they stand, and characters of all of them as JSON."""

UNKNOWN = -1
LAYOUTS = ("half", "interleaved")


def identity_facts(identity: ModelIdentity) -> dict[str, Any]:
    """Who made a chunk; the config stands as an object."""
    return {**identity.to_dict(), "config": json.loads(identity.config)}


def read_identity(facts: Section) -> ModelIdentity:
    """What ``identity_facts`` wrote."""
    config = facts.take("config")
    fine = isinstance(config, dict) and _is_small(config)
    facts.require(fine, "config", f"an object of up to {MOST_NODES} values, {MOST_DEPTH} deep", config)
    text = json.dumps(config, sort_keys=True)
    facts.require(len(text) <= MOST_CONFIG, "config", f"up to {MOST_CONFIG} characters", len(text))
    names = ("model_type", "weights", "adapters", "rotary", "dtype", "tokenizer")
    texts = {name: facts.text(name, most=MOST_NAME) for name in names}
    facts.done()
    return ModelIdentity(config=text, **texts)


def origin_facts(origin: Origin) -> dict[str, Any]:
    """Where a chunk comes from."""
    return {
        "repo": printable(origin.repo),
        "revision": printable(origin.revision),
        "tokenizer": printable(origin.tokenizer),
        "special_ids": [[token_id, printable(text)] for token_id, text in origin.special_ids],
        "attention": printable(origin.attention),
        "adapters": [[printable(name), scale] for name, scale in origin.adapters],
        "versions": [list(pair) for pair in origin.versions],
        "rounded_weights": origin.rounded_weights,
    }


def read_origin(facts: Section) -> Origin:
    """What ``origin_facts`` wrote."""
    texts = {name: facts.text(name) for name in ("repo", "revision", "tokenizer", "attention", "rounded_weights")}
    special = _pairs(facts, "special_ids", int, str)
    adapters = _pairs(facts, "adapters", str, float)
    versions = _pairs(facts, "versions", str, str)
    facts.done()
    return Origin(special_ids=special, adapters=adapters, versions=versions, **texts)


def layout_facts(layout: tuple[LayerSpec, ...]) -> dict[str, Any] | None:
    """How the tensors of each holder rotate: the distinct rotations, and for each tensor which."""
    if not layout:
        return None
    used = [tensor.rotary for layer in layout for tensor in layer.tensors if tensor.rotary is not None]
    rotaries = list(dict.fromkeys(used))
    return {
        "rotaries": [
            {
                "layout": rotary.layout,
                "start": rotary.start,
                "inv_freq": list(rotary.inv_freq),
                "axes": None if rotary.axes is None else list(rotary.axes),
            }
            for rotary in rotaries
        ],
        "holders": [
            {
                "layer_idx": layer.layer_idx,
                "tensors": [
                    {
                        "name": tensor.name,
                        "rotary": None if tensor.rotary is None else rotaries.index(tensor.rotary),
                        "counter": tensor.counter,
                    }
                    for tensor in layer.tensors
                ],
            }
            for layer in layout
        ],
    }


def read_layout(facts: Section | None) -> tuple[LayerSpec, ...]:
    """What ``layout_facts`` wrote."""
    if facts is None:
        return ()
    rotaries = [_rotary(section) for section in facts.sections("rotaries")]
    holders = tuple(_holder(section, rotaries) for section in facts.sections("holders"))
    facts.done()
    return holders


def provenance_facts(provenance: Provenance) -> dict[str, Any]:
    """What the tokens of a chunk had seen."""
    return {
        "how": provenance.how,
        "prefix_ids": list(provenance.prefix_ids),
        "note": provenance.note,
        "parts": [
            {
                "start": part.start,
                "stop": part.stop,
                "prefix_ids": list(part.prefix_ids),
                "name": part.name,
                "note": part.note,
            }
            for part in provenance.parts
        ],
    }


def read_provenance(facts: Section, length: int) -> Provenance:
    """What ``provenance_facts`` wrote, of a chunk of ``length`` tokens."""
    how, note, prefix_ids = facts.choice("how", HOW), facts.text("note"), facts.integers("prefix_ids", UNKNOWN)
    parts, end = [], 0
    for section in facts.sections("parts"):
        start, stop = section.integer("start", end, length), section.integer("stop", 0, length)
        section.require(start == end < stop, "start", f"{end}, and a stop behind it", (start, stop))
        end = stop
        name = read_name(section)
        parts.append(Part(start, stop, tuple(section.integers("prefix_ids", UNKNOWN)), name, section.text("note")))
        section.done()
    facts.require((how == "merged") == bool(parts) and end in (0, length), "parts", f"those of {length} tokens", end)
    facts.done()
    return Provenance(how, tuple(prefix_ids), note, tuple(parts))


def _is_small(config: dict[str, Any]) -> bool:
    """Whether a tree of JSON has few values, none of them deep; looked at without recursion."""
    level: list[Any] = [config]
    nodes = 0
    for _ in range(MOST_DEPTH):
        nodes += len(level)
        below = [each for node in level if isinstance(node, (dict, list)) for each in _children(node)]
        if nodes > MOST_NODES:
            return False
        level = below
    return not level


def _children(node: dict[str, Any] | list[Any]) -> list[Any]:
    return list(node.values()) if isinstance(node, dict) else node


def _rotary(facts: Section) -> RotarySpec:
    layout, start = facts.choice("layout", LAYOUTS), facts.integer("start", 0, MOST_DIM)
    inv_freq = facts.numbers("inv_freq")
    axes = facts.take("axes")
    fine = axes is None or (
        isinstance(axes, list) and len(axes) == len(inv_freq) and all(type(a) is int and 0 <= a < 16 for a in axes)
    )
    facts.require(fine, "axes", f"null, or {len(inv_freq)} axes", axes)
    facts.require(all(abs(f) < 1e30 for f in inv_freq), "inv_freq", "frequencies of float32", inv_freq)
    facts.done()
    return RotarySpec(tuple(inv_freq), layout, start, None if axes is None else tuple(axes))


def _holder(facts: Section, rotaries: list[RotarySpec]) -> LayerSpec:
    layer_idx, tensors = facts.integer("layer_idx", 0, MOST_DIM), []
    for section in facts.sections("tensors"):
        name, rotary = section.text("name", most=100), section.take("rotary")
        known = rotary is None or (type(rotary) is int and 0 <= rotary < len(rotaries))
        section.require(known, "rotary", f"null, or one of {len(rotaries)}", rotary)
        counter = section.choice("counter", (True, False))
        section.done()
        tensors.append(TensorSpec(name, None if rotary is None else rotaries[rotary], counter))
    facts.done()
    return LayerSpec(tuple(tensors), layer_idx)


def _pairs(facts: Section, key: str, *kinds: type) -> tuple[Any, ...]:
    wanted, pairs = f"pairs of {kinds[0].__name__} and short {kinds[1].__name__}", facts.items(key)
    for pair in pairs:
        fine = isinstance(pair, list) and len(pair) == 2
        fine = fine and all(type(value) is kind for value, kind in zip(pair, kinds, strict=True))
        fine = fine and all(math.isfinite(value) for value in pair if isinstance(value, (int, float)))
        fine = fine and all(len(text) <= MOST_NAME and is_printable(text) for text in pair if isinstance(text, str))
        facts.require(fine, key, wanted, pair)
    return tuple(tuple(pair) for pair in pairs)
