"""Decisions of many patched caches at once: cells of one prompt written over those of another, the last token read."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from editable_cache.adapters import host
from editable_cache.cache.layer import EditableLayer
from editable_cache.cache.store import Store
from editable_cache.errors import TaskError
from editable_cache.evaluation.probes.pairs import Pair
from editable_cache.evaluation.probes.prefill import Prefilled
from editable_cache.evaluation.probes.subject import Subject, hooked

ROWS = 16
"""Most variants in one forward."""

ROWS_BYTES = 2**29
"""Most memory of their cells."""


class Patcher:
    """Variants of one prompt's cache, side by side along the batch axis of our own layers.

    Only the cells that differ are written, and written back afterwards; the last token runs on all rows in one forward.
    """

    def __init__(self, subject: Subject, base: Prefilled, *, most_rows: int = ROWS) -> None:
        self._subject, self._base = subject, base
        held = sum(t.numel() * t.element_size() for layer in base.cells for t in layer.values())
        self.rows = max(1, min(most_rows, ROWS_BYTES // max(held, 1)))
        self._layers: list[EditableLayer] | None = None

    def gaps(self, pair: Pair, masks: Tensor) -> Tensor:
        """Gap of each variant that has ``pair.other``'s cells where its mask is set, float64 ``[num_masks]``.

        Args:
            masks: bool ``[num_masks, n - 1]``, or ``[num_masks, num_layers, n - 1]`` to patch some layers only.
        """
        return pair.gap(self.logits(pair.other, masks))

    def logits(self, other: Prefilled, masks: Tensor) -> Tensor:
        """Logits of each variant, float32 ``[num_masks, vocab]``."""
        if other.length != self._base.length or masks.shape[-1] != self._base.length - 1:
            raise TaskError(
                f"patch: expected cells and masks of {self._base.length - 1} tokens, got {other.length - 1} and "
                f"{masks.shape[-1]}."
            )
        return torch.cat([self._read(other, some) for some in masks.split(self.rows)])

    def heads(self, sources: Sequence[Tensor], masks: Tensor) -> Tensor:
        """Logits of the unpatched cache whose last token's head outputs are replaced where a mask is set.

        Args:
            sources: of each layer, ``[num_heads * head_dim]``: what enters the output projection instead.
            masks: bool ``[num_masks, num_layers, num_heads]``.
        """
        nothing = torch.zeros((0, self._base.length - 1), dtype=torch.bool)
        found = []
        for some in masks.split(self.rows):
            with hooked(replacing_heads(self._subject, sources, some)):
                found.append(self._read(self._base, nothing, len(some)))
        return torch.cat(found)

    def head_outputs(self) -> list[Tensor]:
        """What enters each layer's output projection at the last token, ``[num_heads * head_dim]`` each."""
        kept: list[Tensor] = []

        def hook(_module: nn.Module, args: Any) -> None:
            kept.append(args[0][0, -1].clone())

        handles = [projection.register_forward_pre_hook(hook) for projection in self._subject.projections]
        with hooked(handles):
            self._read(self._base, torch.zeros((0, self._base.length - 1), dtype=torch.bool), 1)
        return kept

    def _read(self, other: Prefilled, masks: Tensor, rows: int | None = None) -> Tensor:
        count = len(masks) if rows is None else rows
        layers, last = self._filled(), self._base.length - 1
        whole = masks if masks.dim() == 3 else masks[:, None].expand(-1, len(layers), -1)
        places = [whole[:, index].nonzero(as_tuple=True) for index in range(len(layers))]
        for layer, (row, slot), given in zip(layers, places, other.cells, strict=True):
            _write(layer, row, slot, given)
        for layer in layers:
            _use_rows(layer, count, last)
        ids = self._base.ids[None, last:].expand(count, -1)
        positions = torch.full((count, 1), last)
        cache = Cache(layers=[*layers])
        with nullcontext() if torch.is_inference_mode_enabled() else torch.no_grad():
            logits = host.run(self._subject.model, ids, cache, position_ids=positions, last_logits_only=True)
        for layer, (row, slot), held in zip(layers, places, self._base.cells, strict=True):
            layer.truncate(last)
            _use_rows(layer, self.rows, last)
            _write(layer, row, slot, held)
        return logits[:, -1].float().cpu()

    def _filled(self) -> list[EditableLayer]:
        if self._layers is None:
            self._layers = [_FixedRows(cells, self.rows) for cells in self._base.cells]
        return self._layers


class _FixedRows(EditableLayer):
    """A layer whose storage has room for one more token, and of which some rows are used."""

    def __init__(self, cells: dict[str, Tensor], rows: int) -> None:
        super().__init__()
        last = next(iter(cells.values())).shape[-2]
        like = {name: t.expand(rows, -1, -1, -1) for name, t in cells.items()}
        store = Store.allocate(like, last + 1)
        for name, t in like.items():
            store.buffers[name][..., :last, :] = t
        self.whole = store.buffers
        self.set_store(store, last)


def _use_rows(layer: EditableLayer, rows: int, length: int) -> None:
    assert isinstance(layer, _FixedRows)
    layer.set_store(Store({name: t[:rows] for name, t in layer.whole.items()}, length), length)


def _write(layer: EditableLayer, rows: Tensor, slots: Tensor, cells: dict[str, Tensor]) -> None:
    if len(rows):
        for name, held in layer.view().items():
            at = slots.to(held.device)
            held[rows.to(held.device), :, at] = cells[name][0][:, at].transpose(0, 1)


def replacing_heads(subject: Subject, sources: Sequence[Tensor], masks: Tensor, *, at: int = -1) -> list[Any]:
    """Hooks that replace head outputs at one token of those that run, row by row where a mask is set."""
    handles = []
    for index, (projection, source) in enumerate(zip(subject.projections, sources, strict=True)):
        chosen = masks[:, index].repeat_interleave(subject.head_dim, dim=-1)
        if bool(chosen.any()):
            handles.append(projection.register_forward_pre_hook(_replace(chosen, source, at)))
    return handles


def _replace(chosen: Tensor, source: Tensor, at: int) -> Any:
    def hook(_module: nn.Module, args: Any) -> Any:
        given = args[0].clone()
        given[:, at] = torch.where(chosen.to(given.device), source.to(given), given[:, at])
        return (given, *args[1:])

    return hook
