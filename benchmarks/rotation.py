"""How exactly keys are moved: `python benchmarks/rotation.py [--quick]` writes `results/rotation.json`.

Three questions, each answered on tiny random models: how far is a moved key from the one that the model itself writes
at the target; what does storage in 16 bits add, next to what computing in 16 bits costs anyway; and how far is the
model from itself, when the same text is prefilled at another distance.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import timing
import torch
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedModel

from editable_cache import EditableCache, Skill
from editable_cache.ops import rotate_into, rotation
from editable_cache.spec import RotarySpec
from editable_cache.testing import oracles, tolerance
from editable_cache.testing.contents import random_ids
from editable_cache.testing.tiny_models import draw_weights, tiny_config, tiny_model

DISTANCES = (1, 10, 100, 1_000, 10_000, 32_000, 100_000, 262_144)
TOKENS = 24
EXACT = 1e-6
MOVES = (1, 10, 100)
LAST_STOP = 5_003
"""Where the chunk of the storage table ends up."""


def far_sighted_llama() -> PreTrainedModel:
    """The tiny Llama with theta 500,000."""
    config: Any = tiny_config("llama")
    config.rope_parameters = {**config.rope_parameters, "rope_theta": 5e5}
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    draw_weights(model)
    return model.eval()


Layout = Literal["half", "interleaved"]

MODELS: dict[str, tuple[Callable[[], PreTrainedModel], Layout]] = {
    "Llama, theta 1e4": (lambda: tiny_model("llama"), "half"),
    "Llama, theta 5e5": (far_sighted_llama, "half"),
    "GLM, half of the head, interleaved": (lambda: tiny_model("glm"), "interleaved"),
    "Cohere, interleaved": (lambda: tiny_model("cohere"), "interleaved"),
    "Llama, YaRN": (lambda: tiny_model("llama_yarn"), "half"),
    "Llama, llama3 scaling": (lambda: tiny_model("llama_llama3"), "half"),
}


def rotary_of(model: PreTrainedModel, layout: Layout) -> RotarySpec:
    """The rotation of a model that holds one table of frequencies."""
    tables = {name: buffer for name, buffer in model.named_buffers() if name.endswith("rotary_emb.inv_freq")}
    (table,) = tables.values()
    return RotarySpec(tuple(table.float().tolist()), layout)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--quick", action="store_true", help="one model, few moves, no result file")
    quick = arguments.parse_args().quick
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    models = dict(itertools.islice(MODELS.items(), 1 if quick else None))
    result: dict[str, Any] = {
        "tokens": TOKENS,
        "distances": list(DISTANCES),
        "distance": {},
        "drift": {},
        "slices": slices(),
    }
    for name, (build, layout) in tqdm(models.items(), unit="model"):
        model = build()
        result["distance"][name] = against_distance(model, rotary_of(model, layout))
        result["drift"][name] = drift(model)
    result["storage"] = {
        str(dtype).removeprefix("torch."): storage(dtype, MOVES[:2] if quick else MOVES)
        for dtype in (torch.bfloat16, torch.float16)
    }
    for name, values in result.items():
        print(name, values)
    if not quick:
        print(timing.write("rotation", result))


# -- a moved key against the model's own


def against_distance(model: PreTrainedModel, rotary: RotarySpec) -> dict[str, list[float]]:
    """Largest error of a moved key of layer 0, over the largest key, for each distance and each way to turn.

    Raises:
        AssertionError: if the library's way is not exact, or the control, a turn by ``inv_freq * distance``, is.
    """
    ids, steps = random_ids(TOKENS), torch.arange(TOKENS)
    near = oracles.iso(model, ids, steps).keys[0]
    errors: dict[str, list[float]] = {"difference of angles": [], "float64 product": [], "float32 product": []}
    for distance in DISTANCES:
        expected = oracles.iso(model, ids, steps + distance).keys[0]
        ways = {
            "difference of angles": moved(near, rotary, steps, steps + distance),
            "float64 product": turned(near, rotary, product(rotary, distance, torch.float64)),
            "float32 product": turned(near, rotary, product(rotary, distance, torch.float32)),
        }
        for way, keys in ways.items():
            errors[way].append(rounded(oracles.relative_error(keys, expected)))
    assert max(errors["difference of angles"]) <= EXACT, errors
    assert max(errors["float64 product"]) > 100 * EXACT, errors
    return errors


def moved(states: Tensor, rotary: RotarySpec, source: Tensor, target: Tensor) -> Tensor:
    """``states`` as the library moves them."""
    out = torch.empty_like(states)
    rotate_into(out, states, rotation(rotary, source, target))
    return out


def product(rotary: RotarySpec, distance: int, dtype: torch.dtype) -> Tensor:
    """One angle for each frequency, ``inv_freq * distance``, rounded to ``dtype``."""
    return torch.tensor(rotary.inv_freq, dtype=torch.float32).to(dtype) * distance


def turned(states: Tensor, rotary: RotarySpec, angle: Tensor) -> Tensor:
    """``states`` turned by ``angle`` ``[..., frequencies]`` in the angle's precision; shares no code with `ops`."""
    out = states.to(torch.promote_types(states.dtype, angle.dtype), copy=True)
    part = out[..., rotary.start : rotary.stop]
    count = len(rotary.inv_freq)
    half = rotary.layout == "half"
    first, second = (part[..., :count], part[..., count:]) if half else (part[..., 0::2], part[..., 1::2])
    x, y = first.clone(), second.clone()
    first.copy_(x * angle.cos() - y * angle.sin())
    second.copy_(y * angle.cos() + x * angle.sin())
    return out


