"""Passages compiled one by one: ``python -m evidence.multihop MODEL [--quick] [--threads N] [--items N]``.

Asks questions that need two passages (HotpotQA, MuSiQue) and questions that need one (the second hops of MuSiQue, which
share passages and answers with the former; SQuAD paragraphs), on spliced passages and on a full prefill. Writes
``results/evidence/multihop-MODEL.json``. The texts are read from ``--data`` and not kept.
"""

from __future__ import annotations

from pathlib import Path

from editable_cache.evaluation.results import Row
from editable_cache.evaluation.studies.multihop import MOST_TOKENS, NONE, OTHERS, SEAMS, fitting, run_multihop
from editable_cache.evaluation.studies.questions import hotpot_questions, musique_questions, squad_questions
from editable_cache.evaluation.studies.tables import grouped, paired, table
from evidence import commands, models

DATA = Path(__file__).parents[2].parent / "shared" / "data"
FILES = {
    "rag_multihop/hotpotqa_train_100.json": hotpot_questions,
    "rag_multihop/musique_train_100.json": musique_questions,
    "squad_xquad/xquad.en.json": squad_questions,
}
ITEMS, QUICK_ITEMS = 24, 2
MEASURES = ("full_logp", "logp", "drop", "less_likely", "agreement", "exact", "full_exact", "cosine", "kl")


def main() -> None:
    """The command."""
    options = commands.parser(__doc__, "two questions of each set")
    options.add_argument("--items", type=int, default=ITEMS, help="questions of each set")
    options.add_argument("--data", type=Path, default=DATA, help="folder with rag_multihop and squad_xquad")
    given = options.parse_args()
    missing = [name for name in FILES if not (given.data / name).is_file()]
    if missing:
        raise SystemExit(f"{given.data.name}: {', '.join(missing)} not there, so there is nothing to measure (--data).")
    commands.begin(given.threads)
    model, tokenizer = models.load(given.model)
    questions = [asked for name, reader in FILES.items() for asked in reader(given.data / name)]
    chosen = fitting(tokenizer, questions, QUICK_ITEMS if given.quick else given.items)
    settings = {"seams": SEAMS, "others": OTHERS, "most_tokens": MOST_TOKENS, "dtype": "float32"}
    run = commands.run_of("multihop", given.model, settings, given.quick)
    run_multihop(model, tokenizer, chosen, run, model_name=given.model)
    print("\n".join(described(list(run.results().rows))))
    run.finish()


def described(rows: list[Row]) -> list[str]:
    """Lines of text: every arm by dataset, what the passages give, and two hops against one on the same passages."""
    lines = table(grouped(rows, ("hops", "dataset", "arm"), MEASURES, cluster="cluster"))
    for arm in dict.fromkeys(row["arm"] for row in rows):
        same = [
            {**row, "key": row["cluster"]} for row in rows if row["arm"] == arm and row["dataset"].startswith("musique")
        ]
        found = paired(same, "hops", "multi", "single", "drop", cluster="cluster")
        if found is not None and arm != NONE:
            lines.append(f"  {arm}: drop with two hops less drop with one, same passages and answer: {found}")
    return lines


if __name__ == "__main__":
    main()
