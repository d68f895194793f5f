"""The parts of a decoder that ROME needs: its blocks, the projection that writes each MLP's memory, norm and head."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from editable_cache.adapters.wrappers import inner_model
from editable_cache.errors import Reason, UnsupportedModelError

TRIAL_IDS = (1, 2, 3, 4)
TOLERANCE = 1e-3
"""Relative error up to which blocks, norm and head must give the model's own logits."""


@dataclass(frozen=True, eq=False)
class Blocks:
    """A decoder taken apart.

    Attributes:
        model: without wrappers, unchanged.
        decoder: what turns ids into the last hidden state.
        layers: its blocks in order.
        projections: of each block, the linear layer that ends its MLP. Its input is ROME's key ``[intermediate_size]``,
            its output the value ``[hidden_size]``.
        norm, head: what follows the last block.
    """

    model: nn.Module
    decoder: nn.Module
    layers: tuple[nn.Module, ...]
    projections: tuple[nn.Linear, ...]
    norm: nn.Module
    head: nn.Module

    @classmethod
    def of(cls, model: nn.Module) -> Blocks:
        """Find the parts, and run the model on four tokens to see that they are all there is.

        Raises:
            UnsupportedModelError: if a block has no ``mlp.down_proj`` that is a plain linear layer (experts, other
                layouts, adapters that are not merged), or if blocks, norm and head do not give the model's logits
                (squeezed logits, for example).
        """
        inner: Any = inner_model(model)
        kind = type(inner).__name__
        decoder = inner.get_decoder() if callable(getattr(inner, "get_decoder", None)) else None
        layers = tuple(getattr(decoder, "layers", None) or ())
        norm, head = getattr(decoder, "norm", None), inner.get_output_embeddings() if decoder is not None else None
        if decoder is None or not layers or not isinstance(norm, nn.Module) or not isinstance(head, nn.Module):
            raise UnsupportedModelError(
                f"ROME: expected a decoder with .layers, .norm and an output embedding, as Llama and Gemma have, got "
                f"{kind}; use a model of that form."
            )
        found = [getattr(getattr(layer, "mlp", None), "down_proj", None) for layer in layers]
        against = [
            Reason(f"layer {index}, mlp.down_proj", "a plain linear layer", type(each).__name__)
            for index, each in enumerate(found)
            if type(each) is not nn.Linear
        ]
        if against:
            raise UnsupportedModelError(
                f"ROME: it rewrites the projection that ends an MLP, and this {kind} has another one; merge adapters "
                "first, or use a dense Llama-like model.",
                tuple(against[:5]),
            )
        blocks = cls(inner, decoder, layers, tuple(each for each in found if each is not None), norm, head)
        blocks._require_whole(kind)
        return blocks

    def require_layer(self, layer: int) -> None:
        """Refuse a layer that is not there.

        Raises:
            UnsupportedModelError: with the number of layers.
        """
        if not 0 <= layer < len(self.layers):
            raise UnsupportedModelError(f"ROME: expected a layer from 0 to {len(self.layers) - 1}, got {layer}.")

    def hidden(self, ids: Tensor) -> Tensor:
        """Last hidden state ``[batch, seq_len, hidden_size]`` of ids ``[batch, seq_len]``, behind the final norm."""
        found: Tensor = self.decoder(input_ids=ids.to(self.device), use_cache=False).last_hidden_state
        return found

    @property
    def device(self) -> torch.device:
        """Where the head lives."""
        return next(self.head.parameters()).device

    def _require_whole(self, kind: str) -> None:
        ids = torch.tensor([TRIAL_IDS])
        with torch.no_grad():
            whole: Any = self.model
            logits = whole(input_ids=ids.to(self.device), use_cache=False).logits
            parts = self.head(self.hidden(ids))
        error = float((logits - parts).abs().max() / logits.abs().max())
        if not error <= TOLERANCE:
            raise UnsupportedModelError(
                f"ROME: the head of this {kind} does more than one projection of its last hidden state, so a value "
                "can't be optimised through it.",
                (Reason("relative error of the logits", f"at most {TOLERANCE:g}", f"{error:.2g}"),),
            )


class _StopForwardError(Exception):
    """Raised by a hook to leave a forward whose rest is not needed."""


@contextmanager
def hooked(*handles: Any) -> Iterator[None]:
    """Remove hooks when the context ends."""
    with ExitStack() as undo:
        for handle in handles:
            undo.callback(handle.remove)
        yield


def keys_of(blocks: Blocks, ids: Tensor, layers: tuple[int, ...]) -> dict[int, Tensor]:
    """Inputs of the projections of some layers, ``[batch, seq_len, intermediate_size]``, for ids ``[batch, seq_len]``.

    The forward ends at the highest of them. No gradients.
    """
    found: dict[int, Tensor] = {}

    def keep(layer: int, given: Tensor) -> None:
        found[layer] = given.detach()
        if layer == max(layers):
            raise _StopForwardError

    handles = [
        blocks.projections[layer].register_forward_pre_hook(lambda _, args, layer=layer: keep(layer, args[0]))
        for layer in layers
    ]
    with hooked(*handles), torch.no_grad(), suppress(_StopForwardError):
        blocks.hidden(ids)
    return found
