"""Causal tracing: at which layers does an MLP, at the subject's last token, bring a spoiled fact back?

Meng et al. 2022, section 2: the subject's embeddings are spoiled with noise, and what the clean run computed is put
back at one place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from editable_cache.comparison.blocks import Blocks, hooked
from editable_cache.comparison.request import Prompt

NOISE = 3.0
"""Standard deviations of the embeddings of the subject, as in the original."""


@dataclass(frozen=True, eq=False)
class Trace:
    """Probability of the true answer.

    Attributes:
        clean, spoiled: of the plain run, and with noise on the subject (mean over samples).
        restored: float64 ``[num_layers]``, with the MLPs of a window of layers around each one put back too.
    """

    clean: float
    spoiled: float
    restored: Tensor

    @property
    def effects(self) -> Tensor:
        """Indirect effect of each layer, ``[num_layers]``: what putting it back brings."""
        return self.restored - self.spoiled


def causal_trace(
    blocks: Blocks, prompt: Prompt, answer: int, *, window: int | None = None, samples: int = 4, seed: int = 0
) -> Trace:
    """Trace one fact through the MLPs at the subject's last token. The model is not changed.

    Args:
        answer: token id of the true answer.
        window: layers that are put back together; None takes a fifth of them (10 of 48 in the original).
        samples: draws of the noise.
    """
    count = len(blocks.layers)
    window = window or max(1, round(count / 5))
    ids = torch.tensor([prompt.ids])
    clean: list[Tensor] = []
    embedded: list[Tensor] = []
    handles = [
        projection.register_forward_hook(lambda _, args, output: clean.append(output[0, prompt.last]))
        for projection in blocks.projections
    ]
    handles.append(_embedding(blocks).register_forward_hook(lambda _, args, output: embedded.append(output[0])))
    with hooked(*handles):
        p_clean = _probability(blocks, ids, answer)
    start, end = prompt.subject
    noise = torch.zeros(samples, *embedded[0].shape)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(samples, end - start, noise.shape[-1], generator=generator)
    noise[:, start:end] = NOISE * float(embedded[0][start:end].std()) * drawn
    noise = noise.to(embedded[0])
    rows = ids.expand(samples, -1)

    def spoiled(put_back: range) -> float:
        hooks = [_embedding(blocks).register_forward_hook(lambda _, args, output: output + noise)]
        for layer in put_back:
            hook = _put_back(prompt.last, clean[layer])
            hooks.append(blocks.projections[layer].register_forward_hook(hook))
        with hooked(*hooks):
            return _probability(blocks, rows, answer)

    around = [range(max(0, layer - window // 2), min(count, layer - window // 2 + window)) for layer in range(count)]
    restored = torch.tensor([spoiled(layers) for layers in around], dtype=torch.float64)
    return Trace(p_clean, spoiled(range(0)), restored)


def mean_effects(traces: Sequence[Trace]) -> Tensor:
    """Average indirect effect of each layer over facts, float64 ``[num_layers]``; ROME edits where it is largest."""
    return torch.stack([trace.effects for trace in traces]).mean(0)


def _embedding(blocks: Blocks) -> Any:
    model: Any = blocks.model
    return model.get_input_embeddings()


def _put_back(token: int, clean: Tensor) -> Any:
    def hook(_: Any, args: Any, output: Tensor) -> Tensor:
        changed = output.clone()
        changed[:, token] = clean
        return changed

    return hook


def _probability(blocks: Blocks, ids: Tensor, answer: int) -> float:
    """Mean over the rows ``[rows, seq_len]`` of the probability of the answer at the end."""
    with torch.no_grad():
        logits = blocks.head(blocks.hidden(ids)[:, -1]).double()
    return float(logits.softmax(-1)[:, answer].mean())
