"""Who a model is: digests of everything that decides what its keys and values are.

The digest of the weights reads every byte once and is remembered until a parameter is written (autograd's version
counters and storage addresses tell) or a small sample of each tensor changes (writes through ``.data`` leave the
counters alone). It guards against accident, not against an adversary: integer sums over rows of 4,096 elements,
hashed with BLAKE2.
"""

from __future__ import annotations

import hashlib
import json
import sys
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from editable_cache.spec import ModelIdentity

ROW = 4096
SAMPLE = 8

NEUTRAL_CONFIG_FIELDS = frozenset(
    {
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "bos_token_id",
        "chunk_size_feed_forward",
        "decoder_start_token_id",
        "dtype",
        "eos_token_id",
        "finetuning_task",
        "gguf_file",
        "id2label",
        "initializer_range",
        "is_decoder",
        "label2id",
        "name_or_path",
        "num_labels",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "prefix",
        "problem_type",
        "quantization_config",
        "return_dict",
        "sep_token_id",
        "tie_word_embeddings",
        "tokenizer_class",
        "torch_dtype",
        "transformers_version",
        "use_cache",
        "_attn_implementation",
        "_experts_implementation",
    }
)
"""Config fields that cannot change a key or a value; every other field, known or not, counts."""


class _Known(NamedTuple):
    state: tuple[Any, ...]
    sample: tuple[Any, ...]
    weights: str


_weights: weakref.WeakKeyDictionary[nn.Module, _Known] = weakref.WeakKeyDictionary()
_tokenizers: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


def identify(model: nn.Module, tokenizer: Any = None) -> ModelIdentity:
    """The identity of a model as it stands now, and of a tokenizer if one took part."""
    config = model.config.get_text_config(decoder=True)  # type: ignore[operator,union-attr]
    frequencies = {name: t.tolist() for name, t in model.named_buffers() if "inv_freq" in name}
    return ModelIdentity(
        model_type=str(config.model_type),
        config=_digest({k: v for k, v in config.to_dict().items() if k not in NEUTRAL_CONFIG_FIELDS}),
        weights=weights_digest(model),
        adapters=_active_adapters(model),
        rotary=_digest(frequencies),
        dtype=str(model.dtype).removeprefix("torch."),
        tokenizer="" if tokenizer is None else tokenizer_digest(tokenizer),
    )


def weights_digest(model: nn.Module) -> str:
    """Digest of every parameter and persistent buffer, by name, shape, dtype and content."""
    state = weights_state(model)
    sample = tuple(_sample(tensor) for _, tensor in _tensors(model))
    known = _weights.get(model)
    if known is not None and known.state == state and known.sample == sample:
        return known.weights
    hasher = hashlib.blake2b(digest_size=16)
    for name, tensor in _tensors(model):
        hasher.update(json.dumps([name, list(tensor.shape), str(tensor.dtype)]).encode())
        hasher.update(_row_sums(tensor).numpy().tobytes())
    _weights[model] = _Known(state, sample, hasher.hexdigest())
    return _weights[model].weights


def weights_state(model: nn.Module) -> tuple[Any, ...]:
    """Cheap token that changes when a parameter is written or replaced, adapters switch, or a frequency changes."""
    tensors = tuple((tensor.data_ptr(), tensor._version) for _, tensor in model.named_parameters())
    buffers = tuple((tensor.data_ptr(), tensor._version) for _, tensor in model.named_buffers())
    return tensors, buffers, _active_adapters(model)


def tokenizer_digest(tokenizer: Any) -> str:
    """Digest of what maps text to ids."""
    try:
        return _tokenizers[tokenizer]
    except KeyError:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        content = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
        _tokenizers[tokenizer] = hashlib.sha256(content.encode()).hexdigest()[:16]
        return _tokenizers[tokenizer]


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.state_dict().items()


def _row_sums(tensor: Tensor) -> Tensor:
    flat = tensor.detach().contiguous().reshape(-1)
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    numbers = flat.view(whole)
    rows = numbers.numel() // ROW * ROW
    sums = numbers[:rows].view(-1, ROW).sum(dim=1, dtype=torch.int64)
    return torch.cat((sums, numbers[rows:].sum(dtype=torch.int64)[None])).cpu()


def _sample(tensor: Tensor) -> Any:
    flat = tensor.detach().reshape(-1)
    step = max(flat.numel() // SAMPLE, 1)
    return tuple(flat[::step][:SAMPLE].tolist())


def _active_adapters(model: nn.Module) -> str:
    """PEFT layers by name with what is switched on, merged and scaled; empty without PEFT."""
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    if tuners is None:
        return ""
    active = []
    for name, module in model.named_modules():
        if isinstance(module, tuners.BaseTunerLayer):
            names = [] if module.disable_adapters else list(module.active_adapters)
            scales = {n: getattr(module, "scaling", {}).get(n) for n in names}
            if names or module.merged_adapters:
                active.append([name, scales, list(module.merged_adapters)])
    return _digest(active) if active else ""


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:16]
