"""The studies of composing on a random model: where nothing is missed they are exact, and else they tell."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cache_support import shared_model
from cache_support import shared_tokenizer as chat_tokenizer

from editable_cache import EditableCache
from editable_cache.errors import TaskError
from editable_cache.evaluation.arms import ERRATA
from editable_cache.evaluation.asking import Asking
from editable_cache.evaluation.results import Row, Run
from editable_cache.evaluation.statistics import Interval, bootstrap
from editable_cache.evaluation.studies import compose, diagonal, horizon, multihop, questions
from editable_cache.evaluation.studies.compose import Block, Layout, Way
from editable_cache.evaluation.studies.tables import grouped, paired, table
from editable_cache.evaluation.tasks import Item, Section, build
from editable_cache.testing.tiny_models import tiny_model

pytestmark = pytest.mark.filterwarnings("ignore::editable_cache.TokenBoundaryWarning")
WHOLE, USUAL = Way(None), Way(1)

ITEM = Item(
    key="one",
    task="gated",
    domain="shop",
    mode="direct",
    sections=(
        Section("session", "You are an agent.\nstatus: {status}\n"),
        Section("policy", "\nIf status is pending, refund. If status is shipped, refuse.\nBe kind. Be brief.\n"),
        Section("tools", "\nrefund({{order}})\nescalate({{order}})\n"),
        Section("conversation", "\nuser: refund my order, please.\n"),
    ),
    field="status",
    old="pending",
    new="shipped",
    question="What is the next call?",
    prefix=" call:",
    answers={"pending": " refund", "shipped": " escalate"},
    reasoning={"pending": "", "shipped": ""},
)
CHAT = (
    "{% for m in messages %}{% if m.role == 'tool' and not allowed %}{{ raise_exception('no tool') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def with_template(template: str | None) -> Any:
    tokenizer = copy.deepcopy(chat_tokenizer())
    tokenizer.chat_template = template
    return tokenizer


@functools.cache
def shared_tokenizer() -> Any:
    return with_template(None)


def asking(item: Item = ITEM, tokenizer: Any = None) -> Asking:
    return Asking(shared_model("llama"), tokenizer or shared_tokenizer(), item)


def trial() -> Run:
    return Run(None, study="trial", model="random", settings={})


def measured(content: str, point: str, ways: Sequence[Way], tokenizer: Any = None) -> list[Row]:
    found = compose.layout(asking(tokenizer=tokenizer), content, point, "shipped")
    assert found is not None
    with torch.no_grad():
        return compose.measure(found, ways, {})


# -- compose


@pytest.mark.parametrize("content", compose.CONTENTS)
@pytest.mark.parametrize("point", ["middle", "end"])
def test_a_seam_over_the_whole_skill_is_a_full_prefill_and_a_usual_one_is_not(content: str, point: str) -> None:
    whole, usual = measured(content, point, [WHOLE, USUAL])
    assert whole["gap"] == pytest.approx(whole["full_gap"], abs=2e-4)
    assert whole["cosine"] == pytest.approx(1, abs=1e-6)
    assert whole["agrees"]
    assert abs(usual["gap"] - usual["full_gap"]) > 1e-3
    assert usual["full_gap"] == whole["full_gap"]


def test_the_full_prefill_is_that_of_the_joined_sections() -> None:
    found = compose.layout(asking(), "rule", "middle", "shipped")
    assert found is not None
    text = "".join(shared_tokenizer().decode(ids) for ids in found.ids())
    assert [block.text[:1] for block in found.blocks] == ["Y", "I", "r", "u"]
    assert text == ITEM.context("shipped")
    plain = EditableCache(shared_model("llama"), tokenizer=shared_tokenizer())
    plain.append(torch.cat([*found.ids(), found.asking.question_ids]))
    expected = found.asking.decide(plain).gap
    start, count = found.start()
    assert count == 1
    assert found.exact(start).gap == pytest.approx(expected, abs=1e-4)


def test_what_stands_first_misses_nothing() -> None:
    found = Layout(asking(), [Block("You are an agent.\n", skill=True), Block("status: {status}\n")], "shipped")
    assert compose.measure(found, [Way(0)], {})[0]["gap"] == pytest.approx(found.exact(found.start()[0]).gap, abs=1e-4)


def test_keys_that_are_not_turned_are_seen() -> None:
    turned, left = measured("rule", "end", [USUAL, Way(1, rotated=False)])
    assert abs(turned["gap"] - left["gap"]) > 1e-3
    assert turned["skill_tokens"] == left["skill_tokens"] < turned["tokens"]


@pytest.mark.parametrize("rotated", [True, False])
def test_keys_are_left_as_they_were_compiled_only_where_asked(rotated: bool) -> None:
    found = compose.layout(asking(), "rule", "end", "shipped")
    assert found is not None
    cache, count = found.start()
    chunk = found.chunk(found.ids()[count])
    compose.splice(cache, chunk, Way(0, rotated=rotated), "rule")
    mine, compiled = cache.layers[0].keys[..., -len(chunk) :, :], chunk.layers[0]["keys"]
    assert torch.equal(mine, compiled) is not rotated
    values = cache.layers[0].values[..., -len(chunk) :, :]
    assert torch.equal(values, chunk.layers[0]["values"])


@pytest.mark.parametrize(("content", "partner"), [("rule", "status: {status}"), ("fact", "If status is pending")])
def test_ahead_a_part_is_read_right_before_what_it_is_combined_with(content: str, partner: str) -> None:
    found = compose.layout(asking(), content, "ahead", "shipped")
    assert found is not None
    assert [block.skill for block in found.blocks][-2:] == [True, False]
    assert partner in found.blocks[-1].text
    assert sorted("".join(block.text for block in found.blocks).split()) == sorted(ITEM.template().split())
    assert compose.layout(asking(), "tools", "ahead", "shipped") is None


def test_points_of_a_chat() -> None:
    chat = with_template(CHAT.replace("not allowed", "false"))
    system, tool = (compose.layout(asking(tokenizer=chat), "rule", point, "shipped") for point in ("system", "tool"))
    assert system is not None
    assert tool is not None
    assert [block.text[:6] for block in system.blocks][:2] == ["<user>", "If sta"]
    assert [block.skill for block in system.blocks] == [False, True, False, False, False]
    assert tool.blocks[-3].text == "</user><assistant>One moment.</assistant><tool>\n"
    assert tool.blocks[-1].text == "</tool><user>"
    whole, usual = (compose.measure(tool, [way], {})[0] for way in (WHOLE, USUAL))
    assert whole["gap"] == pytest.approx(whole["full_gap"], abs=2e-4)
    assert abs(usual["gap"] - usual["full_gap"]) > 1e-3


@pytest.mark.parametrize("template", [CHAT, "{{ messages[0].content }}"])
def test_a_chat_without_tool_turns_has_no_such_point(template: str) -> None:
    assert compose.tool_turn(with_template(template)) is None
    assert compose.layout(asking(tokenizer=with_template(template)), "rule", "tool", "shipped") is None
    assert compose.layout(asking(), "rule", "system", "shipped") is None


def test_contents_are_kept_item_by_item() -> None:
    run, model, tokenizer = trial(), shared_model("llama"), shared_tokenizer()
    items = [ITEM, replace(ITEM, key="two", sections=ITEM.sections[:2])]
    compose.run_contents(model, tokenizer, items, run, sweep=("rule",))
    rows = run.results().rows
    assert len([row for row in rows if row["key"].endswith("one")]) == (6 + 6 + 1) + 3 + 2
    assert {row["content"] for row in rows if row["key"].endswith("two")} == {"rule", "fact"}
    before = len(rows)
    compose.run_contents(model, tokenizer, items, run)
    assert len(run.results().rows) == before
    with pytest.raises(TaskError, match="point of"):
        compose.run_contents(model, tokenizer, [replace(ITEM, key="three")], run, points=("nowhere",))


def test_a_model_with_recurrent_layers_has_fewer_ways() -> None:
    model, tokenizer, run = tiny_model("falcon_h1"), shared_tokenizer(), trial()
    compose.run_contents(model, tokenizer, [ITEM], run, contents=("rule",), points=("middle",))
    rows = run.results().rows
    assert {row["seam"] for row in rows} == {0, 1}
    assert all(row["rotated"] for row in rows)


def test_several_skills_are_several_chunks_with_the_relevant_one_among_them() -> None:
    items = [replace(ITEM, key=f"item {name}", domain=name) for name in "abcd"]
    items = [replace(each, sections=(*each.sections[:1], _policy(each.domain), *each.sections[2:])) for each in items]
    run = trial()
    compose.run_counts(shared_model("llama"), shared_tokenizer(), items, run)
    for point in compose.SWEPT:
        rows = [row for row in run.results().where(point=point) if row["key"].endswith("/item a")]
        assert [row["chunks"] for row in rows] == [1, 2, 3, 4]
        assert [row["tokens"] for row in rows] == sorted({row["tokens"] for row in rows})
    found = compose.layout(asking(items[0]), "rule", "middle", "shipped", [_policy("b"), _policy("c")])
    assert found is not None
    assert sorted(block.text[:8] for block in found.blocks if block.skill) == ["policy a", "policy b", "policy c"]
    with pytest.raises(TaskError, match="at least 4 domains, got 1"):
        compose.run_counts(shared_model("llama"), shared_tokenizer(), items[:1], trial())


def _policy(name: str) -> Section:
    return Section("policy", f"\npolicy {name}: if status is pending, refund.\n")


def test_a_memory_in_two_blocks() -> None:
    items = build("cross_reference", per_domain=2, neutral=1)[:2]
    run = trial()
    compose.run_split(shared_model("llama"), shared_tokenizer(), items, run)
    rows = {(row["point"], row["border"]): row for row in run.results().rows if row["key"].endswith(items[0].key)}
    assert {border: row["chunks"] for (_, border), row in rows.items()} == {"one": 1, "together": 2, "split": 2}
    assert len({row["full_gap"] for (point, _), row in rows.items() if point == "end"}) == 1
    assert rows["start", "one"]["gap"] == pytest.approx(rows["start", "one"]["full_gap"], abs=2e-4)
    assert abs(rows["start", "split"]["gap"] - rows["start", "split"]["full_gap"]) > 1e-3
    for item in items:
        found = compose._memory(asking(item), "start", (3,))
        memory = next(block.text for block in found.blocks if block.skill)
        assert memory.count(f": {found.value}\n") == 0  # the rival setting has the other value
    with pytest.raises(TaskError, match="cross_reference"):
        compose.run_split(shared_model("llama"), shared_tokenizer(), [ITEM], trial())


def test_nothing_to_measure_is_refused() -> None:
    with pytest.raises(TaskError, match="at least one item"):
        compose.run_contents(shared_model("llama"), shared_tokenizer(), [], trial())
    with pytest.raises(TaskError, match="at least one question"):
        multihop.run_multihop(shared_model("llama"), shared_tokenizer(), [], trial())


# -- diagonal


def test_a_tracked_segment_is_edited_like_one_that_was_appended_with_its_field() -> None:
    model, tokenizer = shared_model("llama"), shared_tokenizer()
    template = "status: {status}\nIf status is pending, refund.\n"
    known, told = (EditableCache(model, tokenizer=tokenizer) for _ in range(2))
    known.append(template, name="skill", fields={"status": "pending"})
    told.append(known.token_ids[0], name="skill")
    diagonal.track(told, tokenizer, "skill", template, {"status": "pending"})
    assert told.ledger.fields == known.ledger.fields
    stale = told.next_token_logits()
    for cache in (known, told):
        cache.edit("status", "shipped", method="suffix")
    assert torch.equal(told.token_ids, known.token_ids)
    torch.testing.assert_close(told.next_token_logits(), known.next_token_logits(), atol=1e-5, rtol=0)
    assert (told.next_token_logits() - stale).abs().max() > 1e-3
    with pytest.raises(TaskError, match="ids of its template"):
        diagonal.track(told, tokenizer, "skill", "state: {state}\n", {"state": "pending"})


def diagonal_rows(way: Way) -> dict[str, Row]:
    run = trial()
    model, tokenizer = shared_model("llama"), shared_tokenizer()
    diagonal.run_diagonal(model, tokenizer, [ITEM], run, arms=diagonal.ARMS, way=way)
    return {row["arm"]: row for row in run.results().rows}


def test_the_diagonal_is_exact_where_the_whole_skill_is_computed_and_only_there() -> None:
    whole, usual = diagonal_rows(WHOLE), diagonal_rows(USUAL)
    assert set(whole) == {*diagonal.ARMS, diagonal.FULL}
    for name, row in whole.items():
        assert row["composed_gap"] == pytest.approx(row["recomputed_gap"], abs=3e-4), name
        assert row["agrees"], name
    assert len({row["recomputed_gap"] for row in whole.values()}) > 4  # arms differ
    apart = [abs(row["composed_gap"] - row["recomputed_gap"]) for row in usual.values()]
    assert min(apart) > 1e-4
    assert whole["suffix"]["recomputed_gap"] == pytest.approx(whole["full"]["recomputed_gap"], abs=2e-4)


def test_recovery_lies_between_the_ends_that_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("editable_cache.evaluation.metrics.LEAST_GAP", 1e-3)
    rows = diagonal_rows(USUAL)
    assert rows["stale"]["recomputed_recovery"] == 0
    assert rows["full"]["recomputed_recovery"] == 1
    assert rows["stale"]["composed_own_recovery"] == 0
    assert rows["full"]["composed_own_recovery"] == 1
    stale, full = rows["stale"]["recomputed_gap"], rows["full"]["recomputed_gap"]
    expected = (rows["erratum"]["composed_gap"] - stale) / (full - stale)
    assert rows["erratum"]["composed_recovery"] == pytest.approx(expected, rel=0.05, abs=0.05)


def test_an_item_without_the_field_in_the_skill_is_refused() -> None:
    late = replace(ITEM, sections=(*ITEM.sections[1:], ITEM.sections[0]))
    with pytest.raises(TaskError, match="in front of the policy's end"):
        diagonal.run_diagonal(shared_model("llama"), shared_tokenizer(), [late], trial())


# -- horizon


def horizon_rows(turns: int = 6) -> list[Row]:
    run = trial()
    horizon.run_horizon(shared_model("llama"), shared_tokenizer(), [ITEM], run, turns=turns)
    return list(run.results().rows)


def test_appending_is_a_prefill_and_a_refreshed_field_is_not() -> None:
    rows = horizon_rows()
    plain = [row for row in rows if row["arm"] == horizon.APPEND_ONLY]
    mine = [row for row in rows if row["arm"] == horizon.REFRESHED]
    assert [row["turn"] for row in plain] == [row["turn"] for row in mine] == [1, 2, 3, 4, 5, 6]
    assert max(row["error"] for row in plain) < 1e-4
    assert min(row["control"] for row in plain) > 1e-3
    assert max(abs(row["gap"] - row["full_gap"]) for row in plain) < 1e-4
    assert max(abs(row["gap"] - row["full_gap"]) for row in mine) > 1e-3
    lengths = [row["length"] for row in mine]
    assert lengths == sorted(set(lengths))


def test_the_first_turn_by_hand() -> None:
    row = next(row for row in horizon_rows(3) if row["arm"] == horizon.REFRESHED and row["turn"] == 1)
    found = asking()
    cache = found.held("pending")
    cache.refresh_field("status", "shipped")
    cache.append(ERRATA["erratum"].format(name="status", value="shipped"))
    cache.append(horizon.EXCHANGE)
    assert row["gap"] == pytest.approx(found.decide(found.ask(cache)).gap, abs=2e-4)
    prefill = EditableCache(shared_model("llama"), tokenizer=shared_tokenizer())
    prefill.append(cache.token_ids[0])
    assert row["full_gap"] == pytest.approx(found.decide(prefill).gap, abs=2e-4)
    assert row["gap"] != pytest.approx(row["full_gap"], abs=1e-4)


def test_trend_of_a_line() -> None:
    rows = [
        {"key": f"item {place}", "domain": place, "turn": turn, "cosine": 1 - (0.01 + 0.001 * place) * turn}
        for place in range(4)
        for turn in (3, 1, 6, 2, 5, 4)
    ]
    found = horizon.trend(rows, "cosine")
    assert found["slope"].mean == pytest.approx(-0.0115)
    assert found["slope"].low < -0.0115 < found["slope"].high
    assert found["change"].mean == pytest.approx(-0.0115 * 4)
    flat = horizon.trend([{**row, "cosine": 0.5} for row in rows], "cosine")
    assert flat["slope"].mean == 0
    with pytest.raises(TaskError, match="rows with 'kl'"):
        horizon.trend(rows, "kl")
    with pytest.raises(TaskError, match="at least 3 turns"):
        horizon.run_horizon(shared_model("llama"), shared_tokenizer(), [ITEM], trial(), turns=2)


# -- questions


def hotpot(folder: Path) -> Path:
    names = ["Alpha", "Beta", "Gamma", "Delta"]
    entry = {
        "_id": "h1",
        "type": "bridge",
        "question": "Who owns Beta?",
        "answer": "Carl",
        "supporting_facts": [["Alpha", 0], ["Beta", 0], ["Beta", 1]],
        "context": [[name, [f"{name} is a shop.", " It sells paper."]] for name in names],
    }
    others = [{**entry, "_id": "h2", "type": "comparison"}, {**entry, "_id": "h3", "answer": "yes"}]
    path = folder / "hotpot.json"
    path.write_text(json.dumps([entry, *others]))
    return path


def musique(folder: Path) -> Path:
    hops = [
        {"question": "Who made the lamp?", "answer": "Ada", "paragraph_support_idx": 2},
        {"question": "#1 >> birthplace", "answer": "Graz", "paragraph_support_idx": 0},
    ]
    parts = [{"idx": place, "title": f"T{place}", "paragraph_text": f"Text {place}."} for place in range(4)]
    entry = {"id": "2hop__1", "question": "Where was the lamp's maker born?", "answer": "Graz", "paragraphs": parts}
    path = folder / "musique.json"
    path.write_text(json.dumps([{**entry, "question_decomposition": hops}]))
    return path


def squad(folder: Path) -> Path:
    parts = [
        {"context": f"Text {place}.", "qas": [{"id": f"q{place}", "question": "What?", "answers": [{"text": "That"}]}]}
        for place in range(4)
    ]
    path = folder / "squad.json"
    articles = [{"title": title, "paragraphs": parts} for title in ("A_city", "A_river")]
    path.write_text(json.dumps({"data": articles}))
    return path


def test_questions_are_read(tmp_path: Path) -> None:
    (found,) = questions.hotpot_questions(hotpot(tmp_path))
    assert {passage.title for passage in found.support} == {"Alpha", "Beta"}
    assert {passage.title for passage in found.others} == {"Gamma", "Delta"}
    assert found.support[0].text.endswith("is a shop. It sells paper.")
    both, second = questions.musique_questions(musique(tmp_path))
    assert (both.hops, second.hops) == ("multi", "single")
    assert second.question == "What is the birthplace of Ada?"
    assert (both.support, both.others, both.answer) == (second.support, second.others, second.answer)
    assert {passage.text for passage in both.support} == {"Text 2.", "Text 0."}
    first, second, found, *_ = questions.squad_questions(squad(tmp_path))
    assert (first.cluster, second.cluster, found.cluster) == ("A_city", "A_river", "A_city")
    assert "Text 1." in {passage.text for passage in found.support}
    assert "Text 1." not in {passage.text for passage in found.others}


def test_bad_question_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="can't be read"):
        questions.hotpot_questions(tmp_path / "none.json")
    for text, match in (("{", "expected JSON"), ("[1]", "list of objects"), ("[]", "at least one")):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(TaskError, match=match):
            questions.musique_questions(tmp_path / "bad.json")


def test_right_answers_are_as_likely_as_a_stock_forward_says(tmp_path: Path) -> None:
    model, tokenizer = shared_model("llama"), shared_tokenizer()
    (asked,) = questions.hotpot_questions(hotpot(tmp_path))
    found = multihop.prompt(tokenizer, replace(asked, answer="a blue paper lamp"))
    assert found is not None
    assert len(found.answer) > 1
    caches = multihop.read(model, tokenizer, found)
    logits = multihop.answer_logits(model, caches["full"], found)
    ids = torch.cat((found.opening, *found.passages, found.question, found.answer))
    with torch.no_grad():
        stock = model(input_ids=ids[None]).logits[0, -len(found.answer) - 1 : -1]
    torch.testing.assert_close(logits, stock, atol=1e-4, rtol=0)
    for arm in ("seam@0", "seam@1", "seam@16", "joined", "none"):
        assert (multihop.answer_logits(model, caches[arm], found) - stock).abs().max() > 1e-3, arm
    row = multihop.compared(stock, multihop.answer_logits(model, caches["none"], found), found.answer)
    assert row["full_logp"] == pytest.approx(-float(torch.nn.functional.cross_entropy(stock, found.answer)), abs=1e-4)
    assert row["drop"] == pytest.approx(row["full_logp"] - row["logp"], abs=2e-5)
    assert row["less_likely"] == (row["drop"] > 0)


def test_questions_are_asked_once_and_share_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads, real = [], multihop.read
    monkeypatch.setattr(multihop, "read", lambda *given: reads.append(1) or real(*given))
    model, tokenizer, run = shared_model("llama"), shared_tokenizer(), trial()
    found = questions.musique_questions(musique(tmp_path)) + questions.squad_questions(squad(tmp_path))
    found = multihop.fitting(tokenizer, found, 1)
    assert [asked.dataset for asked in found] == ["musique", "musique_second_hop", "squad"]
    multihop.run_multihop(model, tokenizer, found, run)
    multihop.run_multihop(model, tokenizer, found, run)
    assert len(reads) == 2
    assert len(run.results().rows) == 3 * 5
    long = replace(found[0], key="long", support=(questions.Passage("T", "word " * 300), found[0].support[1]))
    with pytest.raises(TaskError, match="supporting passage"):
        multihop.run_multihop(model, tokenizer, [long], run)


# -- tables


def test_groups_and_pairs() -> None:
    rows = [
        {"key": key, "domain": key[0], "arm": arm, "value": value, "other": None}
        for key, pair in {"a1": (1.0, 0.5), "a2": (3.0, 2.0), "b1": (2.0, 2.0)}.items()
        for arm, value in zip(("x", "y"), pair, strict=True)
    ]
    groups = grouped(rows, ("arm",), ("value", "other"))
    assert groups["x",]["value"].mean == 2
    assert groups["y",]["value"].clusters == 2
    assert "other" not in groups["x",]
    difference = paired(rows, "arm", "x", "y", "value")
    assert difference is not None
    assert (difference.mean, difference.n) == (0.5, 3)
    assert paired(rows, "arm", "x", "z", "value") is None
    assert len(table(groups)) == 2
    assert bootstrap([0.0, 0.0], "ab") == Interval(0, 0, 0, 2, 2)
    assert bootstrap([False, False], "ab").high == pytest.approx(1 - 0.025**0.5)
