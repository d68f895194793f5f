"""How the probes are shown."""

from __future__ import annotations

from editable_cache.evaluation.report.views import CurveView, DotView, Study, TableView

_PLAIN = {"measure": "recovery"}

MECHANISM = Study(
    "mechanism",
    "Which tokens hold the notes",
    "Cells of one prompt are put into the cache of another whose right answer differs; recovery is the share of the "
    "way from the one decision to the other. Only items that the model decides right in every prompt of a pair.",
    (
        TableView(
            "The field's own cells, and those behind it",
            ("task", "arm"),
            {"value": "recovery"},
            {"probe": "locality", "arm": ("field_only", "downstream_only", "field+downstream"), **_PLAIN},
            {
                "gated field_only": "-0.028 to 0.137",
                "gated downstream_only": "1.0",
                "two_hop field_only": "-0.012 to 0.006",
                "two_hop downstream_only": "1.00",
                "free_form field_only": "-0.012 to 0.054",
                "free_form downstream_only": "1.00",
                "lookup field_only": "0.25 to 0.63",
            },
        ),
        DotView(
            "evidence-locality",
            "Recovery from the field's own cells and from those behind it (published: Llama-3.1-8B, multi-hop worst)",
            ("task", "arm"),
            "value",
            "recovery",
            (-0.25, 1.25),
            {"probe": "locality", "arm": ("field_only", "downstream_only"), **_PLAIN},
            {"gated field_only": -0.028, "gated downstream_only": 1.0, "two_hop downstream_only": 1.0},
        ),
        CurveView(
            "evidence-suffix",
            "Recovery against the number of patched tokens behind the field",
            "x",
            "value",
            ("tokens", "recovery"),
            ("arm",),
            (-0.1, 1.2),
            {
                "probe": "suffix",
                "task": "gated",
                "arm": ("from_field", "from_end", "by_effect"),
                **_PLAIN,
            },
            logarithmic=True,
        ),
        TableView(
            "Few positions against random ones",
            ("task", "arm", "x"),
            {"value": "recovery"},
            {"probe": "specificity", "x": (8, 16), **_PLAIN},
            {
                "gated top 8": "0.74 to 0.79, 0.95",
                "gated random 8": "at most 0.035, 0.5",
                "gated top 16": "0.86 to 0.92",
                "gated random 16": "0.04 to 0.06",
            },
        ),
        TableView(
            "Dissociation, injection, scrubbing",
            ("probe", "task", "arm", "measure"),
            {"value": "mean"},
            {"probe": ("dissociation", "injection", "scrubbing")},
            {
                "dissociation exchanged trigger_only recovery": "-0.007 to 0.007",
                "dissociation exchanged notes recovery": "0.998 to 1.009",
                "injection gated all_notes recovery": "0.98 to 1.02",
                "injection gated all_notes follows": "1.0",
                "scrubbing exchanged same_conclusion drift": "0.02 to 0.04",
                "scrubbing exchanged same_conclusion cosine": "0.999 to 1.000",
                "scrubbing exchanged opposite_note recovery": "0.68 to 0.82",
                "scrubbing exchanged opposite_rest recovery": "0.18 to 0.32",
            },
        ),
        TableView(
            "Positions made stale again",
            ("arm", "x", "measure"),
            {"value": "mean"},
            {"probe": "knockout", "x": (1, 8, 32)},
        ),
        TableView(
            "Heads that read",
            ("arm", "x"),
            {"value": "recovery"},
            {"probe": "heads", "pair": "rule", "x": (1, 3, 5, 8, 12), **_PLAIN},
            {
                **{
                    f"{arm} {count}": figure
                    for arm in ("top_same_item", "top_of_other_domains")
                    for count, figure in ((1, "0.19"), (3, "0.45"), (5, "0.59"), (8, "0.70"), (12, "0.72 to 0.82"))
                },
                "random 12": "0.00",
            },
        ),
        CurveView(
            "evidence-decoded",
            "Accuracy of a linear probe for the conclusion on held-out domains, by layer",
            "x",
            "value",
            ("layer", "accuracy"),
            ("arm",),
            (0.3, 1.0),
            {"probe": "timing", "measure": "accuracy", "arm": lambda arm: str(arm).startswith("clause at ")},
        ),
        CurveView(
            "evidence-direction",
            "One direction at an aggregator",
            "x",
            "value",
            ("layer", "recovery"),
            ("arm",),
            (-0.2, 1.1),
            {"probe": "direction", **_PLAIN},
        ),
        TableView(
            "What writes",
            ("arm", "measure"),
            {"value": "mean"},
            {"probe": "writing", "arm": ("attention_below_top_cell", "top_cell")},
            {"attention_below_top_cell share": "0.42 to 0.92"},
        ),
    ),
)
