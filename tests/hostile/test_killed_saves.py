"""Whoever is killed while saving leaves the old skill or the new one, and writers of one folder don't mix theirs."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from cache_support import policy, shared_model, shared_tokenizer

from editable_cache import ArtifactError, Skill
from editable_cache.hub import folder as folder_module

TESTS = Path(__file__).parents[1]

SAVE = """
import os, sys
sys.path.insert(0, sys.argv[1])
import torch
torch.set_num_threads(1)
from cache_support import shared_model, shared_tokenizer
from editable_cache import Skill
from editable_cache.hub import folder

calls = 0
def deadly(function):
    def call(*args, **kwargs):
        global calls
        calls += 1
        if calls == int(sys.argv[3]):
            os._exit(9)
        done = function(*args, **kwargs)
        calls += 1
        if calls == int(sys.argv[3]):
            os._exit(9)
        return done
    return call

skill = Skill.precompile(shared_model(), shared_tokenizer(), "the order was delivered and", name="new")
for name in ("save_file", "write_manifest", "_sync", "file_digest"):
    setattr(folder, name, deadly(getattr(folder, name)))
folder.os.replace = deadly(os.replace)
folder.shutil.rmtree = deadly(folder.shutil.rmtree)
skill.save_pretrained(sys.argv[2])
print(calls)
"""

FOREVER = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
torch.set_num_threads(1)
from cache_support import shared_model, shared_tokenizer
from editable_cache import Skill

skills = [Skill.precompile(shared_model(), shared_tokenizer(), text, name=text[:3]) for text in sys.argv[3:]]
print("ready", flush=True)
for number in range(1_000_000 if len(skills) > 1 else 40):
    skills[number % len(skills)].save_pretrained(sys.argv[2])
"""


def skill(text: str, name: str) -> Skill:
    return Skill.precompile(shared_model(), shared_tokenizer(), text, name=name)


def held(folder: Path, *skills: Skill) -> Skill:
    """Which of ``skills`` the folder holds, whole."""
    loaded = Skill.from_pretrained(folder, model=shared_model(), exact=True)
    (found,) = [each for each in skills if each.name == loaded.name]
    assert loaded.equal_cells(found)
    assert loaded.text == found.text
    return found


