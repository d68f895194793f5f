"""What is checked, and put right, before a forward or ``generate`` may use the cache.

Stock transformers trusts ids, mask and cache length to agree; where they do not it feeds the prompt twice, slices
with a negative length, or attends to padding, and answers fluently. Here every disagreement is either resolved to the
one right answer or raised.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from editable_cache.adapters import host
from editable_cache.cache.isolated import trained
from editable_cache.cache.ledger import UNKNOWN, Ledger
from editable_cache.cache.sight import Opening, Sight, look
from editable_cache.errors import LedgerError


class Entry(NamedTuple):
    """A checked forward: its arguments, and what the ledger will record if it succeeds (see ``Ledger``)."""

    arguments: dict[str, Any]
    ids: Tensor
    positions: Tensor
    valid: Tensor
    axes: Tensor
    images: Tensor
    digests: tuple[str, ...]


class Prompt(NamedTuple):
    """How a prompt given to ``generate`` relates to the cache.

    ``keep`` is the number of slots of the cache to keep: all of them, or one less than the prompt where the cache
    covers the whole prompt (``generate`` has to run at least its last token). ``length`` is the prompt's length if it
    repeats what the cache holds, None if it is only the new part.
    """

    keep: int
    length: int | None


def check_prompt(ledger: Ledger, ids: Tensor, mask: Tensor | None) -> Prompt:
    """Compare the prompt given to ``generate`` with the ledger.

    Args:
        ledger: what the cache holds.
        ids: ``[batch, num_tokens]``, the whole prompt, or only its new part together with a ``mask`` of full length.
        mask: 2-D attention mask, or None.

    Raises:
        LedgerError: if the prompt is not a continuation of what the cache holds.
    """
    length, count = len(ledger), ids.shape[1]
    if mask is not None and mask.shape[-1] == length + count and mask.shape[-1] != count:
        return Prompt(length, None)  # only the new tokens, as transformers allows
    if mask is not None and mask.shape[-1] != count:
        raise LedgerError(
            f"generate: the mask has {mask.shape[-1]} columns; expected {count} (the prompt) or {length + count} "
            "(cache and new tokens). Use cache.inputs(text_or_ids), which makes both."
        )
    if 0 < count <= length and bool(trained(ledger)[:, count - 1].any()):
        raise LedgerError(
            f"generate: the prompt ends at slot {count - 1}, at a trained cell, which no token made and none can make "
            f"again; expected at least one token behind the {length} slots of the cache, or a prompt that ends at a "
            "token."
        )
    covered = min(length, count)
    difference = first_difference(ledger, ids, covered)
    if difference is not None:
        row, slot = difference
        raise LedgerError(
            f"generate: the prompt is not a continuation of this cache: at slot {slot} of row {row} the cache holds "
            f"token {int(ledger.ids[row % ledger.batch, slot])}, the prompt has {int(ids[row, slot])}. Pass the whole "
            "sequence (cache.inputs(new_text) builds it), or bring the cache to this prompt with cache.sync(ids)."
        )
    return Prompt(min(length, count - 1), count)


def first_difference(ledger: Ledger, ids: Tensor, covered: int) -> tuple[int, int] | None:
    """Row and slot of the first attended token of ``ids[:, :covered]`` that the ledger does not hold, or None."""
    rows = ids.shape[0] // ledger.batch if len(ledger) else 1
    held = ledger.ids[:, :covered].repeat_interleave(rows, dim=0)
    valid = ledger.valid[:, :covered].repeat_interleave(rows, dim=0)
    wrong = ((held != ids[:, :covered].cpu()) & valid & (held != UNKNOWN)).nonzero()
    return (int(wrong[0, 0]), int(wrong[0, 1])) if len(wrong) else None


def check_continuation(ledger: Ledger, ids: Tensor, prompt: Tensor) -> None:
    """Refuse a step of ``generate`` that feeds other tokens of the prompt than those that follow the cache.

    Raises:
        LedgerError: naming the slot. Some versions of transformers feed a prompt from its start again in chunked
            prefill.
    """
    length = len(ledger)
    count = min(ids.shape[1], prompt.shape[1] - length)
    if count <= 0:
        return
    expected = prompt[:, length : length + count].repeat_interleave(ids.shape[0] // prompt.shape[0], dim=0)
    if not torch.equal(ids[:, :count], expected):
        raise LedgerError(
            f"generate: expected the tokens of the prompt from slot {length} on, got others: this way of generating "
            "does not know that the cache covers the start of the prompt. Leave prefill_chunk_size out, or append "
            "the prompt to the cache first."
        )


def check_batch(ledger: Ledger, batch: int) -> int:
    """How many times each row of the cache must be repeated to serve ``batch`` rows.

    Raises:
        LedgerError: if it does not divide.
    """
    if len(ledger) == 0 or batch == ledger.batch:
        return 1
    if batch > ledger.batch and batch % ledger.batch == 0:
        return batch // ledger.batch
    raise LedgerError(
        f"The cache holds {ledger.batch} rows and the input has {batch}. Keep the rows you want with "
        "cache.batch_select_indices(rows), or start from a fork taken before the batch was expanded."
    )


def prepare(
    ledger: Ledger,
    arguments: dict[str, Any],
    *,
    own_positions: bool,
    prompt_length: int | None,
    again: Ledger | None = None,
    model: nn.Module | None = None,
    opening: Opening | None = None,
) -> Entry:
    """Check the arguments of one forward and complete them.

    Args:
        ledger: what the cache holds, with as many rows as the input.
        arguments: the call's arguments by name.
        own_positions: the caller did not choose ``position_ids`` (``generate`` made them from the mask), so that the
            ledger's replace them.
        prompt_length: in the first forward of a ``generate`` whose prompt starts with what the cache holds, the
            length of that prompt: assisted decoding feeds all of it.
        again: the ledger up to the end of the prompt, if the prompt's last token was in the cache and runs again: it
            keeps its position.
        model: tells which tokens stand for images, and how it numbers them.
        opening: of the ``generate`` whose step this is.
    """
    ids, embeds = arguments.get("input_ids"), arguments.get("inputs_embeds")
    given = ids if ids is not None else embeds
    if given is None:
        raise LedgerError("forward: expected input_ids or inputs_embeds with this cache, got neither.")
    start, whole = 0, ids
    if ids is not None and len(ledger):
        fed_whole = prompt_length is not None and ids.shape[1] >= prompt_length
        if fed_whole or _says_whole(ledger, arguments):
            start, whole = len(ledger), ids
            arguments = _drop_covered(ledger, arguments)
        given = ids = arguments["input_ids"]
    batch, count = given.shape[0], given.shape[1]
    if opening is None:
        arguments, sight = look(model, ledger, arguments, whole, start)
    else:
        sight = opening.sight(model, batch, len(ledger), count)
    arguments, valid = _complete_mask(ledger, arguments, batch, count)
    seen = ids.detach().cpu().long() if ids is not None else torch.full((batch, count), UNKNOWN)
    told = model is not None and host.restarts_positions(model)
    arguments, places = _complete_positions(ledger, arguments, seen, valid, own_positions, again, sight, told=told)
    axes = (places[1:] - places[0]).movedim(0, -1)
    axes = axes if bool(axes.any()) else axes[..., :0]
    return Entry(arguments, seen, places[0], valid, axes, sight.numbers, sight.digests)


def _says_whole(ledger: Ledger, arguments: dict[str, Any]) -> bool:
    """Whether ids and a mask of their own length repeat everything that the cache holds, and more."""
    ids, mask = arguments["input_ids"], arguments.get("attention_mask")
    length, count = len(ledger), ids.shape[1]
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.shape[1] != count or count <= length:
        return False
    return first_difference(ledger, ids, length) is None


def _drop_covered(ledger: Ledger, arguments: dict[str, Any]) -> dict[str, Any]:
    """Feed only what the cache does not hold."""
    length, positions = len(ledger), arguments.get("position_ids")
    if positions is not None:
        arguments = {**arguments, "position_ids": positions[..., length:]}
    return {**arguments, "input_ids": arguments["input_ids"][:, length:]}


def _complete_mask(ledger: Ledger, arguments: dict[str, Any], batch: int, count: int) -> tuple[dict[str, Any], Tensor]:
    mask, length = arguments.get("attention_mask"), len(ledger)
    everything = torch.ones((batch, count), dtype=torch.bool)
    if mask is None:
        if bool(ledger.valid.all()):
            return arguments, everything
        full = torch.cat((ledger.valid, everything), dim=1).long()
        return {**arguments, "attention_mask": full.to(_device(arguments))}, everything
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        masks = mask.values() if isinstance(mask, dict) else [mask]
        for one in masks:
            if isinstance(one, Tensor) and one.shape[-1] != length + count:
                raise LedgerError(_mask_message(one.shape[-1], length, count))
        return arguments, everything
    if mask.shape[1] == length + count:
        valid = mask[:, length:].cpu().bool()
    elif mask.shape[1] == count and _is_new_part(ledger, arguments, count):
        valid = mask.cpu().bool()
    else:
        raise LedgerError(_mask_message(mask.shape[1], length, count))
    if mask.shape[1] == length + count and bool((mask[:, :length].cpu().bool() <= ledger.valid).all()):
        return arguments, valid
    kept = ledger.valid if mask.shape[1] == count else ledger.valid & mask[:, :length].cpu().bool()
    full = torch.cat((kept, valid), dim=1).to(mask.device, mask.dtype)
    return {**arguments, "attention_mask": full}, valid


def _is_new_part(ledger: Ledger, arguments: dict[str, Any], count: int) -> bool:
    """Whether ids with a mask of their own length are plainly new tokens, and not the covered prompt again."""
    ids = arguments.get("input_ids")
    return ids is None or count > len(ledger) or first_difference(ledger, ids, count) is not None


def _mask_message(got: int, length: int, count: int) -> str:
    return (
        f"forward: the mask has {got} columns; expected {length + count}: {length} slots of the cache and {count} new "
        "tokens. Pass a mask over all of them or none at all; if these tokens are in the cache already, roll back "
        "first with cache.crop(-count)."
    )


def _complete_positions(
    ledger: Ledger,
    arguments: dict[str, Any],
    ids: Tensor,
    valid: Tensor,
    own_positions: bool,
    again: Ledger | None,
    sight: Sight,
    *,
    told: bool,
) -> tuple[dict[str, Any], Tensor]:
    """The arguments with positions where the model would choose others, and all positions ``[num_axes, batch, n]``.

    A model with several axes keeps the distance of the last image that it saw, whoever's it was (``host.numbering``),
    so it is always told; others only where ``told`` says so.
    """
    given, several = arguments.get("position_ids"), sight.num_axes > 1
    batch, count = valid.shape
    if given is not None and not (own_positions and len(ledger)):
        return arguments, _rows(given, sight.num_axes).cpu().long().expand(-1, batch, count)
    length = len(ledger)
    positions = torch.arange(length, length + count).expand(batch, count)
    reference = positions if given is None or several else _rows(given, 1)[0].cpu().expand(batch, count)
    if several and bool(sight.numbers.any()):
        places = sight.positions(ledger, ids, valid, arguments)
        return {**arguments, "position_ids": places.to(_device(arguments))}, places
    if length:
        positions = ledger.next_positions(valid)
    if again is not None:
        last = again.positions[:, -1:].repeat_interleave(batch // again.batch, dim=0)
        positions = (positions + last - positions[:, :1]).masked_fill(~valid, 0)
    unsaid = told and given is None
    if not several and (not length or (torch.equal(positions, reference) and not unsaid)):
        return arguments, positions[None]
    wanted = positions if several or given is None or given.dim() == 2 else positions.expand(len(given), batch, count)
    return {**arguments, "position_ids": wanted.to(_device(arguments))}, positions[None]


def _rows(given: Tensor, num_axes: int) -> Tensor:
    """``position_ids`` as ``[num_axes or 1, batch, n]``. A row more than axes, in front, numbers text for the mask."""
    if given.dim() == 2:
        return given[None]
    return given[-num_axes:] if num_axes > 1 else given[:1]


def _device(arguments: dict[str, Any]) -> torch.device:
    given = arguments.get("input_ids")
    device: torch.device = (given if given is not None else arguments["inputs_embeds"]).device
    return device
