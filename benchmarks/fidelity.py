"""Fidelity of a spliced document: `python benchmarks/fidelity.py [--quick]` writes `results/fidelity.json`.

A document of 1,024 tokens is precompiled by itself and spliced behind instructions and a policy (about 900 tokens); the
next-token logits for each question are compared with a full prefill of the same ids. Control: the same cells without
rotation.
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from pathlib import Path
from typing import Any

import timing
import torch
from torch import Tensor
from tqdm import tqdm

from editable_cache import EditableCache, KVChunk, Skill
from editable_cache.testing.real_models import load_gemma3_270m, load_smollm2

DOCUMENTS = Path(__file__).parents[2] / "shared" / "data" / "documents"
NAMES = (
    "peps/pep-0405.rst",
    "peps/pep-0506.rst",
    "peps/pep-0602.rst",
    "scipy2011/vanderwalt__introduction.rst",
    "scipy2011/jacky__pymodel_scipy2011.rst",
    "public_domain/shakespeare_sonnets.txt",
)
QUESTIONS = (
    "What is this document about?",
    "Who wrote it?",
    "In which year was it written?",
    "Name one problem that it describes.",
    "What does it propose?",
    "Is there any mention of Python?",
    "Give one word that appears in the title.",
    "Is the tone formal or informal?",
    "What is the first point that it makes?",
    "Does it contain numbers?",
    "Which reader is it meant for?",
    "Summarize it in one sentence.",
)
SEAMS = (0, 1, 4, 16)
INSTRUCTIONS = (
    "You help people to read documents. Be brief and exact. Use only what the document says; if it does not answer "
    "the question, say so. Do not repeat the question. Quote at most one sentence. Never invent names, dates or "
    "numbers. If two parts of the document disagree, mention both. Answer in English, in one or two sentences, "
    "without headings.\n\n"
)
POLICY = (Path(__file__).parents[1] / "examples" / "refund_policy.txt").read_text(encoding="utf-8") + "\n\n"
SYSTEM = INSTRUCTIONS + POLICY
CHAT = (f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n")
PLAIN = (SYSTEM, "\nAnswer:")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--quick", action="store_true", help="one document, three questions, no result file")
    quick = arguments.parse_args().quick
    if not DOCUMENTS.is_dir():
        raise SystemExit(f"{DOCUMENTS.name}: the documents are not here, so there is nothing to measure.")
    warnings.simplefilter("ignore")
    torch.set_num_threads(2)
    result: dict[str, Any] = {"documents": list(NAMES), "questions": len(QUESTIONS), "document_tokens": 1024}
    for name, load, frame in (("smollm2", load_smollm2, CHAT), ("gemma3_270m", load_gemma3_270m, PLAIN)):
        model, tokenizer = load()
        result[name] = measure(model, tokenizer, frame, quick=quick)
        for arm, values in result[name].items():
            print(name, arm, values)
    if not quick:
        print(timing.write("fidelity", result))


def measure(model: Any, tokenizer: Any, frame: tuple[str, str], *, quick: bool) -> dict[str, Any]:
    """Figures for each way to compile and splice, over documents and questions."""
    rows: dict[str, list[dict[str, float]]] = {}
    for document in tqdm(NAMES[:1] if quick else NAMES, desc=type(model).__name__, unit="document"):
        text = (DOCUMENTS / document).read_text(encoding="utf-8")
        ids = tokenizer(text, add_special_tokens=False)["input_ids"][:1024]
        start = EditableCache(model, tokenizer=tokenizer)
        start.append(frame[0])
        full = start.fork()
        full.append(ids)
        caches = spliced(model, tokenizer, start, ids)
        for question in QUESTIONS[:3] if quick else QUESTIONS:
            expected = _ask(full, question, frame)
            for arm, cache in caches.items():
                rows.setdefault(arm, []).append(_compare(_ask(cache, question, frame), expected))
    return {arm: _summary(values) for arm, values in rows.items()}


def spliced(model: Any, tokenizer: Any, start: EditableCache, ids: list[int]) -> dict[str, EditableCache]:
    """The document spliced behind ``start`` in each way."""
    caches = {}
    text_has_bos = tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
    ways = {"": ()} if not text_has_bos else {" compiled alone": (), "": (tokenizer.bos_token_id,)}
    for way, prefix in ways.items():
        chunk: KVChunk = Skill.precompile(model, tokenizer, ids, name="document", prefix=list(prefix))
        for seam in SEAMS:
            caches[f"seam {seam}{way}"] = start.fork()
            caches[f"seam {seam}{way}"].splice(chunk, seam_tokens=seam)
    first = int(start.positions.max()) + 1
    fake = KVChunk(
        chunk.layers, chunk.token_ids, torch.arange(first, first + len(ids)), chunk.model, chunk.provenance, "document"
    )
    caches["seam 1, not rotated"] = start.fork()
    caches["seam 1, not rotated"].splice(fake, seam_tokens=1)
    return caches


def _ask(cache: EditableCache, question: str, frame: tuple[str, str]) -> Tensor:
    asked = cache.fork()
    asked.append(f"\n\nQuestion: {question}{frame[1]}")
    return asked.next_token_logits()[0].double()


def _compare(logits: Tensor, expected: Tensor) -> dict[str, float]:
    log_p, log_q = expected.log_softmax(0), logits.log_softmax(0)
    centred = torch.cosine_similarity(logits - logits.mean(), expected - expected.mean(), dim=0)
    return {
        "cosine": float(torch.cosine_similarity(logits, expected, dim=0)),
        "centred_cosine": float(centred),
        "kl": float((log_p.exp() * (log_p - log_q)).sum()),
        "agrees": float(logits.argmax() == expected.argmax()),
    }


def _summary(rows: list[dict[str, float]]) -> dict[str, float]:
    def column(name: str) -> list[float]:
        return [row[name] for row in rows]

    return {
        "n": len(rows),
        "cosine_median": round(statistics.median(column("cosine")), 5),
        "cosine_worst": round(min(column("cosine")), 5),
        "centred_cosine_median": round(statistics.median(column("centred_cosine")), 5),
        "centred_cosine_worst": round(min(column("centred_cosine")), 5),
        "kl_median_nats": round(statistics.median(column("kl")), 5),
        "kl_worst_nats": round(max(column("kl")), 5),
        "top_token_agreement": round(statistics.mean(column("agrees")), 4),
    }


if __name__ == "__main__":
    main()
