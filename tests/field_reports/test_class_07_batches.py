"""Field reports, class 7: batches, padding, beams, assisted decoding. (Single-row prefix into beams: tests/dropin.)"""

from __future__ import annotations

import pytest
import torch
from cache_support import (
    forward,
    generate,
    make_cache,
    make_context,
    policy,
    shared_model,
    shared_tokenizer,
    some_ids,
)

from editable_cache import EditableCache
from editable_cache.testing import oracles

TEXTS = ["asked", "the customer asked for the refund of it"]


def rows() -> list[EditableCache]:
    short = make_cache()
    short.append(some_ids(3)[0])
    short.splice(policy())
    return [short, make_context()]


def test_b38_a_row_does_not_depend_on_its_neighbour() -> None:
    """Blaizzy/mlx-vlm#1946: pads enter attention."""
    ids, mask = some_ids(12, batch=2), torch.ones(2, 12, dtype=torch.long)
    mask[0, :7] = 0
    cache = make_cache()
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    logits = forward(cache, ids, attention_mask=mask, position_ids=positions)
    alone = oracles.full(shared_model(), ids[:1, 7:])
    oracles.check(logits[:1, 7:], alone.logits)
    chunk = policy()
    cache.splice(chunk, seam_tokens=1)
    single = make_cache()
    single.append(ids[0, 7:])
    single.splice(chunk, seam_tokens=1)
    more = some_ids(2, seed=4)
    oracles.check(forward(cache, more.expand(2, 2))[:1], forward(single, more))
    oracles.check(
        [layer.view()["keys"][:1, :, 7:] for layer in cache.editable_layers],
        [layer.view()["keys"] for layer in single.editable_layers],
    )
    assert cache.verify().ok


def test_b39_ragged_rows_with_pads_inside() -> None:
    """huggingface/transformers#18104, #34232; unslothai/unsloth#3795, #4078: garbage for short rows only."""
    singles, stacked = rows(), EditableCache.stack(rows())
    for cache, text in zip(singles, TEXTS, strict=True):
        cache.append(text)
    stacked.append(TEXTS)
    more = some_ids(2, seed=4)
    logits = forward(stacked, more.expand(2, 2))
    for row, cache in enumerate(singles):
        oracles.check(logits[row : row + 1], forward(cache, more))
    assert not torch.equal(stacked.positions[0], stacked.positions[1])
    for back, cache in zip(stacked.unstack(), singles, strict=True):
        assert torch.equal(back.token_ids, cache.token_ids)
        assert torch.equal(back.positions, cache.positions)
        oracles.check(
            [layer.view()["keys"] for layer in back.editable_layers],
            [layer.view()["keys"] for layer in cache.editable_layers],
        )
        assert back.verify().ok
    with pytest.raises(AssertionError):  # control: the rows are not each other's
        oracles.check(logits[:1], logits[1:])


@pytest.mark.parametrize("beams", [1, 3])
def test_b39_stacked_rows_generate_as_alone(beams: int) -> None:
    """huggingface/transformers#34232 (second half): a batch of contexts of different lengths and suffixes."""
    singles, stacked = rows(), EditableCache.stack(rows())
    inputs = stacked.inputs(TEXTS)
    options = {"num_beams": beams, "max_new_tokens": 6}
    out = generate(stacked, inputs["input_ids"], attention_mask=inputs["attention_mask"], **options)
    assert stacked.ledger.batch == 2 * beams
    assert stacked.verify().ok
    for row, cache in enumerate(singles):
        ids = cache.inputs(TEXTS[row])["input_ids"]
        alone = generate(cache, ids, **options)
        assert torch.equal(alone.sequences[0, -6:], out.sequences[row, -6:])
        if beams > 1:
            assert torch.allclose(alone.sequences_scores[0], out.sequences_scores[row], atol=1e-4)
        else:
            oracles.check(torch.cat(alone.logits), torch.stack(out.logits)[:, row])
            assert torch.equal(cache.token_ids[0], stacked.unstack()[row].token_ids[0])


def test_a_stacked_cache_goes_on_turn_by_turn() -> None:
    """unslothai/unsloth#4078: the second turn of a padded batch."""
    singles, stacked = rows(), EditableCache.stack(rows())
    for texts in (TEXTS, TEXTS[::-1], ["ok", "ok"]):
        inputs = stacked.inputs(texts)
        out = generate(stacked, inputs["input_ids"], attention_mask=inputs["attention_mask"], max_new_tokens=3)
        for row, cache in enumerate(singles):
            alone = generate(cache, cache.inputs(texts[row])["input_ids"], max_new_tokens=3)
            oracles.check(torch.cat(alone.logits), torch.stack(out.logits)[:, row])
    assert stacked.verify().ok


def test_b41_beams_from_a_composed_cache() -> None:
    """huggingface/transformers#27449: a batch-1 cache cannot feed beams; the composed one equals a copied batch."""
    cache, copied = make_context(), make_context()
    ids = cache.inputs("asked")["input_ids"]
    expected = generate(copied, ids, num_beams=3)
    twin = make_context()
    twin.batch_repeat_interleave(3)
    assert twin.ledger.batch == 3
    actual = generate(cache, ids, num_beams=3)
    assert torch.equal(actual.sequences, expected.sequences)
    assert cache.verify().ok
    torch.manual_seed(0)
    several = generate(make_context(), ids, do_sample=True, num_return_sequences=4)
    assert several.sequences.shape[0] == 4


def test_b43_an_assistant_never_sees_the_skill() -> None:
    """huggingface/transformers#31644, #30312: cache passed to the wrong model, crop off by one."""
    from editable_cache.testing.tiny_models import tiny_model

    assistant, seen = tiny_model("llama", seed=5), []
    assistant.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs.get("cache") or kwargs.get("past_key_values")), with_kwargs=True
    )
    cache, plain = make_context(), make_context()
    ids = cache.inputs("asked")["input_ids"]
    expected = generate(plain, ids, max_new_tokens=8)
    actual = generate(cache, ids, max_new_tokens=8, assistant_model=assistant)
    assert torch.equal(actual.sequences, expected.sequences)
    assert cache.get_seq_length() == actual.sequences.shape[1] - 1
    assert seen
    assert not any(isinstance(one, EditableCache) for one in seen)
    assert cache.verify().ok


def test_beam_rows_match_the_returned_history() -> None:
    """huggingface/transformers#46612: ledger and cells are reordered together."""
    cache = make_context()
    ids = cache.inputs("asked")["input_ids"]
    out = generate(cache, ids, num_beams=4, num_return_sequences=4, max_new_tokens=8)
    assert cache.verify().ok
    assert cache.get_seq_length() == out.sequences.shape[1] - 1
    held = {tuple(row) for row in cache.token_ids.tolist()}
    cache.reorder_cache(torch.tensor([3, 3, 0, 1]))
    assert cache.verify().ok
    broken = cache.fork()
    broken.ledger = broken.ledger.rows(torch.tensor([1, 0, 2, 3])) if len(held) > 1 else broken.ledger
    if not torch.equal(broken.token_ids, cache.token_ids):
        assert not broken.verify().ok  # control: a ledger in another order than the cells is found out


def test_an_empty_row_in_a_batch_of_texts() -> None:
    """Field reports section 2: batch rows with different chunks, one row with none."""
    stacked, single = EditableCache.stack(rows()), rows()[0]
    stacked.append(["", "the order"])
    more = some_ids(2, seed=4)
    oracles.check(forward(stacked, more.expand(2, 2))[:1], forward(single, more))
    assert shared_tokenizer() is stacked.tokenizer
