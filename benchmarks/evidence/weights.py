"""Editing the cache against editing the weights: ``python -m evidence.weights MODEL`` (the study's table 1).

A field changed after its context was read. Each arm has to turn the decision; then eight requests of the same policy
whose field did not change, and ten unrelated decisions, are asked again. A cache arm is asked on the other requests'
own caches, which are alive in the same process; a weight arm on full prefills, since weights that change make every
cache invalid. ROME edits the layer that ``evidence.rome_facts smollm2`` traced: run that first. A stopped run goes on.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from tqdm import tqdm

from editable_cache.comparison.blocks import Blocks
from editable_cache.comparison.covariance import Covariance
from editable_cache.comparison.lora import LoraSettings, lora
from editable_cache.comparison.request import Prompt, Request, prompt_of, random_prefixes
from editable_cache.comparison.rome import Settings, rome
from editable_cache.editable import EditableCache
from editable_cache.errors import ResultsError
from editable_cache.evaluation.arms import Case, arm
from editable_cache.evaluation.asking import Asking
from editable_cache.evaluation.metrics import p_correct
from editable_cache.evaluation.results import Row, Run
from editable_cache.evaluation.statistics import bootstrap
from editable_cache.evaluation.tasks import DOMAINS, Item, build
from editable_cache.ops import checksum
from evidence import commands, rome_facts

CACHE_ARMS = ("in_place", "erratum", "field+erratum")


@dataclass(frozen=True)
class Asked:
    """What is asked again after each edit.

    Attributes:
        unchanged: requests of the same policy whose field did not change.
        gated, lookups: unrelated decisions, of other domains.
    """

    unchanged: int = 8
    gated: int = 7
    lookups: int = 3


CONTEXTS = 4
"""Contexts over which ROME's key is the mean, beside the prompt itself."""


@dataclass(eq=False)
class Live:
    """One live request: its cache holds context and question; ``before`` is what it decides."""

    asking: Asking
    cache: EditableCache
    before: str | None

    @classmethod
    def of(cls, model: Any, tokenizer: Any, item: Item) -> Live:
        """Read it with its old value, which stays."""
        asking = Asking(model, tokenizer, item)
        cache = asking.ask(asking.held(item.old))
        return cls(asking, cache, asking.decide(cache).value)

    @property
    def ids(self) -> list[int]:
        """Everything that the cache holds."""
        return [int(token) for token in self.cache.token_ids[0]]

    def from_cache(self) -> str | None:
        """What a fork of its cache decides now."""
        return self.asking.decide(self.cache.fork()).value

    def from_weights(self) -> str:
        """What a full prefill decides with the weights as they are."""
        return self.asking.item.new if gap_of(self.asking, self.ids) > 0 else self.asking.item.old


def gap_of(asking: Asking, ids: Sequence[int]) -> float:
    """Logit of the new value's answer minus that of the old one's, behind a full prefill without any cache."""
    model: Any = asking.model
    logits = model(input_ids=torch.tensor([list(ids)]), use_cache=False, logits_to_keep=1).logits[0, -1].float()
    return float(logits[asking.new_id] - logits[asking.old_id])


def unchanged(item: Item, count: int) -> list[Item]:
    """The same request of other customers: policy, shape and field value are the same, the reference number is not.

    The number is the argument of a call that the request names too.
    """
    rng = random.Random(item.key)
    named = {word for text in item.answers.values() for word in re.findall(r'="(\w+)"', text)}
    reference = next(word for word in sorted(named) if re.search(r"\d", word) and item.template().count(word) > 1)
    drawn: list[Item] = []
    while len(drawn) < count:
        other = "".join(str(rng.randint(1, 9)) if letter.isdigit() else letter for letter in reference)
        if other == reference or any(each.key.endswith(f"/{other}") for each in drawn):
            continue
        sections = tuple(replace(section, text=section.text.replace(reference, other)) for section in item.sections)
        answers = {value: text.replace(reference, other) for value, text in item.answers.items()}
        drawn.append(replace(item, key=f"{item.key}/{other}", sections=sections, answers=answers))
    return drawn


