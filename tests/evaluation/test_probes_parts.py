"""What probes are made of: pairs, roles, decoding, summaries, pictures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from probe_items import items, situation, subject

from editable_cache.errors import TaskError
from editable_cache.evaluation.probes.bench import Bench, mean
from editable_cache.evaluation.probes.labels import first_named, label
from editable_cache.evaluation.probes.pairs import flipped
from editable_cache.evaluation.probes.pictures import draw, maps
from editable_cache.evaluation.probes.registry import PROBES, chosen
from editable_cache.evaluation.probes.study import items_of, kinds_of, probes_of, turned
from editable_cache.evaluation.probes.subject import Subject
from editable_cache.evaluation.probes.summary import lines, series
from editable_cache.evaluation.probes.timing import committed, decodable_from, held_out
from editable_cache.evaluation.probes.tokens import RULE_PARTS, tokens_of
from editable_cache.evaluation.results import Results
from editable_cache.evaluation.tasks import build
from editable_cache.testing.tiny_models import tiny_model, tiny_tokenizer


def test_a_turned_rule_differs_in_one_word_and_its_answers_change_places() -> None:
    for item in build("trigger", per_domain=4, neutral=20):
        turned = flipped(item)
        assert turned is not None
        before, after = item.context(item.old).split(), turned.context(item.old).split()
        different = [(a, b) for a, b in zip(before, after, strict=True) if a != b]
        assert len(different) == 1
        assert {word.strip(".,") for word in different[0]} == {item.old, item.new}
        assert (turned.answers[item.old], turned.answers[item.new]) == (item.answers[item.new], item.answers[item.old])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_lens_reads_streams_of_any_number_type(dtype: torch.dtype) -> None:
    """Streams are kept in float32, whatever the model computes in."""
    stream = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    models = (tiny_model("llama"), tiny_model("llama").to(dtype))
    stream = stream[:, : models[0].config.hidden_size]
    exact, found = (Subject.of(model, tiny_tokenizer()).lens(stream) for model in models)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, exact, atol=0.05 * float(exact.abs().max()), rtol=0.0)
    assert not torch.allclose(found, exact.flip(0), atol=0.05 * float(exact.abs().max()), rtol=0.0)


def test_two_values_of_a_rule_change_places_and_nothing_else() -> None:
    for item in build("gated", per_domain=2, neutral=20):
        turned = flipped(item)
        assert turned is not None
        before, after = item.context(item.old).split(), turned.context(item.old).split()
        different = [(a.strip(".,"), b.strip(".,")) for a, b in zip(before, after, strict=True) if a != b]
        assert sorted(different) == sorted([(item.old, item.new), (item.new, item.old)])
        assert turned.answers[item.old] == item.answers[item.new]


def test_what_has_no_rule_between_value_and_answer_can_not_be_turned() -> None:
    assert flipped(build("lookup", per_domain=1)[0]) is None
    assert flipped(build("two_hop", per_domain=1)[0]) is None, "its rule names groups, not values"
    item = build("trigger", per_domain=1)[0]
    assert flipped(item) is not None
    rule = next(section for section in item.sections if "RULE" in section.text)
    twice = replace(rule, text=rule.text.replace("For any other", f"Be it {item.old}, yes, {item.old}: for any other"))
    assert twice != rule
    assert flipped(replace(item, sections=tuple(twice if s is rule else s for s in item.sections))) is None


@pytest.mark.parametrize("task", ["trigger", "exchanged"])
def test_the_conclusion_is_balanced_against_the_field(task: str) -> None:
    one = situation(task)
    said = {state: label(one, state, "clause") for state in one.states}
    assert said["old"] != said["new"]
    assert said["old"] == said["flipped new"] != said["flipped old"]
    assert label(one, "old", "call") is None, "a domain of one's own"
    item = one.item
    context = item.context(item.old)
    other = next(answer for answer in item.answers.values() if answer != first_named(item))
    assert context.find(first_named(item)) < context.find(other)


def test_changed_words_are_no_place_for_notes_and_what_is_between_them_is() -> None:
    pair = situation("exchanged").rule_pair
    between = {*range(int(pair.changed[0]), int(pair.changed[-1]))} - {*pair.changed.tolist()}
    behind = {*pair.behind.tolist()}
    assert between < behind
    assert behind & {*pair.changed.tolist()} == set()
    assert max(behind) == pair.base.length - 2
    assert any(pair.base.tokens[slot].role == "first:+0" for slot in between)
    assert torch.equal(pair.base.ids[pair.behind], pair.other.ids[pair.behind])


def test_tokens_are_named_by_their_line() -> None:
    item = items("gated", 1)[0]
    text = item.context(item.old) + item.question + item.prefix
    ids = tiny_tokenizer()(text, add_special_tokens=False).input_ids
    texts = [tiny_tokenizer().decode([token]) for token in ids]
    slot = next(i for i in range(len(ids)) if "".join(texts[:i]).endswith(f"{item.field}: "))
    tokens = tokens_of(tiny_tokenizer(), ids, item, slot)
    assert "".join(token.text for token in tokens) == "".join(texts)

    def line(label: str) -> str:
        return "".join(token.text for token in tokens if token.role.rpartition(":")[0] == label)

    assert line("field") == f"{item.field}: {item.old}\n"
    rule = "".join(line(part) for part in RULE_PARTS)
    assert rule.startswith("ACCESS RULE (binding)")
    assert rule.endswith("\n")
    first, second = sorted(item.answers.values(), key=rule.find)
    assert line("first").strip().startswith(first)
    assert line("second").strip().startswith(second)
    begins = next(token for token in tokens if token.role == "second:+0").text.strip()
    assert second.startswith(begins) != first.startswith(begins)
    assert line("end-0").endswith(item.prefix)
    assert line("end-1").endswith("<args>)\n")
    assert line("rule+1").strip() == "" != line("rule+2")
    closing = [token for token in tokens if token.closes]
    assert all("\n" in token.text for token in closing[:-1])
    assert closing[-1].role == "end-0:-1"


def test_roles_are_the_same_in_all_items_of_a_task() -> None:
    prompts = [situation("gated", number=number).prompt("old") for number in (0, 3)]
    first, second = ({role for role in prompt.roles if role.startswith("end-1:")} for prompt in prompts)
    assert first == second
    assert first


def test_a_ridge_probe_tells_what_can_be_told_in_other_groups_and_nothing_else() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(160) % 2 == 0
    groups = [str(number // 16) for number in range(160)]
    noise = torch.randn((160, 40), generator=generator, dtype=torch.float64)
    planted = noise.clone()
    planted[:, 7] += torch.where(labels, 3.0, -3.0)
    by_group = noise.clone()
    sign = torch.tensor([1.0 if int(group) % 2 else -1.0 for group in groups])
    by_group[:, 7] += 3 * sign * torch.where(labels, 1.0, -1.0)
    assert held_out(planted, labels, groups).double().mean() > 0.95
    assert 0.3 < held_out(noise, labels, groups).double().mean() < 0.7
    assert held_out(by_group, labels, groups).double().mean() < 0.7, "a code that turns from group to group"


@pytest.mark.parametrize(
    ("margins", "layer"), [([1, 2, 3], 0), ([-1, 1, -1, 2, 3], 3), ([1, -1], 1), ([-1, -2], 0), ([0, 1], 1)]
)
def test_a_decision_is_committed_once_its_sign_no_longer_changes(margins: list[float], layer: int) -> None:
    assert committed(margins) == layer


def test_what_is_decodable_once_by_chance_is_not_decodable() -> None:
    assert decodable_from([0.5, 0.5, 1.0, 1.0, 0.75, 1.0, 1.0]) == 2
    assert decodable_from([0.5, 1.0, 0.5, 0.5, 0.75, 0.5]) is None
    assert decodable_from([0.5, 1.0, 0.5, 0.5, 1.0, 1.0]) == 4


def test_the_same_number_everywhere_is_certain_unless_it_is_a_yes_or_no() -> None:
    facts = {"probe": "locality", "task": "gated", "pair": "field", "arm": "prefix"}
    found = [{**facts, "domain": str(n), "measure": m, "value": 0.0} for m in ("deviation", "flips") for n in range(8)]
    certain, counted = lines(found)
    assert (certain.interval.low, certain.interval.high) == (0.0, 0.0)
    assert counted.interval.high > 0.3


def test_effects_rank_the_one_token_that_matters_first() -> None:
    one = situation("gated")
    bench = Bench(one, "field")
    ranked, effects = bench.ranked(), bench.effects()
    single = bench.pair.mask(ranked[:1])
    assert bench.recoveries(bench.pair, [single])[0] == pytest.approx(float(effects.max()), abs=1e-4)
    assert float(effects.max()) > mean(effects.tolist())
    assert bench.drawn(4, "x")[0].tolist() == Bench(one, "field").drawn(4, "x")[0].tolist()


def test_unknown_probes_are_refused_with_the_known_ones() -> None:
    assert [probe.name for probe in chosen(["heads"])] == ["heads"]
    assert len(chosen([])) == len(PROBES)
    with pytest.raises(TaskError, match="Unknown probe 'hands'; expected one of locality, suffix"):
        chosen(["hands"])


def test_side_tasks_are_asked_where_the_note_stands_and_no_more() -> None:
    tasks = ("gated", "lookup")
    names = [probe.name for probe, _ in probes_of("lookup", PROBES.values(), tasks)]
    assert names == ["locality"]
    assert len(probes_of("lookup", PROBES.values(), ("lookup",))) > 1
    for task in ("trigger", "exchanged"):
        assert {kind for _, kind in probes_of(task, PROBES.values(), tasks)} == {"rule"} == {*kinds_of(task)}


def test_items_for_turned_rules_are_those_that_can_be_turned() -> None:
    given = [*build("gated", per_domain=1), *build("lookup", per_domain=1), *build("gated", per_domain=1, mode="cot")]
    found = turned(given)
    assert [item.key for item in found] == [f"exchanged/{item.key}" for item in given[:10]]
    assert {item.task for item in found} == {"exchanged"} == {item.task for item in items_of("exchanged", 10)}


@pytest.mark.parametrize("count", [1, 10, 20, 40, 45])
def test_built_in_items_are_as_many_as_asked_and_from_many_domains(count: int) -> None:
    found = items_of("gated", count)
    assert len(found) == count == len({item.key for item in found})
    assert len({item.domain for item in found}) == min(count, 10)
    if count >= 20:
        first = [item.answers[item.old] < item.answers[item.new] for item in found]
        assert 0.25 < sum(first) / len(first) < 0.75


def rows() -> list[dict[str, object]]:
    """Rows of two domains, as probes make them."""
    found: list[dict[str, object]] = []
    for domain, base in (("a$b", 0.0), ("c", 1.0)):
        facts: dict[str, object] = {"key": f"k/{domain}", "probe": "suffix", "task": "gated", "domain": domain}
        facts |= {"pair": "field"}
        found += [{**facts, "arm": "by_effect", "measure": "recovery", "x": k, "value": base / k} for k in (1, 2)]
        cell = {**facts, "arm": "rule:-1", "measure": "cell", "text": "$x_1$\n"}
        found += [{**cell, "x": layer, "value": base * layer} for layer in (0, 1, 2)]
    return found


def test_lines_have_means_and_intervals_over_domains() -> None:
    found = lines(rows())
    assert [(line.arm, line.x, line.interval.mean) for line in found] == [("by_effect", 1, 0.5), ("by_effect", 2, 0.25)]
    assert (found[0].interval.low, found[0].interval.high) == (0.0, 1.0)
    assert [len(each.points) for each in series(found)] == [2]
    assert found[0].facts()["clusters"] == 2


def test_pictures_are_drawn_from_any_text_and_are_the_same_each_time(tmp_path: Path) -> None:
    results = Results("mechanism", "a $model$", {}, {}, tuple(rows()))
    first = draw(results, tmp_path / "a")
    second = draw(results, tmp_path / "b")
    assert [path.name for path in first] == ["suffix-gated.svg"]
    assert first[0].read_bytes() == second[0].read_bytes()
    text = first[0].read_text("utf-8")
    assert "x_1" in text
    assert "rule:-1" in text
    turned = [{**row, "value": -1.0} for row in rows()]
    other = draw(Results("mechanism", "a $model$", {}, {}, tuple(turned)), tmp_path / "c")
    assert other[0].read_bytes() != first[0].read_bytes()


def test_a_map_has_tokens_down_and_layers_across() -> None:
    found = {each.title: each for each in maps(rows(), "suffix", "gated")}
    assert found["cell"].columns == ("0", "1", "2")
    assert found["cell"].across == "layer"
    assert found["cell"].values == ((0.0, 0.5, 1.0),)
    assert found["recovery"].across == "number"
    assert maps(rows(), "heads", "gated") == []


def test_a_subject_knows_its_parts() -> None:
    model = subject("llama")
    assert (model.num_layers, model.num_heads, model.head_dim) == (3, 4, 16)
    assert all(projection.in_features == 64 for projection in model.projections)
