"""How much a chunk loses that is composed into a hybrid: `python benchmarks/hybrids.py [--quick]` writes
`results/hybrids.json`.

Tiny hybrids learn fact recall from nothing (`recall.py`), on whole texts only. Then two chunks of every text are
compiled alone and spliced behind its prefix, each fact is asked for, and the next-token logits are compared with those
of a stock prefill of the same ids. Controls lack a part of the composition. Also: bytes of transitions and cells, and
the time of a splice against a prefill of the chunk, on larger random models.
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import recall
import torch
from hybrids_cost import cost
from timing import write
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel
from transformers.utils import logging

from editable_cache import EditableCache, Skill
from editable_cache.chunk import Transition
from editable_cache.testing import oracles
from editable_cache.testing.contents import cells_in, recurrent_in
from editable_cache.testing.threaded import named_cells, threaded

Change = Callable[[PreTrainedModel, Skill, Transition, tuple[int, int]], Transition]
RESAMPLES = 1000


def own_state(model: PreTrainedModel, chunk: Skill, transition: Transition, slot: tuple[int, int]) -> Transition:
    """The chunk leaves the state that it had when it ran alone: what stands before it is forgotten."""
    assert chunk.recurrence is not None
    if transition.offset is None:
        return transition
    head = EditableCache(model)
    head.append(chunk.token_ids[: chunk.recurrence.head])
    layer: Any = head.layers[slot[0]]
    return replace(transition, form="replace", factor=None, offset=transition.apply(layer.recurrent_states[slot[1]]))


def identity(model: PreTrainedModel, chunk: Skill, transition: Transition, slot: tuple[int, int]) -> Transition:
    """The chunk leaves the state as it finds it: the chunk's body is forgotten."""
    if transition.offset is None:
        return transition
    return replace(
        transition,
        form="diagonal",
        factor=torch.ones([1] * transition.offset.dim()),
        offset=torch.zeros_like(transition.offset),
    )


def added(model: PreTrainedModel, chunk: Skill, transition: Transition, slot: tuple[int, int]) -> Transition:
    """The chunk's own part is added and nothing of the state decays (a plain sum, as in State Soup)."""
    if transition.offset is None:
        return transition
    return replace(transition, form="diagonal", factor=torch.ones([1] * transition.offset.dim()))


class Arm(NamedTuple):
    """How chunks are compiled, and what is done to their transitions."""

    head: int | None = None
    tail: int | None = None
    change: Change | None = None


ARMS: dict[str, Arm] = {
    "default": Arm(),
    "no tail": Arm(tail=0),
    "tail 8": Arm(tail=8),
    "head 8, no tail": Arm(head=8, tail=0),
    "head 8": Arm(head=8),
    "head 16": Arm(head=16),
    "head 1, no tail": Arm(head=1, tail=0),
    "control: states added, no factor": Arm(change=added),
    "control: the chunk's own state only": Arm(change=own_state),
    "control: the state before it only": Arm(change=identity),
}
"""By default the head is as long as the convolutions look back (3 here), and the tail has 4 tokens."""

LIVE = "appended live"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--quick", action="store_true", help="seconds of training, few texts, no result file")
    quick = arguments.parse_args().quick
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    result: dict[str, Any] = {
        "text": {"tokens": recall.TEXT.tokens, "facts": recall.TEXT.facts},
        "vocabulary": {"keys": recall.NUM_KEYS, "values": recall.NUM_VALUES, "fillers": recall.NUM_FILLERS},
        "models": {},
    }
    for name in list(recall.HYBRIDS)[: 1 if quick else None]:
        model = recall.build(name)
        training = recall.train(model, **({"first_steps": 25, "steps": 50} if quick else {}), say=tqdm.write)
        print(name, training)
        result["models"][name] = {"training": training._asdict(), **evaluate(model, texts=2 if quick else 32)}
        for arm, row in result["models"][name]["arms"].items():
            print(name, arm, row)
    result["cost"] = cost(quick=quick)
    print(result["cost"])
    if not quick:
        print(write("hybrids", result))


def evaluate(model: PreTrainedModel, *, texts: int, seed: int = 7) -> dict[str, Any]:
    """Every fact of some new texts asked for, for each arm."""
    model.requires_grad_(False)
    drawn = recall.draw(texts, recall.TEXT, torch.Generator().manual_seed(seed))
    groups = group_of_facts()
    check_composition(model, [part[0] for part in drawn.parts], drawn.keys[0])
    rows: dict[str, list[Tensor]] = {arm: [] for arm in (LIVE, *ARMS)}
    expected, worst = [], 0.0
    for index in tqdm(range(texts), desc=type(model).__name__, unit="text"):
        prefix, *chunks = (part[index] for part in drawn.parts)
        stock = torch.cat((prefix, *chunks)).expand(len(groups), -1)
        reference = model(torch.cat((stock, drawn.keys[index][:, None]), 1), use_cache=False).logits[:, -1]
        expected.append(reference)
        start = EditableCache(model)
        start.append(prefix)
        live = start.fork()
        for chunk in chunks:
            live.append(chunk)
        rows[LIVE].append(ask(model, live, drawn.keys[index]))
        worst = max(worst, oracles.check(rows[LIVE][-1], reference))
        skills = compiled(model, chunks)
        for name, arm in ARMS.items():
            cache = start.fork()
            for skill in skills[arm.head, arm.tail]:
                cache.splice(changed(model, skill, arm.change))
            assert torch.equal(cache.token_ids[0], stock[0])
            rows[name].append(ask(model, cache, drawn.keys[index]))
    full, values = torch.stack(expected).double(), drawn.values
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "texts": texts,
        "questions": values.numel(),
        "questions_by_place": {place: texts * groups.count(place) for place in dict.fromkeys(groups)},
        "live_against_stock_worst_relative_error": worst,
        "full_prefill_recall": recalled(full, values, groups),
        "arms": {arm: figures(torch.stack(found).double(), full, values, groups) for arm, found in rows.items()},
    }


