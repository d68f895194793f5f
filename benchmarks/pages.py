"""Render the pages with figures from the committed JSON: `python benchmarks/pages.py`. Nothing in them is typed by
hand.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import repair_page
from page_parts import (
    artifact_table,
    axes_table,
    distance_table,
    drift_table,
    hybrids_cost_table,
    hybrids_text,
    load_table,
    machine,
    moves_table,
    ms,
    numbering_text,
    probe_table,
    ratio,
    storage_table,
)

from editable_cache.testing.sweep.page import page

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"


def main() -> None:
    for path, text in rendered().items():
        path.write_text(text, encoding="utf-8")


def rendered() -> dict[Path, str]:
    """Each generated file with the text that it should have."""
    compose, fidelity, rotation, mrope, hybrids, probe, storage, load = (
        json.loads((RESULTS / f"{name}.json").read_text("utf-8"))
        for name in ("compose", "fidelity", "rotation", "mrope", "hybrids", "probe", "storage", "load")
    )
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    text = _between(text, "bench:compose", readme_table(compose))
    text = _between(text, "bench:fidelity", readme_fidelity(fidelity))
    numerics = ROOT / "docs" / "numerics.md"
    numbers = numerics.read_text(encoding="utf-8")
    for mark, part in (
        ("bench:distance", distance_table(rotation)),
        ("bench:drift", drift_table(rotation)),
        ("bench:storage", storage_table(rotation)),
        ("bench:mrope-axes", axes_table(mrope)),
        ("bench:mrope-moves", moves_table(mrope)),
        ("bench:mrope-numbering", numbering_text(mrope)),
    ):
        numbers = _between(numbers, mark, part)
    recurrent = ROOT / "docs" / "recurrent.md"
    states = _between(recurrent.read_text(encoding="utf-8"), "bench:hybrids", hybrids_text(hybrids))
    skill_format = ROOT / "docs" / "skill-format.md"
    return {
        skill_format: _between(skill_format.read_text("utf-8"), "bench:skill-storage", artifact_table(storage)),
        recurrent: _between(states, "bench:hybrids-cost", hybrids_cost_table(hybrids)),
        ROOT / "docs" / "architectures.md": page(json.loads((RESULTS / "architectures.json").read_text("utf-8"))),
        numerics: numbers,
        ROOT / "docs" / "fidelity.md": fidelity_page(fidelity),
        ROOT / "docs" / "speed.md": speed_page(compose, probe, load),
        **repair_page.rendered(ROOT / "docs", RESULTS),
        readme: text,
    }


def _between(text: str, mark: str, new: str) -> str:
    """``text`` with ``new`` between the comments ``<!-- mark -->`` and ``<!-- /mark -->``."""
    begin, end = f"<!-- {mark} -->\n", f"<!-- /{mark} -->"
    before, rest = text.split(begin, 1)
    return f"{before}{begin}{new}{end}{rest.split(end, 1)[1]}"


def readme_fidelity(result: dict[str, Any]) -> str:
    """The figures for one seam token that the README quotes."""
    rows = []
    for model, title in (("smollm2", "SmolLM2-135M-Instruct"), ("gemma3_270m", "Gemma 3 270M")):
        for arm in ("seam 1", "seam 1, not rotated"):
            row = result[model][arm]
            rows.append(
                f"| {title}, {arm} | {row['cosine_median']:.4f} ({row['cosine_worst']:.4f}) | "
                f"{row['kl_median_nats']:.3f} | {row['top_token_agreement']:.2f} |"
            )
    head = "| spliced document of 1,024 tokens | cosine, median (worst) | KL, nats, median | same top token |"
    return "\n".join((head, "|---|---|---|---|", *rows)) + "\n\nMore in [docs/fidelity.md](docs/fidelity.md).\n"


def readme_table(result: dict[str, Any]) -> str:
    """The ratios that the README quotes."""
    rows = []
    for name in ("skill_2048", "skill_6144"):
        part = result[name]
        tokens = f"{part['skill_tokens']:,}"
        rows.append(
            f"| first token with a {tokens}-token skill: full prefill / (load + splice + question) | "
            f"{ratio(part['speedup'])} |"
        )
        rows.append(f"| the same with one seam token recomputed | {ratio(part['speedup_seam_1'])} |")
    rows.append(
        f"| splice of 2,048 tokens / plain copy of the same bytes | {ratio(result['skill_2048']['splice_over_copy'])} |"
    )
    decode = result["decode"]
    rows.append(
        f"| one decoding step behind {decode['context_tokens']:,} tokens: `DynamicCache` / `EditableCache` "
        f"| {ratio(decode['dynamic_over_editable'])} |"
    )
    table = "\n".join(("| what | ratio, median (quartiles) |", "|---|---|", *rows))
    return f"{table}\n\n{result['model']}; {machine(result['environment'])}. More in [docs/speed.md](docs/speed.md).\n"


def speed_page(result: dict[str, Any], probe: dict[str, Any], load: dict[str, Any]) -> str:
    """All figures of the speed benchmark."""
    lines = [
        "# Speed and memory",
        "",
        "Generated from `benchmarks/results/compose.json` by `benchmarks/pages.py`. Baseline and variant take turns "
        "in one",
        "process; every output is verified first. Milliseconds depend on the machine; the ratios are what to read.",
        "",
        f"{result['model']}; {machine(result['environment'])}.",
        "",
        "| | 2,048-token skill | 6,144-token skill |",
        "|---|---|---|",
    ]
    parts = (result["skill_2048"], result["skill_6144"])
    for label, key in (
        ("full prefill with `DynamicCache`", "full_prefill"),
        ("load + splice + 20-token question", "load_splice_question"),
        ("the same, one seam token", "load_splice_seam_1_question"),
        ("splice from memory + question", "splice_question_in_memory"),
        ("splice alone", "splice_alone"),
        ("the same bytes behind the same prefix of a `DynamicCache`, not rotated", "plain_copy"),
    ):
        lines.append(f"| {label}, ms | " + " | ".join(ms(part[key]) for part in parts) + " |")
    for label, key in (
        ("full prefill / composed", "speedup"),
        ("full prefill / composed, one seam token", "speedup_seam_1"),
        ("full prefill / composed, processor time of one thread", "one_thread_cpu_speedup"),
        ("rotate and concatenate by hand, in memory, + question / splice + question", "by_hand_over_splice"),
        ("splice / plain copy", "splice_over_copy"),
    ):
        lines.append(f"| {label} | " + " | ".join(ratio(part[key]) for part in parts) + " |")
    lines.append(
        "| most memory held / chunk (its place in the cache is 1) | "
        + " | ".join(str(p["peak_memory_over_chunk"]) for p in parts)
        + " |"
    )
    decode, fork = result["decode"], result["fork"]
    lines += [
        "",
        f"Decoding one token behind {decode['context_tokens']:,}: `EditableCache` {ms(decode['editable'])} ms, "
        f"`DynamicCache` {ms(decode['dynamic'])} ms; `DynamicCache` / `EditableCache` "
        f"{ratio(decode['dynamic_over_editable'])}.",
        "",
        f"Fork of a cache of {fork['tokens'][1]:,} tokens: {ms(fork['long'])} ms; against one of "
        f"{fork['tokens'][0]:,} tokens {ratio(fork['long_over_short'])}.",
        "",
        "## A skill from disk",
        "",
        load_table(load).rstrip(),
        "",
        "## The self-test",
        "",
        "Once for each model and state of its weights (`benchmarks/results/probe.json`). Median and quartiles.",
        "",
        probe_table(probe).rstrip(),
    ]
    return "\n".join(lines) + "\n"


def fidelity_page(result: dict[str, Any]) -> str:
    """All figures of the fidelity benchmark."""
    lines = [
        "# Fidelity of a spliced document",
        "",
        "Generated from `benchmarks/results/fidelity.json` by `benchmarks/pages.py`.",
        "",
        f"{len(result['documents'])} documents, the first {result['document_tokens']:,} tokens of each, precompiled "
        "by itself and",
        f"spliced behind about 900 tokens of instructions and policy; {result['questions']} questions for each "
        "document. Next-token logits",
        "against a full prefill of the same ids, float32. *Centred* subtracts the mean logit, which a plain cosine "
        "mostly",
        "measures. *Seam n* recomputes the first n tokens of the document. *Not rotated* is the control: the same "
        "cells with",
        "their keys left as they were compiled.",
    ]
    for model, title in (("smollm2", "SmolLM2-135M-Instruct"), ("gemma3_270m", "Gemma 3 270M")):
        lines += [
            "",
            f"## {title}",
            "",
            "| | cosine, median (worst) | centred, median (worst) | KL, nats, median (worst) | same top token | n |",
            "|---|---|---|---|---|---|",
        ]
        for arm, row in result[model].items():
            lines.append(
                f"| {arm} | {row['cosine_median']:.4f} ({row['cosine_worst']:.4f}) | "
                f"{row['centred_cosine_median']:.4f} ({row['centred_cosine_worst']:.4f}) | "
                f"{row['kl_median_nats']:.3f} ({row['kl_worst_nats']:.3f}) | {row['top_token_agreement']:.2f} | "
                f"{row['n']} |"
            )
    lines += [
        "",
        "Gemma's tokenizer puts a BOS token in front of every text, and the model leans on it. A chunk *compiled "
        "alone*, without it,",
        "takes its own first tokens for that sink. `Skill.precompile` therefore compiles behind the BOS token and "
        "drops its cell.",
        "",
        machine(result["environment"]) + ".",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
