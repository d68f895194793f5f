"""A loaded skill is its file, mapped: nothing is copied, and nothing that happens later to either changes the other."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cache_support import policy, shared_model, shared_tokenizer

from editable_cache import EditableCache, Skill

MEASURE = """
import sys, torch
torch.set_num_threads(1)
from editable_cache import Skill

def anonymous():
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Anonymous:")) * 1024

Skill.from_pretrained(sys.argv[2])  # imports and pools
before = anonymous()
skill = Skill.from_pretrained(sys.argv[1])
print(skill.nbytes, anonymous() - before)
"""


def large(folder: Path, mib: int) -> None:
    """A skill of about so many MiB of zeros."""
    small = policy()
    tokens = mib * 2**20 // (len(small.layers) * 2 * 2 * 16 * 4)
    layers = tuple({name: torch.zeros(1, 2, tokens, 16) for name in states} for states in small.layers)
    ids = torch.arange(tokens) % 300
    values = {name: getattr(small, name) for name in ("model", "provenance", "layout", "origin", "name")}
    Skill(layers=layers, token_ids=ids, position_ids=torch.arange(tokens), text=None, **values).save_pretrained(folder)


def measured(folder: Path, small: Path) -> tuple[int, int]:
    command = [sys.executable, "-c", MEASURE, str(folder), str(small)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    nbytes, grown = map(int, done.stdout.split())
    return nbytes, grown


def test_loading_copies_nothing(tmp_path: Path) -> None:
    """The kernel's own count of memory that is no file's. The control: 8-bit cells, which must be expanded."""
    large(tmp_path / "large", 192)
    policy().save_pretrained(tmp_path / "small")
    nbytes, grown = measured(tmp_path / "large", tmp_path / "small")
    assert nbytes >= 190 * 2**20
    assert grown < nbytes / 4, "ids and positions of the manifest, and no cells"
    Skill.from_pretrained(tmp_path / "large").save_pretrained(tmp_path / "int8", storage="int8")
    nbytes, grown = measured(tmp_path / "int8", tmp_path / "small")
    assert grown > nbytes * 0.9


@pytest.mark.parametrize("what", ["saved again", "deleted", "replaced by another"])
def test_a_loaded_skill_outlives_its_file(what: str, tmp_path: Path) -> None:
    policy().save_pretrained(tmp_path)
    loaded = Skill.from_pretrained(tmp_path)
    if what == "deleted":
        shutil.rmtree(tmp_path)
    else:
        text = (
            "something else, and longer than what stood here before" if what.startswith("replaced") else policy().text
        )
        Skill.precompile(shared_model(), shared_tokenizer(), text, name="policy").save_pretrained(tmp_path)
    assert loaded.equal_cells(policy())
    cache = EditableCache(shared_model())
    cache.splice(loaded)
    assert cache.verify().ok


def test_writing_into_a_loaded_skill_never_reaches_the_file(tmp_path: Path) -> None:
    """Pages are private: whoever breaks the rule that chunks are not written breaks only their own."""
    policy().save_pretrained(tmp_path)
    (payload,) = tmp_path.glob("*.safetensors")
    before = payload.read_bytes()
    first, second = (Skill.from_pretrained(tmp_path) for _ in range(2))
    for states in first.layers:
        for tensor in states.values():
            tensor.fill_(7.0)
    assert payload.read_bytes() == before
    assert second.equal_cells(policy())
    assert Skill.from_pretrained(tmp_path).equal_cells(policy())
    assert not first.equal_cells(policy())


def test_caches_of_one_skill_share_nothing_with_it(tmp_path: Path) -> None:
    policy().save_pretrained(tmp_path)
    loaded = Skill.from_pretrained(tmp_path)
    cache = EditableCache(shared_model())
    cache.splice(loaded)
    for layer in cache.editable_layers:
        layer.keys.zero_()
    assert loaded.equal_cells(policy())
