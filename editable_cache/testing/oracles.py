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

Caches are stock for the model's config, except that sliding layers keep every token (the model's mask still applies
the window). A result holds every per-token tensor of every layer, whatever it is called: found by its shape, not by a
list of names.

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
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)
from transformers.masking_utils import create_masks_for_generate

Cells = Mapping[str, Tensor]
"""What one layer stores for each token, by name, ``[1, H, n, D]`` as stored, that is after rotation."""


class OracleResult(NamedTuple):
    """What an oracle saw."""

    logits: Tensor  # [1, n, V]
    layers: Sequence[Cells]  # L of them, empty where a layer stores nothing for each token
    states: Cells = MappingProxyType({})  # recurrent and convolution states by name, such as "layer 0 conv_states.0"

    @property
    def keys(self) -> list[Tensor]:
        """The keys of every layer that has any."""
        return [layer["keys"] for layer in self.layers if "keys" in layer]

    @property
    def values(self) -> list[Tensor]:
        """The values of every layer that has any."""
        return [layer["values"] for layer in self.layers if "values" in layer]

    @property
    def cells(self) -> dict[str, Tensor]:
        """Every per-token tensor by name, such as ``"layer 3 keys"``."""
        return {f"layer {i} {name}": t for i, layer in enumerate(self.layers) for name, t in layer.items()}

    def span(self, start: int, stop: int | None = None) -> OracleResult:
        """Tokens ``[start, stop)`` of it; states, which stand for all tokens, are left out."""
        cut = [{name: t[..., start:stop, :] for name, t in layer.items()} for layer in self.layers]
        return OracleResult(self.logits[:, start:stop], cut)


States = Tensor | Sequence[Tensor] | Cells | OracleResult
"""What `check` compares: one tensor, one per layer, tensors by name, or all that an oracle saw."""


def full(model: PreTrainedModel, ids: Tensor, positions: Tensor | None = None) -> OracleResult:
    """FULL: plain prefill of `ids` at `positions` (None: the model's own, 0 to n-1) into an empty cache.

    Positions may have gaps: transformers takes them for packed sequences only where it sees no cache.
    """
    return _prefill(model, _row(ids), positions, fresh_cache(model))


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
        return _prefill(model, ids, positions, fresh_cache(model))
    prefix_ids = _row(prefix_ids)
    length = prefix_ids.shape[-1]
    prefix_positions = torch.arange(length)[None] if prefix_positions is None else _row(prefix_positions)
    positions = torch.cat([prefix_positions.to(positions.device), positions], dim=-1)
    whole = _prefill(model, torch.cat([prefix_ids, ids], dim=-1), positions, fresh_cache(model))
    return whole.span(length)


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
    return _prefill(model, ids, positions, fresh_cache(model), mask=masks(model, seen))


def cells(
    model: PreTrainedModel,
    ids: Tensor,
    positions: Tensor,
    cached_keys: Sequence[Tensor],
    cached_values: Sequence[Tensor],
    mask: Tensor,
) -> OracleResult:
    """CELLS for a model whose every layer stores keys and values and nothing else; see `layer_cells`."""
    if len(cached_keys) != len(cached_values):
        raise ValueError(f"cells: got {len(cached_keys)} cached keys and {len(cached_values)} cached values")
    cached = [{"keys": k, "values": v} for k, v in zip(cached_keys, cached_values, strict=True)]
    return layer_cells(model, ids, positions, cached, mask)


def layer_cells(
    model: PreTrainedModel, ids: Tensor, positions: Tensor | None, cached: Sequence[Cells], mask: Tensor
) -> OracleResult:
    """CELLS: at every layer, cells outside `mask` keep what is cached, the others are computed.

    A computed cell comes from the recomputed hidden state of its token, and every query attends to the
    mixture. All n tokens run, so the logits of all come back; they mean something only for tokens that were
    selected in at least one layer and for tokens after the last cell that matters to the caller: the logits
    of an unselected token are those of its id read against the mixture, which no cached cell ever produced.

    Args:
        model: Any model whose cache layers hold one row per token.
        ids: Token ids [n], every slot of the cache.
        positions: Position of each slot [n], or None for the model's own.
        cached: Every per-token tensor of each of the L cache layers [1, H, n, D]; empty where there is none.
        mask: True where a cell is computed: [L, n], or [n] for all layers alike.
    """
    ids = _row(ids)
    length, num_layers = ids.shape[-1], len(cached)
    mask = mask.to(ids.device, torch.bool)
    if mask.shape == (length,):
        mask = mask.expand(num_layers, length)
    if mask.shape != (num_layers, length):
        raise ValueError(
            f"cells: expected a mask of {num_layers} layers x {length} tokens, got mask {tuple(mask.shape)}"
        )
    cache = fresh_cache(model)
    stock: Any = cache.layers
    cache.layers = [
        _SubstitutingLayer(layer, selected) if layer else untouched
        for layer, selected, untouched in zip(cached, mask, stock, strict=True)
    ]
    return _prefill(model, ids, positions, cache)


