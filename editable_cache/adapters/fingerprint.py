"""Who a model is: digests of everything that decides what its keys and values are.

The digest of the weights reads every byte once and is remembered until a parameter is written: autograd's version
counters and storage addresses tell, and the first element of each tensor (writes through ``.data`` leave the counters
alone).
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from editable_cache.adapters import host
from editable_cache.adapters.rope_types import renewed_buffers
from editable_cache.adapters.tokenizer import tokenizer_digest
from editable_cache.adapters.weights import contents, form, plain, stored
from editable_cache.adapters.wrappers import inner_model, tuner_layers
from editable_cache.errors import UnsupportedModelError
from editable_cache.ops import checksum
from editable_cache.spec import ModelIdentity

NEUTRAL_CONFIG_FIELDS = frozenset(
    {
        "_name_or_path",
        "activation_dropout",
        "activation_dropout_prob",
        "architectures",
        "attention_dropout",
        "attention_dropout_prob",
        "attention_probs_dropout_prob",
        "attn_dropout",
        "attn_pdrop",
        "auto_map",
        "aux_loss_alpha",
        "bad_words_ids",
        "begin_suppress_tokens",
        "bos_token_id",
        "chunk_size_feed_forward",
        "classifier_dropout",
        "classifier_dropout_prob",
        "decoder_start_token_id",
        "diversity_penalty",
        "do_sample",
        "dropout",
        "dtype",
        "early_stopping",
        "embd_pdrop",
        "embedding_dropout",
        "encoder_no_repeat_ngram_size",
        "eos_token_id",
        "exponential_decay_length_penalty",
        "ffn_dropout",
        "finetuning_task",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "gguf_file",
        "gradient_checkpointing",
        "hidden_dropout",
        "hidden_dropout_prob",
        "id2label",
        "initializer_range",
        "is_decoder",
        "keys_to_ignore_at_inference",
        "label2id",
        "layerdrop",
        "length_penalty",
        "max_length",
        "min_length",
        "name_or_path",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_labels",
        "num_return_sequences",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "output_scores",
        "pad_token_id",
        "prefix",
        "problem_type",
        "quantization_config",
        "remove_invalid_values",
        "repetition_penalty",
        "resid_dropout",
        "resid_pdrop",
        "residual_dropout",
        "return_dict",
        "return_dict_in_generate",
        "router_aux_loss_coef",
        "router_z_loss_coef",
        "sep_token_id",
        "seq_aux",
        "suppress_tokens",
        "task_specific_params",
        "temperature",
        "tie_word_embeddings",
        "tokenizer_class",
        "top_k",
        "top_p",
        "torch_dtype",
        "transformers_version",
        "typical_p",
        "unsloth_fixed",
        "unsloth_version",
        "use_cache",
        "_attn_implementation",
        "_experts_implementation",
    }
)
"""Config fields that cannot change a key or a value in evaluation mode: dropout rates, losses, defaults of generation,
bookkeeping. Every other field, known or not, counts.
"""


PATHS = ("_name_or_path", "name_or_path")
ABSOLUTE = re.compile(r"[/~\\]|[A-Za-z]:[/\\]|file:", re.IGNORECASE)
"""How a text starts that names a place on a machine."""


class _Known(NamedTuple):
    state: tuple[Any, ...]
    identity: ModelIdentity


class WeightsState(NamedTuple):
    """Cheap token of a model's state: addresses, versions and first elements of its tensors, files and objects that
    hold weights, and its adapters.
    """

    parameters: tuple[Any, ...]
    buffers: tuple[Any, ...]
    dtype: str
    adapters: str

    @property
    def without_buffers(self) -> WeightsState:
        """The part that no forward changes (some rotary embeddings renew their buffers as the context grows)."""
        return self._replace(buffers=())


class _FirstElements(NamedTuple):
    addresses: tuple[int, ...]
    views: tuple[tuple[tuple[Tensor, ...], ...], ...]  # of parameters and buffers, by dtype and device; 0-dimensional


STATES = 8
"""How many earlier states of a model are remembered with what they held."""

_first_elements: weakref.WeakKeyDictionary[nn.Module, _FirstElements] = weakref.WeakKeyDictionary()
_contents: weakref.WeakKeyDictionary[nn.Module, dict[WeightsState, tuple[str, str]]] = weakref.WeakKeyDictionary()
_identities: weakref.WeakKeyDictionary[nn.Module, _Known] = weakref.WeakKeyDictionary()
_rounded: weakref.WeakKeyDictionary[nn.Module, tuple[WeightsState, str]] = weakref.WeakKeyDictionary()


def identify(model: nn.Module, tokenizer: Any = None, *, state: WeightsState | None = None) -> ModelIdentity:
    """The identity of a model as it stands now, and of a tokenizer if one took part.

    ``state`` is the model's ``weights_state`` where the caller has it already.
    """
    model = inner_model(model)
    everything = (weights_state(model) if state is None else state), _config_json(model)
    known = _identities.get(model)
    if known is None or known.state != everything:
        _identities[model] = known = _Known(everything, _measure(model))
        contents = _contents.setdefault(model, {})
        contents[everything[0].without_buffers] = (known.identity.weights, known.identity.adapters)
        for old in list(contents)[:-STATES]:
            del contents[old]
    return known.identity if tokenizer is None else replace(known.identity, tokenizer=tokenizer_digest(tokenizer))


def weights_state(model: nn.Module) -> WeightsState:
    """Cheap token that changes when a parameter or buffer is written or replaced, or adapters switch."""
    model = inner_model(model)
    parameters, buffers, marks = stored(model)
    addresses = tuple(tensor.data_ptr() for tensors in (parameters, buffers) for tensor in tensors)
    known = _first_elements.get(model)
    if known is None or known.addresses != addresses:
        views = tuple(_scalars(tensors) for tensors in (parameters, buffers))
        _first_elements[model] = known = _FirstElements(addresses, views)
    tokens = [
        (
            tuple((tensor.data_ptr(), _version(tensor)) for tensor in tensors),
            tuple(tuple(torch.stack(group).tolist()) for group in groups),
        )
        for tensors, groups in zip((parameters, buffers), known.views, strict=True)
    ]
    dtype = str(getattr(model, "dtype", ""))
    return WeightsState((*tokens[0], marks), tokens[1], dtype, _active_adapters(model))


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # autograd does not count writes into inference tensors


def _scalars(tensors: list[Tensor]) -> tuple[tuple[Tensor, ...], ...]:
    groups: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        if not tensor.is_quantized:
            first = tensor.detach()[(0,) * tensor.dim()]
            first = first.view(torch.uint8) if first.itemsize == 1 else first  # float8 can't be stacked
            groups.setdefault((first.dtype, first.device), []).append(first)
    return tuple(tuple(group) for group in groups.values())


def weights_digest(model: nn.Module) -> str:
    """Digest of every parameter and persistent buffer, by name, shape, dtype and content."""
    hasher = hashlib.blake2b(digest_size=16)
    for name, item in contents(inner_model(model)):
        for mark in _marks(name, item):
            hasher.update(f"{mark}\0".encode())
    return hasher.hexdigest()


def _marks(name: str, item: Any) -> Iterator[str]:
    """Name and content of one persistent item, as text.

    Raises:
        UnsupportedModelError: for an item whose content can't be read.
    """
    if isinstance(item, Tensor):
        described = form(item)
        if described:
            yield f"{name}\0{described}"
        for path, leaf in plain(item):
            yield f"{name}{path}\0{checksum(leaf.dequantize() if leaf.is_quantized else leaf)}"
    elif isinstance(item, (tuple, list)):
        for idx, part in enumerate(item):
            yield from _marks(f"{name}[{idx}]", part)
    elif item is None or isinstance(item, (bool, int, float, str, torch.dtype)):
        yield f"{name}\0{item!r}"
    else:
        raise UnsupportedModelError(
            f"identify: expected tensors and plain values in the state of {name}, got a {type(item).__name__}, whose "
            "content can't be compared: a cache of this model could not be told from one of other weights."
        )


def same_weights(model: nn.Module, before: WeightsState, now: WeightsState) -> bool:
    """Whether a model holds now what it held ``before``: untouched, or written with the same content.

    The second can only be told if the model was identified in its earlier state.
    """
    if before.without_buffers == now.without_buffers:
        return True
    known = _contents.get(model, {}).get(before.without_buffers)
    return known is not None and known == (identify(model, state=now).weights, now.adapters)


def _measure(model: nn.Module) -> ModelIdentity:
    config, weights = host.text_config(model.config), weights_digest(model)
    renewed = renewed_buffers(model)
    named = [(name, t) for name, t in model.named_buffers() if "inv_freq" in name and id(t) not in renewed]
    frequencies = {name: tensor.tolist() for name, tensor in named}
    return ModelIdentity(
        model_type=str(config.model_type),
        config=_config_json(model),
        weights=weights,
        adapters=_active_adapters(model),
        rotary=_digest(frequencies),
        dtype=str(host.dtype_of(model)).removeprefix("torch."),
    )


def rounded_digest(model: nn.Module) -> str:
    """Digest of the weights rounded to bfloat16: equal for one set of weights in several dtypes.

    Empty where weights are no plain tensors (quantized ones). Remembered until a weight is written.
    """
    model = inner_model(model)
    state = weights_state(model).without_buffers
    known = _rounded.get(model)
    if known is None or known[0] != state:
        _rounded[model] = known = (state, _rounded_digest(model))
    return known[1]


def _rounded_digest(model: nn.Module) -> str:
    hasher = hashlib.blake2b(digest_size=16)
    for name, item in contents(model):
        if not isinstance(item, Tensor) or item.is_quantized or form(item):
            return ""
        rounded = item.to(torch.bfloat16) if item.is_floating_point() else item
        hasher.update(f"{name}\0{checksum(rounded)}\0".encode())
    return hasher.hexdigest()


def _config_json(model: nn.Module) -> str:
    """The config fields that affect keys and values, in a form that reading and writing as JSON does not change."""
    content = host.text_config(model.config).to_dict()
    counted = {key: value for key, value in content.items() if key not in NEUTRAL_CONFIG_FIELDS}
    return json.dumps(_plain_json(json.loads(json.dumps(counted, default=str))), sort_keys=True)


def _plain_json(value: Any) -> Any:
    """Without the names of folders that nested configs were loaded from and of files anywhere, which change no key and
    tell where things lie here; infinities, which JSON lacks, as text.
    """
    if isinstance(value, dict):
        return {key: _plain_json(each) for key, each in value.items() if key not in PATHS}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, str) and ABSOLUTE.match(value):
        return ""
    return [_plain_json(each) for each in value] if isinstance(value, list) else value


def _active_adapters(model: nn.Module) -> str:
    """PEFT layers by name with what is switched on, merged and scaled; empty without PEFT."""
    active = []
    for name, module in tuner_layers(model):
        names = [] if module.disable_adapters else list(module.active_adapters)
        scales = {n: getattr(module, "scaling", {}).get(n) for n in names}
        if names or module.merged_adapters:
            active.append([name, scales, list(module.merged_adapters)])
    return _digest(active) if active else ""


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:16]
