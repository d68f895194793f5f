"""Skills in one byte per value: `python benchmarks/storage.py [--quick]` writes `results/storage.json`.

A document of 1,024 tokens is precompiled, its cells are quantized and brought back, and the skill is spliced behind
instructions and a policy (about 900 tokens). The logits at every token of each question are compared with those behind
the skill as it was computed. Controls: cells rounded to bfloat16, and scales that belong to another token.
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from typing import Any, NamedTuple

import fidelity
import timing
import torch
from torch import Tensor, nn
from tqdm import tqdm

from editable_cache import EditableCache, KVChunk, Skill
from editable_cache.adapters import model_spec
from editable_cache.ops import relative_error, rotate_into, rotation
from editable_cache.ops.quantize import Grouping, Quantized, Storage, dequantize, quantize
from editable_cache.spec import RotarySpec
from editable_cache.testing.real_models import load_gemma3_270m, load_smollm2

NAMES = ("peps/pep-0405.rst", "public_domain/shakespeare_sonnets.txt")
TOKENS = 1024
BLOCK = 128
STORAGES: tuple[Storage, ...] = ("int8", "fp8")
GROUPINGS: tuple[Grouping, ...] = ("token", "channel")


class Kept(NamedTuple):
    """Cells that were stored and brought back, and the bytes that they took."""

    states: Tensor
    nbytes: int


Store = Callable[[Tensor], Kept]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--quick", action="store_true", help="one document, three questions, no result file")
    quick = arguments.parse_args().quick
    if not fidelity.DOCUMENTS.is_dir():
        raise SystemExit(f"{fidelity.DOCUMENTS.name}: the documents are not here, so there is nothing to measure.")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    names = NAMES[:1] if quick else NAMES
    result: dict[str, Any] = {"documents": list(names), "document_tokens": TOKENS, "seam_tokens": 1, "seed": 0}
    for name, load, frame in (
        ("smollm2", load_smollm2, fidelity.CHAT),
        ("gemma3_270m", load_gemma3_270m, fidelity.PLAIN),
    ):
        model, tokenizer = load()
        skills = [compiled(model, tokenizer, document) for document in names]
        result[name] = {
            "arms": measure(model, tokenizer, skills, frame, fidelity.QUESTIONS[:3] if quick else fidelity.QUESTIONS),
            "cells": spread(model, skills),
            "time": seconds(skills[0], rounds=3 if quick else 15),
        }
        show(name, result[name])
    if not quick:
        print(timing.write("storage", result))


def compiled(model: Any, tokenizer: Any, document: str) -> Skill:
    """The start of a document as a skill, in the dtype of the model."""
    text = (fidelity.DOCUMENTS / document).read_text(encoding="utf-8")
    ids = tokenizer(text, add_special_tokens=False)["input_ids"][:TOKENS]
    return Skill.precompile(model, tokenizer, ids, name="document")


def in_bfloat16(states: Tensor) -> Kept:
    half = states.to(torch.bfloat16)
    return Kept(half.to(states.dtype), half.nbytes)


def in_bytes(states: Tensor, storage: Storage, per: Grouping, block: int | None = None) -> Kept:
    """Quantized, every ``block`` tokens by themselves."""
    parts = [quantize(part, storage, per=per) for part in states.split(block or max(states.shape[-2], 1), dim=-2)]
    return Kept(torch.cat([dequantize(part, states.dtype) for part in parts], -2), sum(part.nbytes for part in parts))


def of_another(states: Tensor, storage: Storage) -> Kept:
    """Per token, with the scale of the token before."""
    quantized = quantize(states, storage, per="token")
    wrong = Quantized(quantized.values, quantized.scales.roll(1, -2))
    return Kept(dequantize(wrong, states.dtype), wrong.nbytes)


def turned(states: Tensor, rotary: RotarySpec | None, source: Tensor, target: Tensor) -> Tensor:
    if rotary is None:
        return states
    out = torch.empty_like(states)
    rotate_into(out, states, rotation(rotary, source, target))
    return out


def kept(
    chunk: KVChunk, spec: Any, keys: Store, values: Store, *, unturned: bool = False
) -> tuple[KVChunk, dict[str, float]]:
    """The chunk as it comes back, its bytes over the original ones, and its worst errors over the layers.

    ``unturned``: keys are stored as they stand before the rotation, and turned again when they are brought back.
    """
    layers, nbytes = [], 0
    errors: dict[str, list[float]] = {}
    zero, here = torch.zeros_like(chunk.position_ids), chunk.position_ids
    for layer, states in zip(spec.layers, chunk.layers, strict=True):
        rotaries = {tensor.name: tensor.rotary if unturned else None for tensor in layer.tensors}
        back = {}
        for name, tensor in states.items():
            store = keys if name == "keys" else values
            stored = store(turned(tensor, rotaries[name], here, zero))
            back[name] = turned(stored.states, rotaries[name], zero, here)
            nbytes += stored.nbytes
            errors.setdefault(f"{name}_max_relative", []).append(relative_error(back[name], tensor))
            rms = (back[name] - tensor).double().square().mean().sqrt() / tensor.double().square().mean().sqrt()
            errors.setdefault(f"{name}_rms_relative", []).append(float(rms))
        layers.append(back)
    content = {field.name: getattr(chunk, field.name) for field in fields(KVChunk)}
    figures = {name: max(per_layer) for name, per_layer in errors.items()}
    return KVChunk(**{**content, "layers": tuple(layers)}), {"bytes_ratio": nbytes / chunk.nbytes, **figures}


def arms(spec: Any) -> dict[str, Callable[[KVChunk], tuple[KVChunk, dict[str, float]]]]:
    """Every way to store a chunk, by name."""
    every: dict[str, Callable[[KVChunk], tuple[KVChunk, dict[str, float]]]] = {
        "bfloat16": lambda chunk: kept(chunk, spec, in_bfloat16, in_bfloat16)
    }
    for storage in STORAGES:
        by = {per: partial(in_bytes, storage=storage, per=per) for per in GROUPINGS}
        blocks = partial(in_bytes, storage=storage, per="channel", block=BLOCK)
        for keys_per in GROUPINGS:
            for values_per in GROUPINGS:
                every[f"{storage}, keys per {keys_per}, values per {values_per}"] = partial(
                    kept, spec=spec, keys=by[keys_per], values=by[values_per]
                )
        every[f"{storage}, keys per channel of {BLOCK} tokens"] = partial(
            kept, spec=spec, keys=blocks, values=by["token"]
        )
        for per in GROUPINGS:
            every[f"{storage}, keys per {per} before rotation"] = partial(
                kept, spec=spec, keys=by[per], values=by["token"], unturned=True
            )
    wrong = partial(of_another, storage="int8")
    every["control: int8 per token, scales of the token before"] = partial(kept, spec=spec, keys=wrong, values=wrong)
    return every


def measure(
    model: nn.Module, tokenizer: Any, skills: list[Skill], frame: tuple[str, str], questions: tuple[str, ...]
) -> dict[str, Any]:
    """Figures of every arm over documents and questions."""
    start = EditableCache(model, tokenizer=tokenizer)
    start.append(frame[0])
    asked = [tokenizer(f"\n\nQuestion: {q}{frame[1]}", add_special_tokens=False)["input_ids"] for q in questions]
    errors: dict[str, list[dict[str, float]]] = {}
    rows: dict[str, list[Mapping[str, Tensor]]] = {}
    for skill in skills:
        expected = logits(model, start, skill, asked)
        for arm, store in tqdm(arms(model_spec(model)).items(), desc=type(model).__name__, unit="arm"):
            chunk, figures = store(skill)
            errors.setdefault(arm, []).append(figures)
            got = logits(model, start, chunk, asked)
            rows.setdefault(arm, []).extend(map(compared, got, expected))
    return {arm: {**worst(errors[arm]), **summary(rows[arm])} for arm in rows}


def logits(model: Any, start: EditableCache, chunk: KVChunk, asked: list[list[int]]) -> list[Tensor]:
    """For each question, float32 ``[tokens, vocab_size]`` behind the spliced chunk, teacher-forced."""
    spliced = start.fork()
    spliced.splice(chunk, seam_tokens=1)
    return [model(torch.tensor([ids]), cache=spliced.fork()).logits[0].float() for ids in asked]


def compared(got: Tensor, expected: Tensor) -> dict[str, Tensor]:
    """One figure for each token."""
    log_p, log_q = expected.double().log_softmax(-1), got.double().log_softmax(-1)
    return {
        "cosine": torch.cosine_similarity(got.double(), expected.double(), dim=-1),
        "centred_cosine": torch.cosine_similarity(
            got.double() - got.double().mean(-1, True), expected.double() - expected.double().mean(-1, True), dim=-1
        ),
        "kl": (log_p.exp() * (log_p - log_q)).sum(-1),
        "agrees": (got.argmax(-1) == expected.argmax(-1)).double(),
    }


def worst(errors: list[dict[str, float]]) -> dict[str, float]:
    return {name: float(f"{max(figures[name] for figures in errors):.4g}") for name in errors[0]}


def summary(rows: list[Mapping[str, Tensor]]) -> dict[str, float]:
    columns = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
    cosine, centred, kl = columns["cosine"], columns["centred_cosine"], columns["kl"]
    return {
        "n": len(kl),
        "cosine_median": round(float(cosine.median()), 7),
        "cosine_worst": round(float(cosine.min()), 7),
        "centred_cosine_median": round(float(centred.median()), 7),
        "centred_cosine_worst": round(float(centred.min()), 7),
        "kl_median_nats": float(f"{float(kl.median()):.4g}"),
        "kl_mean_nats": float(f"{float(kl.mean()):.4g}"),
        "kl_worst_nats": float(f"{float(kl.max()):.4g}"),
        "top_token_agreement": round(float(columns["agrees"].mean()), 4),
    }


def spread(model: nn.Module, skills: list[Skill]) -> dict[str, float]:
    """How unequal groups are: largest over median absmax among the channels, and among the tokens, of one head.

    Median over heads, layers and documents. ``turned back`` is of the keys as they stand before the rotation.
    """
    found: dict[str, list[float]] = {}
    for skill in skills:
        zero = torch.zeros_like(skill.position_ids)
        for layer, states in zip(model_spec(model).layers, skill.layers, strict=True):
            for tensor in layer.tensors:
                cells = {tensor.name: states[tensor.name]}
                if tensor.rotary is not None:
                    cells["turned back"] = turned(states[tensor.name], tensor.rotary, skill.position_ids, zero)
                for name, value in cells.items():
                    for per, dim in (("channel", -2), ("token", -1)):
                        sizes = value.abs().amax(dim).float()
                        ratio = sizes.amax(-1) / sizes.median(-1).values
                        found.setdefault(f"{name}, {per}s", []).extend(ratio.flatten().tolist())
    return {name: round(statistics.median(ratios), 3) for name, ratios in found.items()}


def seconds(skill: Skill, *, rounds: int) -> dict[str, Any]:
    """Time to copy all cells of a skill, to quantize them and to bring them back."""
    cells = [tensor for states in skill.layers for tensor in states.values()]
    variants: dict[str, Callable[[], Any]] = {"copy": lambda: [tensor.clone() for tensor in cells]}
    for storage in STORAGES:
        for per in GROUPINGS:
            stored = [quantize(tensor, storage, per=per) for tensor in cells]
            store = partial(quantize, storage=storage, per=per)
            variants[f"quantize {storage} per {per}"] = lambda store=store: [store(tensor) for tensor in cells]
            variants[f"dequantize {storage} per {per}"] = lambda stored=stored: [
                dequantize(part, cells[0].dtype) for part in stored
            ]
    measured = timing.paired(variants, rounds=rounds)
    return {
        name: {**timing.milliseconds(times), "over_copy": timing.ratios(times, measured["copy"])}
        for name, times in measured.items()
    }


def show(name: str, result: Mapping[str, Any]) -> None:
    """The tables of one model."""
    columns = {
        "bytes": "bytes_ratio",
        "K max": "keys_max_relative",
        "K rms": "keys_rms_relative",
        "V max": "values_max_relative",
        "V rms": "values_rms_relative",
        "cos med": "cosine_median",
        "cos worst": "cosine_worst",
        "KL med": "kl_median_nats",
        "KL mean": "kl_mean_nats",
        "KL worst": "kl_worst_nats",
        "agree": "top_token_agreement",
    }
    print(f"\n{name:52}" + "".join(f"{title:>11}" for title in columns))
    for arm, figures in result["arms"].items():
        print(f"{arm:52}" + "".join(f"{figures[column]:11.6g}" for column in columns.values()))
    print("largest over median absmax:", result["cells"])
    for what, figures in result["time"].items():
        print(f"{what:36} {figures['median_ms']:8} ms, {figures['over_copy']['median']} copies")


if __name__ == "__main__":
    main()
