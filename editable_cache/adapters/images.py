"""The images of a call: which tokens stand for them, what they are, and which positions the model gives to tokens."""

from __future__ import annotations

import contextlib
import hashlib
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from editable_cache.adapters import host
from editable_cache.errors import Reason, UnsupportedModelError

_axes: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Images:
    """The images (and videos) of a call.

    Attributes:
        numbers: int64 ``[batch, num_tokens]``: for each token from the first to the last that stands for an image, its
            number in ``digests`` from 1 on; 0 for all others.
        digests: SHA-256 over pixels, dtype, shape and sizes of each image, in the order of the tokens.
        tensors: the arguments that carry pixels and sizes.
        parts: for each of them, the rows of every image; empty where the images can't be told apart, so that all of
            them are one.
    """

    numbers: Tensor
    digests: tuple[str, ...]
    tensors: Mapping[str, Tensor]
    parts: Mapping[str, tuple[Tensor, ...]]

    def only(self, numbers: Sequence[int]) -> dict[str, Tensor] | None:
        """The arguments for some of the images, ascending; empty for none, None where they can't be told apart."""
        if not numbers:
            return {}
        if list(numbers) == list(range(1, len(self.digests) + 1)):
            return dict(self.tensors)
        if not self.parts:
            return None
        return {name: torch.cat([rows[n - 1] for n in numbers]) for name, rows in self.parts.items()}


def placeholders(model: nn.Module, ids: Tensor) -> Tensor:
    """bool ``[batch, num_tokens]``: ids that stand for a piece of an image or video."""
    known = host.image_ids(model)
    return (
        torch.isin(ids.cpu(), torch.tensor(known, dtype=torch.int64)) if known else torch.zeros_like(ids.cpu()).bool()
    )


def read_images(model: nn.Module, ids: Tensor | None, arguments: Mapping[str, Any]) -> Images | None:
    """The images among the arguments of a call, or None.

    Args:
        ids: ``[batch, num_tokens]``, all tokens to which these images belong.

    Raises:
        UnsupportedModelError: if the model keeps images elsewhere than in cells of their tokens.
    """
    tensors = host.image_tensors(arguments)
    if not any(tensor.is_floating_point() for tensor in tensors.values()):
        return None
    crossed = host.cross_attention_arguments(model)
    if crossed:
        raise UnsupportedModelError(
            f"images: this {type(model).__name__} attends to images outside of its tokens, in layers of their own, and "
            "a cache of tokens can't say which image those hold. Its text works; for images pass a DynamicCache.",
            tuple(Reason("argument", "images as cells of tokens", name) for name in crossed),
        )
    if ids is None or not bool((places := placeholders(model, ids)).any()):
        raise UnsupportedModelError(
            f"images: expected tokens that stand for the images in the ids of this {type(model).__name__}, got none: "
            "nobody could tell which cells belong to which image. Pass input_ids with the placeholders that the "
            "processor makes, or a DynamicCache."
        )
    count = int(places.sum())
    found = _by_grid(tensors, count) or _by_tile(tensors, count)
    tokens, parts = found if found is not None else ((count,), {})
    digests = tuple(
        _digest({name: rows[i] for name, rows in parts.items()} if parts else tensors) for i in range(len(tokens))
    )
    owners = torch.repeat_interleave(torch.arange(1, len(tokens) + 1), torch.tensor(tokens))
    numbers = torch.zeros(places.shape, dtype=torch.int64)
    numbers[places] = owners
    return Images(_closed(numbers, len(tokens)), digests, tensors, parts)


def _closed(numbers: Tensor, count: int) -> Tensor:
    """Tokens between those of one image (ends of its rows) belong to it too."""
    for row in numbers:
        for number in range(1, count + 1):
            slots = (row == number).nonzero()
            if len(slots):
                row[int(slots[0]) : int(slots[-1]) + 1] = number
    return numbers


Found = tuple[tuple[int, ...], dict[str, tuple[Tensor, ...]]]


