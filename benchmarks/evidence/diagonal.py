"""Editing inside a transplant: ``python -m evidence.diagonal MODEL [--quick] [--threads N] [--items N]``.

Every arm on a spliced skill that holds the field, beside the same arm on a full prefill (the study's figure 7a). Writes
``results/evidence/diagonal-MODEL.json``.
"""

from __future__ import annotations

from editable_cache.evaluation.results import Row
from editable_cache.evaluation.statistics import tost
from editable_cache.evaluation.studies.diagonal import ARMS, run_diagonal
from editable_cache.evaluation.studies.tables import grouped, table
from editable_cache.evaluation.tasks import DOMAINS, build, read_items
from evidence import commands, models

NEUTRAL = 3
ITEMS = 40
MARGIN = 0.1
"""Of recovery, within which composed and recomputed count as the same."""
MEASURES = (
    "recomputed_recovery",
    "composed_recovery",
    "composed_own_recovery",
    "difference",
    "recomputed_correct",
    "composed_correct",
    "agrees",
    "cosine",
)


def main() -> None:
    """The command."""
    options = commands.parser(__doc__, "two items, with a short policy")
    options.add_argument("--items", type=int, default=ITEMS, help="adds to finished ones; each domain in turn")
    given = options.parse_args()
    commands.begin(given.threads)
    model, tokenizer = models.load(given.model)
    path, erratum = models.MODELS / given.model / "items.json", None
    if path.is_file():
        own = read_items(path)
        erratum = own.erratum
        items = models.spread((item for item in own.items if item.mode == "direct"), given.items)
    else:
        found = build("gated", per_domain=-(-given.items // len(DOMAINS)), neutral=1 if given.quick else NEUTRAL)
        items = commands.in_turn(found, given.items)
    settings = {"arms": ARMS, "seam": 1, "neutral": None if path.is_file() else NEUTRAL, "dtype": "float32"}
    run = commands.run_of("diagonal", given.model, settings, given.quick)
    run_diagonal(model, tokenizer, items[:2] if given.quick else items, run, erratum=erratum, model_name=given.model)
    print("\n".join(described(list(run.results().rows))))
    run.finish()


def described(rows: list[Row]) -> list[str]:
    """Lines of text: each arm on both caches with intervals, and whether they are equivalent."""
    lines = table(grouped(rows, ("arm",), MEASURES))
    for name in dict.fromkeys(row["arm"] for row in rows):
        differences = [row["difference"] for row in rows if row["arm"] == name and row.get("difference") is not None]
        if len(differences) > 1:
            test = tost(differences, MARGIN)
            lines.append(f"  {name}: difference {test.statistic:+.3f}, within {MARGIN}: p {test.p:.3g} (n {test.n})")
    return lines


if __name__ == "__main__":
    main()
