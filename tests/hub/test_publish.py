"""Publishing: a repository, one commit, a card, several builds; and what a failure leaves."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_support import answer, run
from hub_server import HubServer
from huggingface_hub import HfApi
from skill_support import (
    MARKS,
    SKILL,
    TEXT,
    TINY,
    builds_of,
    built,
    card_of,
    files_of,
    front_matter,
    load,
    meanwhile,
    readable,
    serve,
    turned,
)
from transformers import AutoModelForCausalLM

from editable_cache import ArtifactError, CompatibilityError, Skill
from editable_cache.hub.build import open_build
from editable_cache.hub.resolve import label_of
from editable_cache.testing.tiny_models import tiny_model, tiny_tokenizer

# -- one build


def test_a_skill_comes_back_as_it_was(hub: HubServer) -> None:
    serve(hub)
    model, tokenizer = load()
    skill = Skill.precompile(model, tokenizer, TEXT, name="refunds")
    assert skill.origin.repo == TINY
    assert skill.origin.revision == getattr(model.config, "_commit_hash", "")  # which transformers 5.24 forgets
    assert skill.origin.revision in ("", hub.head(TINY).sha)
    hub.log.clear()
    address = skill.push_to_hub(SKILL)
    assert [call.status for call in hub.calls("POST", "*/commit/*")] == [200]
    head = hub.head(SKILL)
    assert address == f"{hub.url}/{SKILL}/commit/{head.sha}"
    assert hub.repo(SKILL).commits[str(head.parent)].parent is None  # the one that made the repository

    back = Skill.from_pretrained(SKILL, model=model, tokenizer=tokenizer, control_tokens="refuse")
    assert type(back) is Skill
    assert back.equal_cells(skill)
    assert (back.text, back.name, back.digest) == (TEXT, "refunds", skill.digest)
    assert (back.origin, back.provenance, back.model) == (skill.origin, skill.provenance, skill.model)
    other = Skill.precompile(model, tokenizer, TEXT.replace("pending", "delivered"), name="refunds")
    assert not back.equal_cells(other)  # control


def test_the_card_says_what_it_is_and_its_snippet_runs(hub: HubServer, capsys: pytest.CaptureFixture[str]) -> None:
    serve(hub)
    model, tokenizer = load()
    skill = Skill.precompile(model, tokenizer, TEXT, name="refunds")
    skill.push_to_hub(SKILL, license="apache-2.0", fidelity={"cosine of logits": 0.9998})
    text = card_of(hub)
    data = front_matter(text)
    assert {"kv-cache", "editable-cache"} <= set(data["tags"])
    assert (data["base_model"], data["library_name"], data["license"]) == (TINY, "editable_cache", "apache-2.0")
    [label] = builds_of(hub)
    row = next(line for line in text.splitlines() if line.startswith("| " + label.replace("_", r"\_")))
    assert [word in row for word in (TINY, "float32", "original", f" {len(skill)} ", " KiB |", "sdpa")] == [True] * 6
    assert "| cosine of logits | 0.9998 |" in text

    code = re.findall(r"```python\n(.*?)```", text, re.S)
    assert len(code) == 1
    hub.log.clear()
    exec(compile(code[0], "card", "exec"), names := {})
    assert names["skill"].equal_cells(skill)
    assert any(path.startswith("builds/") for path in hub.downloaded())
    assert "Question: what does it say?" in capsys.readouterr().out
    broken = code[0].replace(SKILL, "org/nothing")
    with pytest.raises(ArtifactError):  # control: the snippet asks the hub
        exec(compile(broken, "card", "exec"), {})


def test_a_card_without_a_known_model_names_none(hub: HubServer) -> None:
    built()[1].push_to_hub(SKILL)
    assert "base_model" not in front_matter(card_of(hub))
    assert "license" not in front_matter(card_of(hub))


@pytest.mark.parametrize("name", ["refunds", "../refunds", "org/a/b", "org/..", "org/x y", ""])
def test_only_a_repository_of_somebody_is_a_place(hub: HubServer, name: str) -> None:
    with pytest.raises(ArtifactError, match="organization/name"):
        built()[1].push_to_hub(name)
    assert hub.log == []
    assert hub.store.repos == {}


# -- several builds


def test_builds_of_several_models_stand_side_by_side(hub: HubServer) -> None:
    skill = built()[1]
    for each, storage in ((skill, "original"), (built(torch.bfloat16)[1], "original"), (skill, "int8")):
        each.push_to_hub(SKILL, storage=storage)  # type: ignore[arg-type]
    built(seed=1)[1].push_to_hub(SKILL)
    labels = builds_of(hub)
    assert len(labels) == 4
    text = card_of(hub)
    assert all(f"| {label} |" in text for label in labels)
    assert text.count(MARKS[0]) == text.count(MARKS[1]) == 1
    assert len([path for path in files_of(hub) if path.endswith(".safetensors")]) == 4


def test_the_same_build_is_replaced_in_one_commit(hub: HubServer) -> None:
    model, skill = built()
    skill.push_to_hub(SKILL)
    built(seed=1)[1].push_to_hub(SKILL)
    before = files_of(hub)
    commits = len(hub.repo(SKILL).commits)
    new = Skill.precompile(model, tiny_tokenizer(), TEXT, name="refunds", prefix="Be polite.\n")
    new.push_to_hub(SKILL)
    after = files_of(hub)
    assert len(hub.repo(SKILL).commits) == commits + 1
    payloads = [{path for path in files if path.endswith(".safetensors")} for files in (before, after)]
    assert [len(found) for found in payloads] == [2, 2]
    assert len(payloads[0] & payloads[1]) == 1  # the other model's
    assert len(builds_of(hub)) == 2
    assert Skill.from_pretrained(SKILL, model=model).equal_cells(new)
    assert "Replace build" in hub.head(SKILL).title


def test_the_same_skill_twice_changes_nothing(hub: HubServer) -> None:
    built()[1].push_to_hub(SKILL)
    before = files_of(hub)
    built()[1].push_to_hub(SKILL)
    assert files_of(hub) == before


def test_another_skill_does_not_take_its_place(hub: HubServer) -> None:
    model, skill = built()
    skill.push_to_hub(SKILL)
    before = files_of(hub)
    other = Skill.precompile(model, tiny_tokenizer(), "Quite another text.\n", name="greetings")
    with pytest.raises(ArtifactError, match="'refunds', got one of 'greetings'"):
        other.push_to_hub(SKILL)
    assert files_of(hub) == before


def windowed(sliding_window: int) -> Any:
    """Models of one set of weights, whose configs differ."""
    made = tiny_model("mistral")
    made.config.sliding_window = sliding_window
    other = AutoModelForCausalLM.from_config(made.config).eval()
    other.load_state_dict(made.state_dict())
    return other


def test_models_that_share_weights_have_places_of_their_own(hub: HubServer) -> None:
    for repo, pairs in {
        "org/rope": [(built()[0], tiny_tokenizer()), (turned(), tiny_tokenizer())],
        "org/window": [(windowed(8), tiny_tokenizer()), (windowed(16), tiny_tokenizer())],
        "org/tokenizer": [(built()[0], tiny_tokenizer()), (built()[0], tiny_tokenizer(add_bos=True))],
    }.items():
        skills = [Skill.precompile(*pair, TEXT, name="refunds") for pair in pairs]
        for skill in [*skills, skills[0]]:  # the last replaces the first
            skill.push_to_hub(repo)
        assert len(builds_of(hub, repo)) == 2
        for (model, tokenizer), skill in zip(pairs, skills, strict=True):
            assert Skill.from_pretrained(repo, model=model, tokenizer=tokenizer).equal_cells(skill)


def test_a_label_tells_everything_but_fields_that_are_none(tmp_path: Path) -> None:
    built()[1].save_pretrained(tmp_path)
    build = open_build(tmp_path)

    def label(**changes: str) -> str:
        return label_of(replace(build, model=replace(build.model, **changes)))

    config = build.model.config
    kind, dtype, weights, rest = label_of(build).split("-")
    assert (kind, dtype, weights, len(rest)) == ("llama", "float32", build.model.weights[:8], 4)
    assert label(config=config.replace("{", '{"new": null, "newer": false, ', 1)) == label_of(build)
    changed = {label(**{name: "0" * 16}) for name in ("weights", "rotary", "adapters", "tokenizer")}
    changed |= {label(config=config.replace("{", '{"new": 0, ', 1)), label(dtype="float16"), label_of(build)}
    assert len(changed) == 7
    assert label_of(replace(build, storage="int8")) == f"{label_of(build)}-int8"


def test_another_model_under_the_same_label_is_not_replaced(hub: HubServer) -> None:
    built()[1].push_to_hub("org/other")
    [label] = builds_of(hub, "org/other")
    built(seed=1)[1].push_to_hub(SKILL)
    [theirs] = builds_of(hub)
    moved = {path.replace(theirs, label): data for path, data in files_of(hub).items()}
    hub.repo(SKILL).write({**dict.fromkeys(files_of(hub)), **moved})
    before = files_of(hub)
    with pytest.raises(ArtifactError, match=r"is of another model \(weights"):
        built()[1].push_to_hub(SKILL)
    assert files_of(hub) == before


def test_another_text_is_refused_beside_builds_that_stay(hub: HubServer) -> None:
    skill, other = built()[1], built(seed=1)
    skill.push_to_hub(SKILL)
    skill.push_to_hub(SKILL, storage="int8")
    [label, small], before = builds_of(hub), files_of(hub)
    new = Skill.precompile(other[0], tiny_tokenizer(), TEXT.replace("not ", ""), name="refunds")
    ids = Skill.precompile(other[0], tiny_tokenizer(), skill.token_ids[:7], name="refunds")
    same = Skill.precompile(built()[0], None, skill.token_ids[:7], name="refunds")
    for each in (new, replace(new, text=None), ids, same):
        with pytest.raises(ArtifactError, match="another text, or other token ids") as caught:
            each.push_to_hub(SKILL)
        assert f"['{label}', '{small}']" in str(caught.value)
        assert files_of(hub) == before
    with pytest.raises(ArtifactError, match="'refunds', got one of 'other'"):
        replace(new, name="other").push_to_hub(SKILL, replace=True)
    commits = len(hub.repo(SKILL).commits)
    new.push_to_hub(SKILL, replace=True)
    assert len(hub.repo(SKILL).commits) == commits + 1
    assert len(builds_of(hub)) == 1
    assert not any(path.startswith((f"builds/{label}/", f"builds/{small}/")) for path in files_of(hub))
    assert label not in card_of(hub)
    assert Skill.from_pretrained(SKILL, model=other[0]).equal_cells(new)
    new.push_to_hub(SKILL, storage="int8", replace=True)  # control: what is of the same text stays
    assert len(builds_of(hub)) == 2


def test_the_ids_of_other_tokenizers_are_not_compared(hub: HubServer) -> None:
    built()[1].push_to_hub(SKILL)
    Skill.precompile(built(seed=1)[0], None, built()[1].token_ids[:7], name="refunds").push_to_hub(SKILL)
    assert len(builds_of(hub)) == 2


# -- cells that no model computed


def test_rounded_cells_do_not_take_the_place_of_exact_ones(hub: HubServer, tmp_path: Path) -> None:
    model, skill = built()
    skill.push_to_hub(SKILL)
    skill.push_to_hub(SKILL, storage="int8")
    small = next(label for label in builds_of(hub) if label.endswith("-int8"))
    rounded = Skill.from_pretrained(SKILL, build=small)
    merged = Skill.merge([rounded, skill], name="refunds")
    before = files_of(hub)
    rounded.save_pretrained(tmp_path)
    for each in (rounded, merged, Skill.from_pretrained(tmp_path)):
        for storage in ("original", "fp8"):
            with pytest.raises(CompatibilityError, match=r"rounded to int8 .* pass storage='int8'"):
                each.push_to_hub(SKILL, storage=storage)  # type: ignore[arg-type]
            assert files_of(hub) == before
    with pytest.raises(CompatibilityError):
        rounded.push_to_hub("org/never")
    assert ("model", "org/never") not in hub.store.repos
    rounded.push_to_hub(SKILL, storage="int8")
    merged.push_to_hub("org/merged", storage="int8")
    assert Skill.from_pretrained(SKILL, model=model).equal_cells(skill)


def test_converted_cells_do_not_take_the_place_of_computed_ones(hub: HubServer, tmp_path: Path) -> None:
    built()[1].push_to_hub(SKILL)
    half = built(torch.bfloat16)[0]
    cast = Skill.from_pretrained(SKILL, model=half, dtype="bfloat16")
    before = files_of(hub)
    for each in (cast, Skill.merge([cast, cast], name="refunds")):
        with pytest.raises(CompatibilityError, match="converted from float32 to bfloat16: push the one"):
            each.push_to_hub(SKILL)
    assert files_of(hub) == before
    cast.save_pretrained(tmp_path)
    assert Skill.from_pretrained(tmp_path, model=half).equal_cells(cast)
    built(torch.bfloat16)[1].push_to_hub(SKILL)  # control
    assert len(builds_of(hub)) == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"storage": "int4"}, r"\['original', 'int8', 'fp8'\], got 'int4'"),
        ({"fidelity": "good"}, "fidelity as a mapping .* got str"),
        ({"fidelity": [("a", 1)]}, "fidelity as a mapping .* got list"),
    ],
    ids=["storage", "fidelity text", "fidelity list"],
)
def test_what_is_no_option_asks_no_hub(hub: HubServer, tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ArtifactError, match=words):
        built()[1].push_to_hub(SKILL, **options)
    assert hub.log == []
    with pytest.raises(ArtifactError, match="storage: expected one of"):
        built()[1].save_pretrained(tmp_path, storage="int4")  # type: ignore[arg-type]
    assert list(tmp_path.glob("*.safetensors")) == []


# -- branches and pull requests


def test_a_pull_request_is_read_and_main_is_not_touched(hub: HubServer) -> None:
    model, skill = built()
    skill.push_to_hub(SKILL)
    before = files_of(hub)
    other = built(seed=1)
    address = other[1].push_to_hub(SKILL, create_pr=True)
    assert address == f"{hub.url}/{SKILL}/discussions/1"
    assert files_of(hub) == before
    assert Skill.from_pretrained(SKILL, model=other[0], revision="refs/pr/1").equal_cells(other[1])
    assert Skill.from_pretrained(SKILL, model=model, revision="refs/pr/1").equal_cells(skill)


def test_a_branch_is_committed_to(hub: HubServer) -> None:
    built()[1].push_to_hub(SKILL)
    before = files_of(hub)
    HfApi().create_branch(SKILL, branch="next")
    other = built(seed=1)
    other[1].push_to_hub(SKILL, revision="next", commit_message="by hand")
    assert files_of(hub) == before
    assert hub.repo(SKILL).resolve("next").title == "by hand"
    assert Skill.from_pretrained(SKILL, model=other[0], revision="next").equal_cells(other[1])


# -- failures

FAULTS: list[tuple[str, dict[str, Any], str]] = [
    ("commit_error", {"status": 500}, "answered 500"),
    ("commit_error", {"status": 403}, "answered 403"),
    ("cut_upload", {"after": 100, "times": 99}, SKILL),
    ("status", {"path": "*/preupload/*", "status": 503, "times": 99}, SKILL),
    ("status", {"path": "*/info/lfs/*", "status": 500, "times": 99}, SKILL),
    ("unauthorized", {"path": "*/commit/*"}, "401"),
]
FAULT_IDS = ["commit 500", "commit 403", "upload cut", "preupload 503", "batch 500", "commit 401"]


@pytest.mark.parametrize(("name", "options", "words"), FAULTS, ids=FAULT_IDS)
def test_a_failed_push_leaves_nothing(hub: HubServer, name: str, options: dict[str, Any], words: str) -> None:
    skill = built()[1]
    hub.fault(name, **options)
    with pytest.raises(ArtifactError) as caught:
        skill.push_to_hub(SKILL)
    readable(caught.value, SKILL, words)
    assert hub.store.repos == {}
    hub.clear_faults()
    skill.push_to_hub(SKILL)  # control: it was the fault
    assert len(builds_of(hub)) == 1


@pytest.mark.parametrize(("name", "options", "words"), FAULTS, ids=FAULT_IDS)
def test_a_failed_push_leaves_what_was_there(hub: HubServer, name: str, options: dict[str, Any], words: str) -> None:
    built()[1].push_to_hub(SKILL)
    before = hub.head(SKILL)
    hub.fault(name, **options)
    with pytest.raises(ArtifactError) as caught:
        built(seed=1)[1].push_to_hub(SKILL)
    readable(caught.value, SKILL, words)
    assert hub.head(SKILL) == before


def test_an_interrupt_leaves_nothing(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(HfApi, "create_commit", interrupt)
    with pytest.raises(KeyboardInterrupt):
        built()[1].push_to_hub(SKILL)
    assert hub.store.repos == {}


def test_what_cannot_be_taken_back_is_told(hub: HubServer) -> None:
    hub.fault("commit_error")
    hub.fault("status", method="DELETE", status=500, times=99)
    with pytest.raises(ArtifactError) as caught:
        built()[1].push_to_hub(SKILL)
    readable(caught.value, SKILL, "answered 500", "could not be taken back")


def test_a_lost_answer_is_no_reason_to_delete(hub: HubServer) -> None:
    model, skill = built()
    hub.fault("lost_commit_answer")
    with pytest.raises(ArtifactError) as caught:
        skill.push_to_hub(SKILL)
    readable(caught.value, SKILL, "look whether the skill is there")
    assert Skill.from_pretrained(SKILL, model=model).equal_cells(skill)
    before = files_of(hub)
    skill.push_to_hub(SKILL)
    assert files_of(hub) == before


def test_of_two_who_commit_at_once_the_second_is_told(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    built()[1].push_to_hub(SKILL)
    meanwhile(monkeypatch, lambda: hub.repo(SKILL).write({"theirs.txt": b"x"}))
    with pytest.raises(ArtifactError) as caught:
        built(seed=1)[1].push_to_hub(SKILL)
    readable(caught.value, SKILL, "somebody else committed meanwhile")
    assert "theirs.txt" in files_of(hub)
    assert len(builds_of(hub)) == 1
    built(seed=1)[1].push_to_hub(SKILL)
    assert len(builds_of(hub)) == 2
    assert "theirs.txt" in files_of(hub)


def test_a_new_repository_that_somebody_fills_meanwhile_stays(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    meanwhile(monkeypatch, lambda: hub.repo(SKILL).write({"theirs.txt": b"x"}))
    with pytest.raises(ArtifactError, match="could not be taken back"):
        built()[1].push_to_hub(SKILL)
    assert "theirs.txt" in files_of(hub)


@pytest.mark.parametrize("token", ["hf_alicewrong", "hf_alice\nsecret", False])
def test_who_may_not_push_is_told_and_no_token_is_shown(hub: HubServer, token: str | bool) -> None:
    with pytest.raises(ArtifactError) as caught:
        built()[1].push_to_hub(SKILL, token=token)
    readable(caught.value, SKILL)
    assert "secret" not in str(caught.value)
    assert hub.store.repos == {}


def test_the_repository_of_others_is_refused(hub: HubServer) -> None:
    hub.create("others/skill")
    for repo in ("others/skill", "others/new"):
        with pytest.raises(ArtifactError) as caught:
            built()[1].push_to_hub(repo)
        readable(caught.value, repo, "403")
    assert list(hub.store.repos) == [("model", "others/skill")]


def test_a_private_skill_is_private(hub: HubServer) -> None:
    model, skill = built()
    skill.push_to_hub(SKILL, private=True)
    assert hub.repo(SKILL).private
    assert Skill.from_pretrained(SKILL, model=model).equal_cells(skill)


def test_a_repository_takes_no_more_builds_than_a_reader_does(hub: HubServer) -> None:
    hub.create(SKILL, {f"builds/b{idx}/manifest.json": b"{}" for idx in range(256)})
    before = files_of(hub)
    with pytest.raises(ArtifactError, match="at most 256 builds"):
        built()[1].push_to_hub(SKILL)
    assert files_of(hub) == before


def test_the_command_line_replaces_when_told(hub: HubServer, tmp_path: Path) -> None:
    built()[1].push_to_hub(SKILL)
    Skill.precompile(built(seed=1)[0], tiny_tokenizer(), "Another text.\n", name="refunds").save_pretrained(tmp_path)
    assert "replace=True" in answer("push", str(tmp_path), SKILL, code=2)["error"]
    label = answer("push", str(tmp_path), SKILL, "--replace")["build"]
    assert builds_of(hub) == [label]
    assert ": 1 build of " in run("pull", SKILL, "-o", str(tmp_path / "out")).stdout
