"""``check``: the self-test of a model, layer by layer."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType

from editable_cache.cli.loading import ModelOptions, load_model
from editable_cache.cli.options import Adapter, Device, Json, ModelDtype, ModelName, ModelRevision, Trust
from editable_cache.cli.screen import NO, YES, command, line, reasons_json, table
from editable_cache.errors import Reason

if TYPE_CHECKING:
    from editable_cache.spec import LayerSpec, ModelSpec, RotarySpec


SHOWN_REASONS = 3
WORDS = {
    "append": "append and generate",
    "splice": "splice, move and remove",
    "recompute": "recompute chosen cells",
    "splice_in_the_middle": "splice and insert in the middle",
}
"""What one may want to do with a cache, by its key in JSON."""


def check(
    model: ModelName,
    adapter: Adapter = None,
    dtype: ModelDtype = None,
    device: Device = "cpu",
    model_revision: ModelRevision = None,
    trust_remote_code: Trust = False,
    as_json: Json = False,
) -> None:
    """Measure what a model's cache holds, how it moves, and what works on it.

    Exit code 0 if everything works, 1 if something is refused (the reasons are shown), 2 if the model can't be loaded.
    """
    with command(as_json) as screen:
        options = ModelOptions(model, adapter, dtype, device, model_revision, trust_remote_code)
        loaded = load_model(screen, options, tokenizer=False)
        from editable_cache.adapters import host, measured

        start = time.perf_counter()
        with screen.stage("self-test"):
            spec = measured(loaded.model)
        seconds = time.perf_counter() - start
        layout = host.cache_layout(loaded.model.config)
        abilities = _abilities(spec)
        facts = {
            "ok": not any(abilities.values()),
            "model": model,
            "model_type": loaded.model.config.model_type,
            "dtype": str(host.dtype_of(loaded.model)).removeprefix("torch."),
            "works": {name: not against for name, against in abilities.items()},
            "reasons": {name: reasons_json(against) for name, against in abilities.items() if against},
            "positions": spec.positions,
            "max_positions": spec.max_positions,
            "limit": None if spec.limit is None else {"position": spec.limit.value, "name": spec.limit.name},
            "worst_error": spec.worst_error,
            "masks": [
                {"layer_type": m.layer_type, "sliding_window": m.sliding_window, "chunk_size": m.chunk_size}
                for m in spec.masks
            ],
            "mask_form": spec.mask_form,
            "has_states": spec.has_states,
            "step_tokens": spec.step_tokens,
            "window_tokens": None if spec.compressed is None else spec.compressed.alignment,
            "layers": [
                {
                    "layer": idx,
                    "kind": kind,
                    "type": _layer_type(loaded.model, idx),
                    "reasons": _of_layer(spec, idx),
                    "tensors": [
                        t
                        for holder in spec.layers
                        if holder.layer_idx == idx
                        for t in _tensors_json(holder, spec.against_moving)
                    ],
                }
                for idx, kind in enumerate(layout.kinds)
            ],
            "seconds": seconds,
        }
        screen.answer(facts, _parts(facts), YES if facts["ok"] else NO)


def _abilities(spec: ModelSpec) -> dict[str, tuple[Reason, ...]]:
    """What one may want to do, and what speaks against it."""
    cells = spec.against_recompute
    if spec.has_states and not cells:
        cells = (Reason("layers", "cells that can be chosen", "states that stand for all tokens"),)
    return {
        "append": spec.against_continuing,
        "splice": spec.against_moving,
        "recompute": cells,
        "splice_in_the_middle": tuple(dict.fromkeys((*spec.against_moving, *cells))),
    }


def _of_layer(spec: ModelSpec, idx: int) -> list[dict[str, str]]:
    against = (*spec.against_continuing, *spec.against_moving, *spec.against_recompute)
    return reasons_json(dict.fromkeys(each for each in against if each.what.startswith(f"layer {idx} ")))


def _layer_type(model: Any, idx: int) -> str | None:
    from editable_cache.adapters import host

    types = getattr(host.text_config(model.config), "layer_types", None) or ()
    return str(types[idx]) if idx < len(types) else None


def _tensors_json(holder: LayerSpec, against: tuple[Reason, ...]) -> Iterator[dict[str, Any]]:
    for tensor in holder.tensors:
        rotary = None if tensor.rotary is None else _rotary_json(tensor.rotary)
        explained = not any(each.what == f"layer {holder.layer_idx} {tensor.name}" for each in against)
        yield {"name": tensor.name, "explained": explained, "rotary": rotary, "counter": tensor.counter}


def _rotary_json(rotary: RotarySpec) -> dict[str, Any]:
    return {
        "layout": rotary.layout,
        "start": rotary.start,
        "stop": rotary.stop,
        "fastest": max(rotary.inv_freq, key=abs),
        "slowest": min(rotary.inv_freq, key=abs),
        "axes": None if rotary.axes is None else len(set(rotary.axes)),
    }


def _parts(facts: dict[str, Any]) -> Iterable[RenderableType]:
    yield line(f"{facts['model']}: {facts['model_type']}, {facts['dtype']}, {len(facts['layers'])} layers")
    verdicts = [
        (WORDS[name], "yes" if works else "no", _summary(facts["reasons"].get(name, [])))
        for name, works in facts["works"].items()
    ]
    yield table("what works", ("operation", "works", "why not"), verdicts)
    yield table("layers", ("layers", "holds", "sees", "cells", "against"), _grouped(facts))
    yield from _limits(facts)


def _summary(reasons: list[dict[str, str]]) -> str:
    more = f"; {len(reasons) - SHOWN_REASONS} more" if len(reasons) > SHOWN_REASONS else ""
    return "; ".join(map(_reason, reasons[:SHOWN_REASONS])) + more


def _reason(reason: dict[str, str]) -> str:
    return f"{reason['what']}: expected {reason['expected']}, got {reason['got']}"


def _grouped(facts: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """One row for all layers that are alike."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for layer in facts["layers"]:
        cells = "; ".join(map(_tensor, layer["tensors"])) or "no cells"
        against = "; ".join(map(_reason, layer["reasons"]))
        groups.setdefault((layer["kind"], _sees(facts, layer["type"]), cells, against), []).append(layer["layer"])
    for key, members in groups.items():
        yield (_ranges(members), *key)


