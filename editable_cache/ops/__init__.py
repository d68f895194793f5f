"""Pure tensor operations on cells: torch only, no model, no transformers."""

from editable_cache.ops.checksum import checksum
from editable_cache.ops.compare import LOW_PRECISION, relative_error
from editable_cache.ops.rotate import Rotation, rotate_into, rotation

__all__ = ["LOW_PRECISION", "Rotation", "checksum", "relative_error", "rotate_into", "rotation"]
