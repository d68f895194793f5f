"""One line per model of the zoo: ``python -m editable_cache.testing.zoo [names...]``."""

from __future__ import annotations

import sys
import time

import torch
from transformers import Cache

from editable_cache.testing.zoo.building import ZooError, build, ids_for, model_types, variants


def _line(name: str) -> str:
    start = time.perf_counter()
    try:
        model = build(name)
    except ZooError as error:
        return f"FAIL {name:28s} {time.perf_counter() - start:5.1f}s {error}"
    seconds = time.perf_counter() - start
    with torch.no_grad():
        output = model(input_ids=ids_for(model, 6, 1)[None], use_cache=True)
    cache = next((value for value in output.values() if isinstance(value, Cache)), None)
    layers = [type(layer).__name__ for layer in getattr(cache, "layers", [])]
    counted = ", ".join(f"{layers.count(kind)} {kind}" for kind in dict.fromkeys(layers))
    size = sum(parameter.numel() for parameter in model.parameters())
    spread = float(output.logits.std())
    attention = model.config._attn_implementation
    return (
        f"OK   {name:28s} {seconds:5.1f}s {size / 1e6:6.2f}M {attention} std {spread:.2g} "
        f"{type(cache).__name__}[{counted}]"
    )


def main() -> None:
    """Print one line for each name of the command line, or for the whole zoo."""
    torch.set_num_threads(1)
    for name in sys.argv[1:] or (*model_types(), *variants()):
        print(_line(name), flush=True)


if __name__ == "__main__":
    main()
