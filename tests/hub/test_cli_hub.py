"""push, pull, inspect and diff through the real client and the local hub."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from cli_support import TEXT, answer, json_keys, program, run
from hub_server import HubServer

from editable_cache import Skill
from editable_cache.testing.tiny_models import tiny_model, tiny_tokenizer

REPO = "org/policy"


@pytest.fixture
def skill(tmp_path: Path) -> str:
    folder = tmp_path / "policy"
    Skill.precompile(tiny_model("llama"), tiny_tokenizer(), TEXT, name="policy").save_pretrained(folder)
    return str(folder)


def model_folder(tmp_path: Path, family: str) -> str:
    tiny_model(family).save_pretrained(tmp_path / family)
    tiny_tokenizer().save_pretrained(tmp_path / family)
    return str(tmp_path / family)


def second_build(tmp_path: Path) -> None:
    other = Skill.precompile(tiny_model("gemma3"), tiny_tokenizer(), TEXT, name="policy")
    other.save_pretrained(tmp_path / "gemma")
    answer("push", str(tmp_path / "gemma"), REPO)


def files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_push_and_pull_by_the_program(hub: HubServer, skill: str, tmp_path: Path) -> None:
    environment = hub.env(OMP_NUM_THREADS="1")
    pushed = program("push", skill, REPO, "--private", "--license", "mit", "-m", "first", "--json", env=environment)
    assert pushed.returncode == 0, pushed.stderr
    found = json.loads(pushed.stdout)
    assert set(found) == json_keys("push")
    assert found["url"].startswith(hub.url)
    assert hub.repo(REPO).private
    assert hub.head(REPO).title == "first"
    assert b"license: mit" in hub.head(REPO).files["README.md"].data
    pulled = program("pull", REPO, "-o", str(tmp_path / "out"), env=environment)
    assert pulled.returncode == 0, pulled.stderr
    assert found["build"] in pulled.stdout
    copies = list((tmp_path / "out").rglob("*"))
    assert copies
    assert not any(path.is_symlink() for path in copies)
    assert Skill.from_pretrained(tmp_path / "out").equal_cells(Skill.from_pretrained(skill))


def test_pull_takes_all_builds_or_the_one_that_is_meant(hub: HubServer, skill: str, tmp_path: Path) -> None:
    label = answer("push", skill, REPO)["build"]
    small = answer("push", skill, REPO, "--storage", "int8")["build"]
    second_build(tmp_path)
    whole = answer("pull", REPO, "-o", str(tmp_path / "whole"))
    assert set(whole) == json_keys("pull")
    assert len(whole["builds"]) == 3
    assert whole["commit"] == hub.head(REPO).sha
    assert len(files(tmp_path / "whole")) == 6
    answer("pull", REPO, "-o", str(tmp_path / "one"), "--build", small)
    assert Skill.from_pretrained(tmp_path / "one").provenance.note == "stored as int8"
    fitting = ("--model", model_folder(tmp_path, "llama"))
    assert answer("pull", REPO, "-o", str(tmp_path / "fits"), *fitting)["builds"][0]["build"] == label
    assert files(tmp_path / "fits") == files(Path(skill))
    misfit = answer("pull", REPO, "-o", str(tmp_path / "none"), "--model", model_folder(tmp_path, "gpt2"), code=2)
    assert misfit["kind"] == "CompatibilityError"
    assert not (tmp_path / "none").exists()


def test_inspect_and_diff_download_no_cells(hub: HubServer, skill: str, tmp_path: Path) -> None:
    answer("push", skill, REPO)
    second_build(tmp_path)
    found = answer("inspect", REPO, "--model", model_folder(tmp_path, "llama"))
    assert sorted(build["fits"] for build in found["builds"]) == [False, True]
    misfit = next(build for build in found["builds"] if not build["fits"])
    assert {"model_type", "weights"} <= {reason["what"] for reason in misfit["reasons"]}
    assert misfit["downloaded"] is False
    label = next(build["build"] for build in found["builds"] if build["fits"])
    assert answer("diff", skill, REPO, "--build-b", label)["ok"] is True
    assert "several builds fit" in run("diff", skill, REPO).stderr
    assert not [name for name in hub.downloaded() if name.endswith(".safetensors")]


def test_verify_from_the_hub_at_a_revision(hub: HubServer, skill: str, tmp_path: Path) -> None:
    answer("push", skill, REPO)
    first = hub.head(REPO).sha
    chunk = Skill.from_pretrained(skill)
    layers = [dict(states) for states in chunk.layers]
    layers[1]["keys"] = layers[1]["keys"] * 1.01
    forged = Skill(**{**vars(chunk), "layers": tuple(layers)})
    forged.save_pretrained(tmp_path / "forged")
    answer("push", str(tmp_path / "forged"), REPO)
    model = ("--model", model_folder(tmp_path, "llama"), "--tokens", "4")
    assert answer("verify", REPO, *model, code=1)["decided"] is True
    assert answer("verify", REPO, *model, "--revision", first)["ok"] is True


def test_a_failed_or_damaged_download_leaves_no_folder(hub: HubServer, skill: str, tmp_path: Path) -> None:
    answer("push", skill, REPO)
    out = tmp_path / "parent" / "out"
    hub.fault("flip_download", path="*.safetensors", offset=2000)
    assert answer("pull", REPO, "-o", str(out), code=2)["kind"] == "ArtifactError"
    assert not list(out.parent.iterdir())
    answer("pull", REPO, "-o", str(out), "--force-download")
    assert Skill.from_pretrained(out).equal_cells(Skill.from_pretrained(skill))
    refused = run("pull", REPO, "-o", str(out))
    assert refused.exit_code == 2
    assert "expected a new or empty folder" in refused.stderr


def test_an_interrupted_pull_leaves_nothing(
    hub: HubServer, skill: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer("push", skill, REPO)
    answer("pull", REPO, "-o", str(tmp_path / "before"))  # from now on only our own copy is moved
    monkeypatch.setattr(os, "replace", _killed)
    assert run("pull", REPO, "-o", str(tmp_path / "out")).exit_code == 130
    assert not [path for path in tmp_path.iterdir() if "out" in path.name]


def _killed(*_: object) -> None:
    raise KeyboardInterrupt


def test_errors_of_the_hub_are_one_line(hub: HubServer, skill: str, tmp_path: Path) -> None:
    for arguments in (
        ("inspect", "org/none"),
        ("pull", "org/none", "-o", str(tmp_path / "x")),
        ("push", skill, "bob/x"),
    ):
        result = run(*arguments)
        assert result.exit_code == 2
        assert result.stderr.count("error: ") == 1
        assert "Traceback" not in result.stderr
    assert run("push", str(tmp_path / "nothing"), REPO).exit_code == 2
