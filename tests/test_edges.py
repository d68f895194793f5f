"""Edges that the first testers found: gaps at the end, cut errata, training mode, far positions, swapped rows."""

from __future__ import annotations

import copy

import pytest
import torch

from editable_cache import EditableCache, LedgerError, Skill, UnsupportedModelError
from editable_cache.adapters import host
from editable_cache.adapters.fingerprint import weights_digest
from editable_cache.ops import checksum
from editable_cache.testing import oracles
from editable_cache.testing.tiny_models import tiny_model, tiny_tokenizer


def test_removing_the_end_without_closing_the_gap_keeps_the_next_position():
    model = tiny_model("llama")
    cache = EditableCache(model)
    cache.append(list(range(20)))
    cache.remove((15, 20), close_gap=False)
    cache.append([50, 51])
    assert cache.positions[0, -2:].tolist() == [20, 21]
    expected = oracles.full(model, cache.token_ids, cache.positions)
    oracles.check(cache.layers[-1].keys, expected.keys[-1], what="keys")
    cache.remove((15, 17))
    cache.append([52])
    assert int(cache.positions[0, -1]) == 15


def test_a_cut_erratum_no_longer_speaks_for_its_field():
    cache = EditableCache(tiny_model("llama"), tokenizer=tiny_tokenizer())
    cache.append("status: {s} .\n", fields={"s": "pending"})
    cache.erratum("s", "delivered")
    assert cache.field("s").current == "delivered"
    cache.crop(-3)
    assert cache.field("s").current == "pending"


def test_training_mode_is_refused():
    model = tiny_model("llama").train()
    cache = EditableCache(model)
    with pytest.raises(UnsupportedModelError, match=r"model\.eval\(\)"):
        cache.append([1, 2, 3])
    model.eval()
    cache.append([1, 2, 3])


@pytest.mark.parametrize("family", ["llama", "llama_yarn"])
def test_verify_far_away_counts_the_models_own_rounding(family):
    model = tiny_model(family)
    cache = EditableCache(model)
    cache.append(list(range(12)))
    cache.splice(Skill.precompile(model, None, list(range(30, 60)), name="far"), seam_tokens=0, position=90_000)
    found = cache.verify()
    assert found.isolated_error > found.tolerance  # stock models are not shift-invariant in float32
    assert found.ok
    with torch.no_grad():
        cache.layers[0].keys[..., 20, :] *= 1.1
    assert not cache.verify().ok


def test_checksums_see_swapped_rows_and_elements():
    tensor = torch.arange(8 * 4096, dtype=torch.float32).reshape(-1, 64)
    base = checksum(tensor)
    for one, other in ((3, 7), (0, 511)):
        swapped = tensor.clone()
        swapped[[one, other]] = tensor[[other, one]]
        assert checksum(swapped) != base
    swapped = tensor.clone()
    swapped[5, 2], swapped[5, 9] = tensor[5, 9], tensor[5, 2]
    assert checksum(swapped) != base
    assert checksum(tensor.clone()) == base


def test_the_digest_of_weights_sees_one_changed_weight():
    model = tiny_model("llama")
    other = copy.deepcopy(model)
    assert weights_digest(model) == weights_digest(other)
    with torch.no_grad():
        other.model.norm.weight[3] += 0.05
    assert weights_digest(model) != weights_digest(other)


def test_a_prompt_fed_from_its_start_again_is_refused():
    """transformers 5.20 does so in chunked prefill behind a filled cache; here a model that does it by itself."""
    model = tiny_model("llama")
    prepare = type(model).prepare_inputs_for_generation

    def from_the_start(input_ids, **kwargs):
        return prepare(model, input_ids, **{**kwargs, "next_sequence_length": None})

    cache, ids = EditableCache(model), torch.arange(12)[None]
    cache.append(ids[0, :8].tolist())
    length, argument = len(cache.ledger), host.cache_argument(model)
    model.prepare_inputs_for_generation = lambda input_ids, **kwargs: from_the_start(input_ids[:, :3], **kwargs)
    with pytest.raises(LedgerError, match="from slot 8 on"):
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, do_sample=False, **{argument: cache})
    del model.prepare_inputs_for_generation
    assert len(cache.ledger) == length
    assert cache.verify().ok


def test_someone_elses_generate_on_the_model_is_kept_and_given_back():
    model = tiny_model("llama")
    calls = []

    def theirs(*args, **kwargs):
        calls.append(len(args))
        return type(model).generate(model, *args, **kwargs)

    model.generate = theirs
    cache = EditableCache(model)
    model.generate(torch.arange(4)[None], max_new_tokens=1, do_sample=False, **{host.cache_argument(model): cache})
    assert len(calls) == 1
    assert len(cache.ledger) == 4
    del cache
    assert model.generate is theirs


@pytest.mark.parametrize("changed", [0, 4])
def test_an_approximate_sync_that_keeps_what_follows_a_change_is_not_exact(changed):
    """The cells behind the change stay in their slots; the first plan called that exact and kept the old token."""
    model = tiny_model("llama")
    cache, ids = EditableCache(model), list(range(10, 40))
    cache.append(ids)
    ids[changed] = 5
    plan = cache.sync(ids, dry_run=True, approximate=True)
    assert not plan.exact
    assert plan.count("keep") == 29
    cache.sync(ids, approximate=True)
    assert cache.token_ids[0].tolist() == ids
    found = cache.verify()
    assert found.ok
    assert found.stale_tokens == 29 - changed
    cache.recompute((changed, 30))
    assert cache.verify().full_cosine > 0.99999


def test_a_refused_prompt_leaves_nothing_attached():
    cache = EditableCache(tiny_model("llama"))
    cache.append(list(range(12)))
    with pytest.raises(LedgerError):
        cache.model.generate(torch.arange(20, 40)[None], max_new_tokens=1, **{host.cache_argument(cache.model): cache})
    assert all(layer.undo is None for layer in cache.editable_layers)