class Table:
    """One model, the pool of unrelated decisions, and what ROME needs."""

    def __init__(self, name: str, run: Run, *, tokens: int, layer: int, neutral: int, asked: Asked) -> None:
        self.bench = rome_facts.Bench(name, run, rome_facts.Sizes(tokens=tokens))
        self.run, self.layer, self.asked = run, layer, asked
        self.covariance: Covariance = self.bench.covariance(layer)
        self.pool = {task: build(task, per_domain=1, neutral=neutral, seed=1) for task in ("gated", "lookup")}
        self._live: dict[str, Live] = {}

    @property
    def blocks(self) -> Blocks:
        """The model's parts."""
        return self.bench.blocks

    def read(self, item: Item) -> Live:
        """A live request."""
        return Live.of(self.bench.model, self.bench.tokenizer, item)

    def battery(self, item: Item) -> list[Live]:
        """Unrelated decisions: of other domains, gated ones and lookups. They stay alive from item to item."""
        rng = random.Random(f"battery {item.key}")
        chosen = []
        for task, count in (("gated", self.asked.gated), ("lookup", self.asked.lookups)):
            chosen += rng.sample([each for each in self.pool[task] if each.domain != item.domain], count)
        for each in chosen:
            if each.key not in self._live:
                self._live[each.key] = self.read(each)
        return [self._live[each.key] for each in chosen]

    def checksums(self) -> list[str]:
        """Of every weight."""
        return [checksum(parameter) for parameter in self.bench.model.parameters()]

    def item(self, item: Item) -> None:
        """All arms on one item."""
        case = Case.of(Asking(self.bench.model, self.bench.tokenizer, item))
        ends = case.ends()
        around = [self.read(other) for other in unchanged(item, self.asked.unchanged)]
        battery = self.battery(item)
        eligible = ends.stale.value == item.old and ends.exact.value == item.new
        common = {"kind": "arm", "domain": item.domain, "eligible": eligible, "tokens": len(case.asked.ledger)}
        rows = [{**common, **self.cache_arm(name, case, around, battery)} for name in CACHE_ARMS]
        before = self.checksums()
        for name, enter in self.weight_arms(case).items():
            row = self.weight_arm(name, enter, case, around, battery)
            rows.append({**common, **row, "restored": self.checksums() == before})
        self.run.add(item.key, rows)

    def cache_arm(self, name: str, case: Case, around: list[Live], battery: list[Live]) -> Row:
        """Edit the request's cache, then ask the others' caches."""
        begun = time.process_time()
        edited = arm(name)(case)
        started, spent = time.perf_counter(), time.process_time() - begun
        found = case.asking.decide(edited.cache)
        reading = time.perf_counter() - started
        assert found.gap is not None
        row = verdict(name, found.gap, edited.seconds, reading)
        row |= others(around, battery, Live.from_cache)
        row["cpu_seconds"] = round(spent, 3)
        return row | {"original_kept": case.asking.decide(case.asked).value == case.ends().stale.value}

    def weight_arms(self, case: Case) -> dict[str, Callable[[], AbstractContextManager[Any]]]:
        """ROME and LoRA on the stale prompt."""
        asking, ids = case.asking, tuple(int(token) for token in case.asked.token_ids[0])
        spans = case.asked.ledger.field(asking.item.field).spans
        request = self.rome_request(asking, Prompt(ids, (spans[0][0], spans[-1][1])))
        matrix = self.covariance.matrix
        return {
            "ROME": lambda: rome(self.blocks, request, layer=self.layer, covariance=matrix),
            "LoRA": lambda: lora(self.bench.model, ids, asking.new_id),
        }

    def rome_request(self, asking: Asking, prompt: Prompt) -> Request:
        """Make the prompt end in the new answer, because of the field's value; its key also behind other words."""
        item, tokenizer = asking.item, self.bench.tokenizer
        template = asking.template.replace("{{", "{").replace("}}", "}")
        start, rest = template.split(item.sections[0].text[:20], 1)
        holder = "{" + item.field + "}"
        before, _, after = (item.sections[0].text[:20] + rest).partition(holder)
        prefixes = random_prefixes(self.bench.texts[0], CONTEXTS)
        keyed = tuple(prompt_of(tokenizer, f"{start}{words}{before}", item.old, after[:1]) for words in prefixes)
        essence = prompt_of(tokenizer, f"{item.field}: ", item.old, " is a")
        return Request((prompt,), (asking.new_id,), essence, keyed)

    def weight_arm(
        self,
        name: str,
        enter: Callable[[], AbstractContextManager[Any]],
        case: Case,
        around: list[Live],
        battery: list[Live],
    ) -> Row:
        """Edit the weights, ask everything by full prefills, and put the weights back."""
        ids = [int(token) for token in case.asked.token_ids[0]]
        begun = time.process_time()
        with enter() as done:
            started, spent = time.perf_counter(), time.process_time() - begun
            gap = gap_of(case.asking, ids)
            reading = time.perf_counter() - started
            row = verdict(name, gap, done.seconds, reading)
            row |= others(around, battery, Live.from_weights)
        losses = done.written.losses if name == "ROME" else done.losses
        return row | {"cpu_seconds": round(spent, 3), "steps": len(losses), "loss": round(losses[-1], 4)}


