"""Part 5 of the demo: every way to change one field, from forks of one cache, side by side."""

from __future__ import annotations

from typing import Any

from demo_measure import cosine, kl, plain_prefill
from demo_scene import NEW, OLD, SECOND_QUESTION, START_OF_ANSWER, Scene, one_line
from rich.console import Console
from rich.progress import track
from rich.table import Table
from rich.text import Text

from editable_cache import EditableCache

ARMS = ("stale", "in_place", "erratum", "field+erratum", "selective", "suffix", "hoist", "full")


def compare_arms(console: Console, scene: Scene, cache: EditableCache, tokens: int) -> None:
    """Change the order's status in forks of one cache, each in another way, and ask again."""
    console.rule(f"5. The order's status changes: {OLD} -> {NEW}")
    length = len(cache.token_ids[0])
    console.print(
        f"{length} tokens are in the cache. Those behind the order were computed while it said {OLD!r}. Each way "
        "to edit gets a fork of this cache (no copy until it writes) and the same second question:\n"
        f"customer: {SECOND_QUESTION}\n"
        f"model:    {one_line(START_OF_ANSWER)} ...",
        markup=False,
    )
    rows = [run_arm(scene, cache, arm, tokens) for arm in track(ARMS, "editing", console=console, transient=True)]
    target = next(row["logits"] for row in rows if row["arm"] == "full")
    numbers, answers = Table(title="how near"), Table(title="at what cost, and what the model answers")
    for column in ("arm", "own cos", "own KL", "full cos", "full KL", "top", f"p({NEW})"):
        numbers.add_column(column, justify="left" if column == "arm" else "right", no_wrap=True)
    for column in ("arm", "computed", "moved", "ms"):
        answers.add_column(column, justify="left" if column == "arm" else "right", no_wrap=True)
    answers.add_column(f"{one_line(START_OF_ANSWER)} ...")
    new = scene.tokenizer(" " + NEW, add_special_tokens=False)["input_ids"][0]
    for row in rows:
        logits = row["logits"]
        numbers.add_row(
            row["arm"],
            f"{cosine(row['plain'], logits):.5f}",
            f"{kl(row['plain'], logits):.0e}",
            f"{cosine(target, logits):.5f}",
            f"{kl(target, logits):.0e}",
            "same" if logits.argmax() == target.argmax() else "other",
            f"{float(logits.softmax(-1)[new]):.3f}",
        )
        cost = (str(row["computed"]), str(row["moved"]), f"{row['ms']:.0f}")
        answers.add_row(row["arm"], *cost, Text(row["answer"]))
    console.print(numbers, answers)
    console.print(
        "own: next-token logits against a stock prefill of exactly the tokens that this arm's context holds, with its "
        "correcting line if it has one. It says how faithful the cache is to its own text (stale: the old text).\n"
        f"full, top: against the arm full, whose text says {NEW!r} and was computed whole. Arms with a correcting "
        "line, and hoist, read another text than full, so a difference there need not be an error.\n"
        f"p({NEW}): probability of that next token. KL in nats. computed, moved, ms: tokens and time of the edit; the "
        "question costs every arm the same.\n"
        "This is a small model and it may decide badly. The table shows how near each edit comes to recomputing, not "
        "whether the answer is right."
    )


def run_arm(scene: Scene, cache: EditableCache, arm: str, tokens: int) -> dict[str, Any]:
    """Edit a fork of ``cache`` and ask the second question."""
    twin = cache.fork()
    computed, moved, ms = 0, 0, 0.0
    if arm != "stale":
        role = "system" if scene.chatml and "erratum" in arm else None
        outcome = twin.edit("order_status", NEW, method=arm, role=role)  # type: ignore[arg-type]
        computed, moved, ms = outcome.tokens_computed, outcome.tokens_moved, outcome.seconds * 1e3
    inputs = twin.inputs(scene.question(SECOND_QUESTION, START_OF_ANSWER))
    out = scene.model.generate(
        **inputs,
        past_key_values=twin,
        max_new_tokens=tokens,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return {
        "arm": arm,
        "logits": out.logits[0][0].float(),
        "plain": plain_prefill(scene.model, inputs["input_ids"]),
        "computed": computed,
        "moved": moved,
        "ms": ms,
        "answer": scene.shown(out.sequences[0, inputs["input_ids"].shape[1] :]),
    }
