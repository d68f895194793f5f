"""Run only the upper layers again: what stands below the layer of an edit is computed once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from editable_cache.comparison.blocks import Blocks, hooked


class Replay:
    """Prompts whose lower layers have run, ready to be continued with a changed value at one token each.

    Rows are padded on the right; in a causal model what stands behind a token does not reach it.

    Args:
        layer: whose MLP output is changed; it and the blocks above are run again.
        rows: token ids of each prompt.
        at: of each row, the token whose value is changed.

    Attributes:
        keys: float64 ``[rows, intermediate_size]``, inputs of the layer's projection at those tokens.
    """

    def __init__(self, blocks: Blocks, layer: int, rows: Sequence[Sequence[int]], at: Sequence[int]) -> None:
        blocks.require_layer(layer)
        self._blocks, self._layer = blocks, layer
        self._rows, self._at = torch.arange(len(rows)), torch.tensor(list(at))
        longest = max(len(row) for row in rows)
        ids = torch.tensor([[*row, *[row[-1]] * (longest - len(row))] for row in rows])
        self._calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self._entered = torch.empty(0)
        found: list[Tensor] = []
        handles = [
            block.register_forward_pre_hook(lambda _, args, kwargs: self._keep(args, kwargs), with_kwargs=True)
            for block in blocks.layers[layer:]
        ]
        handles.append(blocks.projections[layer].register_forward_pre_hook(lambda _, args: found.append(args[0])))
        with hooked(*handles), torch.no_grad():
            blocks.hidden(ids)
        self.keys = found[0][self._rows, self._at].double()

    def logits(self, shift: Tensor | None, rows: Sequence[int], tokens: Sequence[int]) -> Tensor:
        """Logits ``[len(rows), vocab]`` at some tokens, ``tokens[i]`` of row ``rows[i]``.

        ``shift`` ``[hidden_size]`` is added to the layer's value at each row's token. Gradients reach it.
        """
        handle = self._blocks.projections[self._layer].register_forward_hook(
            lambda _, args, output: output if shift is None else self._shifted(output, shift)
        )
        hidden = self._entered
        with hooked(handle):
            for block, (args, kwargs) in zip(self._blocks.layers[self._layer :], self._calls, strict=True):
                made = block(hidden, *args, **kwargs)
                hidden = made[0] if isinstance(made, tuple) else made
        chosen = hidden[torch.tensor(list(rows)), torch.tensor(list(tokens))]
        found: Tensor = self._blocks.head(self._blocks.norm(chosen))
        return found

    def _shifted(self, output: Tensor, shift: Tensor) -> Tensor:
        return output.index_put((self._rows, self._at), shift.expand(len(self._rows), -1), accumulate=True)

    def _keep(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        kept = dict(kwargs)
        hidden, rest = (args[0], args[1:]) if args else (kept.pop("hidden_states"), ())
        if not self._calls:
            self._entered = hidden
        self._calls.append((tuple(rest), kept))