def _by_grid(tensors: Mapping[str, Tensor], count: int) -> Found | None:
    """Patches in one list, and a grid ``[num_images, 3]`` that says how many are whose."""
    grids = [name for name, tensor in tensors.items() if name.endswith("grid_thw") and tensor.dim() == 2]
    if len(grids) != 1:
        return None
    grid = tensors[grids[0]]
    sizes = grid.prod(dim=-1).tolist()
    tokens = [size * count // sum(sizes) for size in sizes]
    parts = {}
    for name, tensor in tensors.items():
        if tensor.shape[0] == sum(sizes) and tensor.is_floating_point():
            parts[name] = tuple(tensor.split(sizes))
        elif tensor.shape[0] == len(sizes):
            parts[name] = tuple(tensor.split(1))
    fits = sum(tokens) == count and all(t * sum(sizes) == s * count for t, s in zip(tokens, sizes, strict=True))
    return (tuple(tokens), parts) if fits and parts.keys() == tensors.keys() else None


def _by_tile(tensors: Mapping[str, Tensor], count: int) -> Found | None:
    """Images, or tiles of images, in one list ``[num_images, ...]`` or one for each row, with as many tokens each.

    Tiles that are all zero are padding.
    """
    pixels = next((tensor for tensor in tensors.values() if tensor.is_floating_point()), None)
    if pixels is None or pixels.dim() < 4:
        return None
    lead = pixels.shape[: pixels.dim() - 3]
    flat = {}
    for name, tensor in tensors.items():
        if tensor.shape[: len(lead)] != lead:
            return None
        flat[name] = tensor.flatten(0, len(lead) - 1)
    real = range(int(lead.numel()))
    if len(lead) > 1:
        real = [i for i in real if bool(pixels.flatten(0, len(lead) - 1)[i].any())]  # type: ignore[assignment]
    sizes = tensors.get("image_sizes")
    if not len(real) or count % len(real) or (sizes is not None and bool((sizes != sizes[:1]).any())):
        return None
    rows = lead.numel() == lead[0]

    def part(tensor: Tensor, index: int) -> Tensor:
        return tensor[index : index + 1] if rows else tensor[index : index + 1][None]

    parts = {name: tuple(part(tensor, i) for i in real) for name, tensor in flat.items()}
    return (count // len(real),) * len(real), parts


def _digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over name, dtype, shape and bytes of each tensor."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


# -- numbering


def num_axes(model: nn.Module) -> int:
    """How many positions the model gives to each token: 1, or as many as its own numbering has rows.

    A numbering that fails on plain text (its config lacks a field that it reads) can't number images either; text is
    then numbered as everywhere.
    """
    known = _axes.get(model)
    if known is None:
        owner, known = host.numbering(model), 1
        if owner is not None:
            with contextlib.suppress(Exception):  # whatever a model raises on its own config
                known = int(_number(owner, torch.zeros((1, 1), dtype=torch.int64), {}).shape[0])
        _axes[model] = known
    return known


def number(model: nn.Module, ids: Tensor, first: Tensor, valid: Tensor, arguments: Mapping[str, Any]) -> Tensor:
    """The model's own positions for tokens behind ``first`` positions of text, int64 ``[num_axes, batch, num_tokens]``.

    Args:
        ids: ``[batch, num_tokens]``.
        first: int64 ``[batch]``, the position of the first token of each row.
        valid: bool ``[batch, num_tokens]``, False for padding.
        arguments: images, and what else the call was given.
    """
    count, ahead = ids.shape[1], int(first.max())
    owner = host.numbering(model)
    if owner is None:
        return (first[:, None] + valid.long().cumsum(dim=1) - 1).masked_fill(~valid, 0)[None]
    before = torch.full((ids.shape[0], ahead), host.plain_id(model))
    seen = torch.arange(ahead) >= ahead - first[:, None]
    kinds = {name: arguments[name] for name in host.TOKEN_KINDS if isinstance(arguments.get(name), Tensor)}
    if not kinds:
        kinds = {host.TOKEN_KINDS[0]: host.token_kinds(model, ids)}
    kinds = {name: torch.cat((kind.new_zeros(before.shape), kind[:, -count:]), dim=1) for name, kind in kinds.items()}
    given = {**arguments, **kinds, "attention_mask": torch.cat((seen, valid), dim=1).long()}
    return _number(owner, torch.cat((before, ids.cpu()), dim=1), given)[..., ahead:]


def _number(owner: Any, ids: Tensor, arguments: Mapping[str, Any]) -> Tensor:
    given = {"attention_mask": torch.ones_like(ids), host.TOKEN_KINDS[0]: torch.zeros_like(ids), **arguments}
    accepted = host.accepted(owner.get_rope_index, given)
    accepted.pop("input_ids", None)
    with torch.no_grad():
        positions: Tensor = owner.get_rope_index(
            ids.cpu(), **{name: v.cpu() if isinstance(v, Tensor) else v for name, v in accepted.items()}
        )[0]
    return positions.long()
