"""FROZEN: behind spliced chunks without seam, the model answers as if each chunk had seen only itself."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from editable_cache import EditableCache, Skill
from editable_cache.testing import oracles
from editable_cache.testing.contents import (
    family_cases,
    generated,
    logits_after,
    must_differ,
    random_ids,
    shared_model,
    states_in,
    states_of,
)
from editable_cache.testing.tiny_models import TINY_FAMILIES

CASES = pytest.mark.parametrize(("family", "attention"), family_cases(TINY_FAMILIES))
NUM_CHUNKS = pytest.mark.parametrize("num_chunks", [1, 2, 3])
SUFFIX = random_ids(10, 9)


class Composed(NamedTuple):
    """A cache of live and spliced tokens, with what the oracle needs: ``[n]`` each."""

    cache: EditableCache
    ids: Tensor
    positions: Tensor
    groups: Tensor


def compose(model: PreTrainedModel, num_chunks: int, *, prefix: int = 5, gap: int = 0) -> Composed:
    """`prefix` live tokens, then chunks of 11, 3 and 12 tokens with live tokens between the last two."""
    cache = EditableCache(model)
    parts = [(random_ids(prefix, 1), 0)] if prefix else []
    lengths = [11, 3, 12][:num_chunks]
    parts += [(random_ids(length, 10 + group), group) for group, length in enumerate(lengths, start=1)]
    if num_chunks == 3:
        parts.insert(-1, (random_ids(2, 5), 0))
    if prefix:
        cache.append(parts[0][0])
    for ids, group in parts[1 if prefix else 0 :]:
        if group:
            following = int(cache.positions.max()) + 1 if len(cache.ledger) else 0
            cache.splice(
                Skill.precompile(model, None, ids, name=f"chunk {group}"), seam_tokens=0, position=following + gap
            )
        else:
            cache.append(ids)
    ids = torch.cat([ids for ids, _ in parts])
    groups = torch.cat([torch.full((len(ids),), group) for ids, group in parts])
    return Composed(cache, ids, cache.positions[0], groups)


def expected_behind(
    model: PreTrainedModel, composed: Composed, suffix: Tensor, *, shift: int = 0
) -> oracles.OracleResult:
    ids = torch.cat((composed.ids, suffix))
    last = int(composed.positions.max())
    positions = torch.cat((composed.positions, torch.arange(len(suffix)) + last + 1 + shift))
    return oracles.frozen(model, ids, positions, torch.cat((composed.groups, torch.zeros(len(suffix)))))


@CASES
@NUM_CHUNKS
def test_forward_behind_chunks(family: str, attention: str, num_chunks: int) -> None:
    model = shared_model(family, attention)
    composed = compose(model, num_chunks)
    expected = expected_behind(model, composed, SUFFIX)
    cache, length = composed.cache, len(composed.ids)
    got = torch.cat((logits_after(model, SUFFIX[:6], cache), logits_after(model, SUFFIX[6:], cache)), dim=1)
    oracles.check(got, expected.logits[:, length:])
    oracles.check(states_of(cache), states_in(expected))
    must_differ(got, oracles.full(model, torch.cat((composed.ids, SUFFIX))).logits[:, length:])
    must_differ(states_of(cache, length), states_in(expected_behind(model, composed, SUFFIX, shift=1), length))
    assert cache.verify().ok


@CASES
def test_append_and_generate_behind_chunks(family: str, attention: str) -> None:
    model = shared_model(family, attention)
    composed = compose(model, 3)
    twin = composed.cache.fork()
    twin.append(SUFFIX)
    oracles.check(states_of(twin), states_in(expected_behind(model, composed, SUFFIX)))
    sequence, logits = generated(model, composed.cache, SUFFIX, 7)
    length = len(composed.ids) + len(SUFFIX)
    new = sequence[length:]
    expected = expected_behind(model, composed, torch.cat((SUFFIX, new)))
    oracles.check(logits, expected.logits[:, length - 1 : -1])
    assert composed.cache.token_ids[0].tolist() == sequence[:-1].tolist()
    oracles.check(states_of(composed.cache), states_in(expected, 0, length + len(new) - 1))
    wrong = Composed(composed.cache, composed.ids, composed.positions, torch.zeros_like(composed.groups))
    other = expected_behind(model, wrong, torch.cat((SUFFIX, new)))
    must_differ(states_of(composed.cache), states_in(other, 0, length + len(new) - 1))


@CASES
def test_chunks_alone_and_behind_gaps(family: str, attention: str) -> None:
    model = shared_model(family, attention)
    composed = compose(model, 2, prefix=0, gap=7)
    assert composed.positions[:12].tolist() == [*range(7, 18), 25]
    # Nothing was ever live: the next token's logits come from running the last token of the last chunk again.
    nothing = torch.zeros(len(composed.ids), dtype=torch.bool)
    keys_values = states_of(composed.cache)
    middle = len(keys_values) // 2
    reread = oracles.cells(model, composed.ids, composed.positions, keys_values[:middle], keys_values[middle:], nothing)
    oracles.check(composed.cache.next_token_logits(), reread.logits[:, -1])
    composed.cache.append(SUFFIX)
    expected = expected_behind(model, composed, SUFFIX)
    oracles.check(states_of(composed.cache), states_in(expected))
    oracles.check(composed.cache.next_token_logits(), expected.logits[:, -1])
    closed = composed._replace(positions=torch.arange(len(composed.ids)))
    must_differ(states_of(composed.cache), states_in(expected_behind(model, closed, SUFFIX)))


@CASES
def test_logits_behind_a_removal_that_left_a_gap(family: str, attention: str) -> None:
    model = shared_model(family, attention)
    cache = EditableCache(model)
    chunk = random_ids(12, 3)
    cache.splice(Skill.precompile(model, None, random_ids(9, 2), name="first"), seam_tokens=0)
    cache.splice(Skill.precompile(model, None, chunk, name="second"), seam_tokens=0)
    with pytest.warns(Warning, match="attention leans on"):
        cache.remove("first", close_gap=False)
    got = logits_after(model, SUFFIX, cache)
    ids = torch.cat((chunk, SUFFIX))
    positions = torch.arange(len(ids)) + 9
    groups = torch.cat((torch.ones(12), torch.zeros(10)))
    assert cache.positions[0].tolist() == positions.tolist()
    oracles.check(got, oracles.frozen(model, ids, positions, groups).logits[:, 12:])
    one_counter = torch.cat((positions[:12], torch.arange(12, 22)))
    must_differ(got, oracles.frozen(model, ids, one_counter, groups).logits[:, 12:])
