"""What every wrapping of a model must pass, against stock transformers with the plain model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cache_support import assert_same_output, generate, some_ids
from transformers import DynamicCache

from editable_cache import EditableCache, Skill
from editable_cache.testing import oracles

HEAD = some_ids(5, seed=11)[0]
CHUNK = some_ids(9, seed=12)[0]
QUESTION = some_ids(4, seed=13)[0]


def check_splice(wrapped: Any, plain: Any, tolerance: float = 1e-4) -> EditableCache:
    """A chunk compiled through ``wrapped`` and spliced must equal the chunk alone at its place in ``plain`` (ISO)."""
    skill = Skill.precompile(wrapped, None, CHUNK, name="chunk")
    cache = EditableCache(wrapped)
    cache.append(HEAD)
    cache.splice(skill, seam_tokens=0)
    for shift in (0, 1):
        cells = oracles.iso(plain, CHUNK, torch.arange(len(CHUNK)) + len(HEAD) + shift)
        keys = [layer.view(len(HEAD))["keys"] for layer in cache.editable_layers]
        values = [layer.view(len(HEAD))["values"] for layer in cache.editable_layers]
        oracles.check(values, cells.values, tolerance, what="values")
        if shift:
            with pytest.raises(AssertionError):  # control: keys one position off must show
                oracles.check(keys, cells.keys, tolerance, what="keys")
        else:
            oracles.check(keys, cells.keys, tolerance, what="keys")
    return cache


def check_generate(wrapped: Any, plain: Any, tolerance: float = 1e-4) -> EditableCache:
    """``generate`` through ``wrapped`` from an editable cache must equal stock ``generate`` of ``plain``."""
    ids = torch.cat((HEAD, CHUNK, QUESTION))[None]
    cache = EditableCache(wrapped)
    cache.append(HEAD)
    cache.append(CHUNK)
    out = generate(cache, cache.inputs(QUESTION)["input_ids"], model=wrapped)
    assert_same_output(out, generate(DynamicCache(), ids, model=plain), tolerance)
    other = ids.clone()
    other[0, 0] += 1
    with pytest.raises(AssertionError):  # control: one other token in the prompt must show
        assert_same_output(out, generate(DynamicCache(), other, model=plain), tolerance)
    assert torch.equal(cache.token_ids, out.sequences[:, :-1])
    return cache


def check_edits(cache: EditableCache) -> None:
    """Move, remove, recompute and append on a filled cache; every cell must equal its oracle afterwards."""
    cache.remove((6, 8))
    cache.append(QUESTION)
    cache.recompute((2, 5))
    verified = cache.verify()
    assert verified.ok, str(verified)
    assert cache.recompute(slice(None)).tokens_computed == len(cache.ledger)
    assert cache.verify().full_agrees
