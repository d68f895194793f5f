"""`verify` of a chunk for layers that compress windows: it is compiled again, and entries are compared too."""

from __future__ import annotations

from dataclasses import replace

import torch
from compressed_support import model

from editable_cache import Skill
from editable_cache.chunk import Compressed


def test_entries_are_compared() -> None:
    chunk = Skill.precompile(model(), None, torch.arange(30) + 7, name="chunk")
    assert chunk.compressed is not None
    assert chunk.verify(model()).ok
    layers = {layer_idx: dict(held) for layer_idx, held in chunk.compressed.layers.items()}
    layer_idx, path = next((i, path) for i, held in layers.items() for path in held if path[0] == "compressed_kv")
    layers[layer_idx][path] = layers[layer_idx][path] * 1.01
    found = replace(chunk, compressed=Compressed(layers)).verify(model())
    assert not found.ok
    assert found.errors[f"compressed.{'.'.join(path)}"] > 5e-3
