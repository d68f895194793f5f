"""Pure tensor operations on cells: torch only, no model, no transformers."""

from editable_cache.ops.checksum import checksum
from editable_cache.ops.rotate import Rotation, rotate_into, rotation

__all__ = ["Rotation", "checksum", "rotate_into", "rotation"]
