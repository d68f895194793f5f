"""The self-test: measure on the model itself what its cache stores and how it moves, or say why it can't be moved.

A few random tokens are prefilled alone at several positions. What a layer stores is then the same at both, or a
rotation whose frequencies are the model's own, or something else, which speaks against moving it. Names of models play
no part.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from editable_cache.adapters import host
from editable_cache.adapters.classify import classify, frequency_tables, move_error
from editable_cache.adapters.compressed import examine_compressed
from editable_cache.adapters.continuation import continuation, step_tokens
from editable_cache.adapters.fingerprint import WeightsState, weights_state
from editable_cache.adapters.images import num_axes
from editable_cache.adapters.masks import MaskFinding, examine_masks
from editable_cache.adapters.rope_types import length_limit
from editable_cache.adapters.sample import NUM_TOKENS, Sample, prefill, random_ids
from editable_cache.adapters.sections import with_axes
from editable_cache.adapters.wrappers import inner_model
from editable_cache.errors import Reason, UnsupportedModelError
from editable_cache.ops import LOW_PRECISION, relative_error
from editable_cache.spec import CompressedSpec, LayerSpec, ModelSpec, PositionLimit, RotarySpec, TensorSpec

OFFSETS = (37, 523)
"""Distances at which the cells of the self-test are compared with those at position 0."""

CONTINUED_TOKENS = 12
"""Tokens of the test whether a model with recurrent layers goes on from its own cache."""

BEHIND = 523
"""Number of hidden slots in front of the tokens where it is tested whether the slot itself matters."""

FAR = 2**14
"""A last distance, as far as the model reaches up to this one: frequencies may change anywhere, without a name."""

FAR_TOLERANCE = 5e-2
"""What counts as another function there: a model rounds its own angles, and its deeper layers enlarge that."""

LIMIT_NAMES = re.compile(r"original_max_position|floor")
"""Config fields that name a position from which on a model may compute differently."""

Positions = Literal["given", "slots"]

_specs: weakref.WeakKeyDictionary[nn.Module, tuple[Any, ModelSpec]] = weakref.WeakKeyDictionary()


def measured(model: nn.Module, *, state: WeightsState | None = None) -> ModelSpec:
    """What the self-test found out about ``model``; measured once for each state of its weights.

    ``state`` is the model's ``weights_state`` where the caller has it already.

    Raises:
        UnsupportedModelError: if the model is in training mode.
    """
    model = inner_model(model)
    state = weights_state(model) if state is None else state
    known = _specs.get(model)
    if known is None or known[0] != state:
        known = (state, measure(model))
        if known[1].layers or not known[1].against_continuing:  # else it did not run at all, which may pass (memory)
            _specs[model] = known
    return known[1]


def model_spec(model: nn.Module, *, state: WeightsState | None = None) -> ModelSpec:
    """The same, for those who are going to move cells.

    Raises:
        UnsupportedModelError: with every measurement that speaks against moving this model's cells.
    """
    spec = measured(model, state=state)
    if spec.against_moving:
        raise UnsupportedModelError(
            f"{type(model).__name__}: the self-test can't prove how its cells move, so nothing is moved. Append, "
            "generate, erratum, a refresh by as many tokens, and recompute of everything from a token on still work.",
            spec.against_moving,
        )
    return spec


def measure(model: nn.Module) -> ModelSpec:
    """Run the self-test; about a dozen forwards of seven tokens (of more where windows of tokens are compressed)."""
    if model.training:
        raise UnsupportedModelError(
            "self-test: expected the model in evaluation mode, got training mode; call model.eval()."
        )
    config, layout = host.text_config(model.config), host.cache_layout(model.config)
    maximum = int(getattr(config, "max_position_embeddings", None) or 2**31)
    foreign = [
        Reason(f"layer {i} cache", "per-token keys and values, or a recurrent state", name)
        for i, (kind, name) in enumerate(zip(layout.kinds, layout.names, strict=True))
        if kind == "foreign"
    ]
    ids, reasons, unused = random_ids(model), foreign, tuple[Reason, ...]()
    if not foreign:
        try:
            base = prefill(model, ids, None)
        except Exception as error:  # a model that takes no stock cache may raise anything
            reasons = [Reason("prefill into a DynamicCache", "a forward", f"{type(error).__name__}: {error}"[:300])]
            unused = tuple(reasons)
        else:
            if not base.tensors and "kept" not in layout.kinds:
                reasons = [Reason("prefill into a DynamicCache", "cells or states in some layer", "nothing was stored")]
                unused = tuple(reasons)
            count = len(host.holders_of(host.full_cache(model.config)))
            if len(base.cells) != count:
                reasons = [Reason("holders of cells after a prefill", str(count), str(len(base.cells)))]
    if reasons:
        return ModelSpec((), layout.masks, "none", maximum, 0.0, "slots", tuple(reasons), tuple(reasons), unused)
    tolerance = 5e-2 if base.logits.dtype in LOW_PRECISION else 1e-4
    found = _find_moves(model, ids, base, maximum, tolerance)
    step = None
    if layout.has_states:
        why = Reason("recurrent layers", "cells that can be chosen", "a state that stands for all tokens")
        masks = MaskFinding("none", layout.masks, None, (why,))
    else:
        masks = examine_masks(model, ids, found.base, layout.masks, tolerance)
    against = [*found.reasons]
    if layout.has_states:
        step, failures = _step(model, found.positions)
        against += failures
    stops = _continuation_error(model, ids, found.base, found.positions, step, tolerance)
    if found.positions == "given":
        numbering = relative_error(base.logits, found.base.logits)
        if numbering > 2 * tolerance:
            got = f"others (error {numbering:.1e})"
            stops = (Reason("a forward without position_ids", "positions from 0 on", got), *stops)
    against += stops
    if masks.causal is False:
        against.append(Reason("prefill without a mask", "causal", "later tokens are seen"))
    return ModelSpec(
        layers=found.layers,
        masks=masks.kinds,
        mask_form=masks.form,
        max_positions=maximum,
        worst_error=found.worst_error,
        positions=found.positions,
        against_moving=tuple(against),
        against_recompute=(*masks.against_recompute, *stops),
        against_continuing=stops,
        limit=found.limit,
        has_states=layout.has_states,
        step_tokens=step,
        compressed=found.compressed,
    )


def _step(model: nn.Module, positions: Positions) -> tuple[int | None, tuple[Reason, ...]]:
    """How many tokens may run at once behind others, and what speaks against any number."""
    ids = random_ids(model, CONTINUED_TOKENS, seed=1)
    places = torch.arange(ids.shape[1])[None] if positions == "given" else None
    try:
        result = continuation(model, ids, places, cache_factory=lambda: host.full_cache(model.config))
        return step_tokens(result), ()
    except UnsupportedModelError as error:
        return 1, error.reasons


def _continuation_error(
    model: nn.Module, ids: Tensor, base: Sample, positions: Positions, step: int | None, tolerance: float
) -> tuple[Reason, ...]:
    """What speaks against feeding the tokens in two parts, with another text in another cache between them: a model may
    keep something outside of the cache, or take no more tokens at all.
    """
    cache, other, count = host.full_cache(model.config), host.full_cache(model.config), ids.shape[1]
    first = count - (NUM_TOKENS // 2 if step is None else step)
    places = torch.arange(count)[None] if positions == "given" else None

    def part(into: Any, start: int, stop: int, tokens: Tensor) -> Tensor:
        where = None if places is None else places[:, start:stop]
        return host.run(model, tokens[:, start:stop], into, position_ids=where)

    try:
        part(cache, 0, first, ids)
        part(other, 0, first, ids.flip(1))
        rest = part(cache, first, count, ids)
    except Exception as error:  # whatever a model raises on a filled cache
        return (Reason("tokens behind others", "a forward", f"{type(error).__name__}: {error}"[:200]),)
    off = relative_error(rest, base.logits[:, first:])
    if off <= 2 * tolerance:
        return ()
    return (Reason("tokens behind others", "what one prefill gives", f"error {off:.1e}"),)


class _Moves(NamedTuple):
    """How cells move: what stands in a ``ModelSpec``, and the sample at position 0."""

    base: Sample
    layers: tuple[LayerSpec, ...]
    positions: Positions
    reasons: tuple[Reason, ...]
    worst_error: float
    limit: PositionLimit | None
    compressed: CompressedSpec | None = None


def _find_moves(model: nn.Module, ids: Tensor, native: Sample, maximum: int, tolerance: float) -> _Moves:
    if "kept" in host.cache_layout(model.config).kinds:
        whole = examine_compressed(model, OFFSETS, maximum, tolerance)
        limit = length_limit(model.config)
        return _Moves(native, (), "slots", whole.reasons, whole.worst_error, limit, whole.spec)
    limits = _named_limits(model, maximum)
    limit = next((one for one in limits if one.name.startswith("rope_type")), None)
    found = _moves_below(model, ids, native, limits, limit, maximum, tolerance)
    near = next((one for one in limits if one.value <= OFFSETS[-1] + NUM_TOKENS), None)
    if found.reasons and near is not None and (limit is None or near.value < limit.value):
        below = _moves_below(model, ids, native, [], near, maximum, tolerance)
        return found if below.reasons else below
    return found


def _moves_below(
    model: nn.Module,
    ids: Tensor,
    native: Sample,
    limits: Sequence[PositionLimit],
    limit: PositionLimit | None,
    maximum: int,
    tolerance: float,
) -> _Moves:
    """How cells move below ``limit``; it comes back lower if one of ``limits`` turns out to be a border."""
    reach = maximum if limit is None else min(maximum, limit.value)
    offsets = [offset for offset in OFFSETS if offset + NUM_TOKENS <= reach]
    if not offsets:
        why = Reason("positions", f"room for {OFFSETS[0] + NUM_TOKENS}", str(reach))
        return _Moves(native, (), "slots", (why,), 0.0, limit)
    positions, base, samples, reasons = _sample_positions(model, ids, native, offsets)
    layers, errors, found = _explain(model, base, samples, tolerance)
    reasons += found
    if positions == "given" and not reasons and not any(base.states):
        slot = min(BEHIND, reach - NUM_TOKENS)
        error = _slot_error(model, ids, base, slot)
        if error > 2 * tolerance:
            reasons.append(Reason(f"the same positions at slot {slot}", "the same cells", f"error {error:.1e}"))
    count = num_axes(model) if positions == "given" and not reasons else 1
    if count > 1:
        layers, reasons = with_axes(model, ids, base, layers, count, reach)
    for one in limits if not reasons and positions == "given" else []:
        beyond = one.value + 11
        if not one.name.startswith("rope_type") and beyond + NUM_TOKENS <= maximum:
            error = _error_beyond(model, ids, base, layers, beyond, slots="floor" in one.name)
            if error > 2 * tolerance and (limit is None or one.value < limit.value):
                limit = one
    far = min(FAR, maximum if limit is None else min(maximum, limit.value)) - NUM_TOKENS
    if positions == "given" and not reasons and far > offsets[-1]:
        error = _error_beyond(model, ids, base, layers, far, slots=False)
        if error > max(FAR_TOLERANCE, 4 * tolerance):
            reasons.append(
                Reason(f"cells and logits at offset {far}", "those at offset 0, moved", f"error {error:.1e}")
            )
    return _Moves(base, layers, positions, tuple(reasons), max(errors, default=0.0), limit)


def _sample_positions(
    model: nn.Module, ids: Tensor, native: Sample, offsets: Sequence[int]
) -> tuple[Positions, Sample, dict[int, Sample], list[Reason]]:
    """The same tokens at several positions: given as ``position_ids`` where the model reacts to them, else made by as
    many hidden slots in front.
    """
    try:
        base = prefill(model, ids, 0)
        samples = {offset: prefill(model, ids, offset) for offset in offsets}
    except Exception:  # no such argument, or a table that is looked up by slot
        base, samples = native, {}
    reacts = any(
        not torch.equal(tensor, base.tensors[name]) for s in samples.values() for name, tensor in s.tensors.items()
    )
    reacts = reacts or any(not torch.equal(sample.logits, base.logits) for sample in samples.values())
    if reacts:
        return "given", base, samples, []
    if any(base.states):
        return "slots", base, samples, [] if samples else [Reason("position_ids", "taken or ignored", "an error")]
    for with_positions in (True, False):
        try:
            slots = {o: prefill(model, ids, o if with_positions else None, behind=o, like=native) for o in offsets}
        except Exception as error:  # whatever a model raises on an argument that it does not know
            failure = f"{type(error).__name__}: {error}"[:200]
        else:
            return "slots", native, slots, []
    return "slots", native, {}, [Reason("tokens behind hidden slots", "a forward", failure)]


def _explain(
    model: nn.Module, base: Sample, samples: Mapping[int, Sample], tolerance: float
) -> tuple[tuple[LayerSpec, ...], list[float], list[Reason]]:
    """How every tensor moves, the error of each explanation, and what can't be explained."""
    configs = {id(config): config for config in (host.text_config(model.config), model.config)}
    tables = frequency_tables(model, configs.values())
    likely: dict[RotarySpec, None] = {}
    layers, errors = [], []
    reasons = [
        Reason(name, "a known tensor of the cache", "another one with an axis of tokens") for name in base.unknown
    ]
    for index, (layer_idx, _) in enumerate(host.holders_of(host.full_cache(model.config))):
        tensors: list[TensorSpec] = []
        for name, stored in base.cells[index].items():
            where = f"layer {layer_idx} {name}"
            moved = {offset: sample.cells[index][name] for offset, sample in samples.items()}
            spec, error = classify(name, stored, moved, tables, tuple(likely), tolerance)
            if spec.rotary is not None:
                likely[spec.rotary] = None
            tensors.append(spec)
            errors.append(error)
            if error > tolerance:
                reasons.append(Reason(where, "unchanged, or rotated by the model's frequencies", f"error {error:.1e}"))
        layers.append(LayerSpec(tuple(tensors), layer_idx))
    for layer_idx, states in enumerate(base.states):
        for name, state in states.items():
            error = max((relative_error(s.states[layer_idx][name], state) for s in samples.values()), default=0.0)
            if error > tolerance:
                reasons.append(Reason(f"layer {layer_idx} {name}", "the same at every position", f"error {error:.1e}"))
    for offset, sample in samples.items():
        drift = relative_error(sample.logits, base.logits)
        if drift > 2 * tolerance:
            reasons.append(Reason(f"logits at offset {offset}", "those at offset 0", f"drift {drift:.1e}"))
    return tuple(layers), errors, reasons


