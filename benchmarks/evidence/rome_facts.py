"""Does ROME work here? ``python -m evidence.rome_facts MODEL [--quick]`` writes ``evidence/rome_facts-MODEL.json``.

Facts that the model knows (the true object's first token is its first choice) are rewritten, one at a time, to another
object of their relation: efficacy on the prompt, on other wordings, and what becomes of other subjects. The layer is
where causal tracing finds the largest effect. Controls, on some of the facts: the first and the last layer, no
covariance, the value of another fact. A stopped run goes on.
"""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from editable_cache.comparison.blocks import Blocks
from editable_cache.comparison.covariance import Covariance, key_covariances, text_ids
from editable_cache.comparison.request import Request, prompt_of, random_prefixes, request_of
from editable_cache.comparison.rome import Settings, Value, optimised, rome
from editable_cache.comparison.trace import causal_trace
from editable_cache.evaluation.results import Row, Run
from editable_cache.evaluation.statistics import bootstrap
from editable_cache.ops import checksum
from evidence import commands, models

DATA = Path(__file__).parents[3] / "shared" / "data"
KEPT = commands.RESULTS.parent / "partial" / "covariance"
RELATION_FILES = ("country_capital_city", "country_largest_city", "landmark_in_country", "country_currency")
BATCH = 16
CONTROLS = ("first layer", "last layer", "no covariance", "another fact's value")


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    asked: int = 24
    facts: int = 4
    traced: int = 16
    samples: int = 3
    tokens: int = 100_000
    control_tokens: int = 20_000
    every: int = 4
    prefixes: int = 2
    keyed: int = 6
    relations: int = 99


QUICK = Sizes(asked=6, facts=1, traced=2, samples=1, tokens=2048, control_tokens=1536, every=2, relations=3, prefixes=1)


@dataclass(frozen=True)
class Fact:
    """``template`` with the subject in its braces is continued by the object."""

    relation: str
    template: str
    subject: str
    object: str

    @property
    def name(self) -> str:
        """For keys of results."""
        return f"{self.relation}/{self.subject}"


def read_facts() -> dict[str, list[Fact]]:
    """All facts by relation, one of each subject."""
    found: dict[str, dict[str, Fact]] = defaultdict(dict)
    for name in RELATION_FILES:
        content = json.loads((DATA / "rome" / "relations" / "factual" / f"{name}.json").read_text("utf-8"))
        for sample in content["samples"]:
            if "\\" not in sample["subject"] + sample["object"]:  # some letters are escaped twice
                fact = Fact(name, content["prompt_templates"][0], sample["subject"], sample["object"])
                found[name].setdefault(fact.subject, fact)
    for row in json.loads((DATA / "rome" / "known_1000.json").read_text("utf-8")):
        fact = Fact(row["relation_id"], row["template"], row["subject"], row["attribute"])
        found[fact.relation].setdefault(fact.subject, fact)
    return {relation: list(facts.values()) for relation, facts in found.items()}


def other_wordings(relation: str, facts: Sequence[Fact]) -> list[str]:
    """Templates of a relation, the most used ones first; those used once are left out, they are often odd."""
    if relation in RELATION_FILES:
        content = json.loads((DATA / "rome" / "relations" / "factual" / f"{relation}.json").read_text("utf-8"))
        return [
            template for template in content["prompt_templates"] + content["prompt_templates_zs"] if "{}" in template
        ]
    counts = Counter(fact.template for fact in facts)
    return [template for template, count in counts.most_common() if count > 1]


def documents() -> list[str]:
    """Real text: papers, PEPs, sonnets."""
    listed = json.loads((DATA / "documents" / "index.json").read_text("utf-8"))
    names = [entry["file"] for entry in listed]
    random.Random(0).shuffle(names)
    return [(DATA / "documents" / name).read_text("utf-8", errors="replace") for name in names]


