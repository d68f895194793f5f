"""What the self-test costs at first contact with a model: against prefills of 64 and 512 tokens.

``python benchmarks/probe.py [--quick]`` writes ``results/probe.json``. The specs that it finds are compared with a
second run and must be the same.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from timing import milliseconds, paired, ratios, write
from transformers import DynamicCache

from editable_cache.adapters import host
from editable_cache.adapters.probe import measure
from editable_cache.testing import real_models

ROUNDS = 7
LOADERS = {"smollm2": real_models.load_smollm2, "gemma3_270m": real_models.load_gemma3_270m}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two rounds, no result file")
    rounds = 2 if parser.parse_args().quick else ROUNDS
    results = {}
    for name, load in LOADERS.items():
        reason = real_models.available(name)
        if reason is not None:
            print(f"{name}: left out: {reason}")
            continue
        results[name] = measure_cost(load()[0], rounds)
        print(name, results[name])
    if rounds == ROUNDS and len(results) == len(LOADERS):
        print(write("probe", results))


def measure_cost(model: Any, rounds: int) -> dict[str, Any]:
    """Milliseconds of the self-test and of prefills, and their ratios round by round."""
    spec = measure(model)
    assert measure(model) == spec
    assert not spec.against_moving, spec.against_moving
    forwards = count_forwards(model)

    def prefill(count: int) -> None:
        ids = torch.arange(count)[None] % 1000 + 5
        host.run(model, ids, DynamicCache(config=model.config), last_logits_only=True)

    seconds = paired(
        {"probe": lambda: measure(model), "prefill_64": lambda: prefill(64), "prefill_512": lambda: prefill(512)},
        rounds=rounds,
    )
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "layers": len(spec.layers),
        "forwards": forwards,
        "worst_error": spec.worst_error,
        **{name: milliseconds(values) for name, values in seconds.items()},
        "probe_over_prefill_64": ratios(seconds["probe"], seconds["prefill_64"]),
        "probe_over_prefill_512": ratios(seconds["probe"], seconds["prefill_512"]),
    }


def count_forwards(model: Any) -> int:
    """How many forwards the self-test takes."""
    calls = []
    handle = model.register_forward_hook(lambda *_: calls.append(1))
    try:
        measure(model)
    finally:
        handle.remove()
    return len(calls)


if __name__ == "__main__":
    main()
