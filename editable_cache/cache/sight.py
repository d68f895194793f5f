"""Which images a forward or a prompt brings, held against those that the cache has seen.

Ids alone can't tell two images apart: all of them are the same placeholder. So the ledger records the content of each.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from editable_cache.adapters import host
from editable_cache.adapters.images import Images, num_axes, number, placeholders, read_images
from editable_cache.cache.ledger import UNKNOWN, Ledger
from editable_cache.errors import LedgerError


class Sight(NamedTuple):
    """What a forward shows the model besides ids.

    ``numbers`` is int64 ``[batch, num_new]``, the number of each new token's image in ``digests`` from 1 on, or 0.
    """

    model: nn.Module | None
    numbers: Tensor
    digests: tuple[str, ...]

    @property
    def num_axes(self) -> int:
        """How many positions a token has."""
        return 1 if self.model is None else num_axes(self.model)

    def positions(self, ledger: Ledger, ids: Tensor, valid: Tensor, arguments: dict[str, Any]) -> Tensor:
        """The model's own positions of the new tokens behind those of ``ledger``, ``[num_axes, batch, num_new]``."""
        assert self.model is not None
        first = ledger.next_positions(torch.ones((valid.shape[0], 1), dtype=torch.bool))[:, 0]
        return number(self.model, ids, first, valid, arguments)


def nothing_seen(batch: int, count: int) -> Sight:
    """A forward without images, of a model that nobody knows."""
    return Sight(None, torch.zeros((batch, count), dtype=torch.int64), ())


def look(
    model: nn.Module | None, ledger: Ledger, arguments: dict[str, Any], whole: Tensor | None, start: int
) -> tuple[dict[str, Any], Sight]:
    """The images of the new tokens of a forward; those that the cache covers already are taken out of the arguments.

    Args:
        arguments: of the forward, with the new ids only.
        whole: ids ``[batch, n]`` of all tokens to which the given images belong; the new ones begin at ``start``.

    Raises:
        LedgerError: if an image that the cache holds is another one, or is only partly covered.
        UnsupportedModelError: if the model keeps images elsewhere than in cells of tokens.
    """
    given = arguments.get("input_ids")
    given = given if given is not None else arguments["inputs_embeds"]
    batch, count = int(given.shape[0]), int(given.shape[1])
    sight = nothing_seen(batch, count)._replace(model=model)
    brought = model is not None and bool(host.image_tensors(arguments))
    if model is not None and not brought and "input_ids" in arguments and arguments["input_ids"] is not None:
        check_no_rest(model, ledger, len(ledger), given)
    if model is None or not brought or (len(ledger) and whole is not None and not placeholders(model, whole).any()):
        return {**arguments, **_kinds(arguments, count)}, sight
    images = read_images(model, whole, arguments)
    if images is None or whole is None:
        return {**arguments, **_kinds(arguments, count)}, sight
    check_images(ledger, images, whole, min(start, len(ledger)))
    chosen = _only_new(images, start)
    arguments = {name: value for name, value in arguments.items() if name not in images.tensors} | chosen
    sight = _of_slots(sight, images, start, count)
    shown = len(ledger) + count if bool(sight.numbers.any()) else count
    return {**arguments, **_kinds(arguments, count, shown)}, sight


class Opening(NamedTuple):
    """What a ``generate`` is given besides ids.

    Attributes:
        arguments: what to call it with.
        images: of the tokens from slot ``start`` on.
        own_positions: the positions among the arguments are not to be trusted.
    """

    arguments: dict[str, Any]
    images: Images | None
    start: int
    own_positions: bool

    def sight(self, model: nn.Module | None, batch: int, slot: int, count: int) -> Sight:
        """What a step of it shows that feeds ``count`` tokens from ``slot`` on."""
        sight = nothing_seen(batch, count)._replace(model=model)
        if self.images is None or slot >= self.start + self.images.numbers.shape[1]:
            return sight
        return _of_slots(sight, self.images, slot - self.start, count)


def open_generate(
    model: nn.Module, ledger: Ledger, ids: Tensor, arguments: dict[str, Any], keep: int, *, whole: bool
) -> Opening:
    """Hold the images of a prompt against those of the cache, leave out those that it covers, and number its tokens.

    The model would take the positions of a prompt behind a cache from the last image that it saw (``host.numbering``).

    Args:
        ids: ``[batch, num_tokens]``, the prompt, or only its new part.
        arguments: of the call.
        keep: how many slots of the cache stay.
        whole: ``ids`` repeat what the cache holds.

    Raises:
        LedgerError: if the prompt has another image than the cache, or the cache ends inside of one.
    """
    ids = ids.detach().cpu()
    own_positions, length, count = arguments.get("position_ids") is None, len(ledger), ids.shape[1]
    images = read_images(model, ids, arguments)
    start, done = (0, keep) if whole else (length, 0)
    if images is not None:
        if whole and length:
            check_images(ledger, images, ids, min(length, count))
        left_out = dict.fromkeys(images.tensors)
        arguments = {n: v for n, v in arguments.items() if n not in left_out} | _only_new(images, done)
    elif length:
        check_no_rest(model, ledger, keep if whole else length, ids[:, done:])
    if num_axes(model) == 1 or not own_positions:
        return Opening(arguments, images, start, own_positions)
    if length:
        mask, repeats = arguments.get("attention_mask"), ids.shape[0] // ledger.batch
        ledger = ledger.rows(torch.arange(ledger.batch).repeat_interleave(repeats))
        valid = torch.ones(ids.shape, dtype=torch.bool) if mask is None else mask[:, -count:].cpu().bool()
        fresh, valid, before = ids[:, done:], valid[:, done:], ledger.truncated(keep)
        if keep < min(length, count):
            new = ledger.places(slice(keep, count))  # the last token of the prompt runs again where it stands
        elif images is not None and bool(images.numbers[:, done:].any()):
            new = nothing_seen(*fresh.shape)._replace(model=model).positions(before, fresh, valid, arguments)
        else:
            new = before.next_positions(valid)
        places = _joined(before.places(slice(None)), new)
        arguments = {**arguments, "position_ids": places.to(host.device_of(model))}
    return Opening(arguments, images, start, own_positions=False)


