"""Whether two sets of items ask the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict

from editable_cache.evaluation.tasks.item import Item


def digest(items: Iterable[Item], erratum: str | None = None) -> str:
    """16 hexadecimal digits of everything that items and the wording of their correcting line say (SHA-256)."""
    content = json.dumps([erratum, *map(asdict, items)], sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(content.encode()).hexdigest()[:16]
