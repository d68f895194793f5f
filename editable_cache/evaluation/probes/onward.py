"""A prompt read on from one of its tokens, with something changed at that token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from editable_cache.adapters import host
from editable_cache.cache.layer import EditableLayer
from editable_cache.evaluation.probes.patching import replacing_heads
from editable_cache.evaluation.probes.prefill import Prefilled
from editable_cache.evaluation.probes.subject import Subject, entering, hooked


@dataclass(frozen=True)
class Edit:
    """``vector [hidden_size]`` is added to what enters block ``layer`` at the first token that runs."""

    layer: int
    vector: Tensor


def continued(subject: Subject, base: Prefilled, slot: int, edits: Sequence[Edit]) -> Tensor:
    """Logits ``[num_edits, vocab]`` of the prompt read on from ``slot``, with the stream changed there, once in a row.

    Cells in front of ``slot`` are those of ``base``; it and everything behind it is computed anew.
    """
    handles = [
        block.register_forward_pre_hook(_add(index, edits), with_kwargs=True)
        for index, block in enumerate(subject.blocks)
        if any(edit.layer == index for edit in edits)
    ]
    return _read_on(subject, base, slot, len(edits), handles)


def continued_heads(subject: Subject, base: Prefilled, slot: int, sources: Tensor, masks: Tensor) -> Tensor:
    """The same with head outputs at ``slot`` replaced, row by row where a mask is set.

    Args:
        sources: ``[num_layers, num_heads * head_dim]``.
        masks: bool ``[num_rows, num_layers, num_heads]``.
    """
    handles = replacing_heads(subject, [*sources], masks, at=0)
    return _read_on(subject, base, slot, len(masks), handles)


def _read_on(subject: Subject, base: Prefilled, slot: int, rows: int, handles: list[Any]) -> Tensor:
    layers = []
    for cells in base.cells:
        layer = EditableLayer()
        layer.append({name: t[..., :slot, :].expand(rows, -1, -1, -1) for name, t in cells.items()})
        layers.append(layer)
    ids = base.ids[None, slot:].expand(rows, -1)
    positions = torch.arange(slot, base.length)[None].expand(rows, -1)
    with hooked(handles):
        found = host.run(subject.model, ids, Cache(layers=[*layers]), position_ids=positions, last_logits_only=True)
    return found[:, -1].float().cpu()


def _add(index: int, edits: Sequence[Edit]) -> Any:
    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = entering(args, kwargs)
        changed = given.clone()
        for row, edit in enumerate(edits):
            if edit.layer == index:
                changed[row, 0] += edit.vector.to(changed)
        swapped = tuple(changed if each is given else each for each in args)
        return swapped, {name: changed if each is given else each for name, each in kwargs.items()}

    return hook
