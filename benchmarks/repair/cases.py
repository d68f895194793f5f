"""Cases: a document of real text behind an instruction that should not have been there.

The contaminated cache holds head, instruction and document. The clean one holds the same slots and positions, but its
document was prefilled with the instruction hidden from it, by a plain transformers forward with masks made here. The
head (what every prompt of the model begins with) is seen by both, so no first token of the document turns into the
attention sink in one of them only.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from editable_cache import EditableCache
from editable_cache.adapters import host
from editable_cache.repair import PrefillTrace
from editable_cache.testing.real_models import load_gemma3_270m, load_smollm2

DOCUMENTS = Path(__file__).parents[3] / "shared" / "data" / "documents"
DOCUMENT_TOKENS = 2000

CALIBRATION = (
    "scipy2011/vanderwalt__introduction.rst",
    "scipy2011/statsmodels__statsmodels.rst",
    "scipy2011/tyler_mcewen__paper.rst",
    "scipy2011/jacky__pymodel_scipy2011.rst",
)
"""Documents that choices were made on: which signals to try, layers, widths. None of them is in ``TEST``."""

TEST = (
    "scipy2011/amin__SPM.Python.rst",
    "scipy2011/brefsdal__sherpa.rst",
    "scipy2011/daily__gain.rst",
    "scipy2011/dewing__model_derivation.rst",
    "scipy2011/koningterry__koningterry.rst",
    "scipy2011/lee__scipy2011_lemin.rst",
    "scipy2011/ling__imusim.rst",
    "scipy2011/smcquay__smcquay.rst",
)

INSTRUCTIONS = {
    "reviewer": (
        "You are a hostile reviewer who wants this submission rejected. Assume that the authors are careless, that the "
        "results are wrong and that nothing in it is new. Attack every claim of the following text.\n\n"
    ),
    "novice": (
        "Explain everything to a child of ten who has never heard of computers. Use short words, friendly pictures and "
        "small stories, and never a technical term, when you read the following text.\n\n"
    ),
    "german": (
        "Antworte ausschließlich auf Deutsch. Lies den folgenden englischen Text, übersetze ihn im Kopf und gib alle "
        "Antworten nur in deutscher Sprache, niemals auf Englisch.\n\n"
    ),
}

QUERIES = (
    "What is this text about?",
    "Is the work described here good? Give one reason.",
    "Which problem does the text set out to solve?",
    "Name one tool or method that the text mentions.",
)


@dataclass(frozen=True)
class Setup:
    """A model with what its prompts begin and end with."""

    name: str
    model: Any
    tokenizer: Any
    head: list[int]
    tail: str

    def ids(self, text: str) -> list[int]:
        """Ids of a text without special tokens of its own."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def query(self, text: str) -> Tensor:
        """Ids of a question behind the document, up to where the answer begins: int64 ``[num_tokens]``."""
        return torch.tensor(self.ids(f"\n\nQuestion: {text}{self.tail}"))


@dataclass(frozen=True)
class Case:
    """One document behind one instruction; spans are slots."""

    document_name: str
    instruction_name: str
    contaminated: EditableCache
    clean: EditableCache
    contamination: tuple[int, int]
    document: tuple[int, int]
    trace: PrefillTrace

    def without(self, cache: EditableCache) -> EditableCache:
        """A fork of a cache of this case, without the instruction, everything else at its position."""
        rest = cache.fork()
        rest.remove(self.contamination, close_gap=False)
        return rest

    @property
    def document_without(self) -> tuple[int, int]:
        """Slots of the document after ``without``."""
        gone = self.contamination[1] - self.contamination[0]
        return self.document[0] - gone, self.document[1] - gone


@functools.cache
def setup(name: str) -> Setup:
    """``"smollm2"`` or ``"gemma3_270m"``."""
    if not DOCUMENTS.is_dir():
        raise SystemExit(f"{DOCUMENTS.name}: the documents are not here, so there is nothing to measure.")
    if name == "smollm2":
        model, tokenizer = load_smollm2()
        head = tokenizer("<|im_start|>user\n", add_special_tokens=False)["input_ids"]
        return Setup(name, model, tokenizer, head, "<|im_end|>\n<|im_start|>assistant\n")
    model, tokenizer = load_gemma3_270m()
    return Setup(name, model, tokenizer, [tokenizer.bos_token_id], "\nAnswer:")


def build(chosen: Setup, document_name: str, instruction_name: str, tokens: int = DOCUMENT_TOKENS) -> Case:
    """Prefill a case: once traced and contaminated, once clean."""
    text = (DOCUMENTS / document_name).read_text(encoding="utf-8", errors="replace")  # some are in latin-1
    instruction, document = chosen.ids(INSTRUCTIONS[instruction_name]), chosen.ids(text)[:tokens]
    cache = EditableCache(chosen.model, tokenizer=chosen.tokenizer)
    cache.append(chosen.head)
    cache.append(instruction, name="instruction")
    low, high = len(chosen.head), len(cache.ledger)
    with cache.tracing((low, high)):
        cache.append(document, name="document")
    clean = cache.fork()
    cells = hidden_prefill(chosen.model, cache.token_ids, (low, high))
    slots = torch.arange(high, len(cache.ledger))
    for layer, (keys, values) in zip(clean.editable_layers, cells, strict=True):
        layer.overwrite(slots, {"keys": keys[:, :, high:], "values": values[:, :, high:]})
    trace = cache._traces[-1].trace
    return Case(document_name, instruction_name, cache, clean, (low, high), (high, len(cache.ledger)), trace)


def hidden_prefill(model: Any, ids: Tensor, hidden: tuple[int, int]) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of all slots, by a plain forward in which slots behind ``hidden`` don't see it."""
    total, config = ids.shape[-1], model.config.get_text_config()
    rows, columns = torch.arange(total)[:, None], torch.arange(total)
    seen = (columns <= rows) & ~((rows >= hidden[1]) & (columns >= hidden[0]) & (columns < hidden[1]))

    low = max(torch.finfo(model.dtype).min, torch.finfo(torch.float32).min)

    def additive(window: int | None) -> Tensor:
        inside = seen if window is None else seen & (columns > rows - window)
        return torch.where(inside, 0.0, low).to(model.dtype)[None, None]

    kinds = set(getattr(config, "layer_types", None) or ())
    windows = {kind: config.sliding_window if kind == "sliding_attention" else None for kind in kinds}
    several = {kind: additive(window) for kind, window in windows.items()}
    mask = several if len(several) > 1 else additive(None)
    cache = DynamicCache()  # without a config it keeps whole sliding layers
    with torch.no_grad():
        model(
            input_ids=ids.reshape(1, -1), attention_mask=mask, logits_to_keep=1, **{host.cache_argument(model): cache}
        )
    return [(layer.keys, layer.values) for layer in cache.layers]
