"""How every image-text type of transformers numbers an image behind text: its own `get_rope_index`, without weights."""

from __future__ import annotations

import inspect
import types
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as NAMES

ROWS, COLUMNS = 4, 6
NEAR, FAR = 2, 11
"""Text tokens in front of the image; the difference is what the table shows."""


def survey() -> dict[str, str]:
    """For each type with a ``get_rope_index``: what nine more text tokens in front add to an image, axis by axis.

    The numbering runs on the type's default config. Where it can't be run that way, the text says so.
    """
    found = {}
    for model_type, name in sorted(NAMES.items()):
        head = getattr(transformers, name, None)
        owner = _owner(head) if head is not None else None
        if owner is not None:
            found[model_type] = _added(head, owner)
    return found


def _owner(head: type) -> Any:
    """The class beside ``head`` that numbers tokens."""
    for value in vars(inspect.getmodule(head)).values():
        if inspect.isclass(value) and value.__module__ == head.__module__ and "get_rope_index" in vars(value):
            return value
    return None


def _stub(owner: Any, config: Any) -> Any:
    """What numbering needs of a model: the config and the methods."""
    stub = types.SimpleNamespace(config=config, spatial_merge_size=config.vision_config.spatial_merge_size)
    for base in reversed(owner.__mro__):
        for name, function in vars(base).items():
            if inspect.isfunction(function) and name.startswith("get_"):
                setattr(stub, name, types.MethodType(function, stub))
    return stub


def _added(head: Any, owner: Any) -> str:
    try:
        config = head.config_class()
        text = config.get_text_config()
        # HunYuan-VL counts its axes there. The config is thrown away, so its checks need not agree.
        vars(text)["rope_parameters"] = {"mrope_section": [2, 2, 2, 2]} | (text.rope_parameters or {})
        stub = _stub(owner, config)
    except (AttributeError, TypeError, ValueError) as error:
        return f"not measured: {type(error).__name__}"
    failures = []
    for end_of_row in (0, 1):  # some types end every row of an image with a token of its own
        try:
            near, far = (_image_positions(stub, count, ROWS * (COLUMNS + end_of_row)) for count in (NEAR, FAR))
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
            failures.append(type(error).__name__)
            continue
        added = far - near
        if not (added == added[:, :1]).all():
            return "differs by token"
        return " ".join(f"+{int(value)}" for value in added[:, 0])
    return "not measured: " + ", ".join(failures)


def _image_positions(stub: Any, text: int, tokens: int) -> Tensor:
    """Positions ``[axes, tokens]`` of an image behind ``text`` text tokens, the last of which opens the image."""
    config, merge = stub.config, stub.spatial_merge_size
    ids = torch.full((1, text + tokens), 7)
    ids[0, text - 1] = getattr(config, "vision_start_token_id", 7)
    ids[0, text:] = getattr(config, "image_token_id", 8)
    kinds = torch.zeros_like(ids)
    kinds[0, text:] = 1
    grid = torch.tensor([[1, ROWS * merge, COLUMNS * merge]])
    taken = inspect.signature(stub.get_rope_index).parameters
    named = {"mm_token_type_ids": kinds} if "mm_token_type_ids" in taken else {}
    positions: Tensor = stub.get_rope_index(ids, **named, image_grid_thw=grid)[0]
    return positions[:, 0, text:]
