"""Decisions whose right answer turns with one field of the context."""

from editable_cache.evaluation.tasks.build import build
from editable_cache.evaluation.tasks.digest import digest
from editable_cache.evaluation.tasks.domains import DOMAINS, Domain, call
from editable_cache.evaluation.tasks.file import ItemFile, read_items, write_items
from editable_cache.evaluation.tasks.item import Call, Item, Mode, Section, answered
from editable_cache.evaluation.tasks.kinds import KINDS, Draw
from editable_cache.evaluation.tasks.phrases import JUDGED, Phrases

__all__ = [
    "DOMAINS",
    "JUDGED",
    "KINDS",
    "Call",
    "Domain",
    "Draw",
    "Item",
    "ItemFile",
    "Mode",
    "Phrases",
    "Section",
    "answered",
    "build",
    "call",
    "digest",
    "read_items",
    "write_items",
]
