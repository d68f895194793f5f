"""The masks of one test case: `python -m repair.masks MODEL [--quick]` writes `results/repair_masks.json`.

S_IR in every geometry at 5 % of the cells. Models that the file has already stay in it.
"""

from __future__ import annotations

import json
import warnings
from typing import Any

import timing
import torch
from torch import Tensor

from editable_cache.repair import Tier1View, mask_of, scores
from editable_cache.repair.collect import probe
from repair.cases import DOCUMENT_TOKENS, QUERIES, TEST, Setup, build, setup
from repair.commands import parser
from repair.grid import GEOMETRIES, lowest

SIGNAL, BUDGET, INSTRUCTION = "sir", 0.05, "reviewer"


def main() -> None:
    options = parser(__doc__, "200 tokens, no file")
    arguments = options.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(arguments.threads)
    torch.set_grad_enabled(False)
    found = chosen_masks(setup(arguments.model), 200 if arguments.quick else DOCUMENT_TOKENS)
    print({geometry: sum(map(sum, unpacked(text, found["shape"]))) for geometry, text in found["masks"].items()})
    if not arguments.quick:
        path = timing.RESULTS / "repair_masks.json"
        models = json.loads(path.read_text("utf-8"))["models"] if path.exists() else {}
        print(timing.write("repair_masks", {"models": {**models, arguments.model: found}}))


def chosen_masks(chosen: Setup, tokens: int) -> dict[str, Any]:
    """What was chosen in each geometry, packed, with where from."""
    case = build(chosen, TEST[0], INSTRUCTION, tokens)
    scored = scores(SIGNAL, Tier1View(case.trace, probe(case.contaminated, chosen.query(QUERIES[0]), case.document)))
    return {
        "document": TEST[0],
        "instruction": INSTRUCTION,
        "query": QUERIES[0],
        "signal": SIGNAL,
        "budget": BUDGET,
        "shape": list(scored.shape),
        "masks": {
            geometry: packed(mask_of(scored, BUDGET, geometry, from_layer=lowest(geometry, BUDGET, len(scored))))
            for geometry in GEOMETRIES
        },
    }


def packed(mask: Tensor) -> str:
    """Bits of a bool mask row by row, as hexadecimal digits; the last bits of the last byte may be padding."""
    bits = [int(bit) for bit in mask.reshape(-1).tolist()]
    bits += [0] * (-len(bits) % 8)
    values = (sum(bit << (7 - at) for at, bit in enumerate(bits[low : low + 8])) for low in range(0, len(bits), 8))
    return bytes(values).hex()


def unpacked(text: str, shape: list[int]) -> list[list[bool]]:
    """The mask ``[num_layers][num_tokens]`` of a packed one."""
    layers, tokens = shape
    bits = [bool(byte >> (7 - at) & 1) for byte in bytes.fromhex(text) for at in range(8)]
    return [bits[layer * tokens : (layer + 1) * tokens] for layer in range(layers)]


if __name__ == "__main__":
    main()
