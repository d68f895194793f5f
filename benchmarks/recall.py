"""Fact recall: a task that a tiny hybrid learns from nothing in minutes on one core, and the training.

A text is facts (a key token, a value token) among filler tokens; then comes a question mark and a key, and the value is
due. Texts are drawn from seeded generators. A model is trained on whole texts only, never on a composed cache.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

NUM_KEYS, NUM_VALUES, NUM_FILLERS = 24, 8, 4
KEYS = range(1, 1 + NUM_KEYS)
VALUES = range(KEYS.stop, KEYS.stop + NUM_VALUES)
FILLERS = range(VALUES.stop, VALUES.stop + NUM_FILLERS)
VOCAB_SIZE = FILLERS.stop

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 32,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 64,
    "initializer_range": 0.07,
}
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "gated delta net": (
        "qwen3_next",
        {
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
            "mlp_only_layers": [0, 1, 2],
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
        },
    ),
    "Mamba-2": ("bamba", {"num_hidden_layers": 3, "attn_layer_indices": [2], **MAMBA2}),
}
"""Model type and config of each hybrid: two recurrent layers in front of a full one."""


class Layout(NamedTuple):
    """Tokens and facts of each part of a text, and how many questions follow."""

    tokens: tuple[int, ...]
    facts: tuple[int, ...]
    questions: int


TEXT = Layout((16, 28, 28), (3, 4, 4), 11)
"""Prefix, chunk 1 and chunk 2. Prefix and chunk 1 end with a fact, right in front of a chunk."""


SHORT = Layout((8, 8, 8), (4, 4, 4), 12)
"""What training begins with."""

PROMOTED = 0.55
"""Share of right answers on short texts from which on texts are long."""


class Texts(NamedTuple):
    """Parts ``[num_texts, tokens]`` each; facts ``[num_texts, num_facts]`` in order of the text."""

    parts: list[Tensor]
    keys: Tensor
    values: Tensor


def draw(count: int, layout: Layout, generator: torch.Generator) -> Texts:
    """Random texts: keys without repetition, values with, facts anywhere among filler tokens."""
    num_facts = sum(layout.facts)
    order = torch.rand(count, NUM_KEYS, generator=generator).argsort(1)[:, :num_facts]
    keys = KEYS.start + order
    values = torch.randint(VALUES.start, VALUES.stop, (count, num_facts), generator=generator)
    parts, first = [], 0
    for index, (tokens, facts) in enumerate(zip(layout.tokens, layout.facts, strict=True)):
        ends_with_fact = index < len(layout.tokens) - 1
        items = tokens - facts  # a fact is one item of two tokens
        chosen = torch.rand(count, items - ends_with_fact, generator=generator).argsort(1)[:, : facts - ends_with_fact]
        if ends_with_fact:
            chosen = torch.cat((chosen, torch.full((count, 1), items - 1)), 1)
        at = chosen.sort(1).values + torch.arange(facts)
        part = torch.randint(FILLERS.start, FILLERS.stop, (count, tokens), generator=generator)
        part.scatter_(1, at, keys[:, first : first + facts])
        part.scatter_(1, at + 1, values[:, first : first + facts])
        parts.append(part)
        first += facts
    return Texts(parts, keys, values)


def with_questions(texts: Texts, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Whole texts with ``count`` questions and answers behind, and where the keys of the questions are."""
    num_texts, num_facts = texts.keys.shape
    asked = torch.rand(num_texts, num_facts, generator=generator).argsort(1)[:, :count]
    tail = torch.stack((texts.keys.gather(1, asked), texts.values.gather(1, asked)), -1).flatten(1)
    ids = torch.cat((*texts.parts, tail), 1)
    return ids, ids.shape[1] - tail.shape[1] + 2 * torch.arange(count)


class Training(NamedTuple):
    """How it went."""

    steps: int
    seconds: float
    held_out_accuracy: float
    held_out_questions: int
    goal: float


def build(name: str, *, seed: int = 0) -> PreTrainedModel:
    """An untrained hybrid, float32.

    Step sizes are drawn from 0.001 to 0.1 (Gu & Dao 2023, section 3.6; on a log scale, as their code does): with those
    that transformers puts there a state forgets within a token or two. Mamba-2 also gets matrices and convolutions as
    large as torch draws them (about 1 / sqrt(fan-in)): with those of transformers (0.02) what comes out of a state is
    lost beside the skip connection, and training does not get off the ground.
    """
    model_type, values = HYBRIDS[name]
    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **{**COMMON, **values})
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if "mamba_d_state" in values:
        for module in model.modules():
            if isinstance(module, nn.Conv1d):
                module.reset_parameters()
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("dt_bias"):
            step = torch.exp(torch.empty_like(parameter).uniform_(math.log(1e-3), math.log(1e-1)))
            parameter.data.copy_(step + torch.log(-torch.expm1(-step)))
    return model


def train(
    model: PreTrainedModel,
    *,
    batch: int = 32,
    learning_rate: float = 5e-3,
    first_steps: int = 800,
    steps: int = 900,
    goal: float = 0.99,
    seed: int = 1,
    say: Callable[[str], Any] = lambda line: None,
) -> Training:
    """Train on plain texts until held-out questions are answered, or the steps are done.

    Short texts come first, until most of their questions are answered: on long ones the same takes far longer. The rate
    falls to zero along a cosine over the long ones.
    """
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.01, betas=(0.9, 0.98))
    started, accuracy, layout, step, short_steps = time.perf_counter(), 0.0, SHORT, 0, 0
    held_out = with_questions(*_drawn(128, TEXT, 99))
    while step < short_steps + steps and accuracy < goal:
        model.train()
        ids, at = with_questions(draw(batch, layout, generator), layout.questions, generator)
        logits = model(ids, use_cache=False).logits[:, at]
        due = ids[:, at + 1]
        loss = F.cross_entropy(logits.flatten(0, 1), due.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        done = 0.0 if layout is SHORT else (step - short_steps) / steps
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * min(1.0, (step + 1) / 50) * (1 + math.cos(math.pi * done)) / 2
        optimizer.step()
        step += 1
        if layout is SHORT:
            short_steps = step
        if step % 25:
            continue
        right = float((logits.argmax(-1) == due).float().mean())
        if layout is not SHORT:
            accuracy = held_out_accuracy(model, *held_out)
        elif right > PROMOTED or step >= first_steps:
            layout = TEXT
        say(f"step {step}, {time.perf_counter() - started:.0f} s: right {right:.3f}, held out {accuracy:.3f}")
    accuracy = held_out_accuracy(model, *held_out)
    seconds = round(time.perf_counter() - started, 1)
    return Training(step, seconds, round(accuracy, 4), held_out[0].shape[0] * TEXT.questions, goal)


def _drawn(count: int, layout: Layout, seed: int) -> tuple[Texts, int, torch.Generator]:
    generator = torch.Generator().manual_seed(seed)
    return draw(count, layout, generator), layout.questions, generator


@torch.no_grad()
def held_out_accuracy(model: PreTrainedModel, ids: Tensor, at: Tensor) -> float:
    """Share of right answers."""
    model.eval()
    return float((model(ids, use_cache=False).logits[:, at].argmax(-1) == ids[:, at + 1]).float().mean())
