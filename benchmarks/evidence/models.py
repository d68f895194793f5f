"""Models by name: pretrained ones, the gatekeepers (an adapter on top of one), and the small ones."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from editable_cache.evaluation.tasks import Item
from editable_cache.testing.real_models import load_gemma3_270m, load_smollm2

MODELS = Path(__file__).parents[1] / "models"
PRETRAINED = {"smollm2": load_smollm2, "gemma3_270m": load_gemma3_270m}


def names() -> list[str]:
    """Every model that can be loaded here."""
    return [*PRETRAINED, *sorted(folder.name for folder in MODELS.iterdir() if folder.is_dir())]


def spread(items: Iterable[Item], count: int) -> list[Item]:
    """So many of a small model's items from as many domains as there are, the four directions in turn."""
    by_domain: dict[str, list[Item]] = {}
    for item in items:
        by_domain.setdefault(item.domain, []).append(item)
    turns = range(max(map(len, by_domain.values()), default=0))
    order = [mine[(turn + place) % len(mine)] for turn in turns for place, mine in enumerate(by_domain.values())]
    return order[:count]


def load(name: str, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """Model in evaluation mode and tokenizer. An adapter is merged into its base model in float32.

    Raises:
        ValueError: for a name that is not among ``names()``.
    """
    if name in PRETRAINED:
        model, tokenizer = PRETRAINED[name](dtype)
        return model.eval(), tokenizer
    folder = MODELS / name
    if not folder.is_dir():
        raise ValueError(f"Model {name!r}: expected one of {', '.join(names())}.")
    if not (folder / "adapter_config.json").is_file():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval(), AutoTokenizer.from_pretrained(folder)
    from peft import PeftModel

    base, tokenizer = load_smollm2(torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft remarks on what it can't know of a base model without a hub
        merged: Any = PeftModel.from_pretrained(base, str(folder)).merge_and_unload()
    return merged.to(dtype).eval(), tokenizer
