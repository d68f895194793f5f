"""How a model takes masks over chosen cells, and whether chosen cells can be recomputed with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from editable_cache.adapters import host
from editable_cache.adapters.sample import FilledLayer, Sample, prefill
from editable_cache.errors import Reason
from editable_cache.ops import relative_error
from editable_cache.spec import MaskForm, MaskKind


class MaskFinding(NamedTuple):
    """What the model makes of masks.

    ``causal`` tells whether a prefill without any mask equals one with a causal mask; None where masks aren't taken.
    ``kinds`` are the given ones, without windows that the model names but does not apply.
    """

    form: MaskForm
    kinds: tuple[MaskKind, ...]
    causal: bool | None
    against_recompute: tuple[Reason, ...]


def examine_masks(
    model: nn.Module, ids: Tensor, base: Sample, kinds: Sequence[MaskKind], tolerance: float
) -> MaskFinding:
    """Try each form of mask on a prefill whose first half is hidden from the second, then recompute with it.

    Additive float masks only: eager attention adds whatever it is given, so that a bool mask would be silently wrong.
    """
    form, hidden = _honoured_form(model, ids, base, kinds, tolerance), ids.shape[1] // 2
    if form == "none":
        reason = Reason("mask over chosen cells", "honoured", "ignored or refused")
        return MaskFinding("none", tuple(kinds), None, (reason,))
    count, like = ids.shape[1], base.logits
    whole = prefill(model, ids, 0, shaped(form, kinds, _causal(count, like)))
    causal = relative_error(whole.logits, like) <= tolerance
    reasons = []
    try:
        unchanged = _recomputed(model, ids, whole, [1, hidden + 1], form, kinds)
        again = max(_cells_error(unchanged, whole), relative_error(unchanged.logits, whole.logits[:, [1, hidden + 1]]))
        other = ids.clone()
        other[0, 2] = ids[0, 0] if int(ids[0, 0]) != int(ids[0, 2]) else ids[0, 1]
        fresh = prefill(model, other, 0, shaped(form, kinds, _causal(count, like)))
        changed = _recomputed(model, other, whole, list(range(2, count)), form, kinds)
        error = max(again, _cells_error(changed, fresh), relative_error(changed.logits, fresh.logits[:, 2:]))
        for size in _named_windows(model):  # a model may cut its own mask by the length of the cache
            longer = _recomputed(model, ids, whole, [1, hidden + 1], form, kinds, behind_them=size + 2)
            error = max(error, _cells_error(longer, whole))
            error = max(error, relative_error(longer.logits, whole.logits[:, [1, hidden + 1]]))
        if error > 2 * tolerance:
            reasons.append(Reason("recompute of chosen cells", "what a prefill writes", f"error {error:.1e}"))
    except Exception as error:  # whatever a model raises on a cache whose slots are not its newest tokens
        reasons.append(Reason("recompute of chosen cells", "a forward", f"{type(error).__name__}: {error}"[:200]))
    applied, failures = _applied(model, ids, base, form, tuple(kinds), tolerance)
    return MaskFinding(form, applied, causal, (*reasons, *failures))


def _applied(
    model: nn.Module, ids: Tensor, base: Sample, form: MaskForm, kinds: tuple[MaskKind, ...], tolerance: float
) -> tuple[tuple[MaskKind, ...], tuple[Reason, ...]]:
    """The kinds with those windows and blocks only that the model's own mask applies; and what no mask explains.

    The tokens stand behind so many slots of zeros that a border of the window falls among them.
    """
    plain = tuple(MaskKind(kind.layer_type) for kind in kinds)
    for size in sorted({kind.sliding_window or kind.chunk_size or 0 for kind in kinds} - {0}):
        behind = size - ids.shape[1] // 2
        if behind < 1:
            continue
        own = prefill(model, ids, behind, behind=behind, hidden=False, like=base).logits
        errors = []
        for tried in (kinds, plain):
            masks = {kind.layer_type: allowed(kind, behind, ids.shape[1], base.logits) for kind in tried}
            value = next(iter(masks.values())) if form == "tensor" else masks
            other = prefill(model, ids, behind, value, behind=behind, hidden=False, like=base).logits
            errors.append(relative_error(own, other))
        if errors[0] > tolerance and errors[1] <= tolerance:
            kinds = plain
        elif errors[0] > tolerance:
            return kinds, (Reason(f"window of {size}", "the model's own mask", f"error {errors[0]:.1e}"),)
    return kinds, ()


def allowed(kind: MaskKind, before: int, count: int, like: Tensor) -> Tensor:
    """Additive mask ``[1, 1, count, before + count]`` of what new tokens see in a layer of this kind."""
    queries, keys = torch.arange(before, before + count)[:, None], torch.arange(before + count)
    seen = keys <= queries
    if kind.sliding_window is not None:
        seen = seen & (keys > queries - kind.sliding_window)
    if kind.chunk_size is not None:
        seen = seen & (keys // kind.chunk_size == queries // kind.chunk_size)
    floor = torch.full(seen.shape, torch.finfo(like.dtype).min, dtype=like.dtype)
    return floor.masked_fill(seen, 0.0)[None, None].to(like.device)


def shaped(form: MaskForm, kinds: Sequence[MaskKind], mask: Tensor) -> Any:
    """One additive mask in the form that the model takes."""
    return mask if form == "tensor" else dict.fromkeys([kind.layer_type for kind in kinds], mask)


def _causal(count: int, like: Tensor) -> Tensor:
    floor = torch.finfo(like.dtype).min
    return torch.full((1, 1, count, count), floor, dtype=like.dtype, device=like.device).triu(1)


def _honoured_form(
    model: nn.Module, ids: Tensor, base: Sample, kinds: Sequence[MaskKind], tolerance: float
) -> MaskForm:
    """The form in which tokens that a mask hides can't be felt."""
    count, hidden = ids.shape[1], ids.shape[1] // 2
    mask = _causal(count, base.logits)
    mask[..., hidden:, :hidden] = torch.finfo(mask.dtype).min
    other = ids.clone()
    other[:, :hidden] = ids[:, 1 : hidden + 1]
    forms: list[MaskForm] = ["dict"]
    if len({(kind.sliding_window, kind.chunk_size) for kind in kinds}) == 1:
        forms.insert(0 if len(kinds) == 1 else 1, "tensor")
    for form in forms:
        value = shaped(form, kinds, mask)
        try:
            first, second = (prefill(model, tokens, 0, value).logits[:, hidden:] for tokens in (ids, other))
        except Exception:  # whatever a model raises on a form of mask that it does not know
            continue
        honoured = relative_error(first, second) <= tolerance
        if honoured and relative_error(first, base.logits[:, hidden:]) > tolerance:
            return form
    return "none"