def _slot_error(model: nn.Module, ids: Tensor, base: Sample, slots: int) -> float:
    """How much cells and logits at the same positions change with ``slots`` hidden slots in front of them."""
    try:
        sample = prefill(model, ids, 0, behind=slots, like=base)
    except Exception:  # hidden slots can't be had; scatter recompute tells instead
        return 0.0
    pairs = [(tensor, base.tensors[name]) for name, tensor in sample.tensors.items()]
    return max(relative_error(a.double(), b.double()) for a, b in [*pairs, (sample.logits, base.logits)])


def _error_beyond(
    model: nn.Module, ids: Tensor, base: Sample, layers: Sequence[LayerSpec], offset: int, *, slots: bool
) -> float:
    """How far moved cells and logits are off at ``offset``, and, with ``slots``, behind as many hidden slots."""
    sample = prefill(model, ids, offset)
    errors = [relative_error(sample.logits, base.logits)]
    for layer, here, there in zip(layers, base.cells, sample.cells, strict=True):
        for tensor in layer.tensors:
            if tensor.rotary is not None:
                errors.append(move_error(here[tensor.name], there[tensor.name], tensor.rotary, offset))
            elif not tensor.counter:
                errors.append(relative_error(there[tensor.name], here[tensor.name]))
    if slots and not any(base.states):
        errors.append(_slot_error(model, ids, base, offset))
    return max(errors)


def _named_limits(model: nn.Module, maximum: int) -> list[PositionLimit]:
    """Positions below ``maximum`` that the config names as a border, ascending."""
    config, found = host.text_config(model.config), dict[int, str]()
    rope = getattr(config, "rope_parameters", None) or {}
    sections = [rope, *(section for section in rope.values() if isinstance(section, Mapping))]
    named = [*vars(config).items(), *(item for section in sections for item in section.items())]
    for name, value in named:
        if LIMIT_NAMES.search(name) and isinstance(value, int) and 1 < value < maximum:
            found.setdefault(value, name)
    changing = length_limit(model.config)
    if changing is not None:
        found[changing.value] = changing.name
    return [PositionLimit(value, found[value]) for value in sorted(found)]
