"""All probes on a tiny random model: who is included, what is measured, and a run that is stopped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli_support import answer, json_keys, run
from probe_items import items

from editable_cache.errors import TaskError
from editable_cache.evaluation.probes.registry import PROBES, chosen
from editable_cache.evaluation.probes.study import Inclusion, run_probes
from editable_cache.evaluation.results import Row, Run
from editable_cache.evaluation.tasks import Item, write_items
from editable_cache.testing.tiny_models import tiny_model, tiny_tokenizer

QUICK = ("locality", "dissociation")


def study(asked: Sequence[Item], kept: Run, names: Sequence[str] = QUICK, *, any_model: bool = True) -> list[Inclusion]:
    """Probe the tiny Llama."""
    return run_probes(
        tiny_model("llama").eval(),
        tiny_tokenizer(),
        asked,
        kept,
        probes=chosen(names),
        model_name="tiny",
        any_model=any_model,
        progress=False,
    )


def trial() -> Run:
    """A run that keeps nothing."""
    return Run(None, study="mechanism", model="tiny", settings={})


@pytest.fixture(scope="module")
def everything() -> tuple[Row, ...]:
    """Rows of all probes on three items of two tasks."""
    kept = trial()
    study([*items("gated", 3), *items("trigger", 3)], kept, ())
    return kept.results().rows


def values(rows: Sequence[Row], **facts: Any) -> list[float]:
    """The values of the rows that have all these entries."""
    return [row["value"] for row in rows if "value" in row and all(row.get(n) == v for n, v in facts.items())]


def test_every_probe_measures_and_identities_hold(everything: tuple[Row, ...]) -> None:
    assert {row["probe"] for row in everything} == {*PROBES, "effects", "inclusion"}
    nothing = values(everything, probe="locality", arm="nothing")
    everywhere = values(everything, probe="locality", arm="field+downstream")
    assert nothing == pytest.approx([0.0] * 3, abs=5e-4)
    assert everywhere == pytest.approx([1.0] * 3, abs=5e-4)
    assert values(everything, probe="dissociation", arm="trigger+notes") == pytest.approx([1.0] * 6, abs=5e-4)
    assert values(everything, probe="heads", arm="all_heads") == pytest.approx([1.0] * 6, abs=5e-4)
    assert values(everything, probe="locality", arm="prefix") == [0.0] * 3
    partly = values(everything, probe="locality", arm="field_only")
    assert all(min(abs(value), abs(value - 1)) > 5e-4 for value in partly)
    assert sum(values(everything, probe="locality", arm="downstream_only")) > sum(partly), "in a random model, too"


def test_a_layer_more_is_the_whole_in_the_end(everything: tuple[Row, ...]) -> None:
    downstream = values(everything, probe="locality", arm="downstream_only")
    assert values(everything, probe="suffix", arm="layers_up_to", x=2) == pytest.approx(downstream, abs=5e-4)
    assert values(everything, probe="suffix", arm="layers_from", x=0) == pytest.approx(downstream, abs=5e-4)
    assert values(everything, probe="injection", arm="all_notes", task="gated", measure="recovery")[
        ::2
    ] == pytest.approx(downstream, abs=5e-4)
    assert values(everything, probe="suffix", arm="layer", x=0) != pytest.approx(downstream, abs=1e-2)


def test_knocking_out_the_best_tokens_weighs_more_than_random_ones(everything: tuple[Row, ...]) -> None:
    top, random = (values(everything, probe="specificity", task="gated", arm=arm, x=8) for arm in ("top", "random"))
    assert all(first > second for first, second in zip(top, random, strict=True))


def test_items_are_left_out_for_a_reason_that_is_counted() -> None:
    asked = items("gated", 3)
    longer = replace(asked[0], key="longer", new="qqqqqqqq", answers={asked[0].old: "ant", "qqqqqqqq": "use"})
    alike = replace(asked[0], key="alike", answers={asked[0].old: "use", asked[0].new: "use up"})
    chain = replace(asked[0], key="chain", mode="cot")
    (found,) = study([*asked, longer, alike, chain], trial(), ["locality"])
    assert (found.items, found.eligible, found.included) == (6, 3, 3)
    assert found.left_out == {
        "values of different numbers of tokens": 1,
        "answers that begin alike": 1,
        "answers behind a chain of thought": 1,
    }


def test_a_model_below_the_gate_is_refused_with_what_it_reached() -> None:
    with pytest.raises(TaskError, match=r"expected an accuracy of at least 0\.8 .* got gated: accuracy 0\.\d\d, 0 of"):
        study(items("gated", 3), trial(), any_model=False)
    with pytest.raises(TaskError, match="at least one item"):
        study([], trial())


def test_a_stopped_run_goes_on_and_ends_the_same(tmp_path: Path, everything: tuple[Row, ...]) -> None:
    asked = [*items("gated", 3), *items("trigger", 3)]

    class StoppedError(Exception):
        pass

    class Stopping(Run):
        left = 9

        def add(self, key: str, rows: Any) -> None:
            super().add(key, rows)
            self.left -= 1
            if not self.left:
                raise StoppedError

    facts: dict[str, Any] = {"study": "mechanism", "model": "tiny", "settings": {}}
    names = ["locality", "dissociation", "specificity", "timing"]
    with pytest.raises(StoppedError):
        study(asked, Stopping(tmp_path / "a.json", **facts), names)
    resumed = Run(tmp_path / "a.json", **facts)
    kept = len(resumed.results().rows)
    assert kept
    study(asked, resumed, names)
    straight = trial()
    study(asked, straight, names)

    def content(rows: Sequence[Row]) -> Iterator[tuple[Any, ...]]:
        return iter(
            sorted((r["key"], r["probe"], str(r.get("arm")), r.get("x", -1), str(r.get("measure"))) for r in rows)
        )

    rows = resumed.finish().rows
    assert len(rows) > kept
    assert list(content(rows)) == list(content(straight.results().rows))
    assert sum(values(rows, probe="specificity")) == pytest.approx(
        sum(values(straight.results().rows, probe="specificity")), abs=1e-3
    )


@pytest.fixture(scope="module")
def on_disk(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A tiny model's folder, and a task file."""
    folder = tmp_path_factory.mktemp("probe")
    tiny_model("llama").save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    write_items(folder / "tasks.json", items("gated", 2))
    return str(folder / "model"), str(folder / "tasks.json")


