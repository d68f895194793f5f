"""One prompt prefilled through our own cache: cells of all tokens, and the residual stream where lines end."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from editable_cache.errors import UnsupportedModelError
from editable_cache.evaluation.asking import Asking
from editable_cache.evaluation.probes.subject import Subject, entering, first_tensor, hooked
from editable_cache.evaluation.probes.tokens import Token, tokens_of
from editable_cache.evaluation.tasks import Item

ANCHORED_LINES = tuple(f"end-{number}:" for number in range(3))
"""Lines whose every token is an anchor; of the others only the last one is, and of the rule also ``ANCHORED``."""

ANCHORED = {
    *(f"to_{answer}:-{place}" for answer in ("first", "second") for place in range(1, 7)),
    *(f"{answer}:+{place}" for answer in ("first", "second") for place in range(2)),
}
"""Roles around the answers that the rule names."""

KEPT_BYTES = 3 * 2**30
"""Prefills that are kept, all together; older ones are computed again."""


@dataclass(frozen=True, eq=False)
class Prefilled:
    """A prompt of n tokens that was read.

    Attributes:
        ids: int64 ``[n]``.
        cells: of each layer, keys and values ``[1, num_key_value_heads, n - 1, head_dim]`` of all tokens but the last,
            which is computed anew whenever a decision is read.
        logits: float32 ``[vocab]`` behind the last token.
        tokens: n of them.
        field: slots ``(start, stop)`` of the field's value.
        anchors: int64 ``[a]``, slots behind the field's first token that end a line, all of the last lines, and
            those around the answers that the rule names.
        stream: ``[num_layers + 1, a, hidden_size]``, what enters each block at the anchors, and what leaves the last.
        attention: ``[num_layers, a, hidden_size]``, what attention adds to it; empty where that was not found.
        heads: ``[num_layers, a, num_heads * head_dim]``, what enters the attentions' output projections.
    """

    ids: Tensor
    cells: tuple[dict[str, Tensor], ...]
    logits: Tensor
    tokens: tuple[Token, ...]
    field: tuple[int, int]
    anchors: Tensor
    stream: Tensor
    attention: Tensor
    heads: Tensor

    @property
    def length(self) -> int:
        """Number of tokens, the last one included."""
        return len(self.ids)

    @property
    def roles(self) -> list[str]:
        """Role of each token."""
        return [token.role for token in self.tokens]

    def anchor(self, role: str) -> int | None:
        """Which anchor has this role."""
        for index, slot in enumerate(self.anchors.tolist()):
            if self.tokens[slot].role == role:
                return index
        return None

    def num_bytes(self) -> int:
        """Memory of all tensors."""
        held = [t for layer in self.cells for t in layer.values()] + [
            self.logits,
            self.stream,
            self.attention,
            self.heads,
        ]
        return sum(t.numel() * t.element_size() for t in held)


def prefilled(subject: Subject, item: Item, value: str) -> Prefilled:
    """Read the item's context with ``value``, and its question."""
    asking = Asking(subject.model, subject.tokenizer, item)
    with _streams(subject) as streams:
        cache = asking.ask(asking.held(value))
    logits = asking.read(cache)
    ids = cache.token_ids[0].cpu()
    last = len(ids) - 1
    cells = tuple(
        {name: t[..., :last, :].contiguous() for name, t in layer.view().items()} for layer in cache.editable_layers
    )
    start, stop = cache.ledger.field(item.field).spans[0][0], cache.ledger.field(item.field).spans[-1][1]
    tokens = tokens_of(subject.tokenizer, ids.tolist(), item, start)
    anchors = torch.tensor(
        [
            slot
            for slot, token in enumerate(tokens)
            if slot >= start and (token.closes or token.role.startswith(ANCHORED_LINES) or token.role in ANCHORED)
        ]
    )
    return Prefilled(ids, cells, logits, tuple(tokens), (start, stop), anchors, *streams(anchors, len(ids)))


class Prefills:
    """Prefills by key; the oldest are forgotten beyond ``KEPT_BYTES``."""

    def __init__(self, most_bytes: int = KEPT_BYTES) -> None:
        self._most = most_bytes
        self._kept: OrderedDict[tuple[str, ...], Prefilled] = OrderedDict()

    def get(self, key: tuple[str, ...], make: Callable[[], Prefilled]) -> Prefilled:
        """The prefill of that key, made now unless it is kept."""
        found = self._kept.pop(key, None)
        self._kept[key] = make() if found is None else found
        while len(self._kept) > 1 and sum(each.num_bytes() for each in self._kept.values()) > self._most:
            self._kept.popitem(last=False)
        return self._kept[key]


@contextmanager
def _streams(subject: Subject) -> Any:
    """Collect the residual stream of what runs; yields what picks anchors out of it afterwards."""
    entered: list[list[Tensor]] = [[] for _ in subject.blocks]
    written: list[list[Tensor]] = [[] for _ in subject.writers]
    joined: list[list[Tensor]] = [[] for _ in subject.projections]
    left: list[Tensor] = []
    handles = []
    for index, projection in enumerate(subject.projections):
        handles.append(projection.register_forward_pre_hook(_keep_given(joined[index])))
    for index, block in enumerate(subject.blocks):
        handles.append(block.register_forward_pre_hook(_keep_entering(entered[index]), with_kwargs=True))
    for index, writer in enumerate(subject.writers):
        handles.append(writer.register_forward_hook(_keep_output(written[index])))
    handles.append(subject.blocks[-1].register_forward_hook(_keep_output(left)))

    def pick(anchors: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor]:
        def rows(pieces: list[Tensor]) -> Tensor:
            whole = torch.cat(pieces, dim=1)[0]
            if len(whole) != length:
                raise UnsupportedModelError(
                    f"probe: expected {length} tokens to pass each block once, got {len(whole)}."
                )
            return whole[anchors.to(whole.device)].float().cpu()

        stream = torch.stack([rows(pieces) for pieces in (*entered, left)])
        attention = torch.stack([rows(pieces) for pieces in written]) if written else stream[:0]
        return stream, attention, torch.stack([rows(pieces) for pieces in joined])

    with hooked(handles):
        yield pick


def _keep_entering(kept: list[Tensor]) -> Any:
    def hook(_module: nn.Module, args: Any, kwargs: Any) -> None:
        kept.append(entering(args, kwargs))

    return hook


def _keep_given(kept: list[Tensor]) -> Any:
    def hook(_module: nn.Module, args: Any) -> None:
        kept.append(args[0])

    return hook


def _keep_output(kept: list[Tensor]) -> Any:
    def hook(_module: nn.Module, _args: Any, output: Any) -> None:
        kept.append(first_tensor(output))

    return hook