class _SubstitutingLayer(DynamicLayer):
    """A cache layer that answers one prefill with a mixture of cached and computed rows."""

    indexer_position_ids: Tensor | None = None

    def __init__(self, cached: Cells, selected: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cached, self._selected = cached, selected[None, None, :, None]
        self.is_indexer_initialized = False

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.is_initialized:
            raise RuntimeError("cells: a substituting layer answers one forward only")
        self.lazy_initialization(key_states, value_states)
        self.keys, self.values = self._mixed("keys", key_states), self._mixed("values", value_states)
        return self.keys, self.values

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        self.is_indexer_initialized = True
        self.indexer_keys = self._mixed("indexer_keys", indexer_key_states[:, None])[:, 0]
        return self.indexer_keys

    def update_index(self, idx_k: Tensor) -> Tensor:
        self.idx_keys = self._mixed("idx_keys", idx_k)
        return self.idx_keys

    def _mixed(self, name: str, computed: Tensor) -> Tensor:
        cached = self._cached[name]
        if computed.shape != cached.shape:
            raise ValueError(
                f"cells: expected cached states {tuple(computed.shape)}, got {tuple(cached.shape)}; "
                "a sliding cache layer that dropped rows cannot be used here"
            )
        return torch.where(self._selected, computed, cached.to(computed))


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
    actuals, expecteds = _named(actual, what), _named(expected, what)
    kinds = (Tensor, OracleResult, Mapping, Sequence)
    if next(k for k in kinds if isinstance(actual, k)) is not next(k for k in kinds if isinstance(expected, k)):
        raise TypeError(f"check {what}: got {type(actual).__name__}, expected {type(expected).__name__}")
    if len(actuals) != len(expecteds):
        raise ValueError(f"check {what}: got {len(actuals)} tensors, expected {len(expecteds)}")
    if actuals.keys() != expecteds.keys():
        raise ValueError(f"check {what}: got {sorted(actuals)}, expected {sorted(expecteds)}")
    return list(expecteds), [actuals[name] for name in expecteds], list(expecteds.values())


def _named(states: States, what: str) -> dict[str, Tensor]:
    if isinstance(states, Tensor):
        return {what: states}
    if isinstance(states, OracleResult):
        states = {"logits": states.logits, **states.cells, **states.states}
    if isinstance(states, Mapping):
        return {f"{what} {name}": tensor for name, tensor in states.items()}
    return {f"{what} layer {i}": tensor for i, tensor in enumerate(states)}


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
    return OracleResult(logits, token_tensors(cache, ids.shape[-1]), state_tensors(cache))


def fresh_cache(model: PreTrainedModel) -> DynamicCache:
    """A stock cache for the model's config in which sliding layers keep every token."""
    cache = DynamicCache(config=model.config)
    layers: list[Any] = cache.layers
    for i, layer in enumerate(layers):
        if type(layer) is DynamicSlidingWindowLayer:
            layers[i] = DynamicLayer()
        elif type(layer) is LinearAttentionAndSlidingWindowAttentionLayer:
            layers[i] = LinearAttentionAndFullAttentionLayer(number_of_states=layer.number_of_states)
    return cache


def token_tensors(cache: Cache, length: int) -> list[dict[str, Tensor]]:
    """What each layer holds for each of `length` tokens, by name, as [1, H, length, D] (views).

    Indexer keys [1, length, D] get a head; positions [axes, 1, length] are brought into the same form.
    """
    layers = []
    for layer in cache.layers:
        found = {}
        for name, tensor in vars(layer).items():
            if isinstance(tensor, Tensor) and not name.startswith("_") and tensor.ndim in (3, 4):
                if tensor.ndim == 3:
                    tensor = tensor[:, None] if tensor.is_floating_point() else tensor.transpose(0, 1)[..., None]
                if tensor.shape[-2] == length:
                    found[name] = tensor
        layers.append(found)
    return layers


def state_tensors(cache: Cache) -> dict[str, Tensor]:
    """Recurrent and convolution states of a cache by name, [1, ...] (views)."""
    return {
        f"layer {i} {name}.{index}": tensor
        for i, layer in enumerate(cache.layers)
        for name in ("conv_states", "recurrent_states")
        for index, tensor in (vars(layer).get(name) or {}).items()
        if isinstance(tensor, Tensor)
    }


@functools.cache
def _cache_argument(function: Any) -> str:
    """The name of `function`'s cache argument: `cache` in transformers 5.24, `past_key_values` before."""
    names = inspect.signature(function).parameters
    return next((name for name in ("cache", "past_key_values", "cache_params") if name in names), "past_key_values")


def _row(tokens: Tensor) -> Tensor:
    """[n] or [1, n] -> [1, n]."""
    row = tokens[None] if tokens.ndim == 1 else tokens
    if row.ndim != 2 or row.shape[0] != 1:
        raise ValueError(f"expected [n] or [1, n], got {tuple(tokens.shape)}")
    return row
