"""Render the pages with figures from the committed JSON: `python benchmarks/pages.py`. Nothing in them is typed by
hand.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from editable_cache.testing.sweep.page import page

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"


def main() -> None:
    for path, text in rendered().items():
        path.write_text(text, encoding="utf-8")


def rendered() -> dict[Path, str]:
    """Each generated file with the text that it should have."""
    compose, fidelity, rotation, mrope = (
        json.loads((RESULTS / f"{name}.json").read_text("utf-8"))
        for name in ("compose", "fidelity", "rotation", "mrope")
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
    return {
        ROOT / "docs" / "architectures.md": page(json.loads((RESULTS / "architectures.json").read_text("utf-8"))),
        numerics: numbers,
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


def distance_table(result: dict[str, Any]) -> str:
    """Error of a moved key against the model's own, by distance."""
    models = result["distance"]
    rows = []
    for index, distance in enumerate(result["distances"]):
        worst = {
            way: max(model[way][index] for model in models.values())
            for way in ("difference of angles", "float32 product")
        }
        products = [_short(model["float64 product"][index]) for model in models.values()]
        cells = [f"{distance:,}", _short(worst["difference of angles"]), *products, _short(worst["float32 product"])]
        rows.append(_row(cells))
    worst_slice = max(result["slices"].values())
    return _table(
        [
            "moved by",
            "**difference of angles**, worst of the six",
            *(f"product: {name}" for name in models),
            "product in float32, worst of the six",
        ],
        rows,
    ) + (
        f"\nLayer 0, {result['tokens']} tokens, float32; largest difference to the key that the model computes at the "
        f"target, over the largest key. The\nsame for both layouts and any slice of the head: at most "
        f"{_short(worst_slice)} at {result['distances'][-1]:,}. {_machine(result['environment'])}.\n"
    )


def drift_table(result: dict[str, Any]) -> str:
    """Difference of two stock prefills of the same text, by distance."""
    models = result["drift"]
    deepest = {name: list(rows)[-2] for name, rows in models.items()}
    assert all(name.startswith("values of layer") for name in deepest.values())
    rows = [
        _row([f"{distance:,}", *(_short(models[name][deepest[name]][index]) for name in models)])
        for index, distance in enumerate(result["distances"])
    ]
    return _table(["text shifted by", *models], rows)


def storage_table(result: dict[str, Any]) -> str:
    """Error of keys in 16 bits after moves, and of computing them."""
    parts = result["storage"]
    rows = []
    for way in ("from the stored keys", "in place"):
        for count in parts["bfloat16"][way]:
            label = f"layer 0: moved {count} time{'s' if count != '1' else ''}, {way}"
            rows.append(_row([label, *(_short(part[way][count], 2) for part in parts.values())]))
    last = list(parts["bfloat16"]["in place"])[-1]
    for label, key in (
        ("deepest layer: computed at 0, not moved", "computed at 0"),
        ("deepest layer: computed at the target, not moved", "computed at the target"),
        ("deepest layer: moved once", "moved, 1"),
        (f"deepest layer: moved {last} times, from the stored keys", f"moved, {last}"),
        (f"deepest layer: moved {last} times, in place", f"moved in place, {last}"),
    ):
        rows.append(_row([label, *(_short(part["deepest layer"][key], 2) for part in parts.values())]))
    return _table(["keys", *parts], rows)


def axes_table(result: dict[str, Any]) -> str:
    """Which axis turns which frequency."""
    rows = [
        _row(
            [
                name,
                model["rotary"]["layout"],
                "".join(str(axis) for axis in model["axis_of_frequency"]),
                model["published_axis_of_frequency"],
                _short(model["keys_from_positions"]),
            ]
        )
        for name, model in result["models"].items()
    ]
    return _table(
        ["", "layout", "axis of each frequency, tiny model", "with the published head size", "error of keys"], rows
    )


def moves_table(result: dict[str, Any]) -> str:
    """An image moved behind text, against the model's own prompt."""
    rows = []
    for name, model in result["models"].items():
        for count, part in model["prefix"].items():
            added = " ".join(f"+{delta}" for delta in part["moved_by_the_model"])
            cells = [name, count, added]
            for way in ("all axes", "temporal axis only", "not moved"):
                found = part["ways"][way]
                cells.append(f"{_short(max(found['keys']))} / {_short(found['logits'])}")
            cells.append(_short(part["ways"]["all axes, text at slot numbers"]["logits"]))
            rows.append(_row(cells))
    head = [
        "",
        "text tokens before",
        "the model's own numbering adds",
        "**all axes**: keys / logits",
        "temporal axis only",
        "not moved",
        "all axes, text after it at its slot: logits",
    ]
    return _table(head, rows)


def numbering_text(result: dict[str, Any]) -> str:
    """How the types of transformers number an image behind nine more text tokens."""
    kinds: dict[str, list[str]] = {}
    for model_type, added in result["numbering_of_all_types"].items():
        kinds.setdefault("not measured" if added.startswith("not measured") else added, []).append(model_type)
    rows = [_row([added, ", ".join(f"`{name}`" for name in names)]) for added, names in kinds.items()]
    lines = [
        _row([f"{name}, {kind}", *(str(found[key]) for key in _FOLLOWING)])
        for name, part in result["models"].items()
        for kind, found in part["numbering"].items()
    ]
    return (
        _table(["nine text tokens, image or video of nine frames, one text token", *_FOLLOWING.values()], lines)
        + "\n"
        + _table(["nine more text tokens in front of an image add, axis by axis", "model types"], rows)
    )


_FOLLOWING = {
    "largest_position": "largest position so far",
    "text_follows_at": "the text token",
    "first_generated_token_at": "first generated token (`rope_deltas`)",
}


def _table(head: list[str], rows: list[str]) -> str:
    return "\n".join((_row(head), "|" + "---|" * len(head), *rows)) + "\n"


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _short(value: float, digits: int = 1) -> str:
    """Small numbers with so many digits (1e-7), others with two."""
    return f"{value:.2g}" if value >= 0.01 else f"{value:.{digits - 1}e}".replace("e-0", "e-")


def _ratio(values: dict[str, float]) -> str:
    return f"{values['median']:.2f} ({values['q1']:.2f} to {values['q3']:.2f})"


def _ms(values: dict[str, float]) -> str:
    return f"{values['median_ms']:.1f} ({values['q1_ms']:.1f} to {values['q3_ms']:.1f})"


def _machine(environment: dict[str, Any]) -> str:
    return (
        f"{environment['processor']}, {environment['threads']} thread{'s' if environment['threads'] != 1 else ''}, "
        f"torch {environment['torch']}, transformers {environment['transformers']}"
    )


if __name__ == "__main__":
    main()
