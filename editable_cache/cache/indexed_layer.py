"""`EditableIndexedLayer`: a layer with keys of an indexer (sparse attention) beside its keys and values."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from editable_cache.cache.layer import EditableLayer


class EditableIndexedLayer(EditableLayer):
    """Keys and values, and in holders of their own what an indexer stores for each token.

    A forward writes them at different times, which is why each has a length of its own. The stored form is
    ``[batch, num_heads, seq_len, head_dim]`` for all of them; transformers' form is given out.
    """

    def __init__(self, **kwargs: Any) -> None:
        self._indexer, self._positions, self._blocks = EditableLayer(), EditableLayer(), EditableLayer()
        super().__init__(**kwargs)

    @property
    def holders(self) -> tuple[EditableLayer, ...]:
        return self, self._indexer, self._positions, self._blocks

    # -- DeepSeek's sparse attention: `indexer_keys` [batch, seq_len, index_head_dim]

    @property
    def indexer_keys(self) -> Tensor | None:
        """``[batch, seq_len, index_head_dim]``, or None where this layer uses the indexer of another one."""
        stored = self._indexer.view().get("indexer_keys")
        return None if stored is None else stored[:, 0]

    @property
    def is_indexer_initialized(self) -> bool:
        """Whether an indexer has written to this layer."""
        return self._indexer.is_initialized

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Store keys of the indexer, ``[batch, num_tokens, index_head_dim]``; return all of them (a view)."""
        return self._indexer.write({"indexer_keys": indexer_key_states[:, None]})["indexer_keys"][:, 0]

    @property
    def indexer_position_ids(self) -> Tensor | None:
        """int64 ``[num_axes, batch, seq_len]``, or None where the model keeps none."""
        stored = self._positions.view().get("indexer_position_ids")
        return None if stored is None or not stored.shape[-2] else stored[..., 0].transpose(0, 1)

    @indexer_position_ids.setter
    def indexer_position_ids(self, position_ids: Tensor) -> None:
        new = position_ids[..., self._positions.length :].transpose(0, 1)[..., None]
        self._positions.write({"indexer_position_ids": new})

    # -- MiniMax M3: `idx_keys` [batch, num_heads, seq_len, index_head_dim]

    @property
    def idx_keys(self) -> Tensor | None:
        """``[batch, num_heads, seq_len, index_head_dim]``, or None."""
        return self._blocks.view().get("idx_keys")

    def update_index(self, idx_k: Tensor) -> Tensor:
        """Store keys of the block index; return all of them (a view)."""
        return self._blocks.write({"idx_keys": idx_k})["idx_keys"]

    # -- transformers' contract, for all holders

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        for side in self.holders[1:]:
            side.truncate(self.length)

    def reset(self) -> None:
        super().reset()
        for side in self.holders[1:]:
            side.reset()

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        for side in self.holders[1:]:
            side.batch_select_indices(indices)
