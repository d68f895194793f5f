"""Compute a part of a stored chunk again and compare: whether its cells are what its ids and its model give.

A sampled token sees the stored cells before it, as the CELLS oracle has it, so a check costs a copy of the chunk and a
forward of the sample. Forged or damaged cells of sampled tokens show; those of other tokens need not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from editable_cache.adapters import host, identify, model_spec
from editable_cache.adapters.wrappers import inner_model
from editable_cache.cache import LedgeredCache, Segment
from editable_cache.chunk import CONVERTED, STORED, KVChunk, Part, Provenance
from editable_cache.errors import Reason, SpanError
from editable_cache.forward import run
from editable_cache.forward.compose import require_compatible, splice
from editable_cache.forward.precompile import precompile
from editable_cache.ops import LOW_PRECISION

TOLERANCES = {"float32": 1e-4, "16 bits": 5e-2, "converted": 2e-1, "int8": 6e-2, "fp8": 1e-1}
"""What counts as equal, by what the cells went through: for float32 the largest difference within a cell, for all else
its root mean square.

Measured on every cell of three texts of about 1,000 tokens, SmolLM2-135M and Gemma 3 270M in float32 and bfloat16:
int8 up to 3.8e-2, fp8 up to 5.2e-2 (whole tensors differ by 0.6% to 1.8% and 2.4% to 2.8% of their root mean square,
`benchmarks/results/storage.json`). Cells of float32 converted to bfloat16, or back, were compiled by other weights than
those that judge them: up to 9.9e-2 on 884 tokens of SmolLM2-135M, and 1.0e-1 where they had been stored as int8 first;
the tolerance is twice that. What went through several has the largest of their tolerances. Of 48 sampled tokens behind
rounded cells single ones differ by 0.25 and 0.98: some tokens stand on an edge. So where cells were rounded the whole
is computed, and nothing is read behind rounded cells.
"""


@dataclass(frozen=True)
class ChunkVerification:
    """How far stored cells are from those that the model computes now.

    Attributes:
        slots: tokens of the chunk that were computed again, ascending; the first is always among them.
        num_tokens: tokens of the chunk.
        errors: largest relative error of a cell by the name of its tensor (``"keys"``, ``"values"``,
            ``"transitions.offset"``, ...); infinite for what is not finite or has another shape.
        worst_at: where the largest of them is, or an empty text.
        tolerance: what counts as equal.
        precision: what sets it: ``"float32"``, ``"16 bits"``, ``"converted"``, ``"int8"`` or ``"fp8"``, of several that
            with the largest tolerance.
        undecided: why the chunk can't be judged; then nothing was computed.
    """

    slots: tuple[int, ...]
    num_tokens: int
    errors: Mapping[str, float]
    worst_at: str
    tolerance: float
    precision: str
    undecided: tuple[Reason, ...] = ()

    @property
    def worst_error(self) -> float:
        """The largest of ``errors``; 0 without any."""
        return max(self.errors.values(), default=0.0)

    @property
    def ok(self) -> bool:
        """Whether something was compared and all of it is equal."""
        return bool(self.slots) and not self.undecided and self.worst_error <= self.tolerance

    def __str__(self) -> str:
        if self.undecided:
            return "undecided: " + "; ".join(map(str, self.undecided))
        largest = sorted(self.errors.items(), key=lambda item: -item[1])[:4]
        errors = ", ".join(f"{name} {error:.1e}" for name, error in largest)
        where = "" if self.ok or not self.worst_at else f"; the worst is {self.worst_at}"
        return (
            f"{'ok' if self.ok else 'WRONG'}: {len(self.slots)} of {self.num_tokens} tokens computed again, largest "
            f"errors: {errors} (tolerance {self.tolerance:.0e} for {self.precision}){where}"
        )


class _Difference(NamedTuple):
    tensor: str
    where: str
    error: float


@torch.no_grad()
def verify_chunk(
    model: nn.Module, chunk: KVChunk, num_tokens: int = 32, seed: int = 0, *, tokenizer: Any = None
) -> ChunkVerification:
    """Compute sampled tokens of a chunk again, after what it had seen, and compare with what it holds.

    The prefix of its provenance is prefilled into a fresh cache, the chunk is put behind it, and the sampled tokens are
    computed with the stored cells before them. Each part of a merged chunk is treated so by itself. A chunk for
    recurrent or compressing layers is compiled again as a whole. Where a model takes no mask over chosen cells, and
    where cells were rounded (8 bits, another dtype), the sample is every token.

    The tolerance follows what the file says was done to its cells (``chunk.provenance``), and whoever wrote the file
    wrote that too: read ``precision`` before ``ok``.

    Args:
        model: in evaluation mode; not changed.
        chunk: not changed.
        num_tokens: how many tokens to compute at most, all of them if it has fewer; at least 1.
        seed: of the sample.
        tokenizer: compared with the producer's if given.

    Raises:
        CompatibilityError: if another model computed the chunk.
        UnsupportedModelError: if the self-test can't prove how the model's cells move.
        SpanError: for ``num_tokens`` below 1, or beyond the model's positions.
    """
    if num_tokens < 1:
        raise SpanError(f"verify: expected num_tokens of at least 1, got {num_tokens}.")
    require_compatible(identify(model, tokenizer), chunk, "verify")
    model = inner_model(model)
    spec = model_spec(model)
    precision = _precision(chunk)
    undecided = tuple(_undecided(model, chunk))
    if undecided or not len(chunk):
        undecided = undecided or (Reason("tokens", "at least one", "an empty chunk"),)
        return ChunkVerification((), len(chunk), {}, "", TOLERANCES[precision], precision, undecided)
    exact = precision == "float32"
    if chunk.recurrence is not None or chunk.compressed is not None:
        slots, differences = tuple(range(len(chunk))), list(_compiled_again(model, chunk, exact=exact))
    else:
        complete = precision in ("converted", "int8", "fp8") or bool(spec.against_recompute)
        slots = tuple(range(len(chunk))) if complete else _sample(chunk, num_tokens, seed)
        differences = []
        for part in _parts(chunk):
            inside = [slot - part.start for slot in slots if part.start <= slot < part.stop]
            differences += _recomputed(model, _piece(chunk, part), inside, part.start, exact=exact)
    errors: dict[str, float] = {}
    for each in differences:
        errors[each.tensor] = max(errors.get(each.tensor, 0.0), each.error)
    worst = max(differences, key=lambda each: each.error)
    return ChunkVerification(slots, len(chunk), errors, worst.where, TOLERANCES[precision], precision)


def _precision(chunk: KVChunk) -> str:
    """What sets the tolerance: of all that the cells went through that with the largest."""
    low = {str(dtype).removeprefix("torch.") for dtype in LOW_PRECISION}
    went_through = {"16 bits" if chunk.model.dtype in low else "float32"}
    for note in _notes(chunk):
        if stored := STORED.fullmatch(note):
            went_through.add(stored[1])
        elif CONVERTED.fullmatch(note):
            went_through.add("converted")
    return max(went_through, key=TOLERANCES.__getitem__)


def _notes(chunk: KVChunk) -> list[str]:
    texts = [chunk.provenance.note, *(part.note for part in chunk.provenance.parts)]
    return [note for text in texts for note in text.split("; ") if note]


def _undecided(model: nn.Module, chunk: KVChunk) -> Iterator[Reason]:
    """Why no forward of the chunk's ids after its prefix must give its cells."""
    provenance = chunk.provenance
    if provenance.how == "trained":
        yield Reason("provenance", "cells that a forward of tokens computed", "trained ones")
    for note in _notes(chunk):
        if not STORED.fullmatch(note) and not CONVERTED.fullmatch(note):
            yield Reason("provenance", "cells that were left as they were computed", note)
    ids = torch.tensor([*provenance.prefix_ids, *(i for part in provenance.parts for i in part.prefix_ids)])
    if bool((chunk.token_ids < 0).any()) or bool((ids < 0).any()):
        yield Reason("token ids", "known ones", "unknown ones")
    if provenance.parts and (chunk.recurrence is not None or chunk.compressed is not None):
        yield Reason("provenance", "a chunk for recurrent or compressing layers compiled as a whole", "a merged one")
    if chunk.images or bool(torch.isin(ids, torch.tensor(host.image_ids(model))).any()):
        yield Reason("tokens", "text", "images, whose pixels a chunk does not keep")


