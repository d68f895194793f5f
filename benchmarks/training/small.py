"""Train small models from random weights to keep a gate, in a vocabulary of some 150 words.

    cd benchmarks && ../.venv/bin/python -m training.small small-llama
    cd benchmarks && ../.venv/bin/python -m training.small all

A stopped run goes on from its last checkpoint in ``results/partial``. Writes model, tokenizer, ``training.json``
(settings, loss, accuracies) and ``items.json`` (what it is judged on) to ``models/NAME``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from editable_cache.evaluation.tasks import Item, answered, write_items
from training import mini
from training.architectures import COMMON, CONVOLUTIONS, SLIDING, build

HERE = Path(__file__).parents[1]
JUDGED_LENGTHS = (8, 12)
"""Neutral rules of the items that judge; ``items.json`` holds those of the first."""


@dataclass(frozen=True)
class Settings:
    """Which model, and how it is trained.

    Training has stages: drills; drills and brief prompts; whole prompts. Each but the last ends when ``enough`` of it
    is right, or after ``most_steps`` in all; the last takes ``steps``, over which the rates fall.

    Attributes:
        learning_rate: of the matrices, which Muon trains.
        other_rate: of embeddings, norms and convolutions, which AdamW trains.
        whole_text: weight of the tokens of prompts beside those to be learnt.
        updates: whether texts hold lines that change a value.
        any_order: whether the sections of prompts stand in any order; else the field comes first and then its rule.
    """

    model_type: str
    config: dict[str, Any] = field(default_factory=dict)
    steps: int = 300
    most_steps: int = 4000
    enough: float = 0.9
    batch: int = 32
    learning_rate: float = 5e-3
    other_rate: float = 2e-3
    warmup: int = 30
    most_neutral: int = 6
    long_share: float = 0.15
    longest: int = 14
    whole_text: float = 0.05
    updates: bool = True
    any_order: bool = False
    seed: int = 0
    checkpoint_every: int = 50


MODELS = {
    "small-llama": Settings("llama"),
    "small-llama-no-updates": Settings("llama", updates=False),
    "small-qwen3": Settings("qwen3"),
    "small-gemma3": Settings("gemma3_text", SLIDING),
    "small-hybrid": Settings("lfm2", CONVOLUTIONS),
    "small-llama-any-order": Settings("llama", any_order=True),
    "small-gemma3-any-order": Settings("gemma3_text", SLIDING, any_order=True),
}


MAKERS: tuple[Callable[[random.Random], mini.Text], ...] = (
    mini.recall,
    mini.verdicts,
    partial(mini.decisions, updates=0.0),
    partial(mini.decisions, updates=1.0),
)
SHARES = ((0.1, 0.2, 0.35, 0.35), (0.0, 0.1, 0.1, 0.3), (0.0, 0.0, 0.0, 0.2))
"""What each stage is made of; the rest are prompts, brief ones before the last stage."""
LAST = len(SHARES) - 1


class Entry(NamedTuple):
    """A step of the log.

    Attributes:
        right: share of calls and values foreseen.
    """

    stage: int
    loss: float
    right: float
    seconds: float


def stage_of(settings: Settings, log: list[Entry]) -> int:
    """Of the next step."""
    stage = log[-1].stage if log else 0
    if stage == LAST or len(log) >= settings.most_steps:
        return LAST
    last = [entry.right for entry in log[-25:] if entry.stage == stage]
    return stage + (len(last) == 25 and sum(last) / 25 >= settings.enough)


def texts_of(settings: Settings, stage: int, rng: random.Random) -> list[mini.Text]:
    """The texts of a step."""
    most = settings.longest if rng.random() < settings.long_share else settings.most_neutral
    neutral = rng.randint(0, most) if stage == LAST else 0  # one for the batch: rows of about one length
    shares = SHARES[stage]
    if not settings.updates:
        shares = (*shares[:2], sum(shares[2:]), 0.0)
    texts = [
        make(rng) for make, share in zip(MAKERS, shares, strict=True) for _ in range(round(settings.batch * share))
    ]
    updates = 0.5 if settings.updates else 0.0
    texts += [
        mini.prompts(rng, neutral=neutral, updates=updates, brief=stage < LAST, any_order=settings.any_order)
        for _ in range(settings.batch - len(texts))
    ]
    return texts


def batch_of(tokenizer: Any, texts: list[mini.Text], whole_text: float) -> tuple[Tensor, Tensor]:
    """Ids int64 and weights float32 ``[batch, seq_len]``, padded on the right: calls and values that are to be learnt
    weigh 1, the other words of answers 0.1, those of prompts ``whole_text``.
    """
    rows = [[(token, told) for piece, told in text for token in tokenizer(piece).input_ids] for text in texts]
    longest = max(map(len, rows))
    ids = torch.full((len(rows), longest), tokenizer.pad_token_id)
    weights = torch.zeros(len(rows), longest)
    heavy = {*tokenizer.convert_tokens_to_ids([*mini.CALLS, *mini.VERDICTS, *itertools.chain(*mini.FIELDS.values())])}
    for at, row in enumerate(rows):
        ids[at, : len(row)] = torch.tensor([token for token, _ in row])
        weights[at, : len(row)] = torch.tensor(
            [(1.0 if token in heavy else 0.1) if told else whole_text for token, told in row]
        )
    return ids, weights


def loss_of(model: Any, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted mean of the cross entropy, and which share of the calls and values is foreseen."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    due, weights = ids[:, 1:], weights[:, 1:]
    each = F.cross_entropy(logits.flatten(0, 1), due.flatten(), reduction="none").view_as(due)
    deciding = weights == 1.0
    right = (logits.argmax(-1) == due)[deciding].float().mean()
    return (each * weights).sum() / weights.sum(), right


def optimizers(model: Any, settings: Settings) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for the rest."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=settings.learning_rate, weight_decay=0.0),
        torch.optim.AdamW(others, lr=settings.other_rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def train(name: str, settings: Settings) -> None:
    """Train, or go on; at the end write the model's folder."""
    torch.set_num_threads(1)
    tokenizer = mini.tokenizer()
    model = build(settings.model_type, settings.config, tokenizer, settings.seed)
    both = optimizers(model, settings)
    kept = HERE / "results" / "partial" / f"{name}-checkpoint"
    log = _resume(model, both, kept)
    bar = tqdm(desc=name, initial=len(log), mininterval=10)
    while (done := sum(entry.stage == LAST for entry in log)) < settings.steps:
        started = time.time()
        stage, step = stage_of(settings, log), len(log)
        texts = texts_of(settings, stage, random.Random(f"{settings.seed} {step}"))
        decay = 0.5 * (1 + math.cos(math.pi * done / settings.steps))
        for optimizer, rate in zip(both, (settings.learning_rate, settings.other_rate), strict=True):
            optimizer.param_groups[0]["lr"] = rate * min((step + 1) / settings.warmup, 1.0) * (0.02 + 0.98 * decay)
        loss, right = loss_of(model, *batch_of(tokenizer, texts, settings.whole_text))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in both:
            optimizer.step()
            optimizer.zero_grad()
        log.append(Entry(stage, round(loss.item(), 4), round(float(right), 3), round(time.time() - started, 2)))
        bar.set_postfix(stage=stage, loss=log[-1].loss, right=log[-1].right, refresh=False)
        bar.update()
        if len(log) % settings.checkpoint_every == 0:
            _checkpoint(model, both, log, kept)
            tqdm.write(f"{len(log)}: {log[-1]}")
        if len(log) % 200 == 0 and stage == LAST:
            tqdm.write(f"  held out: {foreseen(model, tokenizer, neutral=4)}")
    bar.close()
    finish(name, settings, model, tokenizer, log)


