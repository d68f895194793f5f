"""What may stand around a model: PEFT, ``torch.compile``, data parallelism, offloading. Found by type, only where the
library that makes it was imported already.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from editable_cache.errors import UnsupportedModelError

_REFUSED = {
    (
        "torch.nn.parallel",
        "DataParallel",
    ): "it gives each device some rows of the batch, and all of them one cache; run the model inside (its .module)",
    (
        "torch.distributed.fsdp",
        "FullyShardedDataParallel",
    ): "its weights are shards that are only whole inside its own forward, so they can't be told apart by content",
}
"""Wrappers that can't be right, by module and class, with the reason."""


def inner_model(model: nn.Module) -> nn.Module:
    """The transformers model that every call of ``model`` passes through, without what is wrapped around it.

    Unwrapped are ``torch.compile(model)``, PEFT models and tuners, and ``DistributedDataParallel``. A model that was
    compiled in place (``model.compile()``) or dispatched by accelerate has no wrapper.

    Raises:
        UnsupportedModelError: for a wrapper whose calls do something to the cache that can't be seen inside: PEFT's
            prompt learning, ``DataParallel``, ``FullyShardedDataParallel``.
    """
    while True:
        _refuse_wrapper(model)
        inside = _inside(model)
        if inside is None:
            return model
        model = inside


def _inside(model: nn.Module) -> nn.Module | None:
    found: Any = None
    if _is_a(model, "torch._dynamo.eval_frame", "OptimizedModule"):
        found = model._orig_mod
    elif _is_a(model, "peft.peft_model", "PeftModel") or _is_a(model, "peft.mixed_model", "PeftMixedModel"):
        found = model.base_model
    elif _is_a(model, "peft.tuners.tuners_utils", "BaseTuner"):
        found = model.model
    elif _is_a(model, "torch.nn.parallel", "DistributedDataParallel"):
        found = model.module
    assert found is None or isinstance(found, nn.Module)
    return found


def _is_a(model: nn.Module, module: str, name: str) -> bool:
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(model, kind)


def _refuse_wrapper(model: nn.Module) -> None:
    for (module, name), reason in _REFUSED.items():
        if _is_a(model, module, name):
            raise UnsupportedModelError(f"{name}: this wrapper of a model is not supported: {reason}.")
    if _is_a(model, "peft.peft_model", "PeftModel"):
        wrapped: Any = model
        learned = [name for name, config in wrapped.peft_config.items() if config.is_prompt_learning]
        if learned:
            raise UnsupportedModelError(
                f"{type(model).__name__}: expected adapters inside the layers, got prompt learning in {learned}: its "
                "virtual tokens reach the cache without ids, at positions that no text has. Give the base model "
                "(model.get_base_model()) to cache and generate, or merge what you need into a text."
            )


def refuse_per_call_adapters(model: nn.Module) -> None:
    """Refuse a forward for which PEFT chose adapters by the call (``adapter_names=`` or activated LoRA).

    What a token's cell holds then depends on the call, which neither chunk nor cache can know later.

    Raises:
        UnsupportedModelError: with the next move.
    """
    if getattr(model, "peft_config", None) is None and not getattr(model, "_hf_peft_config_loaded", False):
        return
    hooked = [
        (module, key)
        for _, module in tuner_layers(model)
        for key, hook in module._forward_pre_hooks.items()
        if _is_per_call(hook)
    ]
    for module, key in hooked:  # PEFT leaves them behind when a call fails, and they would act on every later call
        del module._forward_pre_hooks[key]
        module._forward_pre_hooks_with_kwargs.pop(key, None)
    if hooked:
        raise UnsupportedModelError(
            "forward: expected one set of adapters for all tokens and calls, got adapters chosen for this call "
            "(adapter_names, or an activated LoRA): cells of different calls would not belong together. Choose with "
            "model.set_adapter(name), or run without an EditableCache."
        )


def _is_per_call(hook: Any) -> bool:
    made_from = getattr(hook, "func", None)
    return made_from is not None and str(getattr(made_from, "__module__", "")).split(".")[0] == "peft"


def tuner_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """PEFT's layers inside ``model`` by name; none where PEFT was never imported."""
    kind = getattr(sys.modules.get("peft.tuners.tuners_utils"), "BaseTunerLayer", None)
    if kind is not None:
        yield from ((name, module) for name, module in model.named_modules() if isinstance(module, kind))


def execution_device(module: nn.Module, stored: torch.device) -> torch.device:
    """Where a module whose weights lie on ``stored`` runs: elsewhere if accelerate loads them for each forward."""
    if stored.type != "meta":
        return stored
    for hook in offload_hooks(module):
        if hook.execution_device is not None:
            return torch.device(hook.execution_device)
    return stored


def offload_hooks(module: nn.Module) -> list[Any]:
    """accelerate's hooks on a module that load its weights for the time of its forward."""
    hook = module.__dict__.get("_hf_hook")
    hooks = () if hook is None else getattr(hook, "hooks", (hook,))
    return [one for one in hooks if getattr(one, "weights_map", None) is not None]
