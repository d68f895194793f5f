"""Hypothesis strategies: rotations, states, positions, and texts for fields. Needs the `testing` extra."""

from __future__ import annotations

import functools

import torch
from hypothesis import strategies as st
from torch import Tensor

from editable_cache.spec import RotarySpec
from editable_cache.testing.contents import shared_model
from editable_cache.testing.tiny_models import TINY_FAMILIES

FARTHEST = 100_000
SCALINGS = ("llama", "qwen3", "gpt_neox", "phi", "llama_yarn", "llama_llama3", "llama_linear")
"""Tiny families whose frequency tables stand for plain, partial, YaRN, llama3 and linear scaling."""


@functools.cache
def frequency_tables() -> tuple[tuple[float, ...], ...]:
    """The distinct tables that tiny models hold, as transformers itself computed them."""
    tables: dict[tuple[float, ...], None] = {}
    for family in SCALINGS:
        assert family in TINY_FAMILIES
        for name, buffer in shared_model(family).named_buffers():
            if name.endswith("inv_freq"):
                tables[tuple(buffer.float().tolist())] = None
    return tuple(tables)


def distances(farthest: int = FARTHEST) -> st.SearchStrategy[int]:
    """Positions from 0 to ``farthest``, near and far alike."""
    return st.one_of(st.integers(0, 64), st.integers(0, farthest))


@st.composite
def rotaries(draw: st.DrawFn) -> RotarySpec:
    """A rotation of any layout and scaling, of a whole head or a leading, middle or trailing part."""
    table = draw(st.sampled_from(frequency_tables()))
    layout = draw(st.sampled_from(["half", "interleaved"]))
    return RotarySpec(table, "half" if layout == "half" else "interleaved", draw(st.sampled_from([0, 0, 4, 6])))


@st.composite
def heads(draw: st.DrawFn, rotary: RotarySpec) -> Tensor:
    """Float32 states ``[1, heads, tokens, head_dim]`` that ``rotary`` fits, of any size but not all zero."""
    behind = draw(st.sampled_from([0, 0, 2, 8]))
    shape = (1, draw(st.integers(1, 3)), draw(st.integers(1, 9)), rotary.stop + behind)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    return torch.randn(shape, generator=generator) * draw(st.sampled_from([1e-2, 1.0, 30.0]))


def values() -> st.SearchStrategy[str]:
    """Values of a field, from one token to many, none of which shares a token with white space around it."""
    return st.sampled_from(["pending", "delivered", "1", "12", "refund 9", "the order was delivered", "Ünïcode", "9"])


def tokens(most: int = 12) -> st.SearchStrategy[Tensor]:
    """Ids of plain tokens, int64 ``[1..most]``; few different ones, so that sequences share runs."""
    return st.lists(st.integers(5, 60), min_size=1, max_size=most).map(torch.tensor)