def _sample(chunk: KVChunk, num_tokens: int, seed: int) -> tuple[int, ...]:
    """Ascending slots: the first of the chunk and of its parts, the others at random."""
    firsts = [part.start for part in _parts(chunk)][:num_tokens]
    order = torch.randperm(len(chunk), generator=torch.Generator().manual_seed(seed)).tolist()
    return tuple(sorted(list(dict.fromkeys([*firsts, *order]))[:num_tokens]))


def _parts(chunk: KVChunk) -> tuple[Part, ...]:
    return chunk.provenance.parts or (Part(0, len(chunk), chunk.provenance.prefix_ids),)


def _piece(chunk: KVChunk, part: Part) -> KVChunk:
    """A part of a merged chunk as it was before the merge, at the positions where it stands now."""
    if not chunk.provenance.parts:
        return chunk
    values = {each.name: getattr(chunk.slice(part.start, part.stop), each.name) for each in fields(KVChunk)}
    return KVChunk(**{**values, "provenance": Provenance("precompiled", part.prefix_ids)})


def _recomputed(
    model: nn.Module, chunk: KVChunk, slots: list[int], start: int, *, exact: bool
) -> Iterator[_Difference]:
    """Differences of sampled cells from what the stored ones before them give; ``start`` is added to slots shown."""
    if not slots:
        return
    cache, seen = LedgeredCache(model), chunk.provenance.prefix_ids
    if seen:
        with cache.operation("verify"):
            run.extend(cache, torch.tensor([seen]), Segment("prefix", 0, 0, "prefilled"))
    splice(cache, None, chunk, seam_tokens=0, name="chunk")
    places = torch.tensor(slots) + len(seen)
    stored = [_cells(layer.view(), places) for layer in cache.editable_layers]
    with cache.operation("verify"):
        run.recompute_slots(cache, places)
    for facts, layer, before in zip(model_spec(model).layers, cache.editable_layers, stored, strict=True):
        for name, computed in _cells(layer.view(), places).items():
            errors = _cell_errors(before[name], computed, exact=exact)
            worst = int(errors.argmax())
            yield _Difference(
                name, f"layer {facts.layer_idx} {name}, slot {start + slots[worst]}", float(errors[worst])
            )


