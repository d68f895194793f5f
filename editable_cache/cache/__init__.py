"""The seat: transformers' cache contract, storage that grows and is shared, and the ledger."""

from editable_cache.cache.layer import EditableLayer
from editable_cache.cache.ledger import UNKNOWN, Field, Ledger, Segment, Stale
from editable_cache.cache.ledgered import LedgeredCache

__all__ = ["UNKNOWN", "EditableLayer", "Field", "Ledger", "LedgeredCache", "Segment", "Stale"]
