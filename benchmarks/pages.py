"""Render the pages with figures from the committed JSON: `python benchmarks/pages.py`. Nothing in them is typed by
hand.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"


def main() -> None:
    for path, text in rendered().items():
        path.write_text(text, encoding="utf-8")


def rendered() -> dict[Path, str]:
    """Each generated file with the text that it should have."""
    compose, fidelity = (json.loads((RESULTS / f"{name}.json").read_text("utf-8")) for name in ("compose", "fidelity"))
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    text = _between(text, "bench:compose", readme_table(compose))
    text = _between(text, "bench:fidelity", readme_fidelity(fidelity))
    return {
        ROOT / "docs" / "fidelity.md": fidelity_page(fidelity),
        ROOT / "docs" / "speed.md": speed_page(compose),
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
            f"{_ratio(part['speedup'])} |"
        )
        rows.append(f"| the same with one seam token recomputed | {_ratio(part['speedup_seam_1'])} |")
    rows.append(
        "| splice of 2,048 tokens / plain copy of the same bytes | "
        f"{_ratio(result['skill_2048']['splice_over_copy'])} |"
    )
    decode = result["decode"]
    rows.append(
        f"| one decoding step behind {decode['context_tokens']:,} tokens: `DynamicCache` / `EditableCache` "
        f"| {_ratio(decode['dynamic_over_editable'])} |"
    )
    table = "\n".join(("| what | ratio, median (quartiles) |", "|---|---|", *rows))
    machine = result["environment"]
    return f"{table}\n\n{result['model']}; {_machine(machine)}. More in [docs/speed.md](docs/speed.md).\n"


def speed_page(result: dict[str, Any]) -> str:
    """All figures of the speed benchmark."""
    lines = [
        "# Speed and memory",
        "",
        "Generated from `benchmarks/results/compose.json` by `benchmarks/pages.py`. Baseline and variant take turns "
        "in one",
        "process; every output is verified first. Milliseconds depend on the machine; the ratios are what to read.",
        "",
        f"{result['model']}; {_machine(result['environment'])}.",
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
        lines.append(f"| {label}, ms | " + " | ".join(_ms(part[key]) for part in parts) + " |")
    for label, key in (
        ("full prefill / composed", "speedup"),
        ("full prefill / composed, one seam token", "speedup_seam_1"),
        ("full prefill / composed, processor time of one thread", "one_thread_cpu_speedup"),
        ("rotate and concatenate by hand, in memory, + question / splice + question", "by_hand_over_splice"),
        ("splice / plain copy", "splice_over_copy"),
    ):
        lines.append(f"| {label} | " + " | ".join(_ratio(part[key]) for part in parts) + " |")
    lines.append(
        "| most memory held / chunk (its place in the cache is 1) | "
        + " | ".join(str(p["peak_memory_over_chunk"]) for p in parts)
        + " |"
    )
    decode, fork = result["decode"], result["fork"]
    lines += [
        "",
        f"Decoding one token behind {decode['context_tokens']:,}: `EditableCache` {_ms(decode['editable'])} ms, "
        f"`DynamicCache` {_ms(decode['dynamic'])} ms; `DynamicCache` / `EditableCache` "
        f"{_ratio(decode['dynamic_over_editable'])}.",
        "",
        f"Fork of a cache of {fork['tokens'][1]:,} tokens: {_ms(fork['long'])} ms; against one of "
        f"{fork['tokens'][0]:,} tokens {_ratio(fork['long_over_short'])}.",
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
        _machine(result["environment"]) + ".",
    ]
    return "\n".join(lines) + "\n"


def _ratio(values: dict[str, float]) -> str:
    return f"{values['median']:.2f} ({values['q1']:.2f} to {values['q3']:.2f})"


def _ms(values: dict[str, float]) -> str:
    return f"{values['median_ms']:.1f} ({values['q1_ms']:.1f} to {values['q3_ms']:.1f})"


def _machine(environment: dict[str, Any]) -> str:
    return (
        f"{environment['processor']}, {environment['threads']} threads, torch {environment['torch']}, transformers "
        f"{environment['transformers']}"
    )


if __name__ == "__main__":
    main()
