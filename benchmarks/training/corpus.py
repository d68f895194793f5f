"""What the gatekeepers are trained on: other domains, values, calls and wordings than those that judge them.

Plain text only. An example may hold a later line that updates the field (``updates``): large models know such lines
from pretraining, small ones do not. No example was ever made with an edited or spliced cache.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from editable_cache.evaluation.tasks import KINDS, Call, Domain, Draw, Item, Phrases, Section

ROLES = (
    "You help the staff of a bicycle workshop.",
    "You are the assistant of a theatre's ticket office.",
    "You sort requests for a university registry.",
    "You work at the counter of a post office.",
    "You are the planner of a farm cooperative.",
    "You answer tenants of a housing association.",
    "You are a helper in a chemistry laboratory.",
    "You run the desk of a sports club.",
    "You support the crew of a ferry line.",
    "You are a recruiter's assistant at a software firm.",
    "You take orders for a bakery.",
    "You coordinate volunteers of a museum.",
)
FIELDS = (
    "badge_type", "ticket_class", "enrolment", "parcel_flag", "soil_report", "lease_stage", "sample_grade",
    "membership", "sea_state", "candidate_step", "oven_mode", "visitor_group", "lamp_colour", "queue_rank",
    "permit_kind", "locker_lock", "water_level", "engine_note", "season_pass", "crate_size", "review_mark",
    "signal_code", "shelf_life", "access_key",
)  # fmt: skip
VALUES = (
    "open", "closed", "bronze", "silver", "early", "late", "wet", "dry", "public", "private", "ready", "broken",
    "full", "empty", "blue", "yellow", "left", "right", "short", "long", "fresh", "stale", "junior", "senior",
    "paid", "unpaid", "loud", "quiet", "round_one", "round_two", "type_alpha", "type_beta", "north_wing",
    "south_wing", "day_pass", "night_pass", "calm", "rough", "frozen", "warm", "locked", "loose",
)  # fmt: skip
ACTIONS = (
    ("grant_entry", "person"), ("refuse_entry", "person"), ("book_stage", "slot"), ("cancel_slot", "slot"),
    ("print_badge", "person"), ("call_manager", "desk"), ("start_pump", "tank"), ("drain_tank", "tank"),
    ("accept_lease", "flat"), ("postpone", "days"), ("mail_parcel", "code"), ("return_parcel", "code"),
    ("heat_oven", "tray"), ("open_window", "room"), ("assign_guide", "group"), ("invite_candidate", "name"),
    ("archive_file", "name"), ("repair_bike", "tag"), ("scrap_bike", "tag"), ("sail", "harbour"),
    ("stay_in_port", "harbour"), ("water_field", "plot"), ("harvest", "plot"), ("freeze_sample", "id"),
    ("discard", "id"), ("admit_student", "number"), ("waitlist", "number"), ("charge_fee", "number"),
    ("unlock_locker", "number"), ("ring_bell", "times"),
)  # fmt: skip
REQUESTS = (
    "What should happen with {x} now?",
    "Please take care of {x} today.",
    "Somebody asks about {x}, what do I do?",
    "Kindly deal with {x}.",
    "I am waiting because of {x}.",
)
CONTEXT = (("desk", "2"), ("hour", "ten"), ("city", "Graz"), ("team", "b"), ("line", "7"), ("mood", "fine"))
TOOLS = ("show_map(city)", "list_staff(team)", "read_manual(page)", "check_clock(zone)", "find_key(name)")

TRAINED = Phrases(
    opening=(
        "{role}\n\nCURRENT DATA\n",
        "{role}\nRecord:\n",
        "{role}\n\n## State\n",
    ),
    entry="{key}: {value}\n",
    policy=("\nHANDBOOK\n", "\nHouse rules follow; keep to them.\n", "\n## Regulations\n"),
    rules=(
        "MAIN RULE: When {field} equals {v1}, use {a1}. When {field} equals {v2}, use {a2}.\n",
        "Important: with {field} {v1} the next step is {a1}; with {field} {v2} the next step is {a2}.\n",
        "Decision rule. {field} = {v1} requires {a1}. {field} = {v2} requires {a2}.\n",
        "If the record says {field} is {v1}, choose {a1}. If it says {v2}, choose {a2}, nothing more.\n",
        "For {field} {v2} do {a2}. For {field} {v1} do {a1}.\n",
    ),
    trigger_rules=(
        "MAIN RULE: When {field} equals {v1}, use {a1}. Otherwise use {a2}.\n",
        "Important: with {field} {v1} the next step is {a1}; in all other cases it is {a2}.\n",
        "If the record says {field} is {v1}, choose {a1}. If it says anything else, choose {a2}.\n",
    ),
    two_hop_classes=(
        "Lists: {field} {v1} is on {g1}; {field} {v2} is on {g2}.\n",
        "A {field} of {v2} counts as {g2}, a {field} of {v1} counts as {g1}.\n",
    ),
    two_hop_rules=(
        "MAIN RULE: {g1} requires {a1}; {g2} requires {a2}.\n",
        "Everything in {g2} gets {a2}. Everything in {g1} gets {a1}.\n",
    ),
    groups=(("list_one", "list_two"), ("set_red", "set_black"), ("desk_left", "desk_right"), ("plan_k", "plan_m")),
    notes=(
        "A colleague tells me that the {field} is {value} today.\n",
        "As far as I see, {field} has been {value} since this morning.\n",
        "So, the {field} here is {value}, just so you know.\n",
    ),
    spoken_rules=(
        "You know the habit: {field} {v1} means {a1}, while {field} {v2} means {a2}.\n",
        "People with a {field} of {v1} get {a1}, and those with {v2} get {a2}.\n",
    ),
    memory=("PROFILE\n", "What we know:\n"),
    definition=("The deciding entry is {field}.\n", "Look at the entry {field} to decide.\n"),
    memory_rules=(
        "MAIN RULE: deciding entry {v1}: use {a1}; deciding entry {v2}: use {a2}.\n",
        "When the deciding entry is {v1}, choose {a1}. When it is {v2}, choose {a2}.\n",
    ),
    neutral=(
        "Wear the uniform on public days.",
        "Greet everybody by name if you can.",
        "Write numbers in digits.",
        "Paper goes into the blue bin.",
        "The coffee machine is cleaned at four.",
        "Close the shutters when it rains.",
        "Keep a copy of each letter.",
        "Guests sign the visitors' book.",
        "Do not discuss wages at the counter.",
        "Complaints are read by the head of the house.",
        "Spare keys hang in the cupboard.",
        "Breaks last a quarter of an hour.",
        "Speak slowly on the telephone.",
        "Old posters are taken down on Fridays.",
        "Report broken lamps to the caretaker.",
        "Use the side door after eight.",
        "Tidy the tables before leaving.",
        "Prices include the usual tax.",
        "A first-aid box hangs beside the lift.",
        "Newspapers are kept for a week.",
        "Plants are watered twice a week.",
        "The printer needs thick paper for cards.",
        "Lost items go to the box in the hall.",
        "Meetings start on the hour.",
    ),
    tools=("\nYou can call\n", "\n## Calls\n", "\nPossible steps\n"),
    conversation=(
        "\nMESSAGES\ncaller: {request}\nyou: One moment.\n\n",
        "\nRequest: {request}\n\n",
        "\n## Dialogue\nguest: {request}\nyou: I am looking it up.\n\n",
    ),
    task=("QUESTION\nWhich call comes next? ", "NOW\nName the next call. ", "TASK\nChoose one call. "),
    line_format="Write one line: tool_call: <name>(<args>)",
    json_format='Write one JSON function call: {{"name": ..., "arguments": ...}}',
    lookup=(
        "QUESTION\nWhat is {field} now? Write one line: answer: <value>",
        "NOW\nGive the value of {field}. Write one line: answer: <value>",
    ),
    direct="\nAnswer at once.",
    cot="\nThink in one line first.",
)

UPDATES = (
    "Correction: {field} is {value} now.\n",
    "News from the desk: the {field} was set to {value} a minute ago, so the entry above is out of date.\n",
    "{field} -> {value} (replaces what stood there)\n",
    "Please note: {field} became {value} in the meantime.\n",
    "* change of record: {field} = {value} *\n",
    "Later entry.\n{field}: {value}\n",
    "Forget the old {field}; it is {value} from now on.\n",
    "UPDATE {field}: {value}. Whatever was concluded before is void.\n",
)
"""Wordings of an update; those that judge are others."""

SHARES = {"gated": 8, "trigger": 3, "two_hop": 3, "free_form": 2, "tool_call": 3, "lookup": 2, "cross_reference": 3}


@dataclass(frozen=True)
class Example:
    """An item, the value that its text gives last, and where in the text an update stands."""

    item: Item
    value: str


def example(
    rng: random.Random,
    *,
    updates: bool,
    neutral: int,
    direct: float = 2 / 3,
    gated: float = 0.0,
    any_order: bool = False,
) -> Example:
    """One training example.

    Args:
        updates: whether four in ten examples hold an update (half of them back to the value the field had at first).
        neutral: how many rules decide nothing.
        direct: share of examples without a chain of thought.
        gated: share that is of this kind before the others are drawn by ``SHARES``.
        any_order: the sections in any order, so that the field stands behind its rule as often as before it.
    """
    fields = rng.sample(FIELDS, 1)
    values = tuple(rng.sample(VALUES, 2))
    (first, argument), (second, other) = rng.sample(ACTIONS, 2)
    thing = f"{rng.choice('BCDFGHJKLMNPRSTVWZ')}{rng.randint(2, 99)}"
    domain = Domain(
        name="training",
        role=rng.choice(ROLES),
        field=fields[0],
        values=values,
        actions=(Call(first, ((argument, thing),)), Call(second, ((other, thing),))),
        request=rng.choice(REQUESTS).format(x=thing),
        context=tuple(rng.sample(CONTEXT, 2)),
        tools=tuple(rng.sample(TOOLS, 2)),
    )
    old, new = rng.sample(values, 2)
    draw = Draw(
        rng=rng,
        domain=domain,
        phrases=TRAINED,
        mode="direct" if rng.random() < direct else "cot",
        neutral=neutral,
        swap=rng.random() < 0.5,
        old=old,
        new=new,
    )
    kind = "gated" if rng.random() < gated else rng.choices(list(SHARES), list(SHARES.values()))[0]
    item = KINDS[kind](draw)
    if any_order:
        item = replace(item, sections=tuple(rng.sample(item.sections, len(item.sections))))
    if not updates or rng.random() < 0.6:
        return Example(item, old)
    stated = [new] if rng.random() < 0.75 else [new, old]
    lines = "".join(rng.choice(UPDATES).format(field=item.field, value=value) for value in stated)
    sections = [*item.sections]
    field = next(place for place, section in enumerate(sections) if "{" + item.field + "}" in section.text)
    place = len(sections) if rng.random() < 0.8 else rng.randint(field + 1, len(sections))
    sections.insert(place, Section("update", lines))
    return Example(replace(item, sections=tuple(sections)), stated[-1])


def text_of(found: Example) -> tuple[str, str, str]:
    """``(context, question, completion)``: the field keeps its first value in the context."""
    return found.item.context(found.item.old), found.item.question, found.item.completion(found.value)
