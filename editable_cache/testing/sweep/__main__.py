"""``python -m editable_cache.testing.sweep [names...] [--shard i/n] [--json FILE] [--markdown FILE]``."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path

from tqdm import tqdm

from editable_cache.testing import zoo
from editable_cache.testing.sweep.certify import environment
from editable_cache.testing.sweep.page import page
from editable_cache.testing.sweep.row import Row
from editable_cache.testing.sweep.runner import SECONDS, Worker


def main() -> None:
    """Examine types and write what was found; a type that the JSON has already is not examined again."""
    options = _options()
    names = options.names or [*zoo.model_types(), *zoo.variants()]
    names = names[options.shard[0] - 1 :: options.shard[1]]
    rows = _known(options.json)
    todo = [name for name in names if name not in rows or options.names]
    with Worker(seconds=options.seconds) as worker:
        for name in (bar := tqdm(todo, unit="type")):
            bar.set_postfix_str(name)
            rows[name] = worker.examine(name)
            if options.json is not None:
                _write(options.json, rows)
            if options.names or rows[name].wrong or rows[name].unproven:
                bar.write(_line(rows[name]))
    print(", ".join(f"{count} {verdict}" for verdict, count in Counter(map(_verdict, rows.values())).most_common()))
    if options.markdown is not None:
        options.markdown.write_text(page(_content(rows)), encoding="utf-8")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m editable_cache.testing.sweep", description=main.__doc__)
    parser.add_argument("names", nargs="*", help="types or variants; all by default")
    parser.add_argument(
        "--shard", type=_shard, default=(1, 1), metavar="i/n", help="only every n-th type, from the i-th"
    )
    parser.add_argument("--json", type=Path, help="file of results; what it holds is kept")
    parser.add_argument("--markdown", type=Path, help="page to write")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="most wall time for one type")
    return parser.parse_args()


def _shard(text: str) -> tuple[int, int]:
    index, _, count = text.partition("/")
    if not 1 <= int(index) <= int(count):
        raise ValueError(text)
    return int(index), int(count)


def _known(path: Path | None) -> dict[str, Row]:
    if path is None or not path.exists():
        return {}
    content, here = json.loads(path.read_text(encoding="utf-8")), environment()
    if any(content["environment"][name] != here[name] for name in ("editable_cache", "transformers", "torch")):
        return {}
    return {row["name"]: Row.from_dict(row) for row in content["rows"]}


def _content(rows: dict[str, Row]) -> dict[str, object]:
    order = {name: i for i, name in enumerate((*zoo.model_types(), *zoo.variants()))}
    known = sorted(rows.values(), key=lambda row: order.get(row.name, len(order)))
    return {"environment": environment(), "rows": [row.to_dict() for row in known]}


def _write(path: Path, rows: dict[str, Row]) -> None:
    path.write_text(json.dumps(_content(rows), indent=1) + "\n", encoding="utf-8")


def _verdict(row: Row) -> str:
    return row.verdict if row.certified or row.verdict in ("refused", "not built") else f"{row.verdict}, not certified"


def _line(row: Row) -> str:
    worst = max(row.errors.items(), key=lambda item: item[1] * (not item[0].startswith("drift")), default=("", 0.0))
    least = min(row.controls.items(), key=lambda item: item[1], default=("", 0.0))
    return (
        f"{row.name}: {_verdict(row)}, {row.seconds} s; worst {worst[1]:.1e} ({worst[0]}), "
        f"least control {least[1]:.1e} "
        f"({least[0]})"
        + "".join(f"\n  wrong: {item}" for item in row.wrong)
        + "".join(f"\n  {r}" for r in row.unproven)
    )


if __name__ == "__main__":
    main()
