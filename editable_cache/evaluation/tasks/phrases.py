"""How a task is worded. A model is judged in wordings that it was not trained on, so wordings are data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Phrases:
    """Wordings of the parts of a prompt; of a tuple, each item takes one.

    Braces name what is filled in: ``{field}``, ``{value}``, ``{v1}``, ``{v2}`` (the two values), ``{a1}``, ``{a2}``
    (the calls they lead to), ``{g1}``, ``{g2}`` (groups between value and call).
    """

    opening: tuple[str, ...]
    entry: str
    policy: tuple[str, ...]
    rules: tuple[str, ...]
    trigger_rules: tuple[str, ...]
    two_hop_classes: tuple[str, ...]
    two_hop_rules: tuple[str, ...]
    groups: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    spoken_rules: tuple[str, ...]
    memory: tuple[str, ...]
    definition: tuple[str, ...]
    memory_rules: tuple[str, ...]
    neutral: tuple[str, ...]
    tools: tuple[str, ...]
    conversation: tuple[str, ...]
    task: tuple[str, ...]
    line_format: str
    json_format: str
    lookup: tuple[str, ...]
    direct: str
    cot: str


JUDGED = Phrases(
    opening=("{role}\n\nSESSION CONTEXT\n",),
    entry="{key}: {value}\n",
    policy=("\nPOLICY DOCUMENT (read carefully; rules are binding)\n",),
    rules=(
        "ACCESS RULE (binding): If {field} is {v1}, you must call {a1}. If {field} is {v2}, you must call {a2} and "
        "nothing else.\n",
        "ACCESS RULE (binding): Whenever {field} is {v1}, respond with {a1}. Whenever {field} is {v2}, respond with "
        "{a2}.\n",
    ),
    trigger_rules=(
        "ACCESS RULE (binding): If {field} is {v1}, you must call {a1}. For any other {field}, you must call {a2}.\n",
    ),
    two_hop_classes=("CLASSES: {field} {v1} belongs to {g1}. {field} {v2} belongs to {g2}.\n",),
    two_hop_rules=("ACCESS RULE (binding): For {g1} you must call {a1}. For {g2} you must call {a2}.\n",),
    groups=(("class_north", "class_south"), ("band_amber", "band_violet"), ("tier_oak", "tier_pine")),
    notes=("Hi, a word before you start: I looked into this case and the {field} is {value} at the moment.\n",),
    spoken_rules=(
        "How we usually handle it: when the {field} is {v1} we go with {a1}, and when the {field} is {v2} we go with "
        "{a2}.\n",
    ),
    memory=("# MEMORY OF THIS USER\n",),
    definition=("Requests of this user are governed by the setting {field}.\n",),
    memory_rules=(
        "MEMORY RULE (binding): If the governing setting is {v1}, you must call {a1}. If the governing setting is "
        "{v2}, you must call {a2}.\n",
    ),
    neutral=(
        "Always confirm the customer's identity by reference number before discussing details.",
        "Keep replies brief, courteous and free of internal jargon.",
        "Log every contact in the case history before closing the session.",
        "Never promise a delivery date that the carrier has not confirmed.",
        "Use the customer's preferred language when it is known.",
        "Do not share internal notes, queue names or staff names with customers.",
        "If two requests arrive together, answer them in the order received.",
        "Offer a survey link only after the request has been completed.",
        "Round amounts to two decimals and state the currency.",
        "Record the reason code for every change to an account.",
        "Attachments larger than ten megabytes are uploaded through the portal.",
        "Quote the reference number in the first line of each reply.",
        "When a form is incomplete, ask for the missing part once.",
        "Working hours are nine to six on weekdays; outside them, say so.",
        "Photographs are stored for ninety days and then deleted.",
        "Do not guess at causes that have not been established.",
        "Repeat dates in the format day, month, year.",
        "Duplicate tickets are merged into the oldest one.",
        "Escalations carry a one-sentence summary.",
        "Outages are announced on the status page, not by mail.",
        "Polite small talk is fine, but return to the request soon.",
        "A second opinion from a colleague is noted in the file.",
        "Payment details are never repeated in full.",
        "Phone numbers are written with their country code.",
        "Feedback about the website goes to the web team.",
        "Letters are scanned on the day they arrive.",
        "Do not use exclamation marks in written answers.",
        "Mention the opening hours when a visit is suggested.",
        "Translations are checked by a native speaker.",
        "Sessions without activity end after fifteen minutes.",
    ),
    tools=("\nAVAILABLE TOOLS\n",),
    conversation=("\nCONVERSATION SO FAR\nuser: {request}\nassistant: Let me check the record and policy first.\n",),
    task=("TASK\nDecide the single next tool call. ",),
    line_format="Respond with exactly one line: tool_call: <name>(<args>)",
    json_format='Respond with exactly one JSON function call: {{"name": ..., "arguments": ...}}',
    lookup=("TASK\nState the current {field}. Respond with exactly one line: answer: <value>",),
    direct="\nAnswer at once.",
    cot="\nThink in one line first.",
)
"""The study's prompt (appendix B) and variations; no trained model has seen these sentences."""
