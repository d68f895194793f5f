"""Where a chunk comes from: what a stranger wants to read about its model, and nothing that names this machine."""

from __future__ import annotations

import importlib.metadata
import os
import re
from pathlib import Path
from typing import Any, TypedDict

from huggingface_hub import constants
from huggingface_hub.file_download import repo_folder_name
from torch import Tensor, nn

from editable_cache.adapters.fingerprint import identify, rounded_digest
from editable_cache.adapters.probe import measured
from editable_cache.adapters.special import special_tokens
from editable_cache.adapters.wrappers import inner_model, tuner_layers
from editable_cache.spec import LayerSpec, ModelIdentity, Origin

LIBRARIES = ("editable-cache", "torch", "transformers", "peft")
MODEL_FILES = ("config.json", "tokenizer_config.json", "tokenizer.json")
REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[\w.-]{1,96}")


class Maker(TypedDict):
    """The fields of a ``KVChunk`` that say who made it."""

    model: ModelIdentity
    layout: tuple[LayerSpec, ...]
    origin: Origin


def made_by(model: nn.Module, tokenizer: Any, ids: Tensor) -> Maker:
    """Who makes a chunk now, of whose tokens and their prefix ``ids`` ``[n]`` are all."""
    model = inner_model(model)
    return Maker(model=identify(model, tokenizer), layout=measured(model).layers, origin=origin(model, tokenizer, ids))


def origin(model: nn.Module, tokenizer: Any, ids: Tensor) -> Origin:
    """The circumstances of a compilation by ``model`` as it stands now."""
    used, special = set(ids.tolist()), special_tokens(tokenizer)
    config: Any = model.config
    return Origin(
        repo=_repository(getattr(config, "_name_or_path", "")),
        revision=str(getattr(config, "_commit_hash", None) or ""),
        tokenizer=_repository(getattr(tokenizer, "name_or_path", "")),
        special_ids=tuple((idx, special[idx]) for idx in sorted(used & special.keys())),
        attention=str(getattr(config, "_attn_implementation", None) or ""),
        adapters=_adapters(model),
        versions=tuple((name, version) for name in LIBRARIES if (version := _version(name))),
        rounded_weights=rounded_digest(model),
    )


def _repository(name: Any) -> str:
    """``name`` if files of that repository were downloaded: from elsewhere, a folder's name looks just like one."""
    if not isinstance(name, str) or REPOSITORY.fullmatch(name) is None or os.path.exists(name):
        return ""
    return name if any(_is_downloaded(name, file) for file in MODEL_FILES) else ""


def _is_downloaded(repository: str, file: str) -> bool:
    """Whether a file of a repository is in the Hub's cache, at any commit."""
    folder = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=repository, repo_type="model"))
    return next(folder.glob(f"snapshots/*/{file}"), None) is not None


def _adapters(model: nn.Module) -> tuple[tuple[str, float], ...]:
    scales = {
        name: float(module.scaling[name])
        for _, module in tuner_layers(model)
        for name in ([] if module.disable_adapters else module.active_adapters)
        if name in getattr(module, "scaling", {})
    }
    return tuple(sorted(scales.items()))


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