def run(script: str, *args: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", script, str(TESTS), *map(str, args)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def steps(folder: Path) -> int:
    """How many places there are to be killed at in one save."""
    process = run(SAVE, folder, 0)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return int(out)


def test_killed_at_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, by an exception that nothing catches and that leaves everything as it lies."""
    old, new = policy(), skill("the order was delivered and", "new")

    class Killed(BaseException):
        pass

    outcomes, at = [], 0
    while True:
        at += 1
        folder = tmp_path / str(at)
        old.save_pretrained(folder)
        calls = 0

        def deadly(function, at=at):  # type: ignore[no-untyped-def]
            def call(*args, **kwargs):  # type: ignore[no-untyped-def]
                nonlocal calls
                calls += 1
                if calls == at:
                    raise Killed
                if calls > at:  # dead processes clean nothing up
                    return None
                return function(*args, **kwargs)

            return call

        with monkeypatch.context() as patch:
            for name in ("save_file", "write_manifest", "_sync", "file_digest"):
                patch.setattr(folder_module, name, deadly(getattr(folder_module, name)))
            for module, name in ((folder_module.os, "replace"), (folder_module.shutil, "rmtree")):
                patch.setattr(module, name, deadly(getattr(module, name)))
            try:
                new.save_pretrained(folder)
            except Killed:
                pass
            else:
                break
        outcomes.append(held(folder, old, new).name)
        new.save_pretrained(folder)
        assert held(folder, old, new) is new
        assert sorted(path.suffix for path in folder.iterdir()) == [".json", ".safetensors"], "leftovers"
    assert len(outcomes) >= 8
    assert set(outcomes) == {"policy", "new"}
    assert outcomes == sorted(outcomes, reverse=True), "first the old one, then the new one, and never back"


@pytest.mark.slow
def test_processes_killed_at_every_step(tmp_path: Path) -> None:
    """The same with processes that end at once: what only the system cleans up is not cleaned up by them."""
    old, new = policy(), skill("the order was delivered and", "new")
    outcomes = []
    for at in range(1, steps(tmp_path / "count") + 1):
        folder = tmp_path / str(at)
        old.save_pretrained(folder)
        process = run(SAVE, folder, at)
        _, err = process.communicate(timeout=120)
        assert process.returncode == 9, err
        outcomes.append(held(folder, old, new).name)
        new.save_pretrained(folder)
        assert held(folder, old, new) is new
        assert len(list(folder.iterdir())) == 2
    assert set(outcomes) == {"policy", "new"}
    assert outcomes == sorted(outcomes, reverse=True)


@pytest.mark.slow
def test_processes_killed_at_any_time(tmp_path: Path) -> None:
    texts = ["one order is pending", "two orders are delivered, and the other one is pending"]
    both = [skill(text, text[:3]) for text in texts]
    chance, found = random.Random(0), set()
    for _ in range(20):
        both[0].save_pretrained(tmp_path / "skill")
        process = run(FOREVER, tmp_path / "skill", *texts)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(chance.random() * 0.2)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        found.add(held(tmp_path / "skill", *both).name)
    both[1].save_pretrained(tmp_path / "skill")
    assert len(list((tmp_path / "skill").iterdir())) == 2
    assert found == {"one", "two"}


def test_two_writers_of_one_folder(tmp_path: Path) -> None:
    texts = ["one order is pending", "two orders are delivered, and the other one is pending"]
    both = [skill(text, text[:3]) for text in texts]
    processes = [run(FOREVER, tmp_path / "skill", text) for text in texts]
    for process in processes:
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
    held(tmp_path / "skill", *both)
    assert len(list((tmp_path / "skill").iterdir())) == 2


def test_planted_links_are_not_written_through(tmp_path: Path) -> None:
    """ggml-org/llama.cpp#26315: a save follows a link out of the directory and overwrites its target."""
    folder, victim, other = tmp_path / "skill", tmp_path / "victim", tmp_path / "folder of someone"
    folder.mkdir()
    other.mkdir()
    victim.write_text("precious")
    (other / "kept").write_text("precious")
    policy().save_pretrained(tmp_path / "names")
    names = [path.name for path in (tmp_path / "names").iterdir()]
    for name in (
        *names,
        f".cells-{os.getpid()}.tmp",
        f".manifest-{os.getpid()}.tmp",
        "cells-0123456789abcdef.safetensors",
    ):
        (folder / name).symlink_to(victim)
    (folder / ".saving-x").symlink_to(other)
    (folder / ".saving-y").symlink_to(victim)
    policy().save_pretrained(folder)
    assert victim.read_text() == "precious"
    assert [path.name for path in other.iterdir()] == ["kept"]
    assert held(folder, policy()) is policy()
    assert not any((folder / name).is_symlink() for name in (*names, ".saving-x", ".saving-y"))


def test_folders_in_the_place_of_files(tmp_path: Path) -> None:
    (tmp_path / "a" / "manifest.json").mkdir(parents=True)
    with pytest.raises(ArtifactError, match="can't be written"):
        policy().save_pretrained(tmp_path / "a")
    assert [path.name for path in (tmp_path / "a").glob(".saving-*")] == []
    (tmp_path / "b" / "cells-0123456789abcdef.safetensors").mkdir(parents=True)
    policy().save_pretrained(tmp_path / "b")
    assert held(tmp_path / "b", policy()) is policy()
    with pytest.raises(ArtifactError, match="can't be written"):
        policy().save_pretrained("/dev/null/skill")


def test_everybody_may_read_both_files(tmp_path: Path) -> None:
    """safetensors lets only its owner read what it writes."""
    policy().save_pretrained(tmp_path)
    (tmp_path / "plain").write_text("")
    modes = {path.stat().st_mode for path in tmp_path.iterdir()}
    assert modes == {(tmp_path / "plain").stat().st_mode}


def test_tensors_that_are_one(tmp_path: Path) -> None:
    """safetensors refuses to write one tensor under two names."""
    from editable_cache.hub.folder import read_folder, write_folder

    one = torch.arange(12.0).view(3, 4)
    write_folder(tmp_path, {"a": one, "b": one, "c": one[1:]}, {"kind": "x", "version": 1})
    tensors, _ = read_folder(tmp_path, "x")
    assert all(torch.equal(tensors[name], each) for name, each in {"a": one, "b": one, "c": one[1:]}.items())
