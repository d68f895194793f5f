"""Key covariance of an MLP: which inputs its projection has to keep serving (Meng et al. 2022, equation 2)."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from editable_cache.adapters.fingerprint import weights_digest
from editable_cache.comparison.blocks import Blocks, keys_of
from editable_cache.errors import ResultsError, TaskError

WINDOW = 256
"""Tokens of text that are read together."""

LEAST_TOKENS = 100_000


@dataclass(frozen=True, eq=False)
class Covariance:
    """Second moment of a layer's keys, not centred.

    Attributes:
        matrix: ``E[k k^T]``, float64 ``[intermediate_size, intermediate_size]``, on the CPU.
        tokens: how many keys it is the mean of.
        seconds: what it took to compute; of several layers in one pass, all of them together.
    """

    matrix: Tensor
    tokens: int
    seconds: float


def text_ids(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], tokens: int) -> Tensor:
    """The first ``tokens`` token ids of the texts, one behind the other, int64 ``[tokens]``.

    Raises:
        TaskError: if the texts are shorter.
    """
    found: list[int] = []
    for text in texts:
        for paragraph in text.split("\n\n"):
            found += tokenizer(paragraph + "\n\n", add_special_tokens=False).input_ids
        if len(found) >= tokens:
            return torch.tensor(found[:tokens])
    raise TaskError(f"Key covariance: expected a text of {tokens} tokens, got {len(found)}; give more text.")


def key_covariances(
    blocks: Blocks, ids: Tensor, layers: Sequence[int], *, folder: Path | str | None = None, bos: int | None = None
) -> dict[int, Covariance]:
    """Covariances of some layers over a text, in one pass.

    Args:
        ids: int64 ``[tokens]``; at least as many as a key has entries, or nothing can be inverted.
        layers: numbers from 0 on.
        folder: where they are kept, one file per layer, named by a digest of weights, layer and text; None keeps
            nothing.
        bos: id put before each window, where the model was trained so; its own key does not count.

    Raises:
        TaskError: for too few tokens.
        ResultsError: if a kept file is damaged.
    """
    for layer in layers:
        blocks.require_layer(layer)
    least = max(blocks.projections[layer].in_features for layer in layers)
    if len(ids) < least:
        raise TaskError(
            f"Key covariance: expected at least {least} tokens, as many as a key has entries; got {len(ids)}."
        )
    paths = _paths(blocks, ids, layers, folder, bos)
    found = {layer: _read(path) for layer, path in paths.items() if path is not None and path.is_file()}
    missing = tuple(layer for layer in layers if layer not in found)
    if missing:
        for layer, covariance in _measured(blocks, ids, missing, bos).items():
            found[layer] = covariance
            _write(paths[layer], covariance)
    return {layer: found[layer] for layer in layers}


def fingerprint(blocks: Blocks, ids: Tensor, layer: int, bos: int | None = None) -> str:
    """Name of a covariance: 16 bytes in hex over the model's weights, the layer and the text."""
    return _fingerprint(weights_digest(blocks.model), ids, layer, bos)


def _fingerprint(weights: str, ids: Tensor, layer: int, bos: int | None) -> str:
    hasher = hashlib.blake2b(f"{weights} {layer} {bos} {WINDOW}\0".encode(), digest_size=16)
    hasher.update(ids.to(torch.int64).contiguous().numpy().tobytes())
    return hasher.hexdigest()


def _paths(
    blocks: Blocks, ids: Tensor, layers: Sequence[int], folder: Path | str | None, bos: int | None
) -> dict[int, Path | None]:
    if folder is None:
        return dict.fromkeys(layers)
    weights = weights_digest(blocks.model)
    return {layer: Path(folder) / f"{_fingerprint(weights, ids, layer, bos)}.safetensors" for layer in layers}


def _measured(blocks: Blocks, ids: Tensor, layers: tuple[int, ...], bos: int | None) -> dict[int, Covariance]:
    started = time.perf_counter()
    sizes = {layer: blocks.projections[layer].in_features for layer in layers}
    sums = {layer: torch.zeros(size, size, dtype=torch.float64) for layer, size in sizes.items()}
    first = [] if bos is None else [bos]
    for window in tqdm(ids.split(WINDOW), desc="key covariance", unit="window", leave=False):
        keys = keys_of(blocks, torch.tensor([first + window.tolist()]), layers)
        for layer in layers:
            rows = keys[layer][0, len(first) :].double().cpu()
            sums[layer].addmm_(rows.T, rows)
    seconds = time.perf_counter() - started
    return {layer: Covariance(sums[layer] / len(ids), len(ids), seconds) for layer in layers}


def _write(path: Path | None, covariance: Covariance) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(f"{path.name}.new")
        facts = {"tokens": str(covariance.tokens), "seconds": f"{covariance.seconds:.3f}"}
        save_file({"matrix": covariance.matrix}, fresh, metadata=facts)
        fresh.replace(path)


def _read(path: Path) -> Covariance:
    try:
        with safe_open(path, "pt") as file:
            facts = file.metadata()
            return Covariance(file.get_tensor("matrix"), int(facts["tokens"]), float(facts["seconds"]))
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ResultsError(f"Key covariance {path}: the file is damaged ({error}); delete it.") from error
