"""The self-test: measure on the model itself what its cache stores and how it moves, or refuse with the measurements.

A few random tokens are prefilled alone at several positions. What a layer stores is then the same at both, or a
rotation whose frequencies are one of the model's own ``inv_freq`` buffers, or something else, which is refused. Names
of models play no part.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from editable_cache.adapters import host
from editable_cache.adapters.fingerprint import WeightsState, weights_state
from editable_cache.errors import Reason, UnsupportedModelError
from editable_cache.ops import relative_error, rotate_into, rotation
from editable_cache.spec import LayerSpec, ModelSpec, RotarySpec, TensorSpec

NUM_TOKENS = 6
OFFSETS = (37, 523)
LENGTH_DEPENDENT = frozenset({"dynamic", "longrope"})
"""Rope types whose frequencies change with the length of the context: no single rotation moves their keys."""

MaskForm = Literal["tensor", "dict", "none"]

_specs: weakref.WeakKeyDictionary[nn.Module, tuple[Any, ModelSpec]] = weakref.WeakKeyDictionary()


class _Prefill(NamedTuple):
    layers: list[tuple[Tensor, Tensor]]
    logits: Tensor


def model_spec(model: nn.Module, *, state: WeightsState | None = None) -> ModelSpec:
    """What the self-test proves about ``model``; measured once for each state of its weights.

    ``state`` is the model's ``weights_state`` where the caller has it already.

    Raises:
        UnsupportedModelError: with every measurement that speaks against moving this model's cells.
    """
    state = weights_state(model) if state is None else state
    known = _specs.get(model)
    if known is None or known[0] != state:
        _specs[model] = known = (state, measure(model))
    return known[1]


def measure(model: nn.Module) -> ModelSpec:
    """Run the self-test; about six forwards of six tokens."""
    config = host.text_config(model.config)
    layout = host.cache_layout(model.config)
    _refuse(model, [*_foreign_layers(layout), *_length_dependence(config)])
    if model.training:
        raise UnsupportedModelError(
            "self-test: expected the model in evaluation mode, got training mode; call model.eval()."
        )
    limit = int(getattr(config, "max_position_embeddings", None) or 2**31)
    offsets = [offset for offset in (*OFFSETS, *_beyond_named_limits(config)) if offset + NUM_TOKENS <= limit]
    if not offsets:
        raise UnsupportedModelError(f"self-test: expected room for {OFFSETS[0] + NUM_TOKENS} positions, got {limit}.")
    ids = torch.randint(0, config.vocab_size, (1, NUM_TOKENS), generator=torch.Generator().manual_seed(0))
    base = _prefill(model, ids, 0)
    moved = {offset: _prefill(model, ids, offset) for offset in offsets}
    tolerance = 1e-4 if base.logits.dtype == torch.float32 else 5e-2
    candidates = _candidates(model, config, base.layers[0][0].shape[-1])
    reasons: list[Reason] = []
    layers, errors = [], [0.0]
    for layer_idx, layer_type in enumerate(layout.layer_types):
        tensors = []
        for index, name in enumerate(("keys", "values")):
            samples = {offset: run.layers[layer_idx][index] for offset, run in moved.items()}
            rotary, error = _classify(base.layers[layer_idx][index], samples, candidates if name == "keys" else ())
            tensors.append(TensorSpec(name, rotary))
            errors.append(error)
            if error > tolerance:
                reasons.append(
                    Reason(
                        f"layer {layer_idx} {name}",
                        "unchanged or rotated by the model's inv_freq",
                        f"error {error:.1e}",
                    )
                )
        layers.append(LayerSpec(tuple(tensors), layer_type, layout.windows[layer_idx]))
    if all(torch.equal(run.logits, base.logits) for run in moved.values()):
        reasons.append(Reason("position_ids", "a model that uses them", "no reaction: its positions are its slots"))
    for offset, run in moved.items():
        drift = relative_error(run.logits, base.logits)
        if drift > 2 * tolerance:
            reasons.append(Reason(f"logits at offset {offset}", "those at offset 0", f"drift {drift:.1e}"))
    _refuse(model, reasons)
    return ModelSpec(tuple(layers), _mask_form(model, ids, base, layout, tolerance), limit, max(errors))


def _refuse(model: nn.Module, reasons: Sequence[Reason]) -> None:
    if reasons:
        raise UnsupportedModelError(
            f"{type(model).__name__}: the self-test can't prove how its cells move, so nothing is moved. It still "
            "works as a plain cache (append, generate, erratum).",
            tuple(reasons),
        )


def _foreign_layers(layout: host.CacheLayout) -> list[Reason]:
    foreign = [(i, name) for i, name in enumerate(layout.foreign) if name is not None]
    chunked = [(i, kind) for i, kind in enumerate(layout.layer_types) if kind == "chunked_attention"]
    return [Reason(f"layer {i} cache", "per-token keys and values", found) for i, found in (*foreign, *chunked)]


def _rope_parameters(config: Any) -> list[Mapping[str, Any]]:
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, Mapping)]
    return nested or [parameters]


def _length_dependence(config: Any) -> list[Reason]:
    kinds = {str(parameters.get("rope_type", "default")) for parameters in _rope_parameters(config)}
    return [
        Reason("rope_type", "frequencies that do not depend on the length of the context", kind)
        for kind in sorted(kinds & LENGTH_DEPENDENT)
    ]


def _beyond_named_limits(config: Any) -> list[int]:
    limits = [parameters.get("original_max_position_embeddings") for parameters in _rope_parameters(config)]
    return sorted({int(limit) + 11 for limit in limits if limit})


def _prefill(model: nn.Module, ids: Tensor, offset: int, mask: Any = None) -> _Prefill:
    cache = DynamicCache()
    positions = torch.arange(offset, offset + ids.shape[1])[None]
    logits = host.run(model, ids, cache, position_ids=positions, attention_mask=mask)
    return _Prefill(host.plain_layers(cache), logits)


def _candidates(model: nn.Module, config: Any, head_dim: int) -> tuple[RotarySpec, ...]:
    """Every frequency table that the model holds, in every layout and at both ends of the head."""
    found: dict[RotarySpec, None] = {}
    for name, buffer in model.named_buffers():
        if "inv_freq" not in name or "original" in name or buffer.dim() != 1 or 2 * buffer.numel() > head_dim:
            continue
        table = tuple(buffer.float().tolist())
        for start in dict.fromkeys((0, head_dim - 2 * len(table))):
            found[RotarySpec(table, "half", start)] = None
            found[RotarySpec(table, "interleaved", start)] = None
    return tuple(found)


def _classify(
    base: Tensor, samples: Mapping[int, Tensor], candidates: Sequence[RotarySpec]
) -> tuple[RotarySpec | None, float]:
    """The rotation (or None for none) that explains the samples best, and its worst relative error."""
    choices: list[tuple[float, RotarySpec | None]] = [(max(relative_error(s, base) for s in samples.values()), None)]
    for rotary in candidates:
        if rotary.stop <= base.shape[-1]:
            choices.append(
                (max(_move_error(base, sample, rotary, offset) for offset, sample in samples.items()), rotary)
            )
    error, best = min(choices, key=lambda choice: choice[0])
    return best, error


def _move_error(base: Tensor, sample: Tensor, rotary: RotarySpec, offset: int) -> float:
    positions = torch.arange(base.shape[-2])
    moved = torch.empty_like(base)
    rotate_into(moved, base, rotation(rotary, positions, positions + offset, base.device))
    return relative_error(moved, sample)


def _mask_form(model: nn.Module, ids: Tensor, base: _Prefill, layout: host.CacheLayout, tolerance: float) -> MaskForm:
    """How the model takes masks that block chosen cells; measured by whether blocked tokens can still be felt."""
    count, hidden = ids.shape[1], ids.shape[1] // 2
    mask = torch.full((1, 1, count, count), torch.finfo(base.logits.dtype).min, dtype=base.logits.dtype).triu(1)
    mask[..., hidden:, :hidden] = torch.finfo(base.logits.dtype).min
    mask = mask.to(base.logits.device)
    other = ids.clone()
    other[:, :hidden] = (other[:, :hidden] + 1) % base.logits.shape[-1]
    mixed = len(set(zip(layout.layer_types, layout.windows, strict=True))) > 1
    forms: list[tuple[MaskForm, Any]] = [("dict", dict.fromkeys(layout.layer_types, mask))]
    if len(set(layout.windows)) == 1:
        forms.insert(0 if not mixed else 1, ("tensor", mask))
    for form, value in forms:
        try:
            first, second = (_prefill(model, tokens, 0, value).logits[:, hidden:] for tokens in (ids, other))
        except Exception:  # whatever a model raises on a form of mask that it does not know
            continue
        honoured = relative_error(first, second) <= tolerance
        if honoured and relative_error(first, base.logits[:, hidden:]) > tolerance:
            return form
    return "none"
