"""`certify`: one model type of the zoo, from its name to its row."""

from __future__ import annotations

import platform
import time
import warnings
from collections.abc import Mapping
from dataclasses import replace

import torch
import transformers
from transformers import PreTrainedModel

import editable_cache
from editable_cache.adapters import measured
from editable_cache.errors import ContextWarning
from editable_cache.spec import ModelSpec
from editable_cache.testing import zoo
from editable_cache.testing.sweep import folded, moves, refusals, states
from editable_cache.testing.sweep.findings import REFUSALS, Findings, texts_for
from editable_cache.testing.sweep.moves import Subject
from editable_cache.testing.sweep.row import Row, TensorFacts, Verdict


def certify(name: str, *, seed: int = 0) -> Row:
    """Examine one model type.

    Args:
        name: one of ``zoo.model_types()`` or ``zoo.variants()``.
        seed: of weights and texts.
    """
    start = time.perf_counter()
    try:
        model = zoo.build(name, seed=seed)
    except zoo.ZooError as error:
        return Row(name, "not built", reasons=(str(error),), seconds=_since(start))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ContextWarning)
        row = _examined(name, model, seed)
    return replace(row, seconds=_since(start))


def _since(start: float) -> float:
    return round(time.perf_counter() - start, 2)


def _examined(name: str, model: PreTrainedModel, seed: int) -> Row:
    found, spec = Findings(), measured(model)
    subject = Subject(model, spec, texts_for(model, seed))
    verdict, failure = _verdict(spec), ""
    try:
        if spec.against_moving or spec.against_continuing:
            refusals.examine(subject, found)
        else:
            try:
                chunk = moves.compiled(subject)
            except REFUSALS as refusal:
                verdict = "refused"
                found.refuse("precompile", refusal)
                refusals.examine(subject, found)
            else:
                room = folded if spec.compressed is not None else states if spec.has_states else moves
                room.examine(subject, chunk, found)
                found.operations.insert(0, "splice")
    except Exception as error:  # a type that breaks the examination is a finding, not the end of the sweep
        failure = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        found.unproven.append(f"examination ended by {failure}")
    return Row(
        name,
        verdict,
        certified=verdict != "refused" and not found.wrong and not found.unproven,
        errors=_short(found.errors),
        controls=_short(found.controls),
        wrong=tuple(found.wrong),
        unproven=tuple(found.unproven),
        operations=tuple(found.operations),
        refused=found.refused,
        reasons=tuple(dict.fromkeys(map(str, (*spec.against_continuing, *spec.against_moving)))),
        tensors=_tensors(spec),
        positions=spec.positions,
        mask_form=spec.mask_form,
        limit="" if spec.limit is None else f"{spec.limit.value} ({spec.limit.name})",
        step_tokens=spec.step_tokens,
        model_class=type(model).__name__,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
    )


def _short(errors: Mapping[str, float]) -> dict[str, float]:
    """Three digits of each; 1e30 where names or shapes differ or something is no number."""
    return {name: float(f"{min(error, 1e30):.2e}") for name, error in errors.items()}


def _verdict(spec: ModelSpec) -> Verdict:
    if spec.against_moving or spec.against_continuing:
        return "refused"
    if spec.compressed is not None:
        return "compressed"
    if spec.has_states:
        return "hybrid" if any(layer.tensors for layer in spec.layers) else "state only"
    return "rotation" if spec.rotaries() else "position-free"


def _tensors(spec: ModelSpec) -> tuple[TensorFacts, ...]:
    groups: dict[tuple[str, str, int, int], list[tuple[float, ...]]] = {}
    for layer in spec.layers:
        for tensor in layer.tensors:
            rotary = tensor.rotary
            if spec.against_moving:  # the best of no good explanations says nothing
                key = (tensor.name, "not explained", 0, 0)
            elif rotary is None:
                key = (tensor.name, "counter" if tensor.counter else "same", 0, 0)
            else:
                key = (tensor.name, rotary.layout, rotary.start, rotary.stop)
            groups.setdefault(key, []).append(() if rotary is None else rotary.inv_freq)
    for whole in () if spec.compressed is None else spec.compressed.layers:
        for path, rotary in whole.rotaries:
            groups.setdefault((".".join(path), rotary.layout, rotary.start, rotary.stop), []).append(rotary.inv_freq)
    return tuple(
        TensorFacts(*key, len({t for t in tables if t}), len(tables)) for key, tables in sorted(groups.items())
    )


def environment() -> dict[str, str | int]:
    """Versions and machine."""
    return {
        "editable_cache": editable_cache.__version__,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": platform.processor() or platform.machine(),
        "threads": 1,
    }
