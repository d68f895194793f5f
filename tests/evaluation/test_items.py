"""Items: balanced, whole, parsed as they are written, and refused when they are not."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from editable_cache.errors import TaskError
from editable_cache.evaluation.tasks import DOMAINS, KINDS, Item, Section, answered, build, read_items, write_items


@pytest.mark.parametrize("task", KINDS)
@pytest.mark.parametrize("mode", ["direct", "cot"])
def test_a_right_answer_is_recognised_and_no_other(task: str, mode: Any) -> None:
    for item in build(task, per_domain=4, mode=mode, neutral=2):
        for value, other in ((item.old, item.new), (item.new, item.old)):
            said = item.completion(value)
            assert answered(item, f"{said}\nand more") == value
            assert answered(item, item.completion(other)) == other
        assert answered(item, "") is None
        assert answered(item, "nothing of the kind") is None


def test_wrong_arguments_are_no_answer() -> None:
    item = build("gated", per_domain=1, neutral=0)[0]
    name = item.answers[item.new].split("(")[0]
    assert answered(item, item.answers[item.new]) == item.new
    assert answered(item, f'{name}(order_id="A9999")') is None
    call = build("tool_call", per_domain=1, neutral=0)[0]
    right = call.answers[call.new]
    assert answered(call, right) == call.new
    assert answered(call, right.replace(": {", ': {"extra": "1", ')) is None
    assert answered(call, right[:-1]) is None  # JSON that never ends


def test_a_chain_counts_by_its_last_answer() -> None:
    item = build("gated", per_domain=1, neutral=0, mode="cot")[0]
    first, last = item.completion(item.old), item.completion(item.new)
    assert answered(item, f"{first}\nNo, wait.\n{last}") == item.new


@pytest.mark.parametrize("task", KINDS)
def test_labels_are_balanced_in_every_domain(task: str) -> None:
    items = build(task, per_domain=8, neutral=1)
    assert len(items) == 8 * len(DOMAINS)
    assert len({item.key for item in items}) == len(items)
    for domain in DOMAINS:
        mine = [item for item in items if item.domain == domain.name]
        if task == "lookup":
            assert {Counter(item.new for item in mine)[item.new] for item in mine} <= {2, 4}
        else:
            counts = Counter(item.answers[item.new] for item in mine)
            assert set(counts.values()) == {4}
            assert len({(item.old, item.new) for item in mine}) == 4  # two pairs of values, both directions


@pytest.mark.parametrize("task", KINDS)
def test_the_context_differs_in_the_value_alone(task: str) -> None:
    for item in build(task, per_domain=2, neutral=3):
        old, new = item.context(item.old), item.context(item.new)
        start = next(place for place, (a, b) in enumerate(zip(old, new, strict=False)) if a != b)
        stop = len(old) - next(n for n, (a, b) in enumerate(zip(old[::-1], new[::-1], strict=False)) if a != b)
        assert old[start:stop] in item.old
        assert "{" not in item.context(item.old).replace('{"name"', "")
        assert item.template().count("{" + item.field + "}") == 1


def test_the_rule_stands_where_it_is_asked_for() -> None:
    near, far = (build("gated", per_domain=1, neutral=5, far=far)[0].template() for far in (False, True))
    assert near.index("ACCESS RULE") < near.index("R2.")
    assert far.index("ACCESS RULE") > far.index("R5.")


def test_the_same_arguments_give_the_same_items() -> None:
    assert build("gated", per_domain=2) == build("gated", per_domain=2)
    assert build("gated", per_domain=2) != build("gated", per_domain=2, seed=1)


def test_bad_requests_are_refused() -> None:
    with pytest.raises(TaskError, match="expected a task among gated"):
        build("poetry")
    with pytest.raises(TaskError, match="at least one item"):
        build("gated", per_domain=0)


def test_items_come_back_from_a_file(tmp_path: Path) -> None:
    items = build("tool_call", per_domain=1)
    write_items(tmp_path / "items.json", items, erratum="{name} is {value}.")
    found = read_items(tmp_path / "items.json")
    assert found.items == tuple(items)
    assert found.erratum == "{name} is {value}."


def _changed(item: Item, **changes: Any) -> str:
    path = Path(changes.pop("folder")) / "items.json"
    write_items(path, [replace(item, **changes)])
    return str(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mode": "poem"}, "expected a mode"),
        ({"sections": ()}, "the placeholder"),
        ({"sections": (Section("a", None),)}, "section 0 with 'name' and 'text' as texts"),
        ({"sections": (Section(None, "{account_role}"),)}, "section 0 with 'name' and 'text' as texts"),
        ({"sections": (Section("a", "{account_role:}"),)}, "without a format"),
        ({"sections": (Section("a", "{account_role!r}"),)}, "question, prefix and answers are taken as they are"),
        ({"sections": (Section("a", "{account role}"),), "field": "account role"}, "'field' as a name of letters"),
        ({"sections": (Section("a", "{account_role} and {other}"),)}, "and no other, got "),
        (
            {"sections": (Section("a", "{account_role} and {{account_role}} {"),)},
            "got Single|got expected.*literal brace",
        ),
        ({"sections": (Section("a", "{{account_role}}"),)}, "and no other, got "),
        ({"sections": (Section("a", "{account_role} {account_role}"),)}, "got {account_role}, {account_role}"),
        ({"answers": {"a": "b"}}, "'answers' a text for each"),
        ({"answers": {"verified_admin": " ", "suspended_user": "b"}}, "'answers' to be texts that are not empty"),
        ({"reasoning": {"pending": "a"}}, "'reasoning' a text for each"),
        ({"question": ""}, "'question' as a text that is not empty"),
        ({"new": 3}, "'new' as a text that is not empty"),
        ({"new": "verified_admin"}, "to differ"),
    ],
)
def test_an_item_that_is_not_whole_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    item = build("gated", per_domain=1)[0]
    with pytest.raises(TaskError, match=message) as caught:
        read_items(_changed(item, folder=tmp_path, **changes))
    assert "item 0" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "expected JSON"),
        ("[]", "expected format 1, got list"),
        ('{"format": 2, "items": []}', "expected format 1, got 2"),
        ('{"format": 1, "items": []}', "at least one item"),
        ('{"format": 1, "items": [3]}', "item 0"),
        ('{"format": 1, "items": {"a": 1}}', "in a list under 'items', got dict"),
        ('{"format": 1, "items": {}}', "in a list under 'items', got dict"),
        ('{"format": 1}', "in a list under 'items', got none"),
        ('{"items": []}', "expected format 1, got no format"),
    ],
)
def test_a_file_that_is_no_task_file_is_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "items.json"
    path.write_text(content, "utf-8")
    with pytest.raises(TaskError, match=message):
        read_items(path)


def test_a_missing_file_and_two_items_of_one_key_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="can't be read"):
        read_items(tmp_path / "none.json")
    item = build("gated", per_domain=1)[0]
    write_items(tmp_path / "items.json", [item, item])
    with pytest.raises(TaskError, match="twice"):
        read_items(tmp_path / "items.json")
    path = tmp_path / "items.json"
    write_items(path, [item], erratum="no placeholder")
    with pytest.raises(TaskError, match="an erratum with"):
        read_items(path)
    assert json.loads(path.read_text("utf-8"))["format"] == 1


@pytest.mark.parametrize(
    "line", ["It is new.", "{value} of {other}", "{value", "{0} {value}", "{value:{other}}", "{value!x}", 3]
)
def test_an_erratum_that_can_not_be_filled_is_refused(tmp_path: Path, line: Any) -> None:
    path = tmp_path / "items.json"
    write_items(path, build("gated", per_domain=1), erratum=line)
    with pytest.raises(TaskError, match=r"items\.json: expected an erratum with \{value\}"):
        read_items(path)
    write_items(path, build("gated", per_domain=1), erratum="{{now}} {value}")
    assert read_items(path).erratum == "{{now}} {value}"
    write_items(path, build("gated", per_domain=1), erratum="{{{name}}} {{value}}: {value}")
    with pytest.raises(TaskError, match=r"without \{name\} or \{value\} as literal text"):
        read_items(path)
    write_items(path, build("gated", per_domain=1), erratum="{{{name}}} is {value}")
    assert read_items(path).erratum == "{{{name}}} is {value}"


def test_braces_of_a_value_are_kept() -> None:
    item = replace(build("gated", per_domain=1)[0], field="a", sections=(Section("s", "{{x}} {a} {{y}}"),))
    assert item.context("{{v}}") == "{x} {{v}} {y}"
    told = replace(item, sections=(Section("s", "{{a}} is not {a}, nor {{{a}}}"),))
    assert told.context("v") == "{a} is not v, nor {v}"


@pytest.mark.parametrize("sections", [None, {}, "text", [3], [{"name": "a"}]])
def test_sections_that_are_none_are_refused(tmp_path: Path, sections: Any) -> None:
    path = tmp_path / "items.json"
    write_items(path, build("gated", per_domain=1)[:1])
    content = json.loads(path.read_text("utf-8"))
    content["items"][0]["sections"] = sections
    path.write_text(json.dumps(content), "utf-8")
    with pytest.raises(TaskError, match=r"item 0: expected ('sections' as a list|section 0 with)"):
        read_items(path)


def test_a_prefix_may_be_a_line_break(tmp_path: Path) -> None:
    item = replace(build("gated", per_domain=1)[0], prefix="\n")
    assert read_items(_changed(item, folder=tmp_path)).items == (item,)
