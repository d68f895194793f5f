"""The sweep: what the library proves, or refuses, on a tiny model of every model type of the installed transformers.

``certify(name)`` examines one type of the zoo against stock references and shows in the same run that wrong answers
would be seen. ``python -m editable_cache.testing.sweep`` does it for all of them.
"""

from __future__ import annotations

from editable_cache.testing.sweep.certify import certify
from editable_cache.testing.sweep.row import Row, TensorFacts

__all__ = ["Row", "TensorFacts", "certify"]
