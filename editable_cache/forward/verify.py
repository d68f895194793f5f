"""Rebuild the oracles from the ledger and say how far the cache is from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypedDict

import torch
from torch import Tensor

from editable_cache.adapters import host, measured
from editable_cache.cache import UNKNOWN, LedgeredCache
from editable_cache.cache.ledger import Isolated
from editable_cache.cache.stored import StoredCache
from editable_cache.cache.twins import editable_twin
from editable_cache.errors import LedgerError, SpanError
from editable_cache.forward import run
from editable_cache.forward.verify_states import check_prefill
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
            them. With recurrent layers, all tokens from the first composed one on: only FULL exists, for those before.
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


class _Distance(TypedDict):
    full_cosine: float
    full_kl: float
    full_agrees: bool


class _Substitution:
    """Takes the cache's cell where ``held`` says so and what the forward computes elsewhere."""

    def __init__(self, cached: dict[str, Tensor], held: Tensor) -> None:
        self._cached, self._held = cached, held
        self.computed: dict[str, Tensor] = {}

    def __call__(self, states: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        self.computed = dict(states)
        held = self._held[:, None, :, None].to(next(iter(states.values())).device)
        return {name: torch.where(held, self._cached[name], tensor) for name, tensor in states.items()}


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
    chunks = [ledger.chunks[group - 1] for group in ledger.groups.unique().tolist() if group]
    if not ledger.ids_known or any(UNKNOWN in (*chunk.prefix_ids, *chunk.ids) for chunk in chunks):
        raise LedgerError(
            "verify: some ids are unknown (cells that no token made, as in a trained prefix, or tokens that the "
            "watched model did not see), so no oracle can be run."
        )
    if bool(ledger.images.any()):
        raise LedgerError(
            "verify: some tokens stand for images, whose pixels the cache does not keep, so no oracle can be run; "
            "compare with a plain forward of ids and images."
        )
    if tolerance is None:
        dtype = cache.dtype or host.dtype_of(run.require_model(cache, "verify"))
        tolerance = 5e-2 if dtype in LOW_PRECISION else 1e-4
    if cache.state_layers:
        return _verify_states(cache, tolerance)
    stale = torch.zeros(len(ledger), dtype=torch.bool)
    for span in ledger.stale:
        stale[span.start : span.stop] = True
    held = (ledger.groups != 0) | stale
    exchanges = [_Substitution(layer.view(), held) for layer in cache.editable_layers]
    logits = _prefill(cache, exchanges)
    checked = ~held & ledger.valid
    live = max(
        (
            _worst(exchange.computed, mine.view(), checked)
            for exchange, mine in zip(exchanges, cache.editable_layers, strict=True)
        ),
        default=0.0,
    )
    mine = run.next_token_logits(cache).float() if not bool(held[:, -1].any()) else logits
    isolation = _isolation(cache)
    return Verification(
        live_error=live,
        isolated_error=isolation.error,
        isolated_drift=isolation.drift,
        logits_error=relative_error(mine.to(cache.dtype), logits),
        stale_tokens=int(stale.sum()),
        **_distance(mine, _prefill(cache)),
        tolerance=tolerance,
    )


def _verify_states(cache: LedgeredCache, tolerance: float) -> Verification:
    """Recurrent layers: no oracle substitutes single cells, so everything is held against a plain prefill."""
    found, mine = check_prefill(cache), run.next_token_logits(cache).float()
    return Verification(
        live_error=found.live_error,
        isolated_error=0.0,
        isolated_drift=0.0,
        logits_error=0.0 if found.unchecked else relative_error(mine, found.logits),
        stale_tokens=found.unchecked,
        **_distance(mine, found.logits),
        tolerance=tolerance,
    )


def _distance(mine: Tensor, full: Tensor) -> _Distance:
    """How far next-token logits are from those of a plain prefill, worst row."""
    kl = (full.log_softmax(-1).exp() * (full.log_softmax(-1) - mine.log_softmax(-1))).sum(-1)
    return {
        "full_cosine": float(torch.cosine_similarity(mine, full, dim=-1).min()),
        "full_kl": float(kl.max().clamp_min(0)),
        "full_agrees": bool((mine.argmax(-1) == full.argmax(-1)).all()),
    }


def _prefill(cache: LedgeredCache, exchanges: Sequence[_Substitution] = ()) -> Tensor:
    """One forward over everything in the ledger in a fresh cache; float32 logits after the last token, ``[batch,
    vocab]``.
    """
    model, ledger = run.require_model(cache, "verify"), cache.ledger
    fresh = _fresh(cache)
    for holder, exchange in zip(fresh.editable_layers, exchanges, strict=bool(exchanges)):
        holder.exchange = exchange
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


def _fresh(cache: LedgeredCache) -> StoredCache:
    """An empty cache of the same layout, whose forwards nobody records."""
    fresh = StoredCache(config=run.require_model(cache, "verify").config)
    fresh.layers += [editable_twin(layer) for layer in cache.layers[len(fresh.layers) :]]  # a model may add some
    return fresh


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
    spec = measured(run.require_model(cache, "verify"))
    for row in range(ledger.batch):
        for group, chunk in enumerate(ledger.chunks, start=1):
            slots = (ledger.groups[row] == group).nonzero()[:, 0]
            shifts = ledger.positions[row, slots] - ledger.offsets[row, slots]
            for shift in shifts.unique().tolist():
                mine = slots[shifts == shift]
                here, home = _alone(cache, chunk, shift), _alone(cache, chunk, len(chunk.prefix_ids))
                for layer, facts, alone, compiled in zip(cache.editable_layers, spec.layers, here, home, strict=True):
                    view = layer.view()
                    for tensor in facts.tensors:
                        expected = alone[tensor.name][0][:, ledger.offsets[row, mine]]
                        found = view[tensor.name][row][:, mine]
                        error = max(error, relative_error(found.to(_real(found)), expected.to(_real(found))))
                        if tensor.rotary is None and not tensor.counter:
                            drift = max(drift, relative_error(compiled[tensor.name], alone[tensor.name]))
    return _Isolation(error, drift)


def _real(tensor: Tensor) -> torch.dtype:
    return tensor.dtype if tensor.is_floating_point() else torch.float64


def _alone(cache: LedgeredCache, chunk: Isolated, shift: int) -> list[dict[str, Tensor]]:
    """Cells of a chunk run alone with its first token at position ``shift``, after what it had seen when it was
    compiled.
    """
    model, before = run.require_model(cache, "verify"), len(chunk.prefix_ids)
    spec = measured(model)
    first = 0 if spec.positions == "slots" else max(shift - before, 0)
    ids = torch.tensor([*chunk.prefix_ids, *chunk.ids])[None]
    positions = torch.arange(first, first + ids.shape[1])
    fresh = _fresh(cache)
    host.run(model, ids, fresh, position_ids=positions[None], last_logits_only=True)
    cells = [{name: t[:, :, before:] for name, t in holder.view().items()} for holder in fresh.editable_layers]
    back = shift - before - first  # not 0 where what it had seen does not fit before it, or positions can't be given
    if back:
        for states, facts in zip(cells, spec.layers, strict=True):
            for tensor in facts.tensors:
                if tensor.rotary is not None:
                    source = states[tensor.name]
                    states[tensor.name] = torch.empty_like(source)
                    turn = rotation(tensor.rotary, positions[before:], positions[before:] + back, source.device)
                    rotate_into(states[tensor.name], source, turn)
    return cells
