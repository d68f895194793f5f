"""How studies of composing are shown, and of editing what was composed."""

from __future__ import annotations

from editable_cache.evaluation.report.views import CurveView, DotView, ScatterView, Study, TableView

_COMPOSED = {
    "agrees": "as full",
    "correct": "right",
    "full_correct": "full right",
    "cosine": "cosine",
    "kl": "KL, nats",
}

COMPOSING = Study(
    "composing",
    "Composing",
    "A part of the context is compiled alone, spliced, and read by the same question as a full prefill of the same "
    "ids.",
    (
        TableView(
            "Contents and insertion points",
            ("mode", "task", "content", "point"),
            _COMPOSED,
            {"test": "content", "seam": 1, "rotated": True},
        ),
        TableView(
            "Seams, and keys that were not turned",
            ("content", "point", "seam", "rotated"),
            _COMPOSED,
            {"test": "content", "point": ("ahead", "middle"), "mode": "direct", "task": "gated"},
            {
                "rule ahead 0 True": "cosine 0.94",
                "rule ahead 1 True": "cosine 0.994",
                "rule ahead 1 False": "agreement 0.18 for 0.78",
            },
        ),
        TableView("Several skills", ("point", "chunks"), _COMPOSED, {"test": "count"}),
        TableView(
            "A memory in one block or two",
            ("point", "border"),
            _COMPOSED,
            {"test": "split"},
            {"end split": "agreement 0.46", "end together": "agreement 0.76"},
        ),
        DotView(
            "evidence-composing",
            "Decisions as in a full prefill, one seam token, keys turned",
            ("content", "point"),
            "agrees",
            "agreement",
            where={"test": "content", "seam": 1, "rotated": True, "mode": "direct"},
        ),
    ),
)

MULTIHOP = Study(
    "multihop",
    "Questions over passages that were compiled one by one",
    "Drop is what the right answer loses in log-probability for each of its tokens, in nats, against a full prefill.",
    (
        TableView(
            "Passages",
            ("dataset", "hops", "arm"),
            {
                "drop": "drop, nats",
                "less_likely": "less likely",
                "agreement": "same top token",
                "exact": "exact answer",
                "full_exact": "full: exact answer",
                "cosine": "cosine",
            },
        ),
        DotView(
            "evidence-multihop",
            "What the right answer loses, in nats for each token",
            ("hops", "arm"),
            "drop",
            "nats",
            (-0.5, 3.0),
        ),
    ),
)

DIAGONAL = Study(
    "diagonal",
    "Editing inside a transplant",
    "The field lies in a spliced skill; every arm is put to this cache and to one that was recomputed. Both recoveries "
    "are between the ends of the recomputed cache.",
    (
        TableView(
            "Arms on both caches",
            ("arm",),
            {
                "recomputed_recovery": "recomputed: recovery",
                "composed_recovery": "composed: recovery",
                "composed_own_recovery": "composed: recovery between its own ends",
                "difference": "difference",
                "recomputed_correct": "recomputed: right",
                "composed_correct": "composed: right",
                "agrees": "same decision",
                "cosine": "cosine",
            },
            published={"in_place": "about 0.05", "selective@32": "about 0.80", "erratum": "strongest"},
        ),
        ScatterView(
            "evidence-diagonal",
            "Recovery of each arm on the composed against the recomputed cache, one point for each model",
            ("arm",),
            "recomputed_recovery",
            "composed_recovery",
            ("recomputed", "composed"),
            ((-0.2, 1.4), (-0.2, 1.4)),
            diagonal=True,
        ),
    ),
)

HORIZON = Study(
    "horizon",
    "A field that changes every turn",
    "One evolving cache over 28 turns, with a correcting line each turn. With field+erratum the field is refreshed "
    "in place too, and compared with a prefill of the ids as they stand; what is only appended, with one forward.",
    (
        TableView(
            "Trajectories",
            ("arm",),
            {
                "agrees": "as full",
                "correct": "right",
                "full_correct": "full right",
                "cosine": "cosine",
                "kl": "KL, nats",
                "error": "largest error of logits",
                "control": "control",
            },
            published={"field+erratum": "cosine 0.987 to 0.999, agreement 0.79 to 0.99, full right 0.52 to 0.82"},
        ),
        CurveView(
            "evidence-horizon-cosine",
            "Cosine of logits with a full prefill, by turn",
            "turn",
            "cosine",
            ("turn", "cosine"),
            span=(0.9, 1.0),
            where={"arm": "field+erratum"},
        ),
        CurveView(
            "evidence-horizon",
            "Agreement of decisions with a full prefill, by turn",
            "turn",
            "agrees",
            ("turn", "agreement"),
            where={"arm": "field+erratum"},
        ),
    ),
)
