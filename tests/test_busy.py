"""Operations while a forward or `generate` uses the cache: refused, and what runs goes on as if nothing was."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from cache_support import generate, make_context, policy, shared_model
from transformers.generation.streamers import BaseStreamer

from editable_cache import BusyError, EditableCache

OPERATIONS: dict[str, Any] = {
    "append": lambda c: c.append("x"),
    "splice": lambda c: c.splice(policy(), name="again"),
    "insert": lambda c: c.insert("x", 5),
    "remove": lambda c: c.remove("order"),
    "reposition": lambda c: c.reposition("order", to=0),
    "refresh_field": lambda c: c.refresh_field("status", "delivered"),
    "erratum": lambda c: c.erratum("status", "delivered"),
    "edit": lambda c: c.edit("status", "delivered"),
    "consolidate": lambda c: c.consolidate(),
    "recompute": lambda c: c.recompute((2, 5)),
    "sync": lambda c: c.sync([5, 6]),
    "extract": lambda c: c.extract((2, 5)),
    "fork": lambda c: c.fork(),
    "copy": lambda c: copy.copy(c),
    "deepcopy": lambda c: copy.deepcopy(c),
    "checkpoint": lambda c: c.checkpoint(),
    "verify": lambda c: c.verify(),
    "next_token_logits": lambda c: c.next_token_logits(),
    "inputs": lambda c: c.inputs("x"),
    "reset": lambda c: c.reset(),
    "unstack": lambda c: c.unstack(),
    "stack": lambda c: EditableCache.stack([c]),
    "save": lambda c: c.save_pretrained("/nonexistent/never"),
    "generate": lambda c: generate(c, c.token_ids),
}


@pytest.mark.parametrize("where", ["streamer", "processor", "criteria", "layer", "layer_of_an_operation"])
def test_operations_while_the_cache_is_in_use(where: str) -> None:
    cache, met = make_context(), dict[str, int]()
    expected = generate(twin := make_context(), twin.token_ids.clone())

    def meddle(*_: Any) -> bool:
        for name, operation in OPERATIONS.items():
            with pytest.raises(BusyError, match="in use by") as caught:
                operation(cache)
            assert isinstance(caught.value, RuntimeError)
            met[name] = met.get(name, 0) + 1
        return False

    class Meddler(BaseStreamer):
        def put(self, value: Any) -> None:
            meddle()

        def end(self) -> None:
            meddle()

    options: dict[str, Any] = {}
    handle = None
    if where == "streamer":
        options["streamer"] = Meddler()
    elif where == "processor":
        options["logits_processor"] = [lambda ids, scores: (meddle(), scores)[1]]
    elif where == "criteria":
        options["stopping_criteria"] = [lambda ids, scores, **_: torch.tensor([meddle()])]
    else:
        handle = shared_model().model.layers[1].register_forward_hook(lambda *_: (meddle(), None)[1])
    try:
        if where == "layer_of_an_operation":
            cache.refresh_field("status", "delivered now")
            cache.append("and more")
            cache.recompute((3, 6))
        else:
            actual = generate(cache, cache.token_ids.clone(), **options)
            assert torch.equal(actual.sequences, expected.sequences)
    finally:
        if handle is not None:
            handle.remove()
    assert met.keys() == OPERATIONS.keys()
    assert cache.verify().ok