@torch.no_grad()
def foreseen(model: Any, tokenizer: Any, *, neutral: int) -> dict[str, float]:
    """Share of judged items whose whole completion is the most likely one, token by token, without and with update."""
    shares = {}
    for mode, updated in itertools.product(mini.MODES, (False, True)):
        right = []
        for item in mini.judged(mode, 4, neutral=neutral, seed=1):
            prompt, value = prompt_of(item, updated=updated)
            due = tokenizer(item.completion(value)).input_ids
            ids = torch.tensor([tokenizer(prompt).input_ids + due])
            logits = model(input_ids=ids, use_cache=False).logits[0]
            right.append(bool((logits[-len(due) - 1 : -1].argmax(-1) == torch.tensor(due)).all()))
        shares[f"{mode} {'updated' if updated else 'plain'}"] = round(sum(right) / len(right), 3)
    return shares


def prompt_of(item: Item, *, updated: bool) -> tuple[str, str]:
    """The whole prompt, with or without an erratum behind the context, and the value that it gives last."""
    value = item.new if updated else item.old
    erratum = mini.ERRATUM.format(name=item.field, value=value) if updated else ""
    return item.context(item.old) + erratum + item.question + (item.prefix if item.mode == "direct" else ""), value


@torch.no_grad()
def decides(model: Any, tokenizer: Any, item: Item, *, updated: bool) -> bool:
    """Whether what the model writes behind a whole prompt, reasoning included, ends in the right call."""
    prompt, value = prompt_of(item, updated=updated)
    ids = torch.tensor([tokenizer(prompt).input_ids])
    written = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=3 if item.mode == "direct" else 32,
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id,
    )[0, ids.shape[1] :]
    return answered(item, tokenizer.decode(written, skip_special_tokens=True)) == value


