"""The tables of the generated pages, one function for each, and how a figure is written."""

from __future__ import annotations

from typing import Any


def distance_table(result: dict[str, Any]) -> str:
    """Error of a moved key against the model's own, by distance."""
    models = result["distance"]
    rows = []
    for index, distance in enumerate(result["distances"]):
        worst = {
            way: max(model[way][index] for model in models.values())
            for way in ("difference of angles", "float32 product")
        }
        products = [short(model["float64 product"][index]) for model in models.values()]
        cells = [f"{distance:,}", short(worst["difference of angles"]), *products, short(worst["float32 product"])]
        rows.append(row(cells))
    worst_slice = max(result["slices"].values())
    return table(
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
        f"{short(worst_slice)} at {result['distances'][-1]:,}. {machine(result['environment'])}.\n"
    )


def drift_table(result: dict[str, Any]) -> str:
    """Difference of two stock prefills of the same text, by distance."""
    models = result["drift"]
    deepest = {name: list(rows)[-2] for name, rows in models.items()}
    assert all(name.startswith("values of layer") for name in deepest.values())
    rows = [
        row([f"{distance:,}", *(short(models[name][deepest[name]][index]) for name in models)])
        for index, distance in enumerate(result["distances"])
    ]
    return table(["text shifted by", *models], rows)


def storage_table(result: dict[str, Any]) -> str:
    """Error of keys in 16 bits after moves, and of computing them."""
    parts = result["storage"]
    rows = []
    for way in ("from the stored keys", "in place"):
        for count in parts["bfloat16"][way]:
            label = f"layer 0: moved {count} time{'s' if count != '1' else ''}, {way}"
            rows.append(row([label, *(short(part[way][count], 2) for part in parts.values())]))
    last = list(parts["bfloat16"]["in place"])[-1]
    for label, key in (
        ("deepest layer: computed at 0, not moved", "computed at 0"),
        ("deepest layer: computed at the target, not moved", "computed at the target"),
        ("deepest layer: moved once", "moved, 1"),
        (f"deepest layer: moved {last} times, from the stored keys", f"moved, {last}"),
        (f"deepest layer: moved {last} times, in place", f"moved in place, {last}"),
    ):
        rows.append(row([label, *(short(part["deepest layer"][key], 2) for part in parts.values())]))
    return table(["keys", *parts], rows)


