"""The four oracles, and two rulers to hold against them.

Each oracle is a plain forward of a stock transformers model: nothing here imports the rest of
`editable_cache`, so an oracle can never inherit a fault of what it judges. They say different things, and a
test says which one it means:

| oracle | what is computed | what must equal it |
|---|---|---|
| `iso` | a chunk alone, at explicit positions | keys and values of a chunk after it moved |
| `frozen` | one forward, each chunk sees only itself, the rest sees everything | a splice with no repair |
| `cells` | unselected cells keep cached keys and values, selected ones are computed | a partial recompute |
| `full` | a plain prefill | a recompute of everything, and any operation claimed exact |

Shapes: n tokens, L layers, H key/value heads, D head size, V vocabulary. Batch size is 1 throughout. Token
ids, positions, groups and validity may be given as [n] or [1, n]. Nothing given is modified; results are
detached.

Masks are additive floats, because eager attention *adds* a boolean mask to the scores in silence. Every
sliding window is the one that transformers builds for the model, since a plain causal 4-D mask removes it in
silence. Only `attn_implementation` eager and sdpa are accepted for `frozen`: others take other masks.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer
from transformers.masking_utils import create_masks_for_generate


class OracleResult(NamedTuple):
    """What an oracle saw."""

    logits: Tensor  # [1, n, V]
    keys: list[Tensor]  # L tensors [1, H, n, D], as stored, that is after rotation
    values: list[Tensor]  # L tensors [1, H, n, D]


States = Tensor | Sequence[Tensor] | OracleResult
"""What `check` compares: one tensor, one per layer, or all that an oracle saw."""


def full(model: PreTrainedModel, ids: Tensor, positions: Tensor | None = None) -> OracleResult:
    """FULL: plain prefill of `ids` at `positions` (None: the model's own, 0 to n-1) into an empty cache.

    The cache is made without a config, so that sliding layers keep every token; the model's mask still
    applies the window. Positions may have gaps: transformers takes them for packed sequences only where it
    sees no cache.
    """
    return _prefill(model, _row(ids), positions, DynamicCache())


def iso(
    model: PreTrainedModel,
    ids: Tensor,
    positions: Tensor,
    prefix_ids: Tensor | None = None,
    prefix_positions: Tensor | None = None,
) -> OracleResult:
    """ISO: `ids` alone in a fresh cache at explicit `positions`, all-ones mask.

    With a prefix (an attention sink, a header that every chunk was compiled behind) prefix and chunk run in
    one forward, and the result holds the chunk's n tokens only. Without `prefix_positions` the prefix is at 0
    to p-1.
    """
    ids, positions = _row(ids), _row(positions)
    if prefix_ids is None:
        return _prefill(model, ids, positions, DynamicCache())
    prefix_ids = _row(prefix_ids)
    length = prefix_ids.shape[-1]
    prefix_positions = torch.arange(length)[None] if prefix_positions is None else _row(prefix_positions)
    positions = torch.cat([prefix_positions.to(positions.device), positions], dim=-1)
    whole = _prefill(model, torch.cat([prefix_ids, ids], dim=-1), positions, DynamicCache())
    return OracleResult(
        whole.logits[:, length:],
        [keys[..., length:, :] for keys in whole.keys],
        [values[..., length:, :] for values in whole.values],
    )


def frozen(
    model: PreTrainedModel, ids: Tensor, positions: Tensor, groups: Tensor, valid: Tensor | None = None
) -> OracleResult:
    """FROZEN: one forward over all `ids` at their true `positions`, in which chunks do not see each other.

    Args: model: A model with eager or sdpa attention. ids: Token ids [n] in slot order. positions: Position
        of each slot [n]. groups: Group of each slot [n], integers. A slot of group g > 0 sees itself and
        earlier slots of g; a slot of
            group 0 is live and sees every earlier slot. Windows count slots, as transformers does, so a chunk
            whose slots are not contiguous has another window than it has in `iso`.
        valid: False [n] at pads: no other slot sees them, and their own results mean nothing. None: no pads.
    """
    ids = _row(ids)
    groups = _row(groups)[0].to(ids.device)
    same = groups[:, None] == groups[None, :]
    seen = same | (groups[:, None] == 0)  # [queries, keys]
    if valid is not None:
        seen = seen & _row(valid)[0].to(ids.device, torch.bool)[None, :]
    return _prefill(model, ids, positions, DynamicCache(), mask=masks(model, seen))


def cells(
    model: PreTrainedModel,
    ids: Tensor,
    positions: Tensor,
    cached_keys: Sequence[Tensor],
    cached_values: Sequence[Tensor],
    mask: Tensor,
) -> OracleResult:
    """CELLS: at every layer, cells outside `mask` keep their cached keys and values, the others are computed.

    A computed cell comes from the recomputed hidden state of its token, and every query attends to the
    mixture. All n tokens run, so the logits of all come back; they mean something only for tokens that were
    selected in at least one layer and for tokens after the last cell that matters to the caller: the logits
    of an unselected token are those of its id read against the mixture, which no cached cell ever produced.

    Args:
        model: Any model whose cache layers hold one row per token.
        ids: Token ids [n], every slot of the cache.
        positions: Position of each slot [n].
        cached_keys: L tensors [1, H, n, D].
        cached_values: L tensors [1, H, n, D].
        mask: True where a cell is computed: [L, n], or [n] for all layers alike.
    """
    ids = _row(ids)
    length, num_layers = ids.shape[-1], len(cached_keys)
    mask = mask.to(ids.device, torch.bool)
    if mask.shape == (length,):
        mask = mask.expand(num_layers, length)
    if mask.shape != (num_layers, length) or len(cached_values) != num_layers:
        raise ValueError(
            f"cells: expected a mask of {num_layers} layers x {length} tokens with as many cached values, "
            f"got mask {tuple(mask.shape)} and {len(cached_values)} cached values"
        )
    layers: list[Any] = [_SubstitutingLayer(*layer) for layer in zip(cached_keys, cached_values, mask, strict=True)]
    return _prefill(model, ids, positions, Cache(layers=layers))


class _SubstitutingLayer(DynamicLayer):
    """A cache layer that answers one prefill with a mixture of cached and computed rows."""

    def __init__(self, cached_keys: Tensor, cached_values: Tensor, selected: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cached = cached_keys, cached_values
        self.selected = selected[None, None, :, None]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.is_initialized:
            raise RuntimeError("cells: a substituting layer answers one forward only")
        self.lazy_initialization(key_states, value_states)
        mixed = []
        for computed, cached in zip((key_states, value_states), self.cached, strict=True):
            if computed.shape != cached.shape:
                raise ValueError(
                    f"cells: expected cached states {tuple(computed.shape)}, got {tuple(cached.shape)}; "
                    "a sliding cache layer that dropped rows cannot be used here"
                )
            mixed.append(torch.where(self.selected, computed, cached.to(computed)))
        self.keys, self.values = mixed
        return self.keys, self.values


def masks(model: PreTrainedModel, seen: Tensor) -> Tensor | dict[str, Tensor]:
    """Return the additive mask in which slot i sees slot j iff `seen[i, j]` *and* the model lets it.

    "The model lets it" is causality and, per layer, the sliding window that transformers itself would build.
    A slot always sees itself, so no row is empty. The result is [1, 1, n, n], or one of these per layer type
    where the config mixes layer types (models without layer types refuse a dictionary).
    """
    config = model.config.get_text_config()
    if config._attn_implementation not in ("eager", "sdpa"):
        raise NotImplementedError(
            f"masks: expected eager or sdpa attention, got {config._attn_implementation!r}; "
            "build the model with attn_implementation='sdpa'"
        )
    length, device = seen.shape[-1], seen.device
    causal = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    itself = torch.eye(length, dtype=torch.bool, device=device)
    stock = create_masks_for_generate(
        config=config,
        inputs_embeds=torch.empty(1, length, config.hidden_size, dtype=model.dtype, device=device),
        attention_mask=None,
        **{_cache_argument(create_masks_for_generate): None},
    )

    def additive(allowed: Tensor | None) -> Tensor:
        if allowed is None:  # sdpa: plain causal, left to the kernel
            allowed = causal
        elif allowed.dtype != torch.bool:  # eager: already additive
            allowed = allowed == 0
        visible = (allowed.reshape(length, length) & seen) | itself
        floor = torch.finfo(model.dtype).min
        return torch.zeros(1, 1, length, length, dtype=model.dtype, device=device).masked_fill(~visible, floor)

    if not isinstance(stock, Mapping):
        return additive(stock)
    by_type = {layer_type: additive(allowed) for layer_type, allowed in stock.items()}
    return by_type if len(by_type) > 1 else next(iter(by_type.values()))


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return max |actual - expected| / max |expected|, in float64; infinite if something is not a number."""
    if actual.shape != expected.shape:
        raise ValueError(f"relative_error: got shape {tuple(actual.shape)}, expected {tuple(expected.shape)}")
    if expected.numel() == 0:
        return 0.0
    expected = expected.detach().double().cpu()
    worst = (actual.detach().double().cpu() - expected).abs().max().item()
    scale = expected.abs().max().item()
    if worst != worst or scale != scale or worst == float("inf"):
        return float("inf")
    if scale == 0.0:
        return 0.0 if worst == 0.0 else float("inf")
    return worst / scale


def check(
    actual: States,
    expected: States,
    tolerance: float = 1e-4,
    what: str = "states",
) -> float:
    """Raise AssertionError unless `actual` equals `expected` to `tolerance`, relative, in every tensor.

    Return the worst error. Both are one tensor, one tensor per layer, or two `OracleResult`s (logits, then
    keys and values of every layer). The message names the layer with the worst error, where in it the worst
    value is, and both numbers.
    """
    names, actuals, expecteds = _listed(actual, expected, what)
    errors = [relative_error(a, e) for a, e in zip(actuals, expecteds, strict=True)]
    if not errors:
        raise ValueError(f"check {what}: nothing to compare")
    worst = max(range(len(errors)), key=errors.__getitem__)
    if errors[worst] <= tolerance:
        return errors[worst]
    a, e = actuals[worst].detach().double().cpu(), expecteds[worst].detach().double().cpu()
    index = torch.unravel_index((a - e).abs().nan_to_num(nan=float("inf")).argmax(), e.shape)
    at = tuple(int(i) for i in index)
    failed = ", ".join(name for name, error in zip(names, errors, strict=True) if not error <= tolerance)
    raise AssertionError(
        f"{names[worst]}: relative error {errors[worst]:.3g} > {tolerance:.3g}; worst at {at}: "
        f"got {a[at].item():.6g}, expected {e[at].item():.6g}. Beyond the tolerance: {failed}"
    )


def _listed(actual: States, expected: States, what: str) -> tuple[list[str], list[Tensor], list[Tensor]]:
    """Names, actual and expected tensors, one of each per tensor to compare."""
    if isinstance(actual, OracleResult) and isinstance(expected, OracleResult):
        names = [f"{what} logits"]
        names += [f"{what} {name} layer {i}" for name in ("keys", "values") for i in range(len(expected.keys))]
        actual = [actual.logits, *actual.keys, *actual.values]
        expected = [expected.logits, *expected.keys, *expected.values]
    elif isinstance(actual, Tensor) and isinstance(expected, Tensor):
        names, actual, expected = [what], [actual], [expected]
    elif isinstance(actual, Tensor | OracleResult) or isinstance(expected, Tensor | OracleResult):
        raise TypeError(f"check {what}: got {type(actual).__name__}, expected {type(expected).__name__}")
    else:
        names = [f"{what} layer {i}" for i in range(len(expected))]
    if len(actual) != len(expected):
        raise ValueError(f"check {what}: got {len(actual)} tensors, expected {len(expected)}")
    return names, list(actual), list(expected)


def _prefill(
    model: PreTrainedModel,
    ids: Tensor,
    positions: Tensor | None,
    cache: Cache,
    mask: Tensor | dict[str, Tensor] | None = None,
) -> OracleResult:
    arguments: dict[str, Any] = {_cache_argument(type(model).forward): cache}
    if positions is not None:
        positions = _row(positions).to(ids.device)
        if positions.shape != ids.shape:
            raise ValueError(f"expected {ids.shape[-1]} positions, one per token, got {positions.shape[-1]}")
        arguments["position_ids"] = positions
    mask = torch.ones_like(ids) if mask is None else mask
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask, use_cache=True, **arguments).logits
    layers: list[Any] = cache.layers
    return OracleResult(logits, [layer.keys for layer in layers], [layer.values for layer in layers])


@functools.cache
def _cache_argument(function: Any) -> str:
    """The name of `function`'s cache argument: `cache` in transformers 5.24, `past_key_values` before."""
    names = inspect.signature(function).parameters
    return "cache" if "cache" in names else "past_key_values"


def _row(tokens: Tensor) -> Tensor:
    """[n] or [1, n] -> [1, n]."""
    row = tokens[None] if tokens.ndim == 1 else tokens
    if row.ndim != 2 or row.shape[0] != 1:
        raise ValueError(f"expected [n] or [1, n], got {tuple(tokens.shape)}")
    return row
