"""Artifacts of every version of the format load as they were written (tests/golden/README.md)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from editable_cache import Skill
from editable_cache.forward.verify_chunk import tensors_of

GOLDEN = Path(__file__).parent / "golden"
FACTS: dict[str, dict[str, Any]] = json.loads((GOLDEN / "v1.json").read_text(encoding="utf-8"))


def facts_of(skill: Skill) -> dict[str, Any]:
    """What a skill is, in numbers that any program can compare."""
    return {
        "name": skill.name,
        "text": skill.text,
        "token_ids": skill.token_ids.tolist(),
        "position_ids": skill.position_ids.tolist(),
        "provenance": str(skill.provenance),
        "parts": [[part.start, part.stop, list(part.prefix_ids), part.name] for part in skill.provenance.parts],
        "model_type": skill.model.model_type,
        "weights": skill.model.weights,
        "rotations": [[t.name, t.rotary and t.rotary.layout] for holder in skill.layout for t in holder.tensors],
        "tensors": {
            name: {
                "shape": list(tensor.shape),
                "dtype": str(tensor.dtype),
                "sum": float(tensor.double().sum()),
                "weighted": float((tensor.double().flatten() * torch.arange(tensor.numel()).double().cos()).sum()),
            }
            for name, tensor in tensors_of(skill).items()
        },
    }


@pytest.mark.parametrize("name", FACTS)
def test_it_loads_as_it_was_written(name: str) -> None:
    found = facts_of(Skill.from_pretrained(GOLDEN / name, exact=True))
    expected = dict(FACTS[name])
    tensors = expected.pop("tensors")
    stored = found.pop("tensors")
    assert found == expected
    assert stored.keys() == tensors.keys()
    for key, facts in tensors.items():
        for sums in ("sum", "weighted"):
            assert stored[key].pop(sums) == pytest.approx(facts.pop(sums), rel=1e-9, abs=1e-9)
        assert stored[key] == facts


def test_every_folder_is_told_about() -> None:
    assert {path.name for path in GOLDEN.iterdir() if path.is_dir()} == set(FACTS)


def test_a_changed_cell_would_be_seen() -> None:
    skill = Skill.from_pretrained(GOLDEN / "skill-v1")
    before = facts_of(skill)["tensors"]
    keys = next(iter(skill.layers[0].values()))
    keys[0, 0, 3, 1] += 1e-3
    assert facts_of(skill)["tensors"] != before