def slices() -> dict[str, float]:
    """Error of the library's rotation at the farthest distance for every layout and slice of the head."""
    rotary_dim, head_dim = 16, 40
    inv_freq = tuple((10_000.0 ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)).tolist())
    plain = torch.randn(1, 2, TOKENS, head_dim, generator=torch.Generator().manual_seed(0))
    source = torch.arange(TOKENS)
    errors = {}
    for layout, (where, start) in itertools.product(
        ("half", "interleaved"), (("leading", 0), ("middle", 12), ("trailing", head_dim - rotary_dim))
    ):
        rotary = RotarySpec(inv_freq, "half" if layout == "half" else "interleaved", start)
        near, far = (
            turned(plain, rotary, (positions[:, None].float() * torch.tensor(inv_freq)).double())
            for positions in (source, source + DISTANCES[-1])
        )
        error = oracles.relative_error(moved(near.float(), rotary, source, source + DISTANCES[-1]), far)
        assert error <= EXACT, (layout, where, error)
        errors[f"{layout}, {where}"] = rounded(error)
    return errors


# -- the model against itself


def drift(model: PreTrainedModel) -> dict[str, list[float]]:
    """Difference of two stock prefills of the same text, at 0 and further on: values of each layer, and logits."""
    ids, steps = random_ids(TOKENS), torch.arange(TOKENS)
    near = oracles.iso(model, ids, steps)
    rows: dict[str, list[float]] = {}
    for distance in DISTANCES:
        far = oracles.iso(model, ids, steps + distance)
        pairs = {f"values of layer {i}": pair for i, pair in enumerate(zip(far.values, near.values, strict=True))}
        for name, (there, here) in {**pairs, "logits": (far.logits, near.logits)}.items():
            rows.setdefault(name, []).append(rounded(oracles.relative_error(there, here)))
    assert max(rows["values of layer 0"]) == 0.0
    return rows


# -- 16 bits


def storage(dtype: torch.dtype, moves: Sequence[int]) -> dict[str, Any]:
    """Root-mean-square error, relative, of a chunk's keys in ``dtype`` after moves, and of computing them there.

    Keys of layer 0 are held against the stored ones turned in float64: what moving costs. Keys of the deepest layer are
    held against a prefill at the target in float64 with the same weights: what moving costs on top of computing.
    """
    low = tiny_model("llama", dtype=dtype)
    exact_model = tiny_model("llama", dtype=torch.float64)
    exact_model.load_state_dict(low.state_dict())
    ids, steps = random_ids(TOKENS, 1), torch.arange(TOKENS)
    rotary = rotary_of(low, "half")
    chunk = Skill.precompile(low, None, ids, name="chunk")
    first, deepest = (layer["keys"] for layer in (chunk.layers[0], chunk.layers[-1]))
    target = steps + LAST_STOP
    here, there = oracles.iso(exact_model, ids, steps), oracles.iso(exact_model, ids, target)
    angles = _angles(rotary, target) - _angles(rotary, steps)
    exact = turned(first.double(), rotary, angles)
    result: dict[str, Any] = {"target": LAST_STOP, "from the stored keys": {}, "in place": {}, "deepest layer": {}}
    for count in moves:
        stops = _stops(count)
        cache = EditableCache(low)
        cache.append(random_ids(7, 2))
        cache.splice(chunk, seam_tokens=0)
        for stop in stops:
            cache.reposition("chunk", position=stop)
        kept = [layer.view(7)["keys"] for layer in cache.editable_layers]
        chained, chained_deepest, at = first, deepest, 0
        for stop in stops:
            chained, chained_deepest = (
                moved(states, rotary, steps + at, steps + stop) for states in (chained, chained_deepest)
            )
            at = stop
        result["from the stored keys"][str(count)] = _rms(kept[0], exact)
        result["in place"][str(count)] = _rms(chained, exact)
        result["deepest layer"][f"moved, {count}"] = _rms(kept[-1], there.keys[-1])
        result["deepest layer"][f"moved in place, {count}"] = _rms(chained_deepest, there.keys[-1])
    result["deepest layer"]["computed at 0"] = _rms(deepest, here.keys[-1])
    result["deepest layer"]["computed at the target"] = _rms(oracles.iso(low, ids, target).keys[-1], there.keys[-1])
    pristine = list(result["from the stored keys"].values())
    assert max(pristine) <= 1.05 * min(pristine), result
    assert result["in place"][str(moves[-1])] > 2 * max(pristine), result
    return result


def _stops(count: int) -> list[int]:
    stops = torch.randint(20, 90_000, (count - 1,), generator=torch.Generator().manual_seed(count))
    return [*stops.tolist(), LAST_STOP]


def _angles(rotary: RotarySpec, positions: Tensor) -> Tensor:
    return (positions[:, None].float() * torch.tensor(rotary.inv_freq)).double()


def _rms(states: Tensor, exact: Tensor) -> float:
    return rounded(tolerance.measured_error(states, exact).rms)


def rounded(value: float) -> float:
    """``value`` with three digits."""
    return float(f"{value:.2e}")


if __name__ == "__main__":
    main()
