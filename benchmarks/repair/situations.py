"""Stale fields and seams: `python -m repair.situations [--quick]` writes `results/repair_situations.json`.

Three situations, each judged against a stock prefill of the ids that the context should have: a field that changed
before a document about something else (``field``), one that changed before a policy that draws on it (``policy``), and
the second part of a document, precompiled alone and spliced behind the first (``seam``). Finished documents are kept in
`results/partial`, which is not committed, and skipped when the benchmark runs again.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timing
import torch
from torch import Tensor
from tqdm import tqdm

from editable_cache import EditableCache, Skill
from repair.cases import DOCUMENTS, TEST, Setup, hidden_prefill, setup
from repair.judge import ANSWER_TOKENS, Judge, distances
from repair.progress import Kept
from repair.stats import interval

MODELS = ("smollm2", "gemma3_270m")
POLICY = Path(__file__).parents[2] / "examples" / "refund_policy.txt"
SYSTEM = "Order 4471 of customer Ana Ruiz.\norder_status: {order_status}\n\n"
CHANGES = (("pending", "cancelled"), ("pending", "delivered"), ("shipped", "returned"), ("delivered", "pending"))
"""Old and new value of the field; documents take turns."""

OTHER = ", other question"
DOCUMENT_TOKENS, CONTEXT_TOKENS = 1000, 500
BUDGETS = (0.05, 0.1, 0.2)
SIGNALS = {"trace": "inflow_accumulated", "trace+query": "sir", "query": "readout", "attention": "probe_attention"}
"""What the names of arms stand for; other arms are named after their signal."""

STATUS = ("What is the order_status of order 4471?", "The order_status of order 4471 is")
ABOUT = ("What is this text about?", "")
QUESTIONS = {
    "field": {"field": STATUS, "document": ABOUT},
    "policy": {"field": STATUS, "decision": ("May order 4471 be refunded now? Decide by the policy.", "Decision:")},
    "seam": {"document": ABOUT, "detail": ("Name one tool or method that the text mentions.", "")},
}
"""Questions of each situation, by name, with how the answer begins."""


@dataclass(frozen=True)
class Situation:
    """A cache with wrong cells and the exact one, as the judge reads them.

    Attributes:
        contaminated: what doing nothing leaves: recovery 0.
        clean: the same slots, ids and positions, with the cells of a stock prefill: recovery 1.
        queries: ids by the question's name.
        values: first token of the field's right value and of its old one, or None.
    """

    contaminated: EditableCache
    clean: EditableCache
    queries: dict[str, Tensor]
    values: tuple[int, int] | None

    def without(self, cache: EditableCache) -> EditableCache:
        """Nothing has to go before the judge reads."""
        return cache.fork()


@dataclass(frozen=True)
class Arm:
    """One way to mend: runs on a fork of its start and returns the tokens that ran through the model from there on (the
    refreshed value, and a gap in the start, are not counted). ``asked`` is the question that it was given, or None;
    ``transfer``: judge it by the other questions too.
    """

    name: str
    start: EditableCache
    run: Callable[[EditableCache], int]
    asked: str | None = None
    transfer: bool = False


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--quick", action="store_true", help="one document, one question, no file")
    arguments.add_argument("--extend", action="store_true", help="run new arms on documents that are done")
    quick, extend = vars(arguments.parse_args()).values()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    names = TEST[:1] if quick else TEST
    todo = [(model, kind, name) for name in names for model in MODELS for kind in QUESTIONS]
    kept = Kept(None if quick else "situations")
    for key in tqdm(todo, unit="document"):
        if extend or not kept.has(*key):
            kept.add(key, one_document(setup(key[0]), key[1], key[2], quick, kept.items().get(key, [])))
    done = kept.items()
    found: dict[str, Any] = {model: {} for model in MODELS}
    for model, kind in ((model, kind) for model in MODELS for kind in QUESTIONS):
        found[model][kind] = summary([done[model, kind, name] for name in names])
        for question, entry in found[model][kind].items():
            lines = [f"  {arm:32} {row}" for arm, row in entry["arms"].items()]
            print(f"\n{model}, {kind}, question {question}: {entry['start']}", *lines, sep="\n")
    if not quick:
        tokens = {"document": DOCUMENT_TOKENS, "context": CONTEXT_TOKENS, "answer": ANSWER_TOKENS}
        settings = {"tokens": tokens, "documents": TEST, "changes": CHANGES, "signals": SIGNALS}
        print(timing.write("repair_situations", {"settings": settings, "results": found}))


def one_document(chosen: Setup, kind: str, document_name: str, quick: bool, rows: list[Any]) -> list[dict[str, Any]]:
    """One row for each arm and question of one situation, behind the rows that are there already."""
    build = build_seam if kind == "seam" else build_field
    text = (DOCUMENTS / document_name).read_text(encoding="utf-8", errors="replace")
    situation, arms = build(chosen, kind, text, CHANGES[TEST.index(document_name) % len(CHANGES)], quick)
    case: Any = situation  # the judge reads no more of a case than a situation has
    known, first = {(row["arm"], row["question"]) for row in rows}, next(iter(situation.queries))
    todo = [arm for arm in arms if (arm.name, arm.asked or first) not in known]
    judges = {asked: Judge(chosen, case, ids) for asked, ids in situation.queries.items() if todo}
    for arm in todo:
        mended = arm.start.fork()
        began = time.perf_counter()
        tokens = arm.run(mended)
        seconds = time.perf_counter() - began
        for question, judge in judges.items():
            other = question != (arm.asked or first)
            if other and (arm.name.endswith((" 0.05", " 0.2")) or (arm.asked and not arm.transfer)):
                continue
            scored = score(judge, mended, situation.values if question == "field" else None)
            name = arm.name if arm.asked in (None, question) else f"{arm.name}{OTHER}"
            rows.append({"arm": name, "question": question, "tokens": tokens, "seconds": seconds, **scored})
    exact = [row["recovery"] for row in rows if row["arm"] == "suffix"]
    assert min(exact) > 0.99, exact
    return sorted(rows, key=lambda row: [arm.name for arm in arms].index(row["arm"].removesuffix(OTHER)))


def score(judge: Judge, cache: EditableCache, values: tuple[int, int] | None = None) -> dict[str, Any]:
    """Recovery by centred logits (L2) and by KL, agreement, distances, and chances of right and old value."""
    reading = judge.read(cache)
    found, start, names = distances(reading, judge.clean), judge.start, ("agreement", "l2", "kl")
    row = {name: found[name] for name in names} | {f"{name}_doing_nothing": start[name] for name in names}
    row |= {"recovery": 1 - found["l2"] / start["l2"], "recovery_kl": 1 - found["kl"] / start["kl"]}
    if values is not None:
        for name, logits in (("", reading.logits), ("_exact", judge.clean.logits)):
            chances = logits[0].double().softmax(-1)
            right, old = (float(chances[each]) for each in values)
            row[f"right_value{name}"], row[f"old_value{name}"] = right, old
            row[f"right_preferred{name}"] = right / (right + old)
    return row


def build_field(
    chosen: Setup, kind: str, text: str, change: tuple[str, str], quick: bool
) -> tuple[Situation, list[Arm]]:
    """A field that changes before a traced document, or before a policy with the document behind it.

    The *gap* is what stands between the field and the document: the end of the template, which no trace covers.
    ``document alone`` leaves it stale, ``gap`` begins with it.
    """
    old, new = change
    before = EditableCache(chosen.model, tokenizer=chosen.tokenizer)
    before.append(chosen.head)
    before.append(SYSTEM, name="order", fields={"order_status": old})
    ids = chosen.ids(text if kind == "field" else f"{POLICY.read_text(encoding='utf-8')}\n{text}")[:DOCUMENT_TOKENS]
    with before.tracing(before.ledger.field("order_status").spans[0]):
        before.append(ids, name="document")
    stale = before.fork()
    stale.refresh_field("order_status", new)
    bare = stale.fork()
    bare._traces = ()
    behind, start = stale.ledger.field("order_status").spans[0][1], stale.ledger.segment("document").start
    queries = _queries(chosen, kind, quick)
    gapless, bare_gapless = stale.fork(), bare.fork()
    gapless.recompute((behind, start))
    bare_gapless.recompute((behind, start))
    arms = [
        Arm("nothing edited", before, lambda cache: 0),
        Arm("refresh alone", stale, lambda cache: 0),
        Arm("suffix", stale, lambda cache: cache.recompute(slice(behind, None)).tokens_computed),
        Arm("selective", before, lambda cache: _edit(cache, new, "selective")),
        Arm("erratum", before, lambda cache: _edit(cache, new, "erratum")),
        Arm("field+erratum", before, lambda cache: _edit(cache, new, "field+erratum")),
        Arm("gap", stale, lambda cache: cache.recompute((behind, start)).tokens_computed),
        _repair("gap, random", gapless, 0.1),
    ]
    for budget in BUDGETS:
        starts = {"trace": stale, "window": bare, "gap, trace": gapless}
        arms += [_repair(name, cache, budget) for name, cache in starts.items()]
        arms.append(_repair("document alone, trace", stale, budget, document="document"))
    for asked, query in queries.items():
        arms.append(_repair("document alone, trace+query", stale, 0.1, asked, query=query, document="document"))
        arms += [_repair("sir_columns", stale, budget, asked, query=query) for budget in BUDGETS]
        arms += [_repair("gap, trace+query", gapless, budget, asked, query=query) for budget in BUDGETS]
        arms.append(_repair("query", bare, 0.1, asked, query=query))
        arms.append(_repair("gap, query", bare_gapless, 0.1, asked, query=query))
        arms.append(_repair("near_and_read", bare, 0.1, asked, query=query))
    if quick or kind == "policy":
        arms = [arm for arm in arms if arm.name.rpartition(" ")[2] not in ("0.05", "0.2")]
    values = chosen.ids(f" {new}")[0], chosen.ids(f" {old}")[0]
    return Situation(stale, exact(chosen, stale), queries, values), arms


def build_seam(chosen: Setup, kind: str, text: str, _: Any, quick: bool) -> tuple[Situation, list[Arm]]:
    """The second part of a document, precompiled alone, behind the first."""
    ids = chosen.ids(text)[: CONTEXT_TOKENS + DOCUMENT_TOKENS]
    skill = Skill.precompile(chosen.model, chosen.tokenizer, ids[CONTEXT_TOKENS:], name="document")
    context = EditableCache(chosen.model, tokenizer=chosen.tokenizer)
    context.append([*chosen.head, *ids[:CONTEXT_TOKENS]])
    spliced = {}
    for count in (0, 1):
        spliced[count] = context.fork()
        spliced[count].splice(skill, seam_tokens=count)
    seam, queries = len(context.ledger), _queries(chosen, kind, quick)
    arms = [_splice(context, skill, count) for count in (0, 1, 4, 16, DOCUMENT_TOKENS // 10)]
    arms.append(Arm("suffix", spliced[0], lambda cache: cache.recompute(slice(seam, None)).tokens_computed))
    for signal in ("window", "boundary", "even_columns", "random"):
        arms.append(_repair(signal, spliced[0], 0.1))
    arms.append(_repair("seam 1, window", spliced[1], 0.1))
    for asked, query in queries.items():
        for budget in (0.1,) if quick else BUDGETS:
            arms.append(_repair("query", spliced[0], budget, asked, query=query))
        arms.append(_repair("seam 1, query", spliced[1], 0.1, asked, query=query))
        for name in ("attention", "near_and_read"):
            arms.append(_repair(name, spliced[0], 0.1, asked, query=query))
    return Situation(spliced[0], exact(chosen, spliced[0]), queries, None), arms


def exact(chosen: Setup, cache: EditableCache) -> EditableCache:
    """The same ids at the same positions with the cells of a stock forward over all of them."""
    assert torch.equal(cache.positions[0], torch.arange(len(cache.ledger)))
    clean, slots = cache.fork(), torch.arange(len(cache.ledger))
    cells = hidden_prefill(chosen.model, cache.token_ids, (0, 0))
    for layer, (keys, values) in zip(clean.editable_layers, cells, strict=True):
        layer.overwrite(slots, {"keys": keys, "values": values})
    return clean


def summary(documents: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Means over documents with their intervals, by question and arm."""
    rows = [row for document in documents for row in document]
    found: dict[str, Any] = {}
    for question in dict.fromkeys(row["question"] for row in rows):
        mine = [row for row in rows if row["question"] == question]
        names = [name for name in mine[0] if name.endswith(("_doing_nothing", "_exact"))]
        start = {name: float(f"{statistics.mean(row[name] for row in mine):.4g}") for name in names}
        suffix = [row["seconds"] for row in mine if row["arm"] == "suffix"]
        arms = {}
        for arm in dict.fromkeys(row["arm"] for row in mine):
            each = [row for row in mine if row["arm"] == arm]
            arms[arm] = {
                name: [round(value, 4) for value in interval([row[name] for row in each])]
                for name in ("recovery", "recovery_kl", "agreement", "right_value", "old_value", "right_preferred")
                if name in each[0]
            }
            arms[arm]["tokens"] = round(statistics.mean(row["tokens"] for row in each), 1)
            share = statistics.median(row["seconds"] / whole for row, whole in zip(each, suffix, strict=True))
            arms[arm]["time_over_suffix"] = round(share, 3)
        found[question] = {"start": start, "arms": arms}
    return found


def _queries(chosen: Setup, kind: str, quick: bool) -> dict[str, Tensor]:
    found = {}
    for name, (question, begun) in QUESTIONS[kind].items():
        lead = begun if chosen.tail.endswith("\n") or not begun else f" {begun}"
        found[name] = torch.cat([chosen.query(question), torch.tensor(chosen.ids(lead), dtype=torch.int64)])
    return dict(list(found.items())[:1]) if quick else found


def _repair(name: str, start: EditableCache, budget: float, asked: str | None = None, **options: Any) -> Arm:
    transfer = budget == 0.1 and name in ("gap, trace+query", "query", "sir_columns")
    options["signal"] = SIGNALS.get(plain := name.rpartition(", ")[2], plain)
    return Arm(f"{name} {budget:g}", start, lambda cache: cache.repair(budget, **options).tokens_run, asked, transfer)


def _splice(context: EditableCache, skill: Skill, count: int) -> Arm:
    return Arm(f"seam {count}", context, lambda cache: cache.splice(skill, seam_tokens=count).tokens_computed)


def _edit(cache: EditableCache, value: str, method: Any) -> int:
    return cache.edit("order_status", value, method=method).tokens_computed


if __name__ == "__main__":
    main()
