"""Watching a model, so that the ledger holds every token that reaches one of its caches.

Two forward hooks and a wrapper around ``generate`` are installed on a model when its first cache is made and removed
when its last one is gone. The wrapper is needed because ``generate`` cuts the prompt to the part that the cache does
not cover before any hook can see it: a cache of other tokens with the same length would pass unnoticed.

A compiled model runs the hooks, but never traces what they do: it breaks its graph there.
"""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from editable_cache.adapters import host
from editable_cache.adapters.wrappers import refuse_per_call_adapters
from editable_cache.errors import LedgerError

if TYPE_CHECKING:
    from editable_cache.cache.ledgered import LedgeredCache

_untraced: dict[str, Callable[..., Any]] = {}
"""What the hooks do, kept out of ``torch.compile``; made when the first model is watched, since that loads dynamo."""

_watches: weakref.WeakKeyDictionary[nn.Module, _Watch] = weakref.WeakKeyDictionary()


def watch(model: nn.Module, cache: LedgeredCache) -> None:
    """Let ``cache`` see what ``model`` is fed, for as long as the cache lives."""
    found = _watches.get(model)
    if found is None:
        found = _watches[model] = _Watch(model)
    found.add(cache)


def is_watched(model: nn.Module) -> bool:
    """Whether hooks are installed on ``model``."""
    return model in _watches


class _Watch:
    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._caches = 0
        _remove_copied_hooks(model)
        if not _untraced:
            disable: Any = torch.compiler.disable
            _untraced.update(begin=disable(_begin), end=disable(_end))
        self._handles = [
            model.register_forward_pre_hook(_before_forward, with_kwargs=True),
            model.register_forward_hook(_after_forward, with_kwargs=True, always_call=True),
        ]
        if hasattr(type(model), "generate"):
            model.__dict__["generate"] = _WatchedGenerate(model, model.__dict__.get("generate"))

    def add(self, cache: LedgeredCache) -> None:
        self._caches += 1
        weakref.finalize(cache, self._drop)

    def _drop(self) -> None:
        self._caches -= 1
        model = self._model()
        if self._caches or model is None:
            return
        for handle in self._handles:
            handle.remove()
        ours = model.__dict__.get("generate")
        if isinstance(ours, _WatchedGenerate):
            del model.__dict__["generate"]
            if ours.replaced is not None:
                model.__dict__["generate"] = ours.replaced
        _watches.pop(model, None)


def _remove_copied_hooks(model: nn.Module) -> None:
    """A deep copy of a watched model brings hooks along that nobody would ever remove."""
    for hooks, ours in (
        (model._forward_pre_hooks, _before_forward),
        (model._forward_hooks, _after_forward),
    ):
        for key in [key for key, hook in hooks.items() if hook is ours]:
            del hooks[key]
            for flags in (
                model._forward_pre_hooks_with_kwargs,
                model._forward_hooks_with_kwargs,
                model._forward_hooks_always_called,
            ):
                flags.pop(key, None)


class _WatchedGenerate:
    """``model.generate`` with the prompt checked against the cache first; otherwise the model's own."""

    def __init__(self, model: nn.Module, replaced: Any) -> None:
        self._model = weakref.ref(model)
        self.replaced = replaced  # what somebody else had put on this instance, or None
        kind: Any = type(model)
        functools.update_wrapper(self, kind.generate)
        self.__signature__ = inspect.signature(types.MethodType(kind.generate, model))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self._model()
        assert model is not None
        kind: Any = type(model)
        original = self.replaced or types.MethodType(kind.generate, model)
        cache = host.cache_in(kwargs)
        if not _is_ledgered(cache):
            return original(*args, **kwargs)
        if not host.uses_cache(model, kwargs):
            raise LedgerError(
                "generate: expected use_cache=True together with a cache, got False (from the call, or from "
                "model.generation_config, where gradient checkpointing leaves it): every step would feed the whole "
                "prompt again. Pass use_cache=True, or no cache."
            )
        kwargs = host.with_own_name(model, kwargs)
        ids = args[0] if args else kwargs.get("inputs", kwargs.get("input_ids"))
        mask = kwargs.get("attention_mask")
        with cache.generating(model, ids, mask, kwargs) as completed:
            output = original(*args, **completed)
        cache.note_returned(getattr(output, "sequences", output))
        return output

    def __reduce__(self) -> Any:
        """Pickled with its model as the model's plain method."""
        return getattr, (self._model(), "generate")

    def __deepcopy__(self, memo: Mapping[int, Any]) -> Any:
        model = self._model()
        copied = memo.get(id(model))
        if copied is None:
            raise TypeError("The watched generate of a model can only be copied together with its model.")
        return types.MethodType(type(copied).generate, copied)


def _is_ledgered(cache: Any) -> bool:
    from editable_cache.cache.ledgered import LedgeredCache

    return isinstance(cache, LedgeredCache)


def _is_inside(module: nn.Module, cache: LedgeredCache) -> bool:
    """Whether ``module`` is a part of the cache's model, watched because it has a cache of its own."""
    model = cache.model
    return model is not None and model is not module and any(part is module for part in model.modules())


def _before_forward(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    begin: Callable[..., tuple[tuple[Any, ...], dict[str, Any]] | None] = _untraced.get("begin", _begin)
    return begin(module, args, kwargs)


def _after_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    end: Callable[..., None] = _untraced.get("end", _end)
    end(module, kwargs, output is not None)


def _begin(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    arguments = host.bind(module, args, kwargs)
    cache = host.cache_in(arguments)
    if not _is_ledgered(cache) or _is_inside(module, cache):
        return None
    given = [arguments[name] for name in host.CACHE_NAMES if arguments.get(name) is not None]
    if any(other is not cache for other in given):
        raise LedgerError(
            f"forward: expected one cache, got a {' and a '.join(type(one).__name__ for one in given)}: whoever calls "
            "the model (PEFT's prefix tuning does) adds its own. Run the base model with this cache."
        )
    refuse_per_call_adapters(module)
    return (), host.with_own_name(module, cache.begin_forward(module, arguments))


def _end(module: nn.Module, kwargs: dict[str, Any], succeeded: bool) -> None:
    cache = host.cache_in(kwargs)
    if _is_ledgered(cache) and not _is_inside(module, cache):
        cache.end_forward(succeeded=succeeded)
