"""The general rule: from a config class of transformers to a small config that keeps the type's features.

The type's own default config says which features it has. Sizes shrink by field name, features that are off stay off,
and every combination of the per-layer lists (kind of attention, dense or sparse, own RoPE base) keeps a layer.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from editable_cache.testing.zoo.overrides import ROWS, Row
from editable_cache.testing.zoo.sizes import (
    DEPTH_FIELDS,
    DROPOUTS,
    FIRST_SPECIAL_ID,
    LAYERS,
    LONGEST_TABLE,
    MAX_LAYERS,
    MAX_POSITION,
    MAX_TABLE_POSITION,
    POSITION_FIELDS,
    SIZES,
    SPECIAL_TOKEN,
    TOWER_DEPTH_FIELDS,
    TOWER_SIZES,
    UNKNOWN,
)

_PER_LAYER_KINDS = ("layer_types", "layers_block_type", "mlp_layer_types", "block_types", "attn_layers")
_TEXT_NAMES = ("text_config", "decoder_config", "llm_config", "language_config", "decoder")
_BASE_FIELDS = frozenset(field.name for field in dataclasses.fields(PreTrainedConfig))


def field_names(config_class: type[PreTrainedConfig]) -> frozenset[str]:
    """Fields that the type itself declares: those of the common base are left out, but for `tie_word_embeddings`."""
    names = {field.name for field in dataclasses.fields(config_class)}
    return frozenset(names - _BASE_FIELDS)


def read(config: PreTrainedConfig, name: str) -> Any:
    """The value of a field, or None where the config has none."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # it varies from layer to layer: the value of the layers that say nothing
        return vars(config).get(name)


def sub_configs(config: PreTrainedConfig) -> Iterator[tuple[str, PreTrainedConfig]]:
    """The nested configs of a default config that are there, by field name."""
    for name in config.sub_configs or {}:
        value = read(config, name)
        if isinstance(value, PreTrainedConfig):
            yield name, value


def small_config(model_type: str, extra: Mapping[str, Any] | None = None) -> PreTrainedConfig:
    """The small config of a model type, with `extra` set on the language model's part.

    Raises:
        Exception: whatever the config class raises at values that it does not take.
    """
    config_class = CONFIG_MAPPING[model_type]
    row = ROWS.get(model_type, Row(""))
    default = config_class(**row.default)
    parts = dict(sub_configs(default))
    text_name = _text_name(default, parts)
    if not parts or (text_name is None and default.get_text_config(decoder=True) is default):
        values = _small_text(default, row.text, extra or {})
    else:
        values = {}
    for name, part in parts.items():
        part_row = ROWS.get(part.model_type, Row(""))
        if name == text_name:
            values[name] = type(part)(**_small_text(part, {**part_row.text, **row.text}, extra or {}))
        elif name in row.replaced:
            values[name] = _small_tower(CONFIG_MAPPING[row.replaced[name]](), row.towers.get(name, {}))
        elif name not in row.top:
            values[name] = _small_tower(part, {**part_row.tower, **row.towers.get(name, {})})
    if parts:
        values.update(_top_level(default, values))
    values.update(row.top)
    return config_class(**values)


def _text_name(default: PreTrainedConfig, parts: Mapping[str, PreTrainedConfig]) -> str | None:
    text = default.get_text_config(decoder=True)
    for name, part in parts.items():
        if part is text:
            return name
    return next((name for name in _TEXT_NAMES if name in parts), None)


def _small_text(default: PreTrainedConfig, row: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of the language model's config."""
    names = field_names(type(default))
    values = {**_kept(default, names), **_shrunk(default, names, SIZES)}
    rotary = any(re.match(r"rope_|rotary_dim", name) for name in names)
    for name in POSITION_FIELDS:
        if name in names and isinstance(limit := read(default, name), int):
            values[name] = MAX_POSITION if rotary or limit > LONGEST_TABLE else MAX_TABLE_POSITION
    changes = {**row, **extra}
    values.update(_layers(default, names, changes))
    for name in ("head_dim", "num_key_value_heads"):  # None stands for a size that follows from the others
        if name in names and read(default, name) is None:
            values[name] = SIZES[name]
    if "num_experts_per_tok" in names and read(default, "num_experts_per_tok") is None and "n_routed_experts" in values:
        values["num_experts_per_tok"] = SIZES["num_experts_per_tok"]
    if "kv_lora_rank" in values:  # latent attention has no groups, and often calls its rotary part its head
        if "num_key_value_heads" in names:
            values["num_key_value_heads"] = SIZES["num_attention_heads"]
        if "head_dim" in values and read(default, "head_dim") == read(default, "qk_rope_head_dim"):
            values["head_dim"] = SIZES["qk_rope_head_dim"]
    if "head_dim" in values and "kv_lora_rank" not in values and _least_rotary_part(default) < 0.5:
        values["head_dim"] *= 2  # so that every axis of M-RoPE keeps a frequency
    head = values.get("qk_rope_head_dim") or values.get("head_dim") or SIZES["head_dim"]
    rope = _small_rope(read(default, "rope_parameters"), head)
    if rope is not None:
        values["rope_parameters"] = rope
    values.update(_common_ids(default, names))
    values.update(changes)
    return values


def _least_rotary_part(default: PreTrainedConfig) -> float:
    """The smallest part of a head that rotates, over all layers of the default config."""
    rope = read(default, "rope_parameters")
    sets = [rope, *rope.values()] if isinstance(rope, dict) else []
    return min((part.get("partial_rotary_factor", 1.0) for part in sets if isinstance(part, dict)), default=1.0)


def _kept(default: PreTrainedConfig, names: frozenset[str]) -> dict[str, Any]:
    """Fields that an outer default config sets on this part, unlike the part's own class."""
    try:
        own = type(default)()
    except Exception:  # a class that can't be made without arguments has no defaults of its own
        return {}
    return {
        name: value
        for name in names
        if isinstance(value := read(default, name), (bool, int, float, str, type(None))) and value != read(own, name)
    }


def _shrunk(default: PreTrainedConfig, names: frozenset[str], sizes: Mapping[str, Any]) -> dict[str, Any]:
    """The small value of every field that is on in the default config and that the table or a pattern names."""
    values: dict[str, Any] = {}
    for name in names:
        value = read(default, name)
        if DROPOUTS.search(name) and isinstance(value, float):
            values[name] = 0.0
        elif name == "is_decoder":
            values[name] = True
        elif name == "tie_word_embeddings":
            if isinstance(value, bool):
                values[name] = False
        elif name in sizes:
            if value == "auto" or (isinstance(value, (int, float)) and value):
                values[name] = sizes[name]
            elif isinstance(value, (list, tuple)) and value and all(type(item) is int for item in value):
                values[name] = type(value)([sizes[name]] * len(value))
        elif type(value) is int and value > 256 and not SPECIAL_TOKEN.search(name):
            for pattern, small in UNKNOWN:
                if pattern.search(name):
                    values[name] = small
    return values


def _common_ids(default: PreTrainedConfig, names: frozenset[str]) -> dict[str, Any]:
    """Ids of padding, start and end, inside the small vocabulary where the type has them, and absent where not."""
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "sep_token_id": 2, "decoder_start_token_id": 1}
    ids |= {"cls_token_id": 1, "eod_token_id": 2, "start_token_id": 1, "mask_token_id": 3}
    return {name: ids[name] for name in ids if name in names and read(default, name) is not None}