def group_of_facts() -> list[str]:
    """Where each fact of a text stands."""
    prefix, first, second = recall.TEXT.facts
    places = [*["prefix"] * (prefix - 1), "right before a chunk", *["chunk 1"] * (first - 1), "right before a chunk"]
    return places + ["chunk 2"] * second


def compiled(model: PreTrainedModel, chunks: list[Tensor]) -> dict[tuple[int | None, int | None], list[Skill]]:
    """The chunks compiled alone, by how many of their first and last tokens will run live."""
    return {
        (head, tail): [
            Skill.precompile(model, None, ids, name=f"chunk {number}", head_tokens=head, tail_tokens=tail)
            for number, ids in enumerate(chunks, start=1)
        ]
        for head, tail in {(arm.head, arm.tail) for arm in ARMS.values()}
    }


def changed(model: PreTrainedModel, chunk: Skill, change: Change | None) -> Skill:
    """The chunk with other transitions, where the arm is a control."""
    if change is None:
        return chunk
    assert chunk.recurrence is not None
    transitions = {slot: change(model, chunk, each, slot) for slot, each in chunk.recurrence.transitions.items()}
    return replace(chunk, recurrence=replace(chunk.recurrence, transitions=transitions))


def ask(model: PreTrainedModel, cache: EditableCache, keys: Tensor) -> Tensor:
    """Next-token logits ``[num_keys, vocab_size]`` after each key alone."""
    answers = []
    for key in keys:
        answers.append(model(key[None, None], past_key_values=cache.fork()).logits[0, -1])
    return torch.stack(answers)


def check_composition(model: PreTrainedModel, parts: list[Tensor], keys: Tensor) -> None:
    """One spliced chunk equals the THREADED oracle to 1e-4; with its transitions changed it does not.

    Raises:
        AssertionError: otherwise.
    """
    prefix, chunk, _ = parts
    for name in ("default", "no tail", "control: the chunk's own state only", "control: the state before it only"):
        arm = ARMS[name]
        skill = Skill.precompile(model, None, chunk, name=name, head_tokens=arm.head, tail_tokens=arm.tail)
        skill = changed(model, skill, arm.change)
        assert skill.recurrence is not None
        result = threaded(
            model, prefix[None], chunk[None], keys[None], head=skill.recurrence.head, tail=skill.recurrence.tail, base=0
        )
        cache = EditableCache(model)
        cache.append(prefix)
        cache.splice(skill)
        logits = model(keys[None], past_key_values=cache).logits
        found = {"logits": logits, **cells_in(cache), **recurrent_in(cache)}
        expected = {"logits": result.logits, **named_cells(result.end)}
        errors = {n: oracles.relative_error(found[n], tensor) for n, tensor in expected.items()}
        assert (max(errors.values()) < 1e-4) is not name.startswith("control"), (name, errors)


def recalled(logits: Tensor, values: Tensor, groups: list[str]) -> dict[str, float]:
    """Share of right values by place. Shapes: logits ``[texts, facts, vocab_size]``, values ``[texts, facts]``."""
    right = (logits.argmax(-1) == values).double()
    at = {place: [index for index, group in enumerate(groups) if group == place] for place in groups}
    return {"all": round(float(right.mean()), 4)} | {
        place: round(float(right[:, indices].mean()), 4) for place, indices in at.items()
    }


def figures(logits: Tensor, full: Tensor, values: Tensor, groups: list[str]) -> dict[str, Any]:
    """Distance to the full prefill: quartiles over questions, and means with 95% bootstrap intervals over texts."""
    log_p, log_q = full.log_softmax(-1), logits.log_softmax(-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)
    same = (logits.argmax(-1) == full.argmax(-1)).double()
    cosine = torch.cosine_similarity(logits, full, dim=-1)
    centred = torch.cosine_similarity(
        logits - logits.mean(-1, keepdim=True), full - full.mean(-1, keepdim=True), dim=-1
    )
    edge = [index for index, group in enumerate(groups) if group == "right before a chunk"]
    return {
        "cosine": quartiles(cosine),
        "centred_cosine": quartiles(centred),
        "kl_nats": quartiles(kl),
        "kl_nats_mean": mean_with_interval(kl),
        "kl_nats_mean_right_before_a_chunk": mean_with_interval(kl[:, edge]),
        "same_top_token": mean_with_interval(same),
        "recall": recalled(logits, values, groups),
    }


def quartiles(values: Tensor) -> dict[str, float]:
    """Median, quartiles, mean and both ends."""
    numbers = values.flatten().tolist()
    low, median, high = statistics.quantiles(numbers, n=4)
    named = {"median": median, "q1": low, "q3": high, "least": min(numbers), "most": max(numbers)}
    return {name: _round(value) for name, value in {**named, "mean": statistics.mean(numbers)}.items()}


def mean_with_interval(values: Tensor, *, seed: int = 0) -> dict[str, float]:
    """Mean, and the middle 95% of it when whole texts are drawn again. Shape ``[texts, questions]``."""
    by_text = values.mean(1)
    generator = torch.Generator().manual_seed(seed)
    again = torch.randint(len(by_text), (RESAMPLES, len(by_text)), generator=generator)
    low, high = by_text[again].mean(1).quantile(torch.tensor([0.025, 0.975]).double()).tolist()
    return {"mean": _round(float(by_text.mean())), "low": _round(low), "high": _round(high)}


def _round(value: float) -> float:
    return float(f"{value:.6g}")


if __name__ == "__main__":
    main()
