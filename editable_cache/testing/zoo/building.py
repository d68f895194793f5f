"""From a name of the zoo to a model that runs."""

from __future__ import annotations

import copy
import random
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from editable_cache.testing.zoo.configs import small_config, small_sections
from editable_cache.testing.zoo.overrides import VARIANTS
from editable_cache.testing.zoo.sizes import FIRST_SPECIAL_ID
from editable_cache.testing.zoo.weights import draw

VLM = "@vlm"
FIRST_TEXT_ID = 8
MAX_ELEMENTS = 30_000_000
"""Weights and buffers that a model of the zoo may have at most; nearly all have fewer than two million."""

_PIXELS = re.compile(r"pixel|flattened_patches|image|patches|bbox", re.IGNORECASE)


class ZooError(RuntimeError):
    """A model type can't be built small, or doesn't run on text alone. The message holds the upstream reason."""


def model_types() -> tuple[str, ...]:
    """Every causal-LM type of the installed transformers, then every image-text type.

    A type of both maps appears again as ``"name@vlm"``, its class for images and text.
    """
    causal = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    image_text = (f"{name}{VLM}" if name in causal else name for name in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    return (*causal, *image_text)


def variants() -> tuple[str, ...]:
    """Installed model types with one feature changed, such as ``"llama:yarn"``; `build` takes these names too."""
    installed = set(model_types())
    return tuple(name for name in VARIANTS if name.split(":")[0] in installed)


def build(
    name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, attn_implementation: str | None = None
) -> PreTrainedModel:
    """A tiny random model in eval mode that runs on text with a cache, the same for the same arguments.

    Args:
        name: one of `model_types` or `variants`.
        seed: another number draws other weights.
        dtype: of the weights.
        attn_implementation: by default sdpa, or eager where the type has no sdpa that takes mask tensors.

    Raises:
        ZooError: no such name; no small config; the model doesn't run on text alone.
    """
    if name not in model_types() and name not in variants():
        raise ZooError(
            f"{name!r} is no model type of transformers {transformers.__version__} and no variant of the zoo"
        )
    with _quiet(), torch.random.fork_rng(devices=[]):
        if attn_implementation is not None:
            return _tried(name, seed, dtype, attn_implementation)
        try:
            return _tried(name, seed, dtype, "sdpa")
        except ZooError as error:
            try:
                return _tried(name, seed, dtype, "eager")
            except ZooError as second:
                told = second if "scaled_dot_product_attention" in str(error) else error
                raise told from told.__cause__


def ids_for(model: PreTrainedModel, count: int, seed: int) -> Tensor:
    """Random text ids, int64 [count]: none of them is special or stands for an image, in any model of the zoo."""
    special = set(_special_ids(model.config))
    text = torch.tensor([token for token in range(FIRST_TEXT_ID, FIRST_SPECIAL_ID) if token not in special])
    generator = torch.Generator().manual_seed(seed)
    return text[torch.randint(len(text), (count,), generator=generator)]


def _special_ids(config: PreTrainedConfig) -> Iterator[int]:
    for name, value in config.to_dict().items():
        if re.search(r"_(id|index|token|offset)$", name) and type(value) is int:
            yield value
    for name in config.sub_configs or {}:
        part = getattr(config, name, None)
        if isinstance(part, PreTrainedConfig):
            yield from _special_ids(part)


def _tried(name: str, seed: int, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    """One try with one attention implementation."""
    extra = dict(VARIANTS[name].text) if name in VARIANTS else {}
    model_type = name.split(":")[0].removesuffix(VLM)
    try:
        model_class = _model_class(name, model_type)
        config = _config_of(small_config(model_type, extra), model_class)
        _require_small(model_class, config)
        torch.manual_seed(0)
        random.seed(0)
        model = model_class._from_config(config, attn_implementation=attention, dtype=dtype)
        if _fit_sections(model):
            model = model_class._from_config(config, attn_implementation=attention, dtype=dtype)
    except Exception as error:
        raise ZooError(f"{name}: no small model: {_told(error)}") from error
    built: PreTrainedModel = model.eval()
    draw(built, name, seed)
    _never_stop(built)
    _run(name, built)
    return built


def _require_small(model_class: Any, config: PreTrainedConfig) -> None:
    """Refuse a size that the general rule left large, before it takes memory."""
    try:
        with torch.device("meta"):
            model = model_class(copy.deepcopy(config))
    except Exception:  # some constructors compute with tensors, which the meta device can't
        return
    tensors = (*model.parameters(), *model.buffers())
    largest = max(tensors, key=Tensor.numel)
    size = sum(map(Tensor.numel, tensors))
    if size > MAX_ELEMENTS:
        raise ValueError(f"{size:,} elements, {tuple(largest.shape)} the largest, are no small model")


def _model_class(name: str, model_type: str) -> Any:
    causal = model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not name.endswith(VLM)
    names: Any = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if causal else MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    class_name = names[model_type]
    return getattr(transformers, class_name if isinstance(class_name, str) else class_name[0])


def _config_of(config: PreTrainedConfig, model_class: Any) -> PreTrainedConfig:
    """The part of `config` that the class takes: a causal-LM class may want the language model's config alone."""
    wanted = model_class.config_class
    if wanted is None or isinstance(config, wanted):
        return config
    text = config.get_text_config(decoder=True)
    candidates = [text, *(getattr(config, name, None) for name in config.sub_configs or {})]
    return next((part for part in candidates if isinstance(part, wanted)), config)


def _fit_sections(model: PreTrainedModel) -> bool:
    """Shrink M-RoPE sections that don't fit the small head, in the config. Returns whether any changed."""
    changed = False
    for module in model.modules():
        sections, frequencies = getattr(module, "mrope_section", None), getattr(module, "inv_freq", None)
        if isinstance(sections, (list, tuple)) and isinstance(frequencies, Tensor):
            half = frequencies.shape[-1]
            rope = getattr(module.config, "rope_parameters", None)
            if sum(sections) != half and isinstance(rope, dict):
                rope["mrope_section"] = small_sections(list(sections), half)
                changed = True
    return changed


def _never_stop(model: PreTrainedModel) -> None:
    """Generation must not end early nor be forced to an id, so that its length is known."""
    settings = getattr(model, "generation_config", None)
    if settings is None:
        return
    for field in (
        "eos_token_id",
        "forced_eos_token_id",
        "forced_bos_token_id",
        "suppress_tokens",
        "begin_suppress_tokens",
    ):
        setattr(settings, field, None)


def _run(name: str, model: PreTrainedModel) -> None:
    """Run three tokens and refuse what doesn't give one row of finite logits for each."""
    ids = ids_for(model, 3, 0)[None]
    try:
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=True).logits
    except Exception as error:
        asks = isinstance(error, (TypeError, ValueError)) and _PIXELS.search(str(error))
        raise ZooError(f"{name}: {'needs pixel inputs' if asks else 'no text forward'}: {_told(error)}") from error
    if logits.shape[:2] != ids.shape:
        raise ZooError(f"{name}: no text forward: logits {tuple(logits.shape)} for {ids.shape[1]} tokens")
    if not bool(torch.isfinite(logits).all()):
        raise ZooError(f"{name}: the logits of a text forward are not finite")


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


@contextmanager
def _quiet() -> Iterator[None]:
    """No advice of transformers about the odd configs, and no trace in the generator of `random`."""
    state, level = random.getstate(), transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        random.setstate(state)
        transformers.logging.set_verbosity(level)
