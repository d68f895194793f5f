"""Tensors above the size of the processor's cache are handled in blocks; the result must not depend on it."""

import math

import pytest
import torch

from editable_cache.ops import checksum, rotate_into, rotation
from editable_cache.ops.checksum import BLOCK, FOLD, WORDS, _sums
from editable_cache.ops.rotate import CACHE_BYTES
from editable_cache.spec import RotarySpec


@pytest.mark.parametrize("rows", [0, 1, FOLD, 2 * FOLD, 2 * FOLD + 1, BLOCK, BLOCK + 1, 2 * BLOCK + 5])
def test_sums_in_blocks_are_the_plain_sums(rows):
    table = torch.randint(-(2**63), 2**63 - 1, (rows, WORDS), generator=torch.Generator().manual_seed(0))
    by_row, by_column = _sums(table)
    assert torch.equal(by_row, table.sum(dim=1))
    assert torch.equal(by_column, table.sum(dim=0))


@pytest.mark.parametrize("bit", [0, 31, 63])
@pytest.mark.parametrize("row", [0, BLOCK - 1, BLOCK, BLOCK + 17])
def test_the_checksum_sees_a_bit_in_every_block_and_two_swapped_words(row, bit):
    table = torch.randint(-(2**63), 2**63 - 1, (BLOCK + 18, WORDS), generator=torch.Generator().manual_seed(1))
    base = checksum(table)
    flipped = table.clone()
    flipped[row, 5] ^= -(2**63) if bit == 63 else 1 << bit
    assert checksum(flipped) != base
    swapped = table.clone()
    other = (row + FOLD) % len(table)  # the same place of a folded row
    swapped[row, 5], swapped[other, 5] = table[other, 5], table[row, 5]
    assert checksum(swapped) != base
    swapped = table.clone()
    swapped[row, 5], swapped[row, 6] = table[row, 6], table[row, 5]
    assert checksum(swapped) != base
    assert checksum(table.clone()) == base


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize(("batch", "heads"), [(1, 1), (1, 3), (2, 3)])
def test_keys_turned_in_blocks_equal_keys_turned_token_by_token(batch, heads, layout):
    length, head_dim = CACHE_BYTES // (batch * heads * 32) + 77, 16
    generator = torch.Generator().manual_seed(2)
    keys = torch.randn(batch, heads, length, head_dim, generator=generator)
    source = torch.arange(length).expand(batch, -1)
    target = source + torch.arange(batch)[:, None] * 5 + 9
    turn = rotation(RotarySpec(tuple(0.3**k for k in range(4)), layout, start=4), source, target)
    out = torch.empty_like(keys)
    assert out.nbytes > CACHE_BYTES
    rotate_into(out, keys, turn)
    for low in range(0, length, math.ceil(length / 7)):
        part = slice(low, low + math.ceil(length / 7))
        few = torch.empty_like(keys[..., part, :])
        assert few.nbytes < CACHE_BYTES
        rotate_into(few, keys[..., part, :], turn.slots(part.start, part.stop))
        assert torch.equal(out[..., part, :], few)
    assert not torch.equal(out, keys)
