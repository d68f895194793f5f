"""Rebuild the oracles from the ledger and say how far the cache is from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from editable_cache.adapters import host, model_spec
from editable_cache.cache import LedgeredCache
from editable_cache.cache.ledger import Isolated
from editable_cache.errors import LedgerError, SpanError
from editable_cache.forward import run
from editable_cache.ops import LOW_PRECISION, relative_error, rotate_into, rotation


@dataclass(frozen=True)
class Verification:
    """How far a cache is from what its ledger says it should hold, and from a plain prefill.

    Attributes:
        live_error: largest relative K/V error of cells that saw everything before them, against a forward in which
            all other cells keep what they hold (the CELLS oracle).
        isolated_error: largest relative K/V error of cells of spliced chunks, against the chunk run alone at its
            place (the ISO oracle); 0 without any.
        logits_error: largest relative error of the next-token logits, against the same forward.
        stale_tokens: tokens whose cells were computed before something in front of them changed; no oracle exists for
            them.
        full_cosine: cosine between the next-token logits of this cache and those of a plain prefill of the same ids
            (FULL).
        full_kl: Kullback-Leibler divergence of the same, in nats, from the plain prefill's distribution.
        full_agrees: whether both have the same most likely token.
        tolerance: what counts as equal.
    """

    live_error: float
    isolated_error: float
    isolated_drift: float
    logits_error: float
    stale_tokens: int
    full_cosine: float
    full_kl: float
    full_agrees: bool
    tolerance: float

    @property
    def ok(self) -> bool:
        """Whether every cell that has an oracle equals it."""
        isolated = self.isolated_error <= max(self.tolerance, 3 * self.isolated_drift)
        return isolated and max(self.live_error, self.logits_error) <= self.tolerance

    def __str__(self) -> str:
        return (
            f"{'ok' if self.ok else 'WRONG'}: live cells {self.live_error:.1e}, isolated cells "
            f"{self.isolated_error:.1e}, logits {self.logits_error:.1e} (tolerance {self.tolerance:.0e}); "
            f"{self.stale_tokens} stale tokens without an oracle; to a plain prefill: cosine {self.full_cosine:.4f}, "
            f"KL {self.full_kl:.1e}, top token {'same' if self.full_agrees else 'differs'}"
        )


class _Substituting(DynamicLayer):
    """Takes the cache's cell where ``held`` says so and what the forward computes elsewhere."""

    def __init__(self, cached: dict[str, Tensor], held: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cached, self._held = cached, held
        self.computed: dict[str, Tensor] = {}

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.computed = {"keys": key_states, "values": value_states}
        held = self._held[:, None, :, None]
        keys = torch.where(held, self._cached["keys"], key_states)
        values = torch.where(held, self._cached["values"], value_states)
        return super().update(keys, values)


@torch.no_grad()
def verify(cache: LedgeredCache, tolerance: float | None = None) -> Verification:
    """Compare every cell with its oracle; see ``EditableCache.verify``. Changes nothing."""
    cache.require_idle("verify")
    cache.adopt()
    cache.require_editable("verify")
    run.require_model(cache, "verify")
    ledger = cache.ledger
    if not len(ledger):
        raise SpanError("verify: expected at least one token in the cache, got none.")
    if not ledger.ids_known:
        raise LedgerError(
            "verify: some ids are unknown (tokens that the watched model did not see), so no oracle can be run."
        )
    tolerance = tolerance if tolerance is not None else (5e-2 if cache.dtype in LOW_PRECISION else 1e-4)
    stale = torch.zeros(len(ledger), dtype=torch.bool)
    for span in ledger.stale:
        stale[span.start : span.stop] = True
    held = (ledger.groups != 0) | stale
    layers = [_Substituting(layer.view(), held.to(layer.device)) for layer in cache.editable_layers]
    logits = _prefill(cache, layers)
    checked = ~held & ledger.valid
    live = max(
        (
            _worst(layer.computed, mine.view(), checked)
            for layer, mine in zip(layers, cache.editable_layers, strict=True)
        ),
        default=0.0,
    )
    mine = run.next_token_logits(cache).float() if not bool(held[:, -1].any()) else logits
    full, isolation = _prefill(cache, None), _isolation(cache)
    kl = (full.log_softmax(-1).exp() * (full.log_softmax(-1) - mine.log_softmax(-1))).sum(-1)
    return Verification(
        live_error=live,
        isolated_error=isolation.error,
        isolated_drift=isolation.drift,
        logits_error=relative_error(mine.to(cache.dtype), logits),
        stale_tokens=int(stale.sum()),
        full_cosine=float(torch.cosine_similarity(mine, full, dim=-1).min()),
        full_kl=float(kl.max().clamp_min(0)),
        full_agrees=bool((mine.argmax(-1) == full.argmax(-1)).all()),
        tolerance=tolerance,
    )


def _prefill(cache: LedgeredCache, layers: Any) -> Tensor:
    """One forward over everything in the ledger in a fresh cache; float32 logits after the last token, ``[batch,
    vocab]``.
    """
    model, ledger = run.require_model(cache, "verify"), cache.ledger
    fresh = DynamicCache()
    if layers is not None:
        fresh.layers, fresh.layer_class_to_replicate = layers, None
    mask = None if bool(ledger.valid.all()) else ledger.valid.long()
    logits = host.run(
        model,
        ledger.ids.masked_fill(~ledger.valid, 0),
        fresh,
        position_ids=ledger.positions,
        attention_mask=mask,
        last_logits_only=True,
    )
    return logits[:, -1].float()


def _worst(computed: dict[str, Tensor], stored: dict[str, Tensor], checked: Tensor) -> float:
    worst = 0.0
    for name, tensor in computed.items():
        here = checked.to(tensor.device)[:, None, :, None].expand_as(tensor)
        if bool(here.any()):
            worst = max(worst, relative_error(stored[name][here], tensor[here]))
    return worst


class _Isolation(NamedTuple):
    error: float
    drift: float


def _isolation(cache: LedgeredCache) -> _Isolation:
    """Cells of isolated chunks against a fresh run of each chunk at its place; and how far the model itself changes the
    values of such a chunk, which do not rotate, between the place where it was compiled and this one.
    """
    ledger, error, drift = cache.ledger, 0.0, 0.0
    for row in range(ledger.batch):
        for group, chunk in enumerate(ledger.chunks, start=1):
            slots = (ledger.groups[row] == group).nonzero()[:, 0]
            shifts = ledger.positions[row, slots] - ledger.offsets[row, slots]
            for shift in shifts.unique().tolist():
                mine = slots[shifts == shift]
                here, home = _alone(cache, chunk, shift), _alone(cache, chunk, len(chunk.prefix_ids))
                for layer, alone, compiled in zip(cache.editable_layers, here, home, strict=True):
                    view = layer.view()
                    for name, tensor in alone.items():
                        expected = tensor[0][:, ledger.offsets[row, mine]]
                        error = max(error, relative_error(view[name][row][:, mine], expected))
                    drift = max(drift, relative_error(compiled["values"], alone["values"]))
    return _Isolation(error, drift)


def _alone(cache: LedgeredCache, chunk: Isolated, shift: int) -> list[dict[str, Tensor]]:
    """Cells of a chunk run alone with its first token at position ``shift``, after what it had seen when it was
    compiled.
    """
    model, before = run.require_model(cache, "verify"), len(chunk.prefix_ids)
    first = max(shift - before, 0)
    ids = torch.tensor([*chunk.prefix_ids, *chunk.ids])[None]
    positions = torch.arange(first, first + ids.shape[1])
    fresh = DynamicCache()
    host.run(model, ids, fresh, position_ids=positions[None], last_logits_only=True)
    cells = [{"keys": k[:, :, before:], "values": v[:, :, before:]} for k, v in host.plain_layers(fresh)]
    back = shift - before - first  # below 0 only where what it had seen does not fit before it
    if back:
        for states, facts in zip(cells, model_spec(model).layers, strict=True):
            for tensor in facts.tensors:
                if tensor.rotary is not None:
                    source = states[tensor.name]
                    states[tensor.name] = torch.empty_like(source)
                    turn = rotation(tensor.rotary, positions[before:], positions[before:] + back, source.device)
                    rotate_into(states[tensor.name], source, turn)
    return cells
