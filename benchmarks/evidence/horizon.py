"""A field that changes every turn: ``python -m evidence.horizon MODEL [--quick] [--threads N] [--items N]``.

One evolving cache with a correcting line each turn, with and without a refresh of the field in place, against a prefill
of the same ids (the study's figure 23). Writes ``results/evidence/horizon-MODEL.json``.
"""

from __future__ import annotations

from editable_cache.evaluation.results import Row
from editable_cache.evaluation.studies.horizon import APPEND_ONLY, EXCHANGE, REFRESHED, TURNS, run_horizon, trend
from editable_cache.evaluation.studies.tables import grouped, table
from editable_cache.evaluation.tasks import DOMAINS, build, read_items
from evidence import commands, models

NEUTRAL = 3
ITEMS, OWN_ITEMS = 6, 10
SMALL_EXCHANGE = "user: what about order 25?\n"
"""In the words that the small models know."""
MEASURES = ("full_correct", "correct", "agrees", "cosine", "kl", "top")


def main() -> None:
    """The command."""
    options = commands.parser(__doc__, "one item, six turns")
    options.add_argument("--items", type=int, default=ITEMS, help="trajectories, each of another domain up to ten")
    given = options.parse_args()
    commands.begin(given.threads)
    model, tokenizer = models.load(given.model)
    path, erratum, exchange = models.MODELS / given.model / "items.json", None, EXCHANGE
    if path.is_file():
        own = read_items(path)
        erratum, exchange = own.erratum, SMALL_EXCHANGE
        items = models.spread((item for item in own.items if item.mode == "direct"), OWN_ITEMS)
    else:
        per_domain = -(-given.items // len(DOMAINS))
        items = build("gated", per_domain=per_domain, neutral=1 if given.quick else NEUTRAL)
        items = commands.in_turn(items, given.items)
    settings = {"turns": TURNS, "exchange": exchange, "neutral": None if path.is_file() else NEUTRAL}
    run = commands.run_of("horizon", given.model, {**settings, "dtype": "float32"}, given.quick)
    run_horizon(
        model,
        tokenizer,
        items[:1] if given.quick else items,
        run,
        turns=6 if given.quick else TURNS,
        exchange=exchange,
        erratum=erratum,
        model_name=given.model,
    )
    print("\n".join(described(list(run.results().rows))))
    run.finish()


def described(rows: list[Row]) -> list[str]:
    """Lines of text: both ways over all turns, their trends, and how exact the prefills are."""
    lines = table(grouped(rows, ("arm",), MEASURES))
    mine = [row for row in rows if row["arm"] == REFRESHED]
    for measure in ("cosine", "agrees", "correct", "full_correct"):
        found = trend(mine, measure)
        lines.append(f"  {REFRESHED} {measure}: " + ", ".join(f"{name} {value}" for name, value in found.items()))
    plain = [row for row in rows if row["arm"] == APPEND_ONLY and "error" in row]
    errors, controls = [row["error"] for row in plain], [row["control"] for row in plain]
    lines.append(f"  {APPEND_ONLY}: largest error {max(errors):.2g}, smallest control {min(controls):.2g} (logits)")
    return lines


if __name__ == "__main__":
    main()