def _joined(before: Tensor, after: Tensor) -> Tensor:
    """``position_ids`` of what stands before and of what is new, in the shape that shows all axes."""
    axes = max(before.dim(), after.dim()) == 3 and max(part.shape[0] for part in (before, after) if part.dim() == 3)
    if axes:
        before, after = (part if part.dim() == 3 else part.expand(axes, *part.shape) for part in (before, after))
    return torch.cat((before, after), dim=-1)


def _only_new(images: Images, start: int) -> dict[str, Any]:
    """The arguments for the images of tokens from ``start`` on.

    Raises:
        LedgerError: if the border cuts an image, or images can't be told apart.
    """
    wanted = [int(n) for n in images.numbers[:, start:].unique() if n]
    cut = set(wanted) & set(images.numbers[:, :start].unique().tolist())
    chosen = images.only(wanted)
    if cut or chosen is None:
        what = "inside an image" if cut else "between images that can't be told apart in these arguments"
        raise LedgerError(
            f"The cache ends at slot {start}, {what}; expected it to end in front of the image or behind it. Crop it "
            "to there, or pass the new tokens with their own images only."
        )
    return chosen


def _of_slots(sight: Sight, images: Images, start: int, count: int) -> Sight:
    """``sight`` with the images of ``count`` tokens from ``start`` on."""
    batch = sight.numbers.shape[0]
    given = images.numbers.repeat_interleave(batch // images.numbers.shape[0], dim=0)[:, start : start + count]
    numbers = sight.numbers.clone()
    digests = [int(n) for n in given.unique() if n]
    for new, old in enumerate(digests, start=1):
        numbers[:, : given.shape[1]][given == old] = new
    return sight._replace(numbers=numbers, digests=tuple(images.digests[n - 1] for n in digests))


def _kinds(arguments: dict[str, Any], count: int, shown: int | None = None) -> dict[str, Tensor]:
    """Kinds of tokens for the ``count`` new ones, where they were given for more or fewer.

    Models whose images are read in both directions look kinds up by slot, so that for a new image the mask needs them
    for all ``shown`` tokens; those of the cache say nothing more.
    """
    kinds = {}
    for name in host.TOKEN_KINDS:
        given = arguments.get(name)
        if isinstance(given, Tensor):
            wanted = count if shown is None or name not in host.KINDS_BY_SLOT else shown
            missing = max(wanted - given.shape[-1], 0)
            kinds[name] = torch.nn.functional.pad(given, (missing, 0))[..., -wanted:]
    return kinds


def check_images(ledger: Ledger, images: Images | None, ids: Tensor, covered: int) -> None:
    """Refuse images that differ from those at the same slots of the cache.

    Args:
        images: of a prompt or forward whose ids are ``ids``; without any the cache's own are meant.
        covered: how many first tokens of ``ids`` the cache holds.

    Raises:
        LedgerError: naming the slot.
    """
    if images is None or not covered:
        return
    rows = ids.shape[0] // ledger.batch
    held = ledger.images[:, :covered].repeat_interleave(rows, dim=0)
    known = (ledger.valid & (ledger.ids != UNKNOWN))[:, :covered].repeat_interleave(rows, dim=0)
    given = images.numbers[:, :covered]
    for row, slot in (((held > 0) | (given > 0)) & known).nonzero().tolist():
        mine = ledger.image_at(row // rows, slot)
        theirs = images.digests[int(given[row, slot]) - 1] if given[row, slot] else ""
        if mine != theirs:
            raise LedgerError(
                f"The image at slot {slot} of row {row} is another one than the cache saw there: expected "
                f"{_name(mine)}, got {_name(theirs)}. The placeholder ids are equal, the cells are not: start from "
                "an empty cache, crop this one to before the image, or splice a VisionChunk of the new image."
            )


def check_no_rest(model: nn.Module, ledger: Ledger, slot: int, ids: Tensor) -> None:
    """Refuse tokens without pixels that go on with an image of which the cache holds only the beginning.

    Args:
        slot: where the first of ``ids`` ``[batch, num_tokens]`` comes to stand.

    Raises:
        LedgerError: naming the slot.
    """
    if not slot or not ids.shape[1] or not bool(ledger.images[:, slot - 1].any()):
        return
    rows = ids.shape[0] // ledger.batch
    inside = ledger.images[:, slot - 1].repeat_interleave(rows) > 0
    if bool((inside & placeholders(model, ids[:, :1])[:, 0]).any()):
        raise LedgerError(
            f"The cache ends at slot {slot}, inside an image, and the rest of its placeholders came without pixels; "
            "expected it to end in front of the image or behind it. Crop it to before the image, and pass ids and "
            "image."
        )


def _name(digest: str) -> str:
    return f"content {digest[:12]}" if digest else "no image"
