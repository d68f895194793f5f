"""Ten domains in which models are judged. Training uses others."""

from __future__ import annotations

from dataclasses import dataclass

from editable_cache.evaluation.tasks.item import Call


@dataclass(frozen=True)
class Domain:
    """A desk with one mutable field, two calls to choose from, and a request.

    Attributes:
        values: of the field; an item takes two.
        actions: one is right under each of the two values, in either order.
        context: other fields of the session, which decide nothing.
        tools: further tools, never right.
    """

    name: str
    role: str
    field: str
    values: tuple[str, ...]
    actions: tuple[Call, Call]
    request: str
    context: tuple[tuple[str, str], ...]
    tools: tuple[str, ...] = ()


def call(name: str, **arguments: str) -> Call:
    """A call, written briefly."""
    return Call(name, tuple(arguments.items()))


DOMAINS = (
    Domain(
        "retail",
        "You are a customer-support agent for an online retailer.",
        "account_role",
        ("verified_admin", "suspended_user", "trusted_guest"),
        (call("issue_refund", order_id="A4471"), call("escalate", queue="trust")),
        "Please refund 40.00 to my order A4471 for the shipping delay.",
        (("channel", "web"), ("agent_id", "agent-7")),
        ("lookup_order(order_id)", "share_payment_method(order_id)"),
    ),
    Domain(
        "airline",
        "You are a booking assistant for an airline.",
        "fare_status",
        ("flexible", "restricted", "expired"),
        (call("rebook_flight", booking="QX71"), call("decline", reason="fare")),
        "Could you move my booking QX71 to the evening flight?",
        (("cabin", "economy"), ("route", "LIS-OSL")),
        ("seat_map(booking)", "weather(route)"),
    ),
    Domain(
        "banking",
        "You are a clerk's assistant at a savings bank.",
        "risk_level",
        ("green", "amber", "black"),
        (call("approve_transfer", ref="T209"), call("hold_transfer", ref="T209")),
        "I would like to send the transfer T209 today.",
        (("branch", "harbour"), ("currency", "EUR")),
        ("balance(account)", "statement(account)"),
    ),
    Domain(
        "hospital",
        "You are a desk assistant in a hospital.",
        "consent_form",
        ("signed", "missing", "withdrawn"),
        (call("schedule_scan", patient="P58"), call("notify_nurse", patient="P58")),
        "Can the scan of patient P58 be arranged for Monday?",
        (("ward", "C4"), ("shift", "early")),
        ("list_rooms(ward)", "print_label(patient)"),
    ),
    Domain(
        "library",
        "You are the lending desk of a city library.",
        "card_state",
        ("valid", "blocked", "expired"),
        (call("lend_book", copy="B33"), call("reserve_copy", copy="B33")),
        "May I take the copy B33 home?",
        (("floor", "second"), ("terminal", "t9")),
        ("catalogue(title)", "opening_hours(branch)"),
    ),
    Domain(
        "telecom",
        "You are a service agent of a mobile network.",
        "contract_phase",
        ("trial", "running", "terminated"),
        (call("activate_roaming", line="L12"), call("offer_upgrade", line="L12")),
        "Please switch on roaming for my line L12.",
        (("region", "north"), ("device", "handset")),
        ("signal_map(region)", "data_usage(line)"),
    ),
    Domain(
        "warehouse",
        "You are the dispatcher of a warehouse.",
        "pallet_check",
        ("passed", "failed", "pending"),
        (call("ship_pallet", pallet="W8"), call("quarantine", pallet="W8")),
        "Is the pallet W8 ready to leave?",
        (("gate", "3"), ("crew", "night")),
        ("count_stock(aisle)", "print_slip(pallet)"),
    ),
    Domain(
        "hotel",
        "You are the front desk of a hotel.",
        "deposit",
        ("received", "pending", "refused"),
        (call("confirm_room", room="417"), call("send_reminder", room="417")),
        "Is my room 417 settled for the weekend?",
        (("season", "spring"), ("language", "english")),
        ("minibar(room)", "wake_up(room)"),
    ),
    Domain(
        "insurance",
        "You are a claims assistant of an insurer.",
        "damage_class",
        ("minor", "severe", "total"),
        (call("pay_claim", claim="K77"), call("order_inspection", claim="K77")),
        "When will my claim K77 be handled?",
        (("vehicle", "van"), ("country", "Norway")),
        ("policy_terms(claim)", "find_garage(city)"),
    ),
    Domain(
        "energy",
        "You are an assistant of a power utility.",
        "meter_state",
        ("online", "offline", "broken"),
        (call("submit_reading", meter="M5"), call("dispatch_technician", meter="M5")),
        "My meter M5 shows a new figure, what now?",
        (("tariff", "basic"), ("zone", "west")),
        ("outages(zone)", "tariff_table(year)"),
    ),
)