def _layers(default: PreTrainedConfig, names: frozenset[str], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Depth and per-layer lists: one layer for every combination that the default config has, at least `LAYERS`.

    Lists among the changes stay out, and give the depth.
    """
    depth = next((value for name in DEPTH_FIELDS if name in names and type(value := read(default, name)) is int), None)
    if depth is None:
        return {}
    lists = {
        name: list(value)
        for name in sorted(names - set(changes))
        if isinstance(value := read(default, name), (list, tuple)) and len(value) == depth and depth > 2
    }
    combinations: list[tuple[Any, ...]] = []
    for combination in zip(*lists.values(), strict=True):
        if combination not in combinations:
            combinations.append(combination)
    count = min(max(LAYERS, len(combinations) * (2 if 2 * len(combinations) <= MAX_LAYERS else 1)), MAX_LAYERS)
    count = next((len(changes[name]) for name in _PER_LAYER_KINDS if changes.get(name)), count)
    values: dict[str, Any] = {name: count for name in DEPTH_FIELDS if name in names and read(default, name)}
    if combinations:
        chosen = (combinations * count)[:count]
        for place, name in enumerate(lists):
            column = [row[place] for row in chosen]
            if name in SIZES:
                column = [SIZES[name] if type(item) is int and item else item for item in column]
            values[name] = column
    return values


def _small_rope(rope: Any, head: int) -> dict[str, Any] | None:
    """The default RoPE parameters where they hold sections or nested sets that must shrink with the head, else None."""
    if not isinstance(rope, dict):
        return None
    if any(isinstance(value, dict) for value in rope.values()):
        nested = {name: _small_rope(value, head) or value for name, value in rope.items()}
        return nested if nested != rope else None
    sections, half = rope.get("mrope_section"), int(head * rope.get("partial_rotary_factor", 1.0)) // 2
    return {**rope, "mrope_section": small_sections(sections, half)} if sections else None


def small_sections(sections: list[int], half: int) -> list[int]:
    """M-RoPE sections in the same proportions, so that they sum to `half` frequencies."""
    total = sum(sections)
    small = [max(1, section * half // total) for section in sections]
    small[0] += half - sum(small)
    return small


def _small_tower(default: PreTrainedConfig, changes: Mapping[str, Any]) -> PreTrainedConfig:
    """A vision, audio or other tower of two layers; per-layer lists and lists of layer indices follow the depth."""
    names = field_names(type(default))
    values = {**_kept(default, names), **_shrunk(default, names, TOWER_SIZES)}
    values.pop("is_decoder", None)
    depth = next(
        (value for name in TOWER_DEPTH_FIELDS if name in names and type(value := read(default, name)) is int), None
    )
    for name in names:
        value = read(default, name)
        if name in TOWER_DEPTH_FIELDS and type(value) is int and value > 2:
            values[name] = 2
        elif isinstance(value, (list, tuple)) and depth is not None and len(value) == depth > 4:
            values[name] = [*value[:1], *value[-1:]]
        elif name.endswith(("_indexes", "_indices", "feature_layer")) and isinstance(value, (list, tuple)) and value:
            values[name] = list(range(min(2, len(value))))
    for name, part in sub_configs(default):
        values[name] = _small_tower(part, {})
    values.update(changes)
    return type(default)(**values)


def _top_level(default: PreTrainedConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a config with parts: sizes, special ids in the upper half of the vocabulary, common ids."""
    names = field_names(type(default))
    values = _shrunk(default, names - set(given), SIZES)
    values.update(_common_ids(default, names))
    special = FIRST_SPECIAL_ID
    for name in sorted(names - set(given) - set(values)):
        if SPECIAL_TOKEN.search(name) and type(read(default, name)) is int:
            values[name] = special
            special += 1
        elif name.endswith("feature_layer") and isinstance(value := read(default, name), (list, tuple)):
            values[name] = list(range(len(value)))[:2]
    return values
