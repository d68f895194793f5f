"""A zoo of tiny random models: every causal-LM and image-text model type of the installed transformers.

A type that a newer transformers brings is built by the general rule of `configs`, without code here.
"""

from __future__ import annotations

from editable_cache.testing.zoo.building import ZooError, build, ids_for, model_types, variants

__all__ = ["ZooError", "build", "ids_for", "model_types", "variants"]
