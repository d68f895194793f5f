"""What a cache installs on its model, and what it leaves behind: nothing."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import subprocess
import sys
import weakref
from typing import Any

import pytest
import torch
from cache_support import (
    Snapshot,
    failing_at,
    forward,
    generate,
    make_context,
    shared_model,
    shared_tokenizer,
    some_ids,
)
from transformers import DynamicCache

from editable_cache import BusyError, EditableCache, LedgerError
from editable_cache.cache.watch import is_watched
from editable_cache.testing.tiny_models import tiny_model


def hooks_of(model: Any) -> tuple[int, int]:
    return len(model._forward_pre_hooks), len(model._forward_hooks)


def test_hooks_are_installed_once_and_removed_with_the_last_cache() -> None:
    model = tiny_model("llama")
    assert hooks_of(model) == (0, 0)
    caches = [EditableCache(model) for _ in range(3)]
    caches.append(caches[0].fork())
    assert hooks_of(model) == (1, 1)
    assert is_watched(model)
    while caches:
        assert hooks_of(model) == (1, 1)
        caches.pop()
        gc.collect()
    assert hooks_of(model) == (0, 0)
    assert not is_watched(model)
    assert "generate" not in model.__dict__


def test_a_cache_does_not_keep_its_model_alive_after_it_died() -> None:
    model = tiny_model("llama")
    gone = weakref.ref(model)
    cache = EditableCache(model)
    forward(cache, some_ids(4), model=model)
    del model, cache
    gc.collect()
    assert gone() is None


def test_a_deep_copy_of_a_watched_model_is_independent() -> None:
    model, ids = tiny_model("llama"), some_ids(8)
    cache = EditableCache(model)
    twin = copy.deepcopy(model)
    other = EditableCache(twin)
    assert hooks_of(twin) == (1, 1)  # not those of the original besides
    forward(other, ids, model=twin)
    assert torch.equal(other.token_ids, ids)
    assert cache.get_seq_length() == 0
    with pytest.raises(LedgerError, match="belongs to another"):
        forward(cache, ids, model=twin)
    twin.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2)
    del other
    gc.collect()
    assert hooks_of(twin) == (0, 0)
    assert hooks_of(model) == (1, 1)


def test_a_watched_model_can_be_pickled() -> None:
    model, ids = tiny_model("llama"), some_ids(8)
    cache, buffer = EditableCache(model), io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    other = EditableCache(loaded)
    forward(other, ids, model=loaded)
    assert torch.equal(other.token_ids, ids)
    assert cache.get_seq_length() == 0


def test_generate_keeps_its_signature_and_name() -> None:
    model = tiny_model("llama")
    before = inspect.signature(model.generate)
    cache = EditableCache(model)
    assert inspect.signature(model.generate) == before
    assert model.generate.__name__ == "generate"
    assert cache.model is model


@pytest.mark.parametrize("make", [lambda m: EditableCache(config=m.config), lambda m: EditableCache()])
def test_a_cache_without_a_model_next_to_a_watched_one(make: Any) -> None:
    model, ids = shared_model(), some_ids(12)
    watching, plain = EditableCache(model), make(model)
    stock = DynamicCache()
    out, expected = (generate(cache, ids, max_new_tokens=4).sequences for cache in (plain, stock))
    assert torch.equal(out, expected)
    assert plain.get_seq_length() == stock.get_seq_length()
    assert watching.get_seq_length() == 0


def test_stock_caches_pass_a_watched_model_untouched() -> None:
    model, ids, cache = shared_model(), some_ids(6), DynamicCache()
    watching = EditableCache(model)
    assert torch.equal(forward(cache, ids), forward(DynamicCache(), ids))
    assert cache.get_seq_length() == 6
    assert watching.get_seq_length() == 0


def test_the_ledger_can_be_read_from_inside_a_forward() -> None:
    """Layers run ahead of the ledger there; reading must neither fail nor record the tokens twice."""
    model, ids, cache = shared_model(), some_ids(6), make_context()
    seen = []
    handle = model.model.norm.register_forward_hook(
        lambda *_: seen.append((cache.token_ids.shape, len(cache.segments)))
    )
    try:
        before = cache.token_ids.shape
        forward(cache, ids)
        cache.append("the order")
        cache.refresh_field("status", "delivered now")
    finally:
        handle.remove()
    assert seen[0][0] == before
    assert cache.verify().ok


def test_a_forward_inside_a_forward_is_refused_and_the_outer_one_goes_on() -> None:
    model, ids, cache = shared_model(), some_ids(6), make_context()
    refused: list[str] = []

    def hook(*_: Any) -> None:
        try:
            forward(cache, ids[:, :2])
        except BusyError as error:
            refused.append(str(error))

    handle = model.model.layers[1].register_forward_hook(hook)
    try:
        forward(cache, ids)
        cache.append("the order")
        cache.next_token_logits()
        cache.refresh_field("status", "delivered now")
    finally:
        handle.remove()
    assert len(refused) == 4
    assert cache.token_ids.shape == cache.positions.shape
    assert cache.verify().ok


def test_a_keyboard_interrupt_in_a_bare_forward() -> None:
    """torch runs no hook after it, so the cache cannot notice; it says what to do instead of going on half-filled."""
    model, ids, cache = shared_model(), some_ids(6), make_context()
    before = Snapshot(cache)
    with failing_at(model.model.layers[1], error=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        forward(cache, ids)
    for operation in (lambda: cache.append("x"), lambda: forward(cache, ids), cache.fork):
        with pytest.raises(BusyError, match=r"cache\.recover\(\)"):
            operation()
    cache.recover()
    before.check(cache)
    forward(cache, ids)
    assert cache.verify().ok


_IMPORT = """
import transformers, torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
import transformers.cache_utils as cu, transformers.generation.utils as gu, transformers.masking_utils as mu
def facts():
    modules = (cu, gu, mu, transformers.modeling_utils, torch.nn.Module)
    found = {(m.__name__, k): id(v) for m in modules for k, v in vars(m).items() if not k.startswith("__")}
    for cls in (cu.DynamicCache, cu.Cache, cu.DynamicLayer, gu.GenerationMixin, LlamaForCausalLM):
        found |= {(cls.__qualname__, k): id(v) for k, v in vars(cls).items() if not k.startswith("_abc")}
    return found
before = facts()
import editable_cache
assert {k: v for k, v in facts().items() if k in before} == before, "editable_cache changed transformers on import"
config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
model = LlamaForCausalLM(config)
assert not model._forward_hooks and "generate" not in vars(model)
assert not torch.nn.modules.module._global_forward_hooks
cache = editable_cache.EditableCache(model)
assert {k: v for k, v in facts().items() if k in before} == before, "a cache changed transformers"
"""


def test_importing_changes_nothing_in_transformers() -> None:
    done = subprocess.run([sys.executable, "-c", _IMPORT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    control = _IMPORT.replace("import editable_cache\n", "import editable_cache; cu.Cache.crop = None\n", 1)
    done = subprocess.run([sys.executable, "-c", control], capture_output=True, text=True, timeout=120)
    assert "changed transformers on import" in done.stderr


def test_an_unknown_tokenizer_is_only_needed_for_text() -> None:
    cache = EditableCache(shared_model())
    cache.append(some_ids(4)[0])
    with pytest.raises(ValueError, match="tokenizer"):
        cache.append("text")
    assert shared_tokenizer() is not None
