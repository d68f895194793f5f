"""``torch.compile``: around the model and in place. The hooks see every token and nothing they do is traced."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cache_support import forward
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, DynamicCache
from wrapper_support import CHUNK, HEAD, check_edits, check_generate, check_splice

from editable_cache import EditableCache
from editable_cache.adapters import identify
from editable_cache.testing.tiny_models import draw_weights, tiny_config, tiny_model

# inductor uses it when it is imported
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    counters.clear()


def one_layer() -> Any:
    config = tiny_config("llama")
    config.num_hidden_layers = 1
    model = AutoModelForCausalLM.from_config(config).eval()
    draw_weights(model)
    model.generation_config.eos_token_id = None
    return model


def compiled(how: str, backend: str, make: Any = None) -> tuple[Any, Any]:
    """What the user calls, and the model inside."""
    model = tiny_model("llama") if make is None else make()
    if how == "in place":
        model.compile(backend=backend)
        return model, model
    return torch.compile(model, backend=backend), model


def test_a_compiled_model_is_the_model_inside() -> None:
    wrapped, model = compiled("around", "eager")
    cache = EditableCache(wrapped)
    assert cache.model is model
    assert identify(wrapped) == identify(model) == identify(tiny_model("llama"))
    check_splice(wrapped, tiny_model("llama"))
    check_generate(wrapped, tiny_model("llama"))  # generate runs the model inside, as in stock transformers


@pytest.mark.parametrize("how", ["in place", pytest.param("around", marks=pytest.mark.slow)])
def test_the_hooks_of_a_compiled_model_are_seen_and_not_traced(how: str) -> None:
    (wrapped, model), plain = compiled(how, "eager", one_layer), one_layer()
    cache, stock = EditableCache(model), DynamicCache()
    expected = forward(stock, CHUNK[None], model=plain)
    assert (forward(cache, CHUNK[None], model=wrapped) - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert counters["stats"]["unique_graphs"] > 0  # something was compiled
    assert torch.equal(cache.token_ids[0], CHUNK)
    assert cache.verify().ok
    breaks = "\n".join(counters["graph_break"])
    for inside in ("tolist", "aten.equal", "item()"):  # what the bookkeeping would break on
        assert inside not in breaks


@pytest.mark.slow
@pytest.mark.parametrize("how", ["around", "in place"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_the_whole_story_with_a_compiled_model(how: str, backend: str) -> None:
    wrapped, plain = compiled(how, backend, one_layer)[0], one_layer()
    check_edits(check_splice(wrapped, plain))
    cache = check_generate(wrapped, plain)
    stock = DynamicCache()
    forward(stock, cache.token_ids, model=plain)
    for ids in (CHUNK[None], HEAD[None, :1], HEAD[None, 1:2]):  # through the compiled call itself
        expected = forward(stock, ids, model=plain)
        logits = forward(cache, ids, model=wrapped)
        assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()
        assert (logits - expected.flip(0, -1)).abs().max() > 1e-2
    assert cache.ledger.ids_known
    check_edits(cache)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["around", "in place"])
def test_hooks_that_come_after_the_compilation_are_seen(how: str) -> None:
    """dynamo does not guard on hooks: what was compiled without them must not run where they are."""
    wrapped, model = compiled(how, "eager", one_layer)
    unwatched = EditableCache(config=model.config)
    for ids in (CHUNK[None], HEAD[None, :1], HEAD[None, 1:2]):
        forward(unwatched, ids, model=wrapped)
    assert counters["stats"]["unique_graphs"] > 0
    for _ in range(2):  # and again after they were removed and installed anew
        cache = EditableCache(model)
        for ids in (CHUNK[None], HEAD[None, :1], HEAD[None, 1:2]):
            forward(cache, ids, model=wrapped)
        assert torch.equal(cache.token_ids[0], torch.cat((CHUNK, HEAD[:2])))
        assert cache.verify().ok
        del cache