def judge(model: Any, tokenizer: Any, items: list[Item]) -> list[dict[str, Any]]:
    """Right answers and questions by mode and update."""
    rows = []
    for mode, updated in itertools.product(mini.MODES, (False, True)):
        chosen = [item for item in items if item.mode == mode]
        right = sum(decides(model, tokenizer, item, updated=updated) for item in chosen)
        rows.append({"mode": mode, "updated": updated, "right": right, "asked": len(chosen)})
    return rows


def finish(name: str, settings: Settings, model: Any, tokenizer: Any, log: list[Entry]) -> None:
    """Write the model's folder, then read it again and judge what was read."""
    folder = HERE / "models" / name
    folder.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    stored = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    held_out = {f"{neutral} neutral rules": judge(stored, tokenizer, _items(neutral)) for neutral in JUDGED_LENGTHS}
    write_items(folder / "items.json", _items(JUDGED_LENGTHS[0]), erratum=mini.ERRATUM)
    report = {
        "settings": asdict(settings),
        "config": {**COMMON, **settings.config},
        "parameters": sum(parameter.numel() for parameter in stored.parameters()),
        "minutes": round(sum(entry.seconds for entry in log) / 60, 1),
        "threads": 1,
        "held_out": held_out,
        "log": {
            "columns": ["step", *Entry._fields],
            "rows": [[step, *log[step]] for step in range(0, len(log), 20)],
        },
    }
    (folder / "training.json").write_text(json.dumps(report) + "\n", "utf-8")


def _items(neutral: int) -> list[Item]:
    return [item for mode in mini.MODES for item in mini.judged(mode, 4, neutral=neutral)]


def _checkpoint(model: Any, both: list[torch.optim.Optimizer], log: list[Entry], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    state = {f"weights.{key}": value.clone() for key, value in model.state_dict().items()}
    for which, optimizer in enumerate(both):
        for index, moments in optimizer.state_dict()["state"].items():
            state |= {f"optimizer.{which}.{index}.{key}": value.contiguous() for key, value in moments.items()}
    save_file(state, folder / "new.safetensors", metadata={"log": json.dumps(log)})
    os.replace(folder / "new.safetensors", folder / "state.safetensors")


def _resume(model: Any, both: list[torch.optim.Optimizer], folder: Path) -> list[Entry]:
    path = folder / "state.safetensors"
    if not path.is_file():
        return []
    with safe_open(path, "pt") as file:
        log = [Entry(*entry) for entry in json.loads(file.metadata()["log"])]
    state = load_file(path)
    model.load_state_dict({key.removeprefix("weights."): value for key, value in state.items() if key[0] == "w"})
    moments: list[dict[int, dict[str, Tensor]]] = [{}, {}]
    for key, value in state.items():
        if key[0] == "o":
            _, which, index, name = key.split(".")
            moments[int(which)].setdefault(int(index), {})[name] = value
    for optimizer, kept in zip(both, moments, strict=True):
        optimizer.load_state_dict(optimizer.state_dict() | {"state": kept})
    return log


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=[*MODELS, "all"])
    arguments = parser.parse_args()
    for name in MODELS if arguments.name == "all" else [arguments.name]:
        train(name, MODELS[name])


if __name__ == "__main__":
    main()
