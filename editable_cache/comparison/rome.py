"""ROME: rewrite one fact in the weights by a rank-one update of one MLP's last projection (Meng et al. 2022).

In the form that Gupta et al. 2024 call r-ROME: one and the same key, the mean over contexts, stands everywhere in the
update. The original code mixed it with the key of the prompt alone, which made single edits break models.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from editable_cache.comparison.blocks import Blocks, keys_of
from editable_cache.comparison.replay import Replay
from editable_cache.comparison.request import Prompt, Request
from editable_cache.comparison.restore import restored


@dataclass(frozen=True)
class Settings:
    """How the value is optimised; names and values of the original (its GPT-2 XL file).

    Attributes:
        steps: of Adam, at most; it stops once the target's loss is below ``enough`` nats.
        essence: weight of the KL divergence that keeps the essence prompt's answer.
        decay: weight of the shift's norm over the squared norm of the unedited value.
        most: the shift's norm is cut to this many norms of the unedited value.
    """

    steps: int = 20
    learning_rate: float = 0.5
    essence: float = 0.0625
    decay: float = 0.5
    most: float = 4.0
    enough: float = 0.05


@dataclass(frozen=True, eq=False)
class Value:
    """What is to be written.

    Attributes:
        key: k*, float64 ``[intermediate_size]``: mean of the subject's keys over the contexts.
        value: v*, float64 ``[hidden_size]``: what the projection shall give for it.
        losses: total loss before each step, in nats.
    """

    key: Tensor
    value: Tensor
    losses: tuple[float, ...]


@dataclass(frozen=True, eq=False)
class Edit:
    """An edit that is in force.

    Attributes:
        layer: whose projection was rewritten.
        written: key and value.
        seconds: from request to changed weights.
    """

    layer: int
    written: Value
    seconds: float


def optimised(blocks: Blocks, layer: int, request: Request, settings: Settings | None = None) -> Value:
    """Find the value that makes the model give the target, for the key of the subject. The model is not changed.

    The loss is the mean negative log probability of the target over the contexts, plus ``essence`` times the divergence
    at the essence prompt, plus the decay; all with the same shift added to the layer's output at the subject's token.
    """
    settings = settings or Settings()
    target = request.target
    contexts = [prompt.followed_by(target[:-1]) for prompt in request.prompts]
    replay = Replay(blocks, layer, [prompt.ids for prompt in contexts], [prompt.last for prompt in contexts])
    rows = [row for row in range(len(contexts)) for _ in target]
    tokens = [len(prompt.ids) - 1 + i for prompt in request.prompts for i in range(len(target))]
    wanted = torch.tensor([*target] * len(contexts), device=blocks.device)
    further = [keys_of(blocks, torch.tensor([prompt.ids[: prompt.subject[1]]]), (layer,)) for prompt in request.keyed]
    key = torch.cat([replay.keys, *(found[layer][0, -1:].double() for found in further)]).mean(0)
    plain = _projected(blocks.projections[layer], key)
    norm = float(plain.norm())
    kept = None if request.essence is None else _Essence(blocks, layer, request.essence)
    dtype = next(blocks.projections[layer].parameters()).dtype
    shift = torch.zeros_like(plain, dtype=dtype).requires_grad_()
    optimizer = torch.optim.Adam([shift], lr=settings.learning_rate)
    losses = []
    with torch.enable_grad():
        for _ in range(settings.steps):
            logits = replay.logits(shift, rows, tokens).float()
            told = nn.functional.cross_entropy(logits, wanted, reduction="mean") * len(target)
            loss = told + settings.decay * shift.norm() / norm**2
            if kept is not None and settings.essence:
                loss = loss + settings.essence * kept.divergence(shift)
            losses.append(float(loss.detach()))
            if float(told.detach()) < settings.enough:
                break
            (shift.grad,) = torch.autograd.grad(loss, [shift])
            optimizer.step()
            with torch.no_grad():
                shift *= min(1.0, settings.most * norm / max(float(shift.norm()), 1e-12))
    return Value(key, plain + shift.detach().double(), tuple(losses))


def rank_one(weight: Tensor, key: Tensor, value: Tensor, covariance: Tensor, bias: Tensor | None = None) -> Tensor:
    """The weight nearest to ``weight``, in the metric of the covariance, that maps ``key`` to ``value``.

    ``W' = W + (v* - W k*) (C^-1 k*)^T / (k*^T C^-1 k*)``, computed in float64 (Meng et al. 2022, equation 2).

    Args:
        weight: ``[hidden_size, intermediate_size]``. Not changed.
        covariance: ``E[k k^T]`` ``[intermediate_size, intermediate_size]``; the identity gives the smallest change.

    Returns:
        New tensor of the weight's shape and dtype.
    """
    wide, key, value = weight.detach().double(), key.double(), value.double()
    direction = torch.linalg.solve(covariance.double().to(key.device), key)
    missing = value - wide @ key - (0 if bias is None else bias.detach().double())
    changed: Tensor = wide + torch.outer(missing, direction) / (direction @ key)
    return changed.to(weight.dtype)


@contextmanager
def rome(
    model: nn.Module | Blocks,
    request: Request,
    *,
    layer: int,
    covariance: Tensor,
    settings: Settings | None = None,
    written: Value | None = None,
) -> Iterator[Edit]:
    """Edit the weights while the context lasts; then they have the bits that they had before.

    Args:
        model: a dense decoder, or its parts. The edit holds for everything that it is asked.
        layer: whose MLP is rewritten.
        covariance: of that layer's keys, see ``key_covariances``.
        written: a key and value found before; None finds them.

    Raises:
        UnsupportedModelError: for a model of another form.
    """
    blocks = model if isinstance(model, Blocks) else Blocks.of(model)
    blocks.require_layer(layer)
    started = time.perf_counter()
    found = written or optimised(blocks, layer, request, settings)
    projection = blocks.projections[layer]
    with restored(projection.weight):
        changed = rank_one(projection.weight, found.key, found.value, covariance, projection.bias)
        with torch.no_grad():
            projection.weight.copy_(changed)
        yield Edit(layer, found, time.perf_counter() - started)


class _Essence:
    """How far a shift moves the answer to the essence prompt."""

    def __init__(self, blocks: Blocks, layer: int, prompt: Prompt) -> None:
        self._replay = Replay(blocks, layer, [prompt.ids], [prompt.last])
        self._last = [len(prompt.ids) - 1]
        with torch.no_grad():
            self._before = self._replay.logits(None, [0], self._last).float().log_softmax(-1)

    def divergence(self, shift: Tensor) -> Tensor:
        """KL divergence of the answer now from the one before, in nats, a scalar."""
        now = self._replay.logits(shift, [0], self._last).float().log_softmax(-1)
        return (now.exp() * (now - self._before)).sum()


def _projected(projection: nn.Linear, key: Tensor) -> Tensor:
    found: Tensor = projection.weight.detach().double() @ key
    return found if projection.bias is None else found + projection.bias.detach().double()
