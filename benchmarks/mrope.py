"""How an image moves: `python benchmarks/mrope.py [--quick]` writes `results/mrope.json`.

Tiny random vision-language models whose tokens have three positions (time, height, width). A marked image is prefilled
alone at 0, pixels through the vision tower, and its keys are moved behind text of several lengths. Is it right to move
all three axes, or the temporal one alone? The model decides: its own `get_rope_index` numbers text, image and text in
one prompt, and a stock forward of that prompt, with the image blind to the text before it, is the reference.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from typing import Any

import timing
import torch
from mrope_models import (
    END,
    FAMILIES,
    FIRST_TEXT_ID,
    IMAGE,
    LAST_TEXT_ID,
    PATCH_VALUES,
    START,
    VIDEO,
    published_model,
    tiny_vision_model,
)
from mrope_numbering import survey
from torch import Tensor
from tqdm import tqdm
from transformers import DynamicCache, PreTrainedModel

from editable_cache.adapters import host
from editable_cache.adapters.sections import axis_of_frequency, shift_axis, telling_shift
from editable_cache.ops import rotate_into, rotation
from editable_cache.spec import RotarySpec
from editable_cache.testing import oracles

GRID = (1, 8, 12)
"""Frames, rows and columns of patches of a still image; the tower merges 2 x 2 patches into one token."""

PREFIXES = (9, 37, 500)
TEXT_AFTER = 7
EXACT = 1e-4
AXES = ("temporal", "height", "width")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--quick", action="store_true", help="one model, one prefix, no result file")
    quick = arguments.parse_args().quick
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    result: dict[str, Any] = {"grid": list(GRID), "image_tokens": int(image_ids().shape[0]), "models": {}}
    for name in tqdm(list(FAMILIES)[: 1 if quick else None], unit="model"):
        model = tiny_vision_model(name)
        rotary, axes, formula = embedding(model)
        result["models"][name] = {
            "rotary": {"layout": rotary.layout, "start": rotary.start, "frequencies": len(rotary.inv_freq)},
            "axis_of_frequency": list(axes),
            "published_axis_of_frequency": runs(embedding(published_model(name))[1]),
            "keys_from_positions": formula,
            "numbering": numbering(model),
            "prefix": {str(count): moves(model, rotary, axes, count) for count in PREFIXES[: 1 if quick else None]},
        }
    result["numbering_of_all_types"] = survey()
    for name, values in result.items():
        print(name, values)
    if not quick:
        print(timing.write("mrope", result))


# -- one stock forward


def image_ids() -> Tensor:
    """The chunk: a mark, one id for each image token, a mark."""
    frames, rows, columns = GRID
    return torch.tensor([START, *[IMAGE] * (frames * rows * columns // 4), END])


def text_ids(count: int, seed: int) -> Tensor:
    """Plain text ids ``[count]``."""
    return torch.randint(FIRST_TEXT_ID, LAST_TEXT_ID, (count,), generator=torch.Generator().manual_seed(seed))


def pixels() -> dict[str, Tensor]:
    """One image as its tower takes it."""
    count = GRID[0] * GRID[1] * GRID[2]
    values = torch.randn(count, PATCH_VALUES, generator=torch.Generator().manual_seed(7))
    return {"pixel_values": values, "image_grid_thw": torch.tensor([GRID])}


def prefill(
    model: PreTrainedModel,
    ids: Tensor,
    positions: Tensor | None,
    cache: DynamicCache | None = None,
    mask: Any = None,
) -> tuple[Tensor, DynamicCache]:
    """Logits ``[n, vocab]`` and cache of a stock forward at ``positions`` ``[3, n]`` (None: the model's own)."""
    cache = DynamicCache() if cache is None else cache
    arguments: dict[str, Any] = {host.cache_argument(model): cache, "attention_mask": mask}
    if positions is not None:
        arguments["position_ids"] = positions[:, None]
    if (ids == IMAGE).any():
        arguments |= {**pixels(), "mm_token_type_ids": (ids == IMAGE).int()[None]}
    return model(input_ids=ids[None], use_cache=True, **arguments).logits[0], cache


def own_positions(model: Any, ids: Tensor) -> Tensor:
    """The positions ``[3, n]`` that the model itself gives to a prompt."""
    kinds = (ids == IMAGE).int()[None]
    grids = {"image_grid_thw": torch.tensor([GRID])} if (ids == IMAGE).any() else {}
    positions: Tensor = model.model.get_rope_index(ids[None], mm_token_type_ids=kinds, **grids)[0]
    return positions[:, 0]


# -- how keys follow from positions


def embedding(model: PreTrainedModel) -> tuple[RotarySpec, tuple[int, ...], float]:
    """Rotation, axis of each frequency, and the error of keys of layer 0 computed from both, for an image's positions.

    The layout is the one that explains a shift of all axes alike.
    """
    ids = image_ids()
    positions = own_positions(model, ids)
    (table,) = (b for name, b in model.named_buffers() if name.endswith("language_model.rotary_emb.inv_freq"))
    inv_freq = tuple(table.tolist())

    def keys(at: Tensor) -> Tensor:
        return prefill(model, ids, at)[1].layers[0].keys

    here, there = keys(positions), keys(positions + 523)
    choices = [RotarySpec(inv_freq, "half"), RotarySpec(inv_freq, "interleaved")]
    everywhere = [(0,) * len(inv_freq)] * 2
    errors = [
        oracles.relative_error(moved(here, rotary, axes, positions * 0, positions * 0 + 523), there)
        for rotary, axes in zip(choices, everywhere, strict=True)
    ]
    assert min(errors) < EXACT < 1e-2 < max(errors), errors
    rotary = choices[errors.index(min(errors))]
    shift = telling_shift(rotary)
    axes = axis_of_frequency(rotary, here, [keys(shift_axis(positions, axis, shift)) for axis in range(len(AXES))])
    unturned = keys(positions * 0)
    error = oracles.relative_error(moved(unturned, rotary, axes, positions * 0, positions), here)
    assert error <= 1e-6, error
    wrong = oracles.relative_error(moved(unturned, rotary, axes[::-1], positions * 0, positions), here)
    assert wrong > 1e-2, wrong
    return rotary, axes, rounded(error)


def moved(states: Tensor, rotary: RotarySpec, axes: Sequence[int], source: Tensor, target: Tensor) -> Tensor:
    """Keys moved from ``source`` to ``target`` ``[3, n]``, each frequency along its own axis."""
    out = states.clone()
    count, at = len(rotary.inv_freq), rotary.start
    for axis in sorted(set(axes)):
        turned = torch.empty_like(states)
        rotate_into(turned, states, rotation(rotary, source[axis], target[axis]))
        for index in (i for i, own in enumerate(axes) if own == axis):
            pair = (index, index + count) if rotary.layout == "half" else (2 * index, 2 * index + 1)
            for channel in pair:
                out[..., at + channel] = turned[..., at + channel]
    return out


def runs(axes: Sequence[int]) -> str:
    """An axis vector in short: ``16 x 0, 24 x 1``, or ``20 x (0 1 2), 4 x 0`` where the three take turns."""
    text, rest = [], list(axes)
    turns = 0
    while rest[:3] == [0, 1, 2]:
        turns, rest = turns + 1, rest[3:]
    if turns > 1:
        text.append(f"{turns} x (0 1 2)")
    else:
        rest = list(axes)
    text += [f"{len(list(group))} x {axis}" for axis, group in itertools.groupby(rest)]
    return ", ".join(text)


# -- moving an image


def moves(model: PreTrainedModel, rotary: RotarySpec, axes: tuple[int, ...], count: int) -> dict[str, Any]:
    """Errors of each way to move the image behind ``count`` text tokens, against the model's own prompt.

    Keys of each layer and logits of the text behind the image are held against one stock forward of the whole prompt in
    which the image does not see the text before it; keys of layer 0 also against the plain forward, where nothing but
    ids and pixels are given.
    """
    before, image, after = text_ids(count, 1), image_ids(), text_ids(TEXT_AFTER, 2)
    ids = torch.cat((before, image, after))
    own, source = own_positions(model, ids), own_positions(model, image)
    start, stop = count, count + len(image)
    target = own[:, start:stop]
    blind = torch.ones(len(ids), len(ids), dtype=torch.bool)
    blind[start:stop, :start] = False
    logits, reference = prefill(model, ids, own, mask=oracles.masks(model, blind))
    _, plain = prefill(model, ids, None)
    _, alone = prefill(model, image, source)
    temporal = shift_axis(source, 0, count)
    follows = int(own[0, stop])
    ways = {
        "all axes": (source + count, follows),
        "temporal axis only": (temporal, follows),
        "not moved": (source, follows),
        "all axes, text at slot numbers": (source + count, stop),
    }
    result: dict[str, Any] = {
        "moved_by_the_model": [int(delta) for delta in (target - source)[:, 0]],
        "same_for_all_tokens": bool((target - source == (target - source)[:, :1]).all()),
        "text_follows_at": follows,
        "largest_position_of_the_image": int(target.max()),
        "slot_of_the_text": stop,
        "ways": {},
    }
    for way, (positions, first) in ways.items():
        cache = prefill(model, before, own[:, :start])[1]
        for index, layer in enumerate(alone.layers):
            cache.update(moved(layer.keys, rotary, axes, source, positions), layer.values, index)
        keys = [layer.keys[..., start:, :].clone() for layer in cache.layers]
        text = torch.arange(first, first + TEXT_AFTER).expand(3, -1)
        answer, _ = prefill(model, after, text, cache)
        result["ways"][way] = {
            "keys": [
                rounded(oracles.relative_error(mine, layer.keys[..., start:stop, :]))
                for mine, layer in zip(keys, reference.layers, strict=True)
            ],
            "keys_of_layer_0_in_a_plain_prompt": rounded(
                oracles.relative_error(keys[0], plain.layers[0].keys[..., start:stop, :])
            ),
            "logits": rounded(oracles.relative_error(answer, logits[stop:])),
        }
    _verify(result)
    return result


def _verify(result: dict[str, Any]) -> None:
    right = result["ways"]["all axes"]
    assert max(*right["keys"], right["keys_of_layer_0_in_a_plain_prompt"], right["logits"]) <= EXACT, result
    for way in ("temporal axis only", "not moved"):
        wrong = result["ways"][way]
        assert min(*wrong["keys"], wrong["logits"]) > 100 * EXACT, result
    assert result["ways"]["all axes, text at slot numbers"]["logits"] > 100 * EXACT, result


# -- how models number


def numbering(model: Any) -> dict[str, Any]:
    """Where text goes on after an image and after a long video, next to the largest position so far."""
    before, after = text_ids(9, 1), text_ids(1, 2)
    found = {"image": _follows(model, torch.cat((before, image_ids(), after)), torch.tensor([GRID]), IMAGE)}
    frames = 9
    if video_in_one_piece(model):
        ids = torch.cat((before, torch.full((frames,), VIDEO), after))
        found["video"] = _follows(model, ids, torch.tensor([[frames, 2, 2]]), VIDEO)
    return found


def video_in_one_piece(model: Any) -> bool:
    """Whether the model takes all frames of a video as one run of tokens; others put time stamps between frames."""
    kinds = torch.full((1, 4), 2)
    try:
        model.model.get_rope_index(kinds, mm_token_type_ids=kinds, video_grid_thw=torch.tensor([[2, 2, 4]]))
    except RuntimeError:
        return False
    return True


def _follows(model: Any, ids: Tensor, grid: Tensor, kind: int) -> dict[str, int]:
    """Positions around the last token of ``ids``, which is text, and of the token generated after it."""
    kinds = torch.where(ids == kind, 1 if kind == IMAGE else 2, 0)[None]
    grids = {"image_grid_thw" if kind == IMAGE else "video_grid_thw": grid}
    positions, deltas = model.model.get_rope_index(ids[None], mm_token_type_ids=kinds, **grids)
    return {
        "largest_position": int(positions[:, 0, :-1].max()),
        "text_follows_at": int(positions[0, 0, -1]),
        "first_generated_token_at": len(ids) + int(deltas[0, 0]),
    }


def rounded(value: float) -> float:
    """``value`` with three digits."""
    return float(f"{value:.2e}")


if __name__ == "__main__":
    main()
