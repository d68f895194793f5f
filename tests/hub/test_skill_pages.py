"""The blocks of the README and of docs/skills.md that need a hub, run against the local one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hub_server import HubServer
from skill_support import builds_of, load, serve

from editable_cache import ArtifactError, EditableCache, Skill

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"<!-- not run: needs a hub[^>]*-->\n```python\n(.*?)^```$", re.S | re.M)
NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"


def run(hub: HubServer, page: str) -> dict[str, Any]:
    serve(hub, NAME)
    model, tokenizer = load(NAME)
    cache = EditableCache(model, tokenizer=tokenizer)
    cache.append("You are a support agent.\n")
    names = {"model": model, "tokenizer": tokenizer, "policy": "Refund it.\n", "cache": cache}
    names |= {"Skill": Skill, "EditableCache": EditableCache}
    for block in BLOCK.findall((ROOT / page).read_text(encoding="utf-8")):
        exec(compile(block, page, "exec"), names)
    return names


@pytest.fixture
def owner(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> HubServer:
    """The hub, with somebody logged in who may write where the pages do."""
    monkeypatch.setenv("HF_TOKEN", hub.add_user("writer", orgs=("your-org",)))
    return hub


def test_the_four_lines_of_the_readme(owner: HubServer) -> None:
    names = run(owner, "README.md")
    assert "refund-policy" in [segment.name for segment in names["cache"].segments]
    assert len(builds_of(owner, "your-org/refund-policy")) == 1


def test_the_page_about_skills(owner: HubServer, capsys: pytest.CaptureFixture[str]) -> None:
    names = run(owner, "docs/skills.md")
    printed = capsys.readouterr().out
    assert f"your-org/refund-policy ('{NAME}',)" in printed
    assert "precompiled alone (converted from float32 to bfloat16)" in printed
    assert [label.split("-")[-1] for label in builds_of(owner, "your-org/refund-policy")][1:] == ["int8"]
    assert names["address"].startswith(owner.url)


def test_a_block_that_needs_a_hub_really_asks_it(owner: HubServer) -> None:
    owner.fault("status", status=503, times=999, path="*/api/models/your-org/*")
    with pytest.raises(ArtifactError, match="503"):
        run(owner, "README.md")
