"""The editable layer for each layer of a stock cache."""

from __future__ import annotations

from typing import Any

from editable_cache.adapters import host
from editable_cache.cache.indexed_layer import EditableIndexedLayer
from editable_cache.cache.kept_layers import KeptLayer, kept_twin
from editable_cache.cache.layer import EditableLayer
from editable_cache.cache.state_layers import EditableHybridLayer, StateLayer


def editable_twin(layer: Any, kind: host.LayerKind | None = None) -> Any:
    """An empty editable layer in the place of a stock one; the stock one itself where nothing of it can be edited.

    A sliding window is the mask's business, so the twin of a sliding layer keeps every token; not so beside compressed
    layers, which is why ``kind``, what the layer holds, may come from its cache (``host.kinds_of``).
    """
    if isinstance(layer, StateLayer):
        return type(layer)(number_of_states=layer.number_of_states)
    if isinstance(layer, EditableLayer):
        return type(layer)()
    if isinstance(layer, KeptLayer):
        return kept_twin(layer)
    kind = host.kind_of(layer) if kind is None else kind
    if kind == "plain":
        return EditableLayer()
    if kind == "indexed":
        return EditableIndexedLayer()
    if kind == "state":
        return StateLayer(number_of_states=layer.number_of_states)
    if kind == "hybrid":
        return EditableHybridLayer(number_of_states=layer.number_of_states)
    if kind == "kept":
        return kept_twin(layer)
    return layer
