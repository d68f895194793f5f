"""Watching attention: every call of a decoder's attention, with what is needed to say where its output comes from.

transformers looks an attention function up by the name in the config, in a registry that others may add to. While a
model is traced its config names a function of this file, which calls the one that was in use and lets somebody look.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from editable_cache.adapters import host
from editable_cache.errors import BusyError, Reason, UnsupportedModelError

PREFIX = "editable_cache_tracing_"
"""Start of the names under which traced attention is registered, one for each tracing."""

BASES = ("sdpa", "eager")
"""Implementations that are given a mask from which the weights can be computed again."""

BRANCHES = re.compile(r"config\._attn_implementation\s*(==|!=|in\b|not in\b)")
"""A model that reads the name itself would compute something else under another name."""

_LOWEST = torch.finfo(torch.float32).min

_numbers = itertools.count()


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One call of the attention of one layer, of one row; tensors are the model's own, not to be kept or changed.

    Attributes:
        layer_idx: index of the cache layer.
        query: ``[1, num_heads, num_queries, head_dim]``, rotated.
        key, value: ``[1, num_key_value_heads, total, head_dim]``, everything in the cache and the new tokens.
        mask: ``[1, 1 or num_heads, num_queries, at least total]``, bool (True is seen) or added to the scores; or None.
        causal: without a mask, query i sees keys 0 to i; else it sees all of them.
        scaling: factor of the scores.
        softcap: scores are squeezed into +- this, or None.
        sinks: score of an outlet that no value stands behind ``[num_heads]``, or None.
        output: ``[1, num_queries, num_heads, value_dim]``, before the output projection.
        hidden: ``[1, num_queries, hidden_size]``, the residual stream that entered the block.
        projection: the output projection, a module.
    """

    layer_idx: int
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    causal: bool
    scaling: float
    softcap: float | None
    sinks: Tensor | None
    output: Tensor
    hidden: Tensor
    projection: nn.Module

    @property
    def num_queries(self) -> int:
        """Number of tokens that run."""
        return int(self.query.shape[-2])

    @property
    def total(self) -> int:
        """Number of keys."""
        return int(self.key.shape[-2])

    def weights(self, start: int, stop: int) -> Tensor:
        """Attention of queries ``[start, stop)``: new float32 ``[num_heads, stop - start, total]``."""
        seen, low = self.seen_weights(start, stop)
        return F.pad(seen, (low, self.total - low - seen.shape[-1]))

    def seen_weights(self, start: int, stop: int) -> tuple[Tensor, int]:
        """The same without the keys before the first and behind the last one that any of these queries sees.

        Returns:
            float32 ``[num_heads, stop - start, num_seen]`` and the slot of the first of these keys.
        """
        low, high = self._reach(start, stop)
        heads, groups = self.query.shape[1], self.query.shape[1] // self.key.shape[1]
        query = self.query[0, :, start:stop].float().unflatten(0, (heads // groups, groups))
        scores = (query @ self._keys[:, None, low:high].transpose(-1, -2)).flatten(0, 1).mul_(self.scaling)
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        if self.mask is not None:
            mask = self.mask[0, :, start:stop, low:high]
            scores = scores.masked_fill_(~mask, _LOWEST) if mask.dtype == torch.bool else scores.add_(mask)
        elif self.causal:
            columns = torch.arange(self.total, device=scores.device)
            scores = scores.masked_fill_(columns[low:high] > columns[start:stop, None], _LOWEST)
        if self.sinks is not None:
            outlet = self.sinks.float().reshape(-1, 1, 1).expand(-1, stop - start, 1)
            scores = torch.cat((scores, outlet), dim=-1)
        return scores.softmax(dim=-1)[..., : high - low], low

    def _reach(self, start: int, stop: int) -> tuple[int, int]:
        """First key, and the one behind the last, that any of these queries sees."""
        if self.mask is None:
            return 0, stop if self.causal else self.total
        mask = self.mask[0, :, start:stop, : self.total]
        seen = (mask if mask.dtype == torch.bool else mask > _LOWEST / 2).any(0).any(0).nonzero()[:, 0]
        return (int(seen[0]), int(seen[-1]) + 1) if len(seen) else (0, self.total)

    def mixed(self, weights: Tensor, start: int, stop: int) -> Tensor:
        """``weights [num_heads, n, stop - start]`` times the values of slots ``[start, stop)``.

        Returns float32 ``[num_heads, n, value_dim]``.
        """
        kv_heads = self.value.shape[1]
        grouped = weights.unflatten(0, (kv_heads, weights.shape[0] // kv_heads))
        found: Tensor = (grouped @ self._values[:, None, start:stop]).flatten(0, 1)
        return found

    def weighted(self, weights: Tensor, start: int, stop: int) -> Tensor:
        """``weights [num_heads, stop - start]``, each times its own slot's value: ``[num_heads, n, value_dim]``."""
        heads, kv_heads = weights.shape[0], self.value.shape[1]
        return weights[..., None] * self._values[:, start:stop].repeat_interleave(heads // kv_heads, dim=0)

    def projected(self, mixed: Tensor) -> Tensor:
        """``[num_heads, n, value_dim]`` through the output projection, without bias: float32 ``[n, hidden_size]``."""
        joined = mixed.transpose(0, 1).flatten(1).to(self.output.dtype)
        if type(self.projection) is nn.Linear:
            return F.linear(joined, self.projection.weight).float()
        several = torch.cat((joined, torch.zeros_like(joined[:1])))[None]
        found = self.projection(several)[0].float()
        return torch.as_tensor(found[:-1] - found[-1:])

    @functools.cached_property
    def _keys(self) -> Tensor:
        return self.key[0].float()

    @functools.cached_property
    def _values(self) -> Tensor:
        return self.value[0].float()


Record = Callable[[AttentionCall], None]


@contextmanager
def tracing(model: nn.Module, record: Record) -> Iterator[None]:
    """Call ``record`` for every attention call of a decoder, in the order of its layers, until the context ends.

    The name of the attention implementation in the model's config changes meanwhile, and hooks stand on its modules;
    afterwards config, modules and transformers' registries are as before. Nobody else may run the model meanwhile.

    The output projection is the first module called behind the attention function, within the attention module, that
    takes the heads joined. A gate between the two is not seen.

    Raises:
        UnsupportedModelError: for an implementation other than sdpa or eager, or a model whose code reads its name; at
            the call, if weights computed from query, key and mask do not give the attention's output.
        BusyError: if the model is being traced already.
    """
    config: Any = host.text_config(model.config)
    base = config._attn_implementation
    if str(base).startswith(PREFIX):
        raise BusyError("tracing: this model is being traced already; leave the other context first.")
    _require_traceable(model, base)
    name, watch = f"{PREFIX}{next(_numbers)}", _Watch(model, base, record)
    with ExitStack() as undo:
        undo.callback(AttentionInterface._global_mapping.pop, name, None)
        AttentionInterface.register(name, watch.attend)
        undo.callback(AttentionMaskInterface._global_mapping.pop, name, None)
        AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[base])
        undo.callback(watch.remove)
        watch.install()
        undo.callback(setattr, config, "_attn_implementation_internal", base)
        config._attn_implementation_internal = name
        yield
        watch.finish()


def _require_traceable(model: nn.Module, base: Any) -> None:
    kind = type(model).__name__
    if base not in BASES:
        raise UnsupportedModelError(
            f"tracing: the attention of this {kind} can't be looked into; load it with attn_implementation='sdpa'.",
            (Reason("attention implementation", " or ".join(BASES), str(base)),),
        )
    try:
        source = inspect.getsource(sys.modules[type(model).__module__])
    except (OSError, TypeError, KeyError):  # no file: nothing can be said, and the check at each call remains
        return
    found = BRANCHES.search(source)
    if found is not None:
        raise UnsupportedModelError(
            f"tracing: the code of {kind} decides by the name of its attention implementation, so it can't be watched "
            "under another one.",
            (Reason("model code", "no look at the name", found[0]),),
        )


class _Watch:
    """The function that is registered, and the hooks that find residual stream and output projection."""

    def __init__(self, model: nn.Module, base: str, record: Record) -> None:
        self._model, self._base, self._record = model, base, record
        self._handles: list[Any] = []
        self._block_of: dict[nn.Module, nn.Module] = {}
        self._hidden: dict[nn.Module, Tensor] = {}
        self._watched: set[nn.Module] = set()
        self._pending: tuple[nn.Module, dict[str, Any]] | None = None

    def install(self) -> None:
        """Hooks on every block: what enters it is the residual stream."""
        blocks = {
            child
            for module in self._model.modules()
            if isinstance(module, nn.ModuleList)
            for child in module.children()
        }
        self._find_blocks(self._model, None, blocks)
        for block in blocks:
            self._handles.append(block.register_forward_pre_hook(self._entered, with_kwargs=True))

    def remove(self) -> None:
        """Take all hooks away."""
        for handle in self._handles:
            handle.remove()
        self._pending = None
        self._hidden.clear()

    def finish(self) -> None:
        """Raise if the output of the last attention call met no projection."""
        if self._pending is not None:
            raise UnsupportedModelError(
                f"tracing: no output projection was called behind the attention of {type(self._pending[0]).__name__}."
            )

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
        """What the registry gives the model: the implementation in use, looked at."""
        self.finish()
        names = inspect.unwrap(type(module).forward).__globals__
        registry = names.get("ALL_ATTENTION_FUNCTIONS", ALL_ATTENTION_FUNCTIONS)
        default = names.get("eager_attention_forward")
        if self._base == "eager" and default is None:
            raise UnsupportedModelError(f"tracing: {type(module).__name__} has no eager attention to be found.")
        attention = registry.get_interface(self._base, default)
        found = attention(module, query, key, value, mask, **kwargs)
        self._await_projection(module, query, key, value, mask, kwargs, found[0])
        return found

    def _await_projection(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any,
        given: dict[str, Any],
        out: Tensor,
    ) -> None:
        block, layer_idx = self._block_of.get(module), getattr(module, "layer_idx", None)
        if block not in self._hidden or layer_idx is None or given.get("position_bias") is not None:
            what = "a bias on its scores" if given.get("position_bias") is not None else "no block or layer index"
            raise UnsupportedModelError(f"tracing: {type(module).__name__} has {what}, which can't be traced.")
        causal = given.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        scaling = given.get("scaling")
        facts = {
            "layer_idx": layer_idx,
            "query": query,
            "key": key,
            "value": value,
            "mask": mask,
            "causal": bool(self._base == "sdpa" and mask is None and query.shape[-2] > 1 and causal),
            "scaling": query.shape[-1] ** -0.5 if scaling is None else float(scaling),
            "softcap": given.get("softcap"),
            "sinks": given.get("s_aux"),
            "output": out,
            "hidden": self._hidden.pop(block),
        }
        self._pending = module, facts
        if module not in self._watched:
            self._watched.add(module)
            width = out.shape[-1] * out.shape[-2]
            for inner in module.modules():
                if inner is not module and getattr(inner, "in_features", None) == width:
                    self._handles.append(inner.register_forward_pre_hook(functools.partial(self._projecting, module)))

    def _projecting(self, attention: nn.Module, projection: nn.Module, args: Any) -> None:
        if self._pending is None or self._pending[0] is not attention:
            return
        facts, self._pending = self._pending[1], None
        with torch.no_grad():
            call = AttentionCall(**facts, projection=projection)
            _check(call, type(attention).__name__)
            self._record(call)

    def _entered(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for given in (*args, *kwargs.values()):
            if isinstance(given, Tensor) and given.dim() == 3 and given.is_floating_point():
                self._hidden[block] = given
                return

    def _find_blocks(self, module: nn.Module, block: nn.Module | None, blocks: set[nn.Module]) -> None:
        for child in module.children():
            if block is not None:
                self._block_of[child] = block
            self._find_blocks(child, child if child in blocks else block, blocks)


def _check(call: AttentionCall, where: str) -> None:
    """The last query's weights, computed again, must give its output."""
    last = call.num_queries - 1
    expected = call.output[0, last].float()
    got = call.mixed(call.weights(last, last + 1), 0, call.total)[:, 0]
    error = float((got - expected).abs().max() / expected.abs().max().clamp_min(torch.finfo(torch.float32).tiny))
    tolerance = 1e-3 if call.output.dtype in (torch.float32, torch.float64) else 5e-2
    if not error <= tolerance:
        raise UnsupportedModelError(
            f"tracing: the output of {where} at layer {call.layer_idx} is not the softmax of query, key and mask over "
            "the values.",
            (Reason("output of the last query", f"error up to {tolerance:.0e}", f"{error:.1e}"),),
        )
