"""The plain tensors that a model's weights are made of, wherever they lie: inside tensor subclasses (torchao, DTensor),
offloaded to memory or disk by accelerate, or packed into objects of torch's quantized modules.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from editable_cache.adapters.rope_types import renewed_buffers
from editable_cache.adapters.wrappers import offload_hooks
from editable_cache.errors import UnsupportedModelError


class Stored(NamedTuple):
    """What holds a model's weights: tensors in memory, and marks of what is no tensor (files, packed objects)."""

    parameters: list[Tensor]
    buffers: list[Tensor]
    marks: tuple[Any, ...]


def stored(model: nn.Module) -> Stored:
    """Everything that holds the weights of ``model`` now, but for buffers that every forward renews; reads no file."""
    parameters: list[Tensor] = []
    buffers: list[Tensor] = []
    marks: list[Any] = []
    offloaded, renewed = False, renewed_buffers(model)
    for module in model.modules():
        for parameter in module._parameters.values():
            parameters.extend(_held(parameter))
        for buffer in module._buffers.values():
            if id(buffer) not in renewed:
                buffers.extend(_held(buffer))
        packed = module.__dict__.get("_packed_params")
        if packed is not None:  # of torch.ao's quantized modules: replaced, never written
            marks.append(id(packed))
        offloaded = offloaded or "_hf_hook" in module.__dict__
    for weights, name in offloaded_weights(model).values() if offloaded else ():
        source = _source(weights, name)
        if isinstance(source, Tensor):
            parameters.extend(_held(source))
        else:
            marks.append(source)
    return Stored(parameters, buffers, tuple(dict.fromkeys(marks)))


def plain(tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The plain tensors inside ``tensor``, by the attributes that lead to them; itself if it is one."""
    if type(tensor) in (Tensor, nn.Parameter):
        yield "", tensor
        return
    flatten: Any = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield "", tensor
        return
    for name in flatten()[0]:
        inner = getattr(tensor, name)
        if isinstance(inner, Tensor):  # a distributed tensor also names its mesh
            yield from ((f".{name}{rest}", leaf) for rest, leaf in plain(inner))


def form(tensor: Tensor) -> str:
    """How a tensor subclass reads the plain tensors inside it, as text; empty for a plain tensor.

    Of a distributed tensor only the local part counts, which its own shape and content tell.
    """
    distributed = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    flatten: Any = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None or type(tensor) in (Tensor, nn.Parameter):
        return ""
    if distributed is not None and isinstance(tensor, distributed):
        return f"part of {tuple(tensor.shape)}"
    return f"{type(tensor).__qualname__} {_text(flatten()[1])}"


def offloaded_weights(model: nn.Module) -> dict[str, tuple[Mapping[str, Tensor], str]]:
    """For each weight that accelerate keeps elsewhere: where, and under which name."""
    found: dict[str, tuple[Mapping[str, Tensor], str]] = {}
    for prefix, module in model.named_modules():
        for hook in offload_hooks(module):
            deep = bool(getattr(hook, "place_submodules", False))
            for named in (module.named_parameters, module.named_buffers):
                for name, tensor in named(recurse=deep, remove_duplicate=False):
                    if tensor.is_meta:
                        found[f"{prefix}.{name}" if prefix else name] = (hook.weights_map, name)
    return found


def contents(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Every persistent item of ``model`` by name, with offloaded weights loaded one at a time.

    Raises:
        UnsupportedModelError: for a weight without data that nothing holds.
    """
    elsewhere = offloaded_weights(model)
    for name, item in model.state_dict().items():
        if isinstance(item, Tensor) and item.is_meta:
            if name not in elsewhere:
                raise UnsupportedModelError(
                    f"identify: expected every weight to have data, got {name} on the meta device, and nothing that "
                    "loads it (accelerate's hooks would). Load the model's weights first."
                )
            weights, key = elsewhere[name]
            item = weights[key]
        yield name, item


def _held(tensor: Tensor | None) -> list[Tensor]:
    if tensor is None:
        return []
    return [leaf for _, leaf in plain(tensor) if not leaf.is_meta and leaf.numel()]


def _source(weights: Any, name: str) -> Any:
    """What holds an offloaded weight: a tensor in memory, or ``(path, bytes, time of change)`` of a file."""
    loader: Any = sys.modules.get("accelerate.utils.offload")
    while isinstance(weights, loader.PrefixedDataset):
        weights, name = weights.dataset, weights.prefix + name
    if not isinstance(weights, loader.OffloadedWeightsLoader) or name in weights.state_dict:
        return getattr(weights, "state_dict", weights)[name]
    file = weights.index[name].get("safetensors_file") or Path(weights.save_folder) / f"{name}.dat"
    facts = os.stat(file)
    return str(file), facts.st_size, facts.st_mtime_ns


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_text(value[key])}" for key in sorted(value, key=str)) + "}"
    if isinstance(value, (tuple, list)) and type(value) in (tuple, list):
        return "[" + ", ".join(map(_text, value)) + "]"
    text = repr(value)
    return type(value).__qualname__ if " at 0x" in text else text