def _named_windows(model: nn.Module) -> list[int]:
    """Every number of slots that the config calls a window."""
    values = {name: value for name, value in vars(host.text_config(model.config)).items() if "window" in name}
    return sorted({value for value in values.values() if type(value) is int and value > 0})


def _recomputed(
    model: nn.Module,
    ids: Tensor,
    base: Sample,
    slots: list[int],
    form: MaskForm,
    kinds: Sequence[MaskKind],
    *,
    behind_them: int = 0,
) -> Sample:
    """The cells of ``base`` after the tokens at ``slots`` ran again; logits are those of these tokens.

    ``behind_them`` further slots of zeros stand behind all tokens.
    """
    cache = host.full_cache(model.config)
    holders, cells = host.holders_of(cache), dict[int, dict[str, Tensor]]()
    for (layer_idx, _), tensors in zip(holders, base.cells, strict=True):
        longer = {name: torch.nn.functional.pad(t, (0, 0, 0, behind_them)) for name, t in tensors.items()}
        cells.setdefault(layer_idx, {}).update(longer)
    layers: dict[int, Any] = {i: FilledLayer(tensors, slots) for i, tensors in cells.items()}
    cache.layers = [layers.get(i, layer) for i, layer in enumerate(cache.layers)]
    count = ids.shape[1]
    mask = _causal(count + behind_them, base.logits)[..., slots, :]
    positions = torch.tensor(slots)[None]
    logits = host.run(model, ids[:, slots], cache, position_ids=positions, attention_mask=shaped(form, kinds, mask))
    after = [
        {name: layers[i].cells[name][..., :count, :] for name in names if name in layers[i].cells}
        for i, names in holders
    ]
    return Sample(after, [], logits)


def _cells_error(first: Sample, second: Sample) -> float:
    return max(
        (
            relative_error(tensor.float(), theirs[name].float())
            for mine, theirs in zip(first.cells, second.cells, strict=True)
            for name, tensor in mine.items()
        ),
        default=0.0,
    )