def _sees(facts: dict[str, Any], layer_type: str | None) -> str:
    masks = [mask for mask in facts["masks"] if layer_type in (None, mask["layer_type"])]
    return ", ".join(map(_mask, masks)) or (layer_type or "everything before")


def _mask(mask: dict[str, Any]) -> str:
    if mask["sliding_window"] is not None:
        return f"a window of {mask['sliding_window']}"
    if mask["chunk_size"] is not None:
        return f"its block of {mask['chunk_size']}"
    return "everything before"


def _tensor(tensor: dict[str, Any]) -> str:
    rotary = tensor["rotary"]
    if not tensor["explained"]:
        return f"{tensor['name']} move in a way that is not understood"
    if rotary is None:
        return f"{tensor['name']} {'count positions' if tensor['counter'] else 'stay'}"
    axes = f", {rotary['axes']} axes" if rotary["axes"] else ""
    return (
        f"{tensor['name']} rotate ({rotary['layout']}, channels {rotary['start']}-{rotary['stop'] - 1}, "
        f"{rotary['fastest']:.3g} to {rotary['slowest']:.3g} rad{axes})"
    )


def _ranges(members: list[int]) -> str:
    """``0-3, 5, 7-9``."""
    found: list[list[int]] = []
    for member in members:
        if found and member == found[-1][-1] + 1:
            found[-1] = [found[-1][0], member]
        else:
            found.append([member])
    return ", ".join("-".join(map(str, each)) for each in found)


def _limits(facts: dict[str, Any]) -> Iterator[str]:
    yield line(f"positions: {facts['positions']}, up to {facts['max_positions']}")
    if facts["limit"] is not None:
        yield line(f"cells move exactly below position {facts['limit']['position']} ({facts['limit']['name']})")
    if facts["has_states"]:
        most = facts["step_tokens"]
        yield line(f"recurrent or compressed states; a forward behind others takes {most or 'any number of'} tokens")
    if facts["window_tokens"] is not None:
        yield line(f"compressed windows: a skill starts at a multiple of {facts['window_tokens']} tokens")
    yield line(f"largest error of a moved cell: {facts['worst_error']:.1e}; self-test {facts['seconds']:.1f} s")