class Bench:
    """One model with the texts and sizes of a run."""

    def __init__(self, name: str, run: Run, sizes: Sizes) -> None:
        self.model, self.tokenizer = models.load(name)
        self.blocks = Blocks.of(self.model)
        self.run, self.sizes = run, sizes
        self.facts = read_facts()
        self.texts = documents()
        self.prefixes = random_prefixes(self.texts[0], sizes.prefixes + sizes.keyed)

    def first(self, word: str) -> int:
        """First token of a word behind a text."""
        return int(self.tokenizer(f" {word}", add_special_tokens=False).input_ids[0])

    def answers(self, texts: Sequence[str]) -> Tensor:
        """Log probabilities ``[len(texts), vocab]`` of what follows each text."""
        rows = [self.tokenizer(text).input_ids for text in texts]
        found = []
        for start in range(0, len(rows), BATCH):
            batch = rows[start : start + BATCH]
            longest = max(map(len, batch))
            ids = torch.tensor([row + row[-1:] * (longest - len(row)) for row in batch])
            last = torch.tensor([len(row) - 1 for row in batch])
            hidden = self.blocks.hidden(ids)[torch.arange(len(batch)), last]
            found.append(self.blocks.head(hidden).float().log_softmax(-1))
        return torch.cat(found)

    def request(self, asked: Questions) -> Request:
        """What ROME is asked for."""
        fact, count = asked.fact, self.sizes.prefixes
        words = {"prefixes": self.prefixes[:count], "keyed": self.prefixes[count:]}
        return request_of(self.tokenizer, fact.template, fact.subject, f" {asked.new}", **words)

    def ask(self) -> None:
        """Which facts does it know?"""
        for relation in tqdm(list(self.facts)[: self.sizes.relations], desc="known facts", unit="relation"):
            if not self.run.has(f"known/{relation}"):
                some = random.Random(relation).sample(
                    self.facts[relation], min(self.sizes.asked, len(self.facts[relation]))
                )
                answers = self.answers([fact.template.format(fact.subject) for fact in some])
                wanted = [self.first(fact.object) for fact in some]
                rows = [
                    {"kind": "fact", **asdict(fact), "known": int(row.argmax()) == token, "p": float(row[token].exp())}
                    for fact, row, token in zip(some, answers, wanted, strict=True)
                ]
                self.run.add(f"known/{relation}", rows)

    def known(self) -> list[Fact]:
        """The known ones, relations taking turns, with an object that could be another one."""
        by_relation: dict[str, list[Fact]] = defaultdict(list)
        for row in self.run.results().where(kind="fact"):
            if row["known"]:
                by_relation[row["relation"]].append(
                    Fact(*(row[name] for name in ("relation", "template", "subject", "object")))
                )
        return [
            facts[place]
            for place in range(max(map(len, by_relation.values())))
            for facts in by_relation.values()
            if place < len(facts)
        ]

    def chosen(self) -> list[Fact]:
        """The facts that are rewritten: at most so many of each relation."""
        counts: Counter[str] = Counter()
        kept = []
        for fact in self.known():
            counts[fact.relation] += 1
            if counts[fact.relation] <= self.sizes.facts:
                kept.append(fact)
        return kept

    def layer(self) -> int:
        """Where tracing finds the largest mean effect among windows that leave the first MLP out.

        The first MLP sees little but the token itself: putting it back undoes noise on the embedding, of any token.
        """
        facts = self.chosen()[: self.sizes.traced]
        for fact in tqdm(facts, desc="causal tracing", unit="fact"):
            key = f"trace/{fact.name}"
            if not self.run.has(key):
                before, _, after = fact.template.partition("{}")
                prompt = prompt_of(self.tokenizer, before, fact.subject, after)
                trace = causal_trace(self.blocks, prompt, self.first(fact.object), samples=self.sizes.samples)
                effects = [round(float(effect), 5) for effect in trace.effects]
                self.run.add(
                    key, [{"kind": "trace", "clean": trace.clean, "spoiled": trace.spoiled, "effects": effects}]
                )
        rows = self.run.results().where(kind="trace")
        mean = torch.tensor([row["effects"] for row in rows], dtype=torch.float64).mean(0)
        window = max(1, round(len(mean) / 5))
        return int(mean[window // 2 + 1 :].argmax()) + window // 2 + 1

    def covariance(self, layer: int) -> Covariance:
        """Of a layer's keys over the text; what it took is kept as a row."""
        folder = None if self.sizes.tokens == QUICK.tokens else KEPT
        bos = self.tokenizer("").input_ids[:1]
        ids = text_ids(self.tokenizer, self.texts, self.sizes.tokens)
        found = key_covariances(self.blocks, ids, (layer,), folder=folder, bos=bos[0] if bos else None)[layer]
        if not self.run.has("covariance"):
            row = {"kind": "covariance", "layer": layer, "tokens": found.tokens, "seconds": round(found.seconds, 1)}
            self.run.add("covariance", [row])
        return found

    def control_covariances(self) -> dict[int, Covariance]:
        """Of the first and the last layer, over less text."""
        bos = self.tokenizer("").input_ids[:1]
        ids = text_ids(self.tokenizer, self.texts, self.sizes.control_tokens)
        folder = None if self.sizes is QUICK else KEPT
        ends = (0, len(self.blocks.layers) - 1)
        return key_covariances(self.blocks, ids, ends, folder=folder, bos=bos[0] if bos else None)


@dataclass(frozen=True)
class Questions:
    """What is asked before and after an edit."""

    fact: Fact
    new: str
    wordings: tuple[str, ...]
    neighbours: tuple[Fact, ...]

    def texts(self) -> list[str]:
        """The prompt, other wordings, neighbours."""
        subject = self.fact.subject
        wordings = [self.fact.template, *self.wordings]
        return [*(w.format(subject) for w in wordings), *(n.template.format(n.subject) for n in self.neighbours)]


def questions(bench: Bench, fact: Fact) -> Questions:
    """A new object, other wordings, and other subjects of the relation, those of the same object first."""
    rng = random.Random(fact.name)
    own = bench.first(fact.object)
    objects = sorted({each.object for each in bench.facts[fact.relation] if bench.first(each.object) != own})
    new = rng.choice(objects)
    wordings = [w for w in other_wordings(fact.relation, bench.facts[fact.relation]) if w != fact.template][:2]
    others = [each for each in bench.known() if each.relation == fact.relation and each.subject != fact.subject]
    others = [each for each in others if bench.first(each.object) != bench.first(new)]
    others.sort(key=lambda each: each.object != fact.object)
    return Questions(fact, new, tuple(wordings), tuple(others[:5]))


def judged(bench: Bench, asked: Questions, answers: Tensor) -> Row:
    """Efficacy, shares of other wordings and of neighbours, from the answers to ``asked.texts()``.

    Neighbours are facts that the model knows: ``neighbourhood`` is the share whose own object is still likelier than
    the new one, ``neighbours_said`` the share still answered right.
    """
    true, new = bench.first(asked.fact.object), bench.first(asked.new)
    wordings = range(1, 1 + len(asked.wordings))
    around = answers[1 + len(asked.wordings) :]
    kept = [float(row[bench.first(n.object)] > row[new]) for row, n in zip(around, asked.neighbours, strict=True)]
    said = [float(row.argmax() == bench.first(n.object)) for row, n in zip(around, asked.neighbours, strict=True)]
    return {
        "efficacy": float(answers[0, new] > answers[0, true]),
        "said": float(answers[0].argmax() == new),
        "p_new": round(float(answers[0, new].exp()), 5),
        "p_true": round(float(answers[0, true].exp()), 5),
        "paraphrase": _share([float(answers[i, new] > answers[i, true]) for i in wordings]),
        "neighbourhood": _share(kept),
        "neighbours_said": _share(said),
        "wordings": len(wordings),
        "neighbours": len(kept),
    }


def _share(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def edit(bench: Bench, asked: Questions, arm: str, layer: int, matrix: Tensor, written: Value | None = None) -> Row:
    """One edit, asked while it is in force, and undone."""
    request = bench.request(asked)
    weight = bench.blocks.projections[layer].weight
    before = checksum(weight)
    with rome(bench.blocks, request, layer=layer, covariance=matrix, written=written) as done:
        row = judged(bench, asked, bench.answers(asked.texts()))
    facts = {
        "kind": "edit",
        "arm": arm,
        "domain": asked.fact.relation,
        "layer": layer,
        "seconds": round(done.seconds, 2),
    }
    loss = done.written.losses[-1] if done.written.losses else None
    return {**facts, **row, "loss": loss, "steps": len(done.written.losses), "restored": checksum(weight) == before}


def controls(bench: Bench, facts: Sequence[Fact], layer: int, matrix: Tensor) -> None:
    """The same facts with one thing wrong at a time."""
    ends = bench.control_covariances()
    last = len(bench.blocks.layers) - 1
    values: dict[str, Value] = {}

    def value_of(fact: Fact) -> Value:
        if fact.name not in values:
            values[fact.name] = optimised(bench.blocks, layer, bench.request(questions(bench, fact)))
        return values[fact.name]

    for number, fact in enumerate(tqdm(facts, desc="controls", unit="fact")):
        others = [each for each in [*facts[number:], *facts[:number]][::-1] if each.relation != fact.relation]
        if bench.run.has(f"control/{fact.name}") or not others:
            continue
        asked, own = questions(bench, fact), value_of(fact)
        plain = torch.eye(len(matrix), dtype=torch.float64)
        rows = [
            edit(bench, asked, CONTROLS[0], 0, ends[0].matrix),
            edit(bench, asked, CONTROLS[1], last, ends[last].matrix),
            edit(bench, asked, CONTROLS[2], layer, plain, own),
            edit(bench, asked, CONTROLS[3], layer, matrix, Value(own.key, value_of(others[0]).value, ())),
        ]
        bench.run.add(f"control/{fact.name}", rows)


def summary(run: Run) -> Iterator[str]:
    """One line per arm, relations drawn as clusters."""
    rows = run.results().rows
    for arm in dict.fromkeys(row["arm"] for row in rows if row.get("kind") == "edit"):
        mine = [row for row in rows if row.get("arm") == arm]
        parts = [f"{arm:22} n = {len(mine)}"]
        for name in ("efficacy", "said", "paraphrase", "neighbourhood", "seconds"):
            held = [(row[name], row["domain"]) for row in mine if row[name] is not None]
            values = [value for value, _ in held]
            found = bootstrap(values, [d for _, d in held], counted=name != "seconds") if held else "-"
            parts.append(f"{name} {found}")
        yield ", ".join(parts)


def settings_of(sizes: Sizes) -> dict[str, Any]:
    """Everything that was chosen."""
    return {**asdict(sizes), **asdict(Settings()), "dtype": "float32"}


def main() -> None:
    """The command."""
    given = commands.parser(__doc__, "a few facts of four relations, little text").parse_args()
    commands.begin(given.threads)
    sizes = QUICK if given.quick else Sizes()
    bench = Bench(given.model, commands.run_of("rome_facts", given.model, settings_of(sizes), given.quick), sizes)
    bench.ask()
    layer = bench.layer()
    covariance = bench.covariance(layer)
    facts = bench.chosen()
    print(f"{given.model}: {len(bench.known())} facts known, {len(facts)} to rewrite, layer {layer}")
    for fact in tqdm(facts, desc=f"{given.model}, ROME", unit="fact"):
        if not bench.run.has(f"edit/{fact.name}"):
            asked = questions(bench, fact)
            before = {"kind": "edit", "arm": "before", "domain": fact.relation, "seconds": 0.0}
            rows = [{**before, **judged(bench, asked, bench.answers(asked.texts()))}]
            bench.run.add(f"edit/{fact.name}", [*rows, edit(bench, asked, "ROME", layer, covariance.matrix)])
    controls(bench, facts[:: sizes.every], layer, covariance.matrix)
    print("\n".join(summary(bench.run)))
    bench.run.finish()


if __name__ == "__main__":
    main()
