"""The card of a repository: what people wrote on it stays, what it tells is of the builds that are there."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hub_server import HubServer
from skill_support import (
    MARKS,
    SKILL,
    TEXT,
    TINY,
    builds_of,
    built,
    card_of,
    edit_card,
    files_of,
    front_matter,
    readable,
)

from editable_cache import ArtifactError, Skill
from editable_cache.testing.tiny_models import tiny_tokenizer


def test_what_people_wrote_on_the_card_stays(hub: HubServer) -> None:
    skill = built()[1]
    skill.push_to_hub(SKILL, license="mit", fidelity={"cosine": 0.5})
    edit_card("# refunds", "# Our refunds\n\nWritten by us: $1 \\1 {name}.")
    edit_card("tags:", "language: en\ntags:\n- mine")
    edit_card(MARKS[1], f"{MARKS[1]}\n\nBehind the table.")
    built(seed=1)[1].push_to_hub(SKILL)
    text, data = card_of(hub), front_matter(card_of(hub))
    assert "Written by us: $1 \\1 {name}." in text
    assert "Behind the table." in text
    assert (data["license"], data["language"]) == ("mit", "en")
    assert {"mine", "kv-cache", "editable-cache"} <= set(data["tags"])
    assert "| cosine | 0.5 |" in text
    assert all(label in text for label in builds_of(hub))
    skill.push_to_hub(SKILL, fidelity={"cosine": 0.75})
    assert "| cosine | 0.75 |" in card_of(hub)
    assert "| cosine | 0.5 |" not in card_of(hub)


def test_old_figures_go_with_the_cells_they_were_measured_on(hub: HubServer) -> None:
    model, skill = built()
    behind = Skill.precompile(model, tiny_tokenizer(), TEXT, name="refunds", prefix="Be polite.\n")
    other = Skill.precompile(model, tiny_tokenizer(), "Another text.\n", name="refunds")
    skill.push_to_hub(SKILL, fidelity={"cosine": 0.5})
    skill.push_to_hub(SKILL, storage="int8")
    skill.push_to_hub(SKILL)
    assert "| cosine | 0.5 |" in card_of(hub)  # a build more, and the same again
    behind.push_to_hub(SKILL)
    assert "cosine" not in card_of(hub)
    behind.push_to_hub(SKILL, fidelity={"cosine": 0.25})
    other.push_to_hub(SKILL, replace=True)
    assert "cosine" not in card_of(hub)
    other.push_to_hub(SKILL, fidelity={"cosine": 0.125})
    assert "| cosine | 0.125 |" in card_of(hub)


@pytest.mark.parametrize(
    "marks", [f"{MARKS[1]}\nmine\n{MARKS[0]}\n", MARKS[0], MARKS[1]], ids=["reversed", "start only", "stop only"]
)
def test_marks_that_are_not_ours_take_nothing_with_them(hub: HubServer, marks: str) -> None:
    hub.create(SKILL, {"README.md": f"---\nlicense: mit\n---\n# Mine\n\n{marks}\n\nStays.\n".encode()})
    for storage in ("original", "int8"):
        built()[1].push_to_hub(SKILL, storage=storage)  # type: ignore[arg-type]
        text = card_of(hub)
        assert marks in text
        assert text.count("Stays.") == text.count("## Builds") == 1
        assert all(text.count(f"| {label} |") == 1 for label in builds_of(hub))


def test_the_card_names_adapters_and_says_what_to_load(hub: HubServer) -> None:
    skill = built()[1]
    skill.push_to_hub("org/plain")
    plain = files_of(hub, "org/plain")["README.md"].decode()
    adapted = replace(
        skill,
        model=replace(skill.model, adapters="a" * 16),
        origin=replace(skill.origin, repo=TINY, adapters=(("tone|x", 4.0),)),
    )
    adapted.push_to_hub(SKILL)
    text = card_of(hub)
    assert rf"| {TINY} + adapter tone\|x (scale 4) |" in text
    snippets = [re.findall(r"```python\n(.*?)```", each, re.S)[0] for each in (text, plain)]
    assert ["# Load the adapter" in snippet for snippet in snippets] == [True, False]
    assert ["# the/model: the repository or folder" in snippet for snippet in snippets] == [False, True]
    for snippet in snippets:
        compile(snippet, "card", "exec")
    assert " + adapter" not in plain


def test_a_card_of_another_kind_is_kept(hub: HubServer) -> None:
    hub.create(SKILL, {"README.md": b"# Mine\n\nNo front matter here.\n", "notes.txt": b"keep"})
    built()[1].push_to_hub(SKILL)
    text = card_of(hub)
    assert "# Mine\n\nNo front matter here." in text
    assert builds_of(hub)[0] in text
    assert front_matter(text)["library_name"] == "editable_cache"
    assert files_of(hub)["notes.txt"] == b"keep"


@pytest.mark.parametrize(
    "readme",
    [
        b"---\ntags: [a\n---\n# Mine\n",
        b"---\n- a\n- b\n---\n# Mine\n",
        b"---\nx: y\n---\n\xff\xfe\n",
        b"---\na: b: c\n---\n",
    ],
    ids=["open list", "no mapping", "no UTF-8", "two colons"],
)
def test_a_card_that_cannot_be_read_is_left_alone(hub: HubServer, readme: bytes) -> None:
    hub.create(SKILL, {"README.md": readme})
    before = files_of(hub)
    with pytest.raises(ArtifactError) as caught:
        built()[1].push_to_hub(SKILL)
    readable(caught.value, SKILL, "README.md", "repair or delete it")
    assert files_of(hub) == before


@pytest.mark.parametrize("tags", ["kv-cache", "[a, b]", "null"])
def test_tags_of_any_form_stay(hub: HubServer, tags: str) -> None:
    hub.create(SKILL, {"README.md": f"---\ntags: {tags}\n---\n# Mine\n".encode()})
    built()[1].push_to_hub(SKILL)
    found = set(front_matter(card_of(hub))["tags"])
    wanted = {"kv-cache", "editable-cache", *({"a", "b"} if "a" in tags.split(",")[0] and "[" in tags else set())}
    assert found == wanted


def test_a_name_can_say_nothing_on_the_card_but_itself(hub: HubServer) -> None:
    name = "a|b <script> [x](y) `c` {model} # d"
    skill = Skill.precompile(built()[0], tiny_tokenizer(), TEXT, name=name)
    skill.push_to_hub(SKILL, fidelity={"a|b": "<b>\n| c |"})
    text = card_of(hub)
    assert "<script>" not in text
    assert "<b>" not in text
    assert "{model}" in text
    assert Skill.from_pretrained(SKILL).name == name