def axes_table(result: dict[str, Any]) -> str:
    """Which axis turns which frequency."""
    rows = [
        row(
            [
                name,
                model["rotary"]["layout"],
                "".join(str(axis) for axis in model["axis_of_frequency"]),
                model["published_axis_of_frequency"],
                short(model["keys_from_positions"]),
            ]
        )
        for name, model in result["models"].items()
    ]
    return table(
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
                cells.append(f"{short(max(found['keys']))} / {short(found['logits'])}")
            cells.append(short(part["ways"]["all axes, text at slot numbers"]["logits"]))
            rows.append(row(cells))
    head = [
        "",
        "text tokens before",
        "the model's own numbering adds",
        "**all axes**: keys / logits",
        "temporal axis only",
        "not moved",
        "all axes, text after it at its slot: logits",
    ]
    return table(head, rows)


def numbering_text(result: dict[str, Any]) -> str:
    """How the types of transformers number an image behind nine more text tokens."""
    kinds: dict[str, list[str]] = {}
    for model_type, added in result["numbering_of_all_types"].items():
        kinds.setdefault("not measured" if added.startswith("not measured") else added, []).append(model_type)
    rows = [row([added, ", ".join(f"`{name}`" for name in names)]) for added, names in kinds.items()]
    lines = [
        row([f"{name}, {kind}", *(str(found[key]) for key in _FOLLOWING)])
        for name, part in result["models"].items()
        for kind, found in part["numbering"].items()
    ]
    return (
        table(["nine text tokens, image or video of nine frames, one text token", *_FOLLOWING.values()], lines)
        + "\n"
        + table(["nine more text tokens in front of an image add, axis by axis", "model types"], rows)
    )


_FOLLOWING = {
    "largest_position": "largest position so far",
    "text_follows_at": "the text token",
    "first_generated_token_at": "first generated token (`rope_deltas`)",
}


def hybrids_text(result: dict[str, Any]) -> str:
    """For each trained hybrid, how far each way to splice is from a full prefill."""
    parts = []
    for name, model in result["models"].items():
        training, places = model["training"], list(model["questions_by_place"])
        rows = [row(["full prefill", "1", "", "", "", *(f"{model['full_prefill_recall'][p]:.3f}" for p in places)])]
        for arm, found in model["arms"].items():
            centred, kl, same = found["centred_cosine"], found["kl_nats_mean"], found["same_top_token"]
            cells = [
                arm,
                f"{found['cosine']['median']:.5f} ({found['cosine']['q1']:.5f}; {found['cosine']['least']:.3f})",
                f"{centred['median']:.5f} ({centred['q1']:.5f}; {centred['least']:.3f})",
                f"{short(kl['mean'], 2)} ({short(kl['low'], 2)} to {short(kl['high'], 2)})",
                f"{same['mean']:.3f}",
            ]
            rows.append(row([*cells, *(f"{found['recall'][place]:.3f}" for place in places)]))
        counts = ", ".join(f"{number} {place}" for place, number in model["questions_by_place"].items())
        head = ["chunks", "cosine, median (lower quartile; least)", "centred", "KL, nats, mean (95%)", "same top token"]
        parts.append(
            f"**{name}**, {model['parameters']:,} parameters, {training['steps']:,} steps: "
            f"{training['held_out_accuracy']:.3f} of {training['held_out_questions']:,} held-out answers right. Below, "
            f"{model['questions']} questions\nabout {model['texts']} new texts ({counts}).\n\n"
            + table([*head, *(f"recall: {place}" for place in places)], rows)
        )
    return "\n".join(parts) + f"\n{machine(result['environment'])}.\n"


def hybrids_cost_table(result: dict[str, Any]) -> str:
    """Bytes and times of a splice into a hybrid."""
    rows = []
    for name, lengths in result["cost"]["models"].items():
        for tokens, part in lengths.items():
            sizes = [f"{part[key] / 2**20:.2f}" for key in ("transition_bytes", "cell_bytes")]
            times = [ms(part[key]) for key in ("stock_prefill", "splice")]
            speed = [ratio(part[key]) for key in ("stock_over_splice", "append_over_splice")]
            rows.append(row([name, tokens, *sizes, *times, *speed]))
    head = ["", "tokens", "transitions, MiB", "cells, MiB", "stock prefill, ms", "splice, ms", "stock prefill / splice"]
    return table([*head, "`append` / splice"], rows)


def probe_table(result: dict[str, Any]) -> str:
    """What the self-test costs at first contact with a model."""
    rows = []
    for name, title in (("smollm2", "SmolLM2-135M-Instruct"), ("gemma3_270m", "Gemma 3 270M")):
        cost = result[name]
        rows.append(
            row(
                [
                    title,
                    str(cost["forwards"]),
                    ms(cost["probe"]),
                    ratio(cost["probe_over_prefill_64"]),
                    ratio(cost["probe_over_prefill_512"]),
                ]
            )
        )
    head = ["model", "forwards of 7 tokens", "self-test, ms", "/ prefill of 64 tokens", "/ prefill of 512 tokens"]
    return table(head, rows) + f"\n{machine(result['environment'])}\n"


def table(head: list[str], rows: list[str]) -> str:
    return "\n".join((row(head), "|" + "---|" * len(head), *rows)) + "\n"


def row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def short(value: float, digits: int = 1) -> str:
    """Small numbers with so many digits (1e-7), others with two."""
    return f"{value:.2g}" if value >= 0.01 else f"{value:.{digits - 1}e}".replace("e-0", "e-")


def ratio(values: dict[str, float]) -> str:
    return f"{values['median']:.2f} ({values['q1']:.2f} to {values['q3']:.2f})"


def ms(values: dict[str, float]) -> str:
    return f"{values['median_ms']:.1f} ({values['q1_ms']:.1f} to {values['q3_ms']:.1f})"


def machine(environment: dict[str, Any]) -> str:
    return (
        f"{environment['processor']}, {environment['threads']} thread{'s' if environment['threads'] != 1 else ''}, "
        f"torch {environment['torch']}, transformers {environment['transformers']}"
    )


def artifact_table(result: dict[str, Any]) -> str:
    """What a skill stored in 8 bits differs from the full one, with the grouping of scales that the library uses."""
    grouped = "keys per channel, values per token"
    rows = []
    for model, title in (("smollm2", "SmolLM2-135M-Instruct"), ("gemma3_270m", "Gemma 3 270M")):
        for arm in ("bfloat16", f"int8, {grouped}", f"fp8, {grouped}"):
            found = result[model]["arms"][arm]
            cells = [
                title,
                arm.split(",")[0],
                f"{found['bytes_ratio']:.3f}",
                f"{found['keys_max_relative']:.4f} ({found['keys_rms_relative']:.4f})",
                f"{found['cosine_median']:.6f} ({found['cosine_worst']:.6f})",
                f"{found['kl_mean_nats']:.1e} ({found['kl_worst_nats']:.1e})",
                f"{found['top_token_agreement']:.3f}",
            ]
            rows.append(row(cells))
    head = [
        "model",
        "storage",
        "bytes / float32",
        "keys, largest error (root mean square)",
        "logit cosine, median (worst)",
        "KL, nats, mean (worst)",
        "same top token",
    ]
    return table(head, rows) + (
        f"\nAgainst the full float32 skill: {len(result['documents'])} documents of {result['document_tokens']:,} "
        "tokens, logits at the tokens of the questions behind them. Errors of\nkeys over the largest key. bfloat16 is "
        f"the usual dtype of a model, for comparison. {machine(result['environment'])}.\n"
    )


def load_table(result: dict[str, Any]) -> str:
    """What load and splice of a skill on disk cost against a plain copy of its bytes."""
    regimes = (
        ("fresh_pages", "fresh pages, 2 threads, wall"),
        ("fresh_pages_one_thread_cpu", "fresh pages, 1 thread, processor time"),
        ("kept_pages", "pages kept by the allocator, 2 threads, wall"),
        ("kept_pages_one_thread_cpu", "pages kept, 1 thread, processor time"),
    )
    rows = []
    for key, title in regimes:
        part = result[key]
        times, over = part["milliseconds"], part["over_plain_copy"]
        cells = [
            title,
            ms(times["plain_copy"]),
            ms(times["load"]),
            ms(times["splice"]),
            ms(times["load_splice_seam_0"]),
        ]
        rows.append(row([*cells, ratio(over["load_splice_seam_0"]), ratio(over["load_splice_seam_1"])]))
    head = ["ms", "plain copy", "load", "splice", "load + splice", "load + splice / copy", "the same, one seam token"]
    cold, memory, pages = result["cold"], result["memory"], result["shared_pages"]
    return table(head, rows) + (
        f"\n`benchmarks/results/load.json`: {result['skill_tokens']:,} tokens, {result['skill_mb']} MB, page cache "
        "warm. Copy: `clone()` of every tensor. A process that has just started, or splices once, gets fresh pages from the "
        "system; the faults cost more than the copy.\n\n"
        f"Cold (the file dropped from the page cache): reading it {ms(cold['read'])} ms, load {ms(cold['load'])} ms, "
        f"load + splice {ms(cold['load_splice'])} ms; load + splice / reading {ratio(cold['load_splice_over_read'])}.\n\n"
        f"Memory, in sizes of the file: load {memory['load_file_backed']} mapped and {memory['load_anonymous']} of its "
        f"own; with the splice {memory['load_splice_anonymous']} of its own, the cache. Two loads of one skill share their "
        f"pages: resident {pages['rss_over_file']}, proportional {pages['pss_over_file']}.\n"
    )