def _cells(states: Mapping[str, Tensor], slots: Tensor) -> dict[str, Tensor]:
    return {name: tensor[0].index_select(1, slots.to(tensor.device)) for name, tensor in states.items()}


def _compiled_again(model: nn.Module, chunk: KVChunk, *, exact: bool) -> Iterator[_Difference]:
    """Differences of everything that a chunk holds from the same text compiled now."""
    ends: dict[str, int | None] = {"head_tokens": None, "tail_tokens": None}
    if chunk.recurrence is not None:
        ends = {"head_tokens": chunk.recurrence.head, "tail_tokens": chunk.recurrence.tail}
    prefix = torch.tensor(chunk.provenance.prefix_ids, dtype=torch.int64)
    fresh = precompile(
        model, None, chunk.token_ids, prefix=prefix, head_tokens=ends["head_tokens"], tail_tokens=ends["tail_tokens"]
    )
    if not torch.equal(fresh.position_ids, chunk.position_ids):
        yield _Difference("position_ids", "position_ids", math.inf)
    stored, computed = tensors_of(chunk), tensors_of(fresh)
    for name in stored.keys() | computed.keys():
        mine, theirs = stored.get(name), computed.get(name)
        error = math.inf
        if mine is not None and theirs is not None and mine.shape == theirs.shape:
            by_token = name.startswith("layer ") and mine.dim() == 4
            pair = (mine[0], theirs[0]) if by_token else (mine.reshape(1, 1, -1), theirs.reshape(1, 1, -1))
            error = float(_cell_errors(*pair, exact=exact).max()) if mine.numel() else 0.0
        yield _Difference(name.split(" ")[-1], name, error)


def tensors_of(chunk: KVChunk) -> dict[str, Tensor]:
    """Every tensor of a chunk by a name whose last word tells its kind."""
    found = {f"layer {idx} {name}": t for idx, states in enumerate(chunk.layers) for name, t in states.items()}
    if chunk.recurrence is not None:
        for (layer_idx, state_idx), each in chunk.recurrence.transitions.items():
            for part, tensor in (("factor", each.factor), ("offset", each.offset), ("conv", each.conv)):
                if tensor is not None:
                    found[f"state {layer_idx}.{state_idx} transitions.{part}"] = tensor
    if chunk.compressed is not None:
        for layer_idx, held in chunk.compressed.layers.items():
            found |= {f"windows {layer_idx} compressed.{'.'.join(path)}": t for path, t in held.items()}
    return found


def _cell_errors(stored: Tensor, computed: Tensor, *, exact: bool) -> Tensor:
    """Relative error of each token, float64 ``[num_tokens]``, of ``[num_heads, num_tokens, head_dim]``.

    The reference is the cell's own size, or that of the median token where it is smaller: tokens that attention leans
    on have tiny values and huge keys.
    """
    mine, theirs = stored.double().cpu(), computed.double().cpu()
    difference = (mine - theirs).abs()
    if exact:
        error, size = difference.amax(dim=(0, 2)), theirs.abs().amax(dim=(0, 2))
    else:
        error, size = difference.square().mean(dim=(0, 2)).sqrt(), theirs.square().mean(dim=(0, 2)).sqrt()
    error = error / torch.maximum(size, size.median()).clamp_min(1e-30)
    return error.masked_fill(~error.isfinite(), math.inf)
