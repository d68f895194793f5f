"""A forward that raises half-way through the layers, in every operation: cache and ledger are put back bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cache_support import Snapshot, failing_at, forward, generate, make_context, policy, shared_model, some_ids

from editable_cache.forward import run

PHRASE = "delivered now at last"


def own_policy(cache: Any) -> Any:
    return policy() if cache.dtype == torch.float32 else policy("llama", dtype=cache.dtype)


def sync_moved(cache: Any) -> Any:
    ids = cache.token_ids[0]
    return cache.sync(torch.cat((ids[:3], ids[20:], ids[5:20])), approximate=True)


OPERATIONS: dict[str, Any] = {
    "append": lambda c: c.append("and more text"),
    "append_fields": lambda c: c.append("x: {x} \n", fields={"x": "5"}),
    "splice": lambda c: c.splice(own_policy(c), name="again"),
    "splice_inside": lambda c: c.splice(own_policy(c), at=5, name="again", seam_tokens=2),
    "insert": lambda c: c.insert(" the order", 5),
    "refresh_longer": lambda c: c.refresh_field("status", PHRASE),
    "refresh_same": lambda c: c.refresh_field("status", "refund"),
    "erratum": lambda c: c.erratum("status", "delivered"),
    "recompute": lambda c: c.recompute("order"),
    "recompute_all": lambda c: c.recompute((0, len(c.ledger))),
    "recompute_cells": lambda c: c.recompute(torch.rand(3, len(c.ledger)) < 0.5),
    "sync": lambda c: c.sync([*c.token_ids[0, :9].tolist(), 7, 8, 9]),
    "sync_approximate": sync_moved,
    "next_token_logits": lambda c: c.next_token_logits(),
    "verify": lambda c: c.verify(),
    "consolidate": lambda c: c.consolidate(),
    "model": lambda c: forward(c, some_ids(4)),
    "model_beams": lambda c: forward(c, some_ids(4, batch=3)),
    "generate": lambda c: generate(c, c.inputs("hello")["input_ids"]),
    "generate_beams": lambda c: generate(c, c.inputs("hello")["input_ids"], num_beams=3),
    "generate_full_hit": lambda c: generate(c, c.token_ids.clone()),
    "generate_shorter": lambda c: generate(c, c.token_ids[:, :9].clone()),
    "generate_lookup": lambda c: generate(c, c.inputs("hello")["input_ids"], prompt_lookup_num_tokens=3),
    **{
        f"edit_{method}": lambda c, method=method: c.edit("status", PHRASE, method=method)
        for method in ("field+erratum", "erratum", "in_place", "suffix", "selective", "hoist", "full")
    },
}


@pytest.mark.parametrize("shared", ["alone", "forked", "checkpointed"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_half_way(operation: str, shared: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "PREFILL_TOKENS", 5)  # several forwards in one operation
    monkeypatch.setattr(run, "SCATTER_TOKENS", 5)
    call = OPERATIONS[operation]
    layers = shared_model().model.layers
    raised = 0
    for dtype, error, layer, nth in (
        (torch.float32, RuntimeError, 1, 1),
        (torch.float32, KeyboardInterrupt, 1, 2),
        (torch.float32, RuntimeError, 2, 3),
        (torch.bfloat16, RuntimeError, 0, 2),
        (torch.float32, RuntimeError, 1, 6),
    ):
        cache = make_context("llama", **({} if dtype == torch.float32 else {"dtype": dtype}))
        if operation == "consolidate":
            cache.erratum("status", "delivered")
        if dtype == torch.bfloat16:
            cache.reposition("policy", to=2)  # so that pristine keys are at stake
            layers = cache.model.model.layers
        else:
            layers = shared_model().model.layers
        if cache.model is not shared_model() and operation.startswith(("model", "generate")):
            continue
        fork = cache.fork() if shared == "forked" else None
        if shared == "checkpointed":
            cache.checkpoint()
        before = Snapshot(cache)
        with failing_at(layers[layer], nth, error):
            try:
                call(cache)
            except error:
                raised += 1
                if error is KeyboardInterrupt and operation.startswith("model"):
                    cache.recover()
            else:
                continue  # it needs fewer forwards than that
        before.check(cache)
        assert cache.verify().ok
        call(cache)
        if fork is not None:
            before.check(fork)
        if shared == "checkpointed":
            cache.rollback()
            before.check(cache)
    assert raised >= 1


def test_the_snapshot_sees_one_bit() -> None:
    """Negative control of this file."""
    cache = make_context()
    before = Snapshot(cache)
    cache.layers[2].values[..., 7, 3] += 1e-6
    with pytest.raises(AssertionError, match="layer 2 cells values"):
        before.check(cache)
    cache = make_context()
    before = Snapshot(cache)
    cache.ledger = cache.ledger.marked_stale([(3, 4)], "x")
    with pytest.raises(AssertionError, match="ledger"):
        before.check(cache)


def test_a_warning_turned_error_is_a_failure_like_any_other() -> None:
    cache = make_context()
    before = Snapshot(cache)
    with pytest.raises(UserWarning):
        cache.remove("system")  # warnings are errors in this suite
    before.check(cache)