def verdict(name: str, gap: float, seconds: float, reading: float) -> Row:
    """What became of the request itself. ``seconds`` of the edit; ``reading`` of getting its answer afterwards.

    A cache arm reads one token; behind a weight edit the whole prompt is read again.
    """
    return {
        "arm": name,
        "flips": gap > 0,
        "p_correct": round(p_correct(gap), 5),
        "seconds": round(seconds, 4),
        "reading": round(reading, 4),
    }


def others(around: list[Live], battery: list[Live], ask: Callable[[Live], str | None]) -> Row:
    """Shares of answers that changed: of the unchanged requests that were right, and of the unrelated decisions.

    ``contamination`` is None where no unchanged request was right before.
    """
    right = [each for each in around if each.before == each.asking.item.old]
    wrong = sum(ask(each) != each.asking.item.old for each in right)
    moved = sum(ask(each) != each.before for each in battery)
    return {
        "contamination": wrong / len(right) if right else None,
        "unchanged": len(right),
        "collateral": moved / len(battery),
        "battery": len(battery),
    }


def summary(run: Run) -> Iterator[str]:
    """One line per arm over items that were eligible, domains drawn as clusters."""
    rows = [row for row in run.results().rows if row.get("kind") == "arm"]
    keys = {row["key"] for row in rows}
    eligible = [row for row in rows if row["eligible"]]
    yield f"{len(keys)} items, {len({row['key'] for row in eligible})} decided by the field before and after"
    for name in dict.fromkeys(row["arm"] for row in eligible):
        mine = [row for row in eligible if row["arm"] == name]
        parts = [f"{name:14}"]
        for measure in ("flips", "seconds", "cpu_seconds", "reading", "contamination", "collateral"):
            held = [row for row in mine if row[measure] is not None]
            if held:
                counted = measure in ("flips", "contamination", "collateral")
                values, domains = [float(row[measure]) for row in held], [row["domain"] for row in held]
                found = bootstrap(values, domains, counted=counted)
                parts.append(f"{measure} {found}")
        yield ", ".join(parts)


def traced_layer() -> int:
    """The layer that the validation on facts chose.

    Raises:
        ResultsError: if it did not run.
    """
    settings = rome_facts.settings_of(rome_facts.Sizes())
    rows = commands.run_of("rome_facts", "smollm2", settings, quick=False).results().where(kind="covariance")
    if not rows:
        raise ResultsError("weights: ROME's layer is not known; run `python -m evidence.rome_facts smollm2` first.")
    return int(rows[0]["layer"])


def main() -> None:
    """The command."""
    options = commands.parser(__doc__, "one item, few other requests, little text for the covariance")
    options.add_argument("--items", type=int, default=50, help="adds to finished ones; each domain in turn")
    given = options.parse_args()
    commands.begin(given.threads)
    layer, neutral = traced_layer(), 0
    tokens = rome_facts.QUICK.tokens if given.quick else rome_facts.Sizes().tokens
    asked = Asked(2, 1, 1) if given.quick else Asked()
    settings = {
        "layer": layer,
        "covariance_tokens": tokens,
        "neutral": neutral,
        **asdict(asked),
        "rome": asdict(Settings()),
        "lora": asdict(LoraSettings()),
        "dtype": "float32",
    }
    run = commands.run_of("weights", given.model, settings, given.quick)
    items = build("gated", per_domain=1 if given.quick else -(-given.items // len(DOMAINS)), neutral=neutral)
    items = commands.in_turn(items, 1 if given.quick else given.items)
    left = [item for item in items if not run.has(item.key)]
    if left:
        table = Table(given.model, run, tokens=tokens, layer=layer, neutral=neutral, asked=asked)
        for item in tqdm(left, desc=f"{given.model}, cache against weights", unit="item"):
            table.item(item)
    print("\n".join(summary(run)))
    run.finish()


if __name__ == "__main__":
    main()
