"""Fine-tune a LoRA until a decision flips (Hu et al. 2022).

As in the study's appendix I: rank 8 on the q, v and down projections.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from editable_cache.adapters.wrappers import inner_model
from editable_cache.errors import TaskError, UnsupportedModelError


@dataclass(frozen=True)
class LoraSettings:
    """How it is trained: Adam on the one prompt, until the target is likeliest, with probability ``enough``."""

    rank: int = 8
    alpha: int = 16
    modules: tuple[str, ...] = ("q_proj", "v_proj", "down_proj")
    learning_rate: float = 1e-3
    steps: int = 30
    enough: float = 0.5
    seed: int = 0


@dataclass(frozen=True)
class LoraEdit:
    """An adapter that is in force.

    Attributes:
        flipped: whether the target was reached within the steps.
        losses: before each step, in nats.
        seconds: of attaching and training.
    """

    flipped: bool
    losses: tuple[float, ...]
    seconds: float


@contextmanager
def lora(
    model: nn.Module, ids: tuple[int, ...], target: int, *, settings: LoraSettings | None = None
) -> Iterator[LoraEdit]:
    """Train an adapter so that ``target`` follows ``ids``, while the context lasts; then the model is as it was.

    The weights themselves are never written. Modules are wrapped, so a cache sees another adapter.

    Raises:
        ImportError: without peft.
        UnsupportedModelError: for a model that has adapters already.
        TaskError: for an empty prompt.
    """
    try:
        from peft import LoraConfig, LoraModel
    except ImportError as error:
        raise ImportError("fine-tuning needs peft: pip install 'editable-cache[evaluation]'") from error
    if not ids:
        raise TaskError("LoRA: expected a prompt, got no token.")
    inner: Any = inner_model(model)
    if "peft_config" in vars(inner) or inner is not model:
        raise UnsupportedModelError(
            f"LoRA: expected a plain model, got {type(model).__name__} with adapters or a wrapper; merge them first."
        )
    settings = settings or LoraSettings()
    started = time.perf_counter()
    wanted = [(parameter, parameter.requires_grad) for parameter in inner.parameters()]
    training = inner.training
    config: Any = LoraConfig(
        r=settings.rank, lora_alpha=settings.alpha, target_modules=list(settings.modules), lora_dropout=0.0
    )
    state = torch.random.get_rng_state()
    torch.manual_seed(settings.seed)
    tuner: Any = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tuner = LoraModel(inner, config, "default")
        inner.eval()
        torch.random.set_rng_state(state)
        flipped, losses = _trained(inner, torch.tensor([list(ids)]), target, settings)
        yield LoraEdit(flipped, losses, time.perf_counter() - started)
    finally:
        torch.random.set_rng_state(state)
        if tuner is not None:
            tuner.unload()
        vars(inner).pop("peft_config", None)
        for parameter, flag in wanted:
            parameter.requires_grad_(flag)
        inner.train(training)


def _trained(model: Any, ids: Tensor, target: int, settings: LoraSettings) -> tuple[bool, tuple[float, ...]]:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=settings.learning_rate)
    losses: list[float] = []
    ids = ids.to(parameters[0].device)
    wanted = torch.tensor([target], device=ids.device)
    with torch.enable_grad():
        for step in range(settings.steps + 1):
            logits = model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[:, -1].float()
            loss = nn.functional.cross_entropy(logits, wanted)
            losses.append(float(loss.detach()))
            done = int(logits[0].argmax()) == target and float(loss.detach().neg().exp()) >= settings.enough
            if done or step == settings.steps:
                return done, tuple(losses)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    raise AssertionError("the last step returns")