def test_the_command_prints_what_its_page_says_and_writes_pictures(on_disk: tuple[str, str], tmp_path: Path) -> None:
    model, tasks = on_disk
    arguments = ("probe", model, "--tasks", tasks, "--probes", "locality", "--any-model", "-o", str(tmp_path / "out"))
    found = answer(*arguments)
    assert set(found) == json_keys("probe")
    assert found["inclusion"][0]["included"] == 2
    assert [Path(path).name for path in found["pictures"]] == ["locality-gated.svg"]
    assert all(Path(path).is_file() for path in (*found["pictures"], found["results"]))
    assert {line["arm"] for line in found["lines"]} >= {"field_only", "downstream_only"}
    again = answer(*arguments)
    assert again["lines"] == found["lines"]
    assert "field_only" in run(*arguments).stdout


def test_the_command_says_why_it_can_not(on_disk: tuple[str, str], tmp_path: Path) -> None:
    model, tasks = on_disk
    unknown = run("probe", model, "--probes", "hands")
    assert unknown.exit_code == 2
    assert "Unknown probe 'hands'" in unknown.output
    below = run("probe", model, "--tasks", tasks, "--probes", "locality")
    assert below.exit_code == 2
    assert "expected an accuracy of at least 0.8" in " ".join(below.output.split())
    (tmp_path / "empty.json").write_text('{"format": 1, "items": []}')
    empty = run("probe", model, "--tasks", str(tmp_path / "empty.json"))
    assert empty.exit_code == 2
    assert "at least one item" in empty.output
