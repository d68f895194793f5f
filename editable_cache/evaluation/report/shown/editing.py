"""How studies of edits are shown, of caches and of weights."""

from __future__ import annotations

from editable_cache.evaluation.report.views import CurveView, DotView, ScatterView, ShareView, Study, TableView

GATE = Study(
    "gate",
    "Which models decide",
    "Plain full prefills, no edit anywhere; old value, new value, and the old value with a line behind the context "
    "that updates it. Short and long policies, in domains and wordings that no model was trained on.",
    (
        TableView(
            "Full prefills",
            ("task", "mode", "key#3"),
            {"old": "old value", "new": "new value", "update": "old value and an update"},
            {"arm": "gate"},
            heads={"key#3": "neutral rules"},
        ),
    ),
)

FRONTIER = Study(
    "frontier",
    "The edit frontier",
    "A context is read with a field's old value; then the field changes, each arm does what it does, and the model "
    "decides. Right is the new value's answer. Share is of all tokens of the prompt. Published: Qwen3-8B, 8 tasks "
    "(table 6), with a chain of thought figure 2c.",
    (
        TableView(
            "Arms, answering at once and behind a chain of thought",
            ("set", "arm"),
            {
                "correct": "right",
                "agrees": "as full",
                "recovery": "recovery",
                "p_correct": "P(correct)",
                "cosine": "cosine",
                "share": "share of tokens",
                "generated": "generated",
            },
            {"arm": lambda arm: arm != "gate", "set": ("direct", "cot", "")},
            {
                "direct stale": "0.00 at 0 %",
                "direct in_place": "0.00 at 0.6 %",
                "direct cacheblend@15%": "0.13 at 14.5 %",
                "direct erratum": "1.00 at 12.0 %",
                "direct field+erratum": "1.00 at 12.6 %",
                "direct hoist": "1.00 at 5.2 %",
                "direct full": "1.00 at 100 %",
                "cot in_place": "1.00",
            },
        ),
        ShareView(
            "Right by domain, answering at once",
            ("domain",),
            "arm",
            ("stale", "in_place", "selective@64", "cacheblend@15%", "erratum", "field+erratum", "full"),
            "correct",
            {"set": ("direct", ""), "mode": "direct"},
        ),
        DotView(
            "evidence-frontier",
            "Right decisions, answering at once (published: Qwen3-8B)",
            ("arm",),
            "correct",
            "right",
            where={"arm": lambda arm: arm != "gate", "set": ("direct", "")},
            published={
                "stale": 0.0,
                "in_place": 0.0,
                "cacheblend@15%": 0.13,
                "erratum": 1.0,
                "field+erratum": 1.0,
                "hoist": 1.0,
                "full": 1.0,
            },
        ),
        DotView(
            "evidence-chain",
            "Right decisions behind a chain of thought (published: Qwen3-8B)",
            ("arm",),
            "correct",
            "right",
            where={"arm": lambda arm: arm != "gate", "set": "cot"},
            published={"in_place": 1.0, "erratum": 1.0, "field+erratum": 1.0, "full": 1.0},
        ),
        ScatterView(
            "evidence-cost",
            "Cost and correctness, one point for each model",
            ("arm",),
            "share",
            "correct",
            ("share of the prompt's tokens that ran", "right"),
            where={
                "arm": ("stale", "in_place", "selective@32", "cacheblend@15%", "erratum", "field+erratum", "hoist"),
                "set": ("direct", ""),
            },
        ),
        CurveView(
            "evidence-sweep",
            "The field and the K tokens of largest causal effect",
            "arm@",
            "correct",
            ("K", "right"),
            where={"arm": lambda arm: str(arm).startswith("selective@"), "set": ("direct", "")},
            logarithmic=True,
        ),
        TableView(
            "One window against chosen tokens, the rule near the field and far from it",
            ("set", "arm"),
            {"recovery": "recovery", "correct": "right", "share": "share of tokens"},
            {"arm": lambda arm: arm != "gate", "set": ("near", "far")},
        ),
        TableView(
            "Wordings of the line",
            ("set", "arm"),
            {"correct": "right", "p_correct": "P(correct)", "recovery": "recovery"},
            {"arm": lambda arm: arm != "gate", "set": ("wordings", "wordings-cot")},
            {
                "wordings erratum:bare": "about 1.0",
                "wordings erratum:tagged": "about 1.0",
                "wordings erratum:erratum": "about 1.0",
                "wordings erratum:confrontational": "0.81",
            },
        ),
        TableView(
            "Other tasks",
            ("set", "arm"),
            {"correct": "right", "recovery": "recovery", "share": "share of tokens"},
            {
                "arm": lambda arm: arm != "gate",
                "set": lambda name: name not in ("direct", "cot", "", "near", "far", "wordings", "wordings-cot"),
            },
        ),
    ),
)

WEIGHTS = Study(
    "weights",
    "Editing the cache against editing the weights",
    "Each arm must turn the decision of one request. Then eight requests of the same policy whose field did not change,"
    " and ten unrelated decisions, are asked again, for every arm. Published: Llama-3.1-8B, one item.",
    (
        TableView(
            "Arms beside each other",
            ("arm",),
            {
                "flips": "turns the decision",
                "cpu_seconds": "processor seconds for an edit",
                "seconds": "seconds for an edit",
                "reading": "seconds to the answer after it",
                "contamination": "other requests turned",
                "collateral": "unrelated answers changed",
                "restored": "weights restored",
            },
            {"kind": "arm", "eligible": True},
            {
                "field+erratum": "turns; 0.114 s; 0; 0",
                "in_place": "does not; 0.071 s; 0; 0",
                "ROME": "turns; 5.6 s (and 11.6 s once); 1.0; 0.5",
                "LoRA": "turns; 3.1 s; 1.0; 0.5",
            },
        ),
        DotView(
            "evidence-contamination",
            "Other requests whose field did not change, and whose decision turned (published: one item)",
            ("arm",),
            "contamination",
            "share turned",
            where={"kind": "arm", "eligible": True},
            published={"field+erratum": 0.0, "in_place": 0.0, "ROME": 1.0, "LoRA": 1.0},
        ),
        DotView(
            "evidence-collateral",
            "Unrelated decisions whose answer changed (published: one item)",
            ("arm",),
            "collateral",
            "share changed",
            where={"kind": "arm", "eligible": True},
            published={"field+erratum": 0.0, "in_place": 0.0, "ROME": 0.5, "LoRA": 0.5},
        ),
    ),
)

FACTS = Study(
    "rome_facts",
    "Does ROME work here?",
    "Facts that the model knows are rewritten one at a time to another object of their relation. Efficacy: the new "
    "object is likelier than the true one; said: it is the first choice. Neighbours: other subjects keep theirs.",
    (
        TableView(
            "Facts",
            ("arm",),
            {
                "efficacy": "efficacy",
                "said": "said",
                "paraphrase": "other wordings",
                "neighbourhood": "neighbours keep theirs",
                "neighbours_said": "neighbours' own first",
                "seconds": "seconds",
            },
            {"kind": "edit"},
        ),
    ),
)
