"""Train SmolLM2-135M-Instruct to keep a gate: LoRA on generated decisions, judged in domains it has not seen.

    cd benchmarks && ../.venv/bin/python -m training.gatekeeper gatekeeper
    cd benchmarks && ../.venv/bin/python -m training.gatekeeper gatekeeper-no-updates
    cd benchmarks && ../.venv/bin/python -m training.gatekeeper gatekeeper-any-order

Where two variants begin with the same stages, a copy of one's checkpoint lets the other go on from there. A stopped
run goes on from its last checkpoint in ``results/partial``. Writes the adapter and ``training.json``
(settings and losses) to ``models/NAME``; ``evidence.gate`` judges it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm

from editable_cache.evaluation.chat import turn
from editable_cache.testing.real_models import load_smollm2
from training import corpus

HERE = Path(__file__).parents[1]
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
IGNORED = -100


@dataclass(frozen=True)
class Stage:
    """A part of the training; the learning rate falls by a cosine within each.

    Attributes:
        most_neutral: rules that decide nothing, at most; in a share of batches (``long_share``) up to all there are.
        direct, gated: shares of examples, see ``corpus.example``.
        updates: whether a variant that is trained on updates has them in this stage.
        any_order: the sections in any order; else the field comes before its rule.
        rate: of the learning rate.
        decision: weight of the first token of a direct answer, which is the decision; the other tokens have 1 together.
            Without it the decision is one token of many, and the loss hardly falls when it is learnt.
    """

    steps: int
    most_neutral: int = 6
    long_share: float = 0.08
    direct: float = 2 / 3
    gated: float = 0.0
    decision: float = 0.0
    updates: bool = True
    any_order: bool = False
    batch: int = 8
    rate: float = 1.0


@dataclass(frozen=True)
class Settings:
    """How it is trained."""

    updates: bool
    stages: tuple[Stage, ...]
    learning_rate: float = 1e-3
    warmup: int = 10
    rank: int = 16
    alpha: int = 32
    seed: int = 0
    checkpoint_every: int = 20

    def stage(self, step: int) -> tuple[Stage, int]:
        """The stage that a step belongs to, and the step within it."""
        for found in self.stages:
            if step < found.steps:
                return found, step
            step -= found.steps
        raise ValueError(f"expected a step below {self.steps}")

    @property
    def steps(self) -> int:
        """Of all stages."""
        return sum(stage.steps for stage in self.stages)


FIRST = Stage(steps=20, most_neutral=1, long_share=0.0, direct=1.0, gated=1.0, decision=1.0, updates=False, batch=16)
FOCUSED = Stage(steps=90, most_neutral=4, long_share=0.04, direct=0.8, gated=0.5, decision=1.0, rate=0.5)
CHAINS = Stage(steps=70, long_share=0.06, direct=0.5, gated=0.4, decision=1.0, rate=0.5)
ORDERS = Stage(steps=60, long_share=0.06, direct=0.7, gated=0.5, decision=1.0, any_order=True, rate=0.5)
STAGES = (Stage(steps=160), FIRST, FOCUSED, CHAINS)
VARIANTS = {
    "gatekeeper": Settings(updates=True, stages=STAGES),
    "gatekeeper-no-updates": Settings(updates=False, stages=(Stage(steps=140), replace(FOCUSED, steps=60))),
    "gatekeeper-any-order": Settings(updates=True, stages=(*STAGES, ORDERS)),
}


def encoded(tokenizer: Any, found: corpus.Example, around: tuple[str, str]) -> tuple[list[int], list[int]]:
    """Ids of prompt and completion, tokenized apart as they are when the model is asked."""
    context, question, completion = corpus.text_of(found)
    prompt = tokenizer(around[0] + context).input_ids
    prompt += tokenizer(question + around[1], add_special_tokens=False).input_ids
    if found.item.mode == "direct":
        prompt += tokenizer(found.item.prefix, add_special_tokens=False).input_ids
    return prompt, [*tokenizer(completion, add_special_tokens=False).input_ids, tokenizer.eos_token_id]


def batch_of(
    tokenizer: Any, settings: Settings, stage: Stage, rng: random.Random, around: tuple[str, str]
) -> tuple[Tensor, Tensor, Tensor]:
    """Ids and labels ``[batch, seq_len]``, padded on the right; only completions are learnt. Then where the decisions
    are, bool ``[batch, seq_len]``.
    """
    most = len(corpus.TRAINED.neutral) if rng.random() < stage.long_share else stage.most_neutral
    neutral = rng.randint(0, most)  # one number for the batch: rows of about one length
    share = {"direct": stage.direct, "gated": stage.gated}
    examples = [
        corpus.example(
            rng, updates=settings.updates and stage.updates, neutral=neutral, any_order=stage.any_order, **share
        )
        for _ in range(stage.batch)
    ]
    rows = [encoded(tokenizer, found, around) for found in examples]
    longest = max(len(prompt) + len(completion) for prompt, completion in rows)
    ids = torch.full((len(rows), longest), tokenizer.eos_token_id)
    labels = torch.full((len(rows), longest), IGNORED)
    decisions = torch.zeros((len(rows), longest), dtype=torch.bool)
    for row, (prompt, completion) in enumerate(rows):
        whole = prompt + completion
        ids[row, : len(whole)] = torch.tensor(whole)
        labels[row, len(prompt) : len(whole)] = torch.tensor(completion)
        decisions[row, len(prompt)] = examples[row].item.mode == "direct"
    return ids, labels, decisions


def losses_of(model: Any, ids: Tensor, labels: Tensor, decisions: Tensor) -> tuple[Tensor, Tensor]:
    """Mean cross entropy of the completions' tokens, and of the decisions among them.

    Logits are made at these tokens only: the vocabulary is large.
    """
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(input_ids=ids).last_hidden_state[:, :-1]
        told = labels[:, 1:] != IGNORED
        logits = model.lm_head(hidden[told])
    each = torch.nn.functional.cross_entropy(logits.float(), labels[:, 1:][told], reduction="none")
    deciding = decisions[:, 1:][told]
    return each.mean(), each[deciding].sum() / max(int(deciding.sum()), 1)


def train(name: str, settings: Settings, threads: int) -> None:
    """Train, or go on; at the end write the adapter."""
    torch.set_num_threads(threads)
    torch.manual_seed(settings.seed)
    base, tokenizer = load_smollm2(torch.float32)
    lora = LoraConfig(r=settings.rank, lora_alpha=settings.alpha, target_modules=PROJECTIONS, task_type="CAUSAL_LM")
    model = get_peft_model(base, lora)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=settings.learning_rate, weight_decay=0.0)
    around = turn(tokenizer)
    kept = HERE / "results" / "partial" / f"{name}-checkpoint"
    log = _resume(model, optimizer, kept)
    started = time.time()
    for step in tqdm(range(len(log), settings.steps), desc=name, initial=len(log), total=settings.steps):
        rng = random.Random(f"{settings.seed} {step}")
        stage, within = settings.stage(step)
        decay = 0.5 * (1 + math.cos(math.pi * within / stage.steps))
        for group in optimizer.param_groups:
            group["lr"] = (
                stage.rate * settings.learning_rate * min((within + 1) / settings.warmup, 1.0) * (0.05 + 0.95 * decay)
            )
        loss, decision = losses_of(base, *batch_of(tokenizer, settings, stage, rng, around))
        (loss + stage.decision * decision).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        told = {"loss": loss.item(), "decision": decision.item(), "seconds": time.time() - started}
        log.append({name: round(value, 4) for name, value in told.items()})
        if step % 5 == 4:
            recent = log[-10:]
            means = {name: sum(entry.get(name, 0.0) for entry in recent) / len(recent) for name in told}
            tqdm.write(f"{step + 1}: " + ", ".join(f"{name} {value:.3f}" for name, value in means.items()))
        started = time.time()
        if (step + 1) % settings.checkpoint_every == 0:
            _checkpoint(model, optimizer, log, kept)
    folder = HERE / "models" / name
    folder.mkdir(parents=True, exist_ok=True)
    weights = {key: value.to(torch.bfloat16) for key, value in get_peft_model_state_dict(model).items()}
    save_file(weights, folder / "adapter_model.safetensors")
    described = lora.to_dict() | {
        "base_model_name_or_path": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "inference_mode": True,
        "target_modules": PROJECTIONS,
    }
    (folder / "adapter_config.json").write_text(json.dumps(described, indent=1, default=str) + "\n", "utf-8")
    minutes = sum(entry["seconds"] for entry in log) / 60
    report = {"settings": asdict(settings), "minutes": round(minutes, 1), "threads": threads, "log": log}
    (folder / "training.json").write_text(json.dumps(report) + "\n", "utf-8")


def _checkpoint(model: Any, optimizer: Any, log: list[dict[str, float]], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    state = {f"weights.{key}": value.contiguous() for key, value in get_peft_model_state_dict(model).items()}
    for index, moments in optimizer.state_dict()["state"].items():
        state |= {f"optimizer.{index}.{key}": value.contiguous() for key, value in moments.items()}
    save_file(state, folder / "new.safetensors", metadata={"log": json.dumps(log)})
    os.replace(folder / "new.safetensors", folder / "state.safetensors")


def _resume(model: Any, optimizer: Any, folder: Path) -> list[dict[str, float]]:
    path = folder / "state.safetensors"
    if not path.is_file():
        return []
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        log: list[dict[str, float]] = json.loads(file.metadata()["log"])
    state = load_file(path)
    set_peft_model_state_dict(model, _under(state, "weights."))
    moments: dict[int, dict[str, Tensor]] = {}
    for key, value in _under(state, "optimizer.").items():
        index, name = key.split(".")
        moments.setdefault(int(index), {})[name] = value
    optimizer.load_state_dict(optimizer.state_dict() | {"state": moments})
    return log


def _under(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=VARIANTS)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    train(arguments.name, VARIANTS[arguments.name], arguments.threads)


if __name__ == "__main__":
    main()
