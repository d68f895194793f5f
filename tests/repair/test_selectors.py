"""Signals: what each may read, the registry, and every formula against one written out cell by cell."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from editable_cache.errors import LedgerError, SpanError
from editable_cache.repair import (
    CleanTrace,
    PrefillTrace,
    ProbeTrace,
    Tier0View,
    Tier1View,
    Tier2View,
    View,
    get_signal,
    list_signals,
    mask_of,
    narrowed,
    pooled,
    ranks,
    scores,
    selector,
    signal,
)
from editable_cache.repair.baselines import random_cells
from editable_cache.repair.signals_probe import sir_window

LAYERS, TOKENS = 5, 12
VIEWS = (Tier0View, Tier1View, Tier2View)
NAMES = [found.name for found in list_signals()]


def prefill_trace(num_layers: int = LAYERS, num_tokens: int = TOKENS, seed: int = 0) -> PrefillTrace:
    generator = torch.Generator().manual_seed(seed)
    arrays = [torch.rand(num_layers, num_tokens, generator=generator) + 0.01 for _ in range(6)]
    slots = torch.arange(num_tokens)
    return PrefillTrace(*arrays, slots * 7 % 5, slots + 3, slots % 4 == 1)


def probe_trace(num_layers: int = LAYERS, num_tokens: int = TOKENS, seed: int = 1) -> ProbeTrace:
    generator = torch.Generator().manual_seed(seed)
    return ProbeTrace(*(torch.rand(num_layers, num_tokens, generator=generator) for _ in range(2)))


def clean_trace(num_layers: int = LAYERS, num_tokens: int = TOKENS, seed: int = 2) -> CleanTrace:
    generator = torch.Generator().manual_seed(seed)
    return CleanTrace(*(torch.rand(num_layers, num_tokens, generator=generator) for _ in range(3)))


def everything(num_layers: int = LAYERS, num_tokens: int = TOKENS) -> Tier2View:
    size = num_layers, num_tokens
    return Tier2View(prefill_trace(*size), probe_trace(*size), clean_trace(*size))


def test_pooled_probes() -> None:
    one, two = probe_trace(seed=1), probe_trace(seed=2)
    assert torch.equal(pooled([one, two]).readout, (one.readout + two.readout) / 2)
    assert torch.equal(pooled([one, two]).attention, (one.attention + two.attention) / 2)
    assert torch.equal(pooled([one, two], "max").readout, torch.maximum(one.readout, two.readout))
    assert torch.equal(pooled([one]).readout, one.readout)
    for wrong in ([], [one, probe_trace(num_tokens=TOKENS + 1)]):
        with pytest.raises(LedgerError, match="traces of one document"):
            pooled(wrong)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, selector.Signal]:
    """A registry of its own for tests that add to it."""
    found = dict(selector._SIGNALS)
    monkeypatch.setattr(selector, "_SIGNALS", found)
    return found


# -- who may read what: attempts at more


def test_views_hold_exactly_their_tier() -> None:
    held = [[field.name for field in dataclasses.fields(view)] for view in VIEWS]
    assert held == [["prefill"], ["prefill", "probe"], ["prefill", "probe", "clean"]]
    for one in VIEWS:
        assert [other for other in VIEWS if issubclass(one, other)] == [one]


@pytest.mark.parametrize("name", NAMES)
def test_a_signal_reads_its_own_view_and_no_other(name: str) -> None:
    found, view = get_signal(name), everything()
    assert found(narrowed(view, found.tier)).shape == (LAYERS, TOKENS)
    for tier, kind in enumerate(VIEWS):
        if tier != found.tier:
            with pytest.raises(TypeError, match=rf"exactly a Tier{found.tier}View, got {kind.__name__}"):
                found(narrowed(view, tier))
    for wrong in (view.prefill, view.clean, None, {"prefill": view.prefill}):
        with pytest.raises(TypeError, match="reads"):
            found(wrong)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="reads"):
            scores(name, wrong)  # type: ignore[arg-type]


def test_nothing_can_be_smuggled_into_a_view() -> None:
    clean = clean_trace()

    class Smuggler(Tier0View):
        pass

    class Luggage(PrefillTrace):
        pass

    smuggler, view = Smuggler(prefill_trace()), Tier0View(prefill_trace())
    object.__setattr__(smuggler, "clean", clean)  # a subclass has room for it, so it is no view
    for refused in (lambda: get_signal("inflow")(smuggler), lambda: scores("inflow", smuggler)):
        with pytest.raises(TypeError, match="Smuggler"):
            refused()
    with pytest.raises(TypeError, match="exactly a PrefillTrace, got Luggage"):
        Tier0View(Luggage(**vars(prefill_trace())))
    with pytest.raises(TypeError, match="exactly a ProbeTrace, got CleanTrace"):
        Tier1View(prefill_trace(), clean)  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        object.__setattr__(view, "clean", clean)
    with pytest.raises(dataclasses.FrozenInstanceError):
        view.prefill = clean  # type: ignore[assignment, misc]


def test_a_narrowed_view_leads_nowhere_else(registry: dict[str, selector.Signal]) -> None:
    """A spy of tier 0 is handed everything the caller has, by the registry, and looks for the clean cache."""
    seen: list[object] = []
    _SPIED["seen"] = seen
    signal("spy", tier=0)(_spy)
    scores("spy", everything())
    (view,) = seen
    assert type(view) is Tier0View
    reachable = {name for name in dir(view) if not name.startswith("__")} | set(vars(view.prefill))
    assert reachable == {"prefill"} | {field.name for field in dataclasses.fields(PrefillTrace)}
    with pytest.raises(AttributeError):
        view.clean  # type: ignore[attr-defined]  # noqa: B018


_SPIED: dict[str, list[object]] = {}


def _spy(view: Tier0View) -> Tensor:
    _SPIED["seen"].append(view)
    return view.prefill.inflow


@pytest.mark.parametrize(("tier", "missing"), [(1, "ProbeTrace"), (2, "CleanTrace")])
def test_a_missing_trace_is_named(tier: int, missing: str) -> None:
    lower = narrowed(everything(), tier - 1)
    for found in list_signals(tier):
        with pytest.raises(SpanError, match=rf"tier {tier} needs a {missing}"):
            scores(found.name, lower)


@pytest.mark.parametrize("name", NAMES)
def test_scores_do_not_move_with_what_is_above_the_tier(name: str) -> None:
    """Other probes and clean caches change no score below their tier; the traces themselves stay as they are."""
    view, tier = everything(), get_signal(name).tier
    before = copy.deepcopy(view)
    other = Tier2View(view.prefill, view.probe if tier else probe_trace(seed=8), clean_trace(seed=9))
    found = scores(name, view)
    if tier < 2:
        assert torch.equal(found, scores(name, other))
    if tier == 2:
        assert not torch.equal(found, scores(name, other))
    found.fill_(7.0)
    for trace, kept in ((view.prefill, before.prefill), (view.probe, before.probe), (view.clean, before.clean)):
        assert all(torch.equal(getattr(trace, key), value) for key, value in vars(kept).items())


# -- registration


def _plain(view: Tier0View) -> Tensor:
    return view.prefill.inflow


def _unannotated(view) -> Tensor:  # type: ignore[no-untyped-def]
    return view.prefill.inflow


def _wide(view: View) -> Tensor:
    return view.prefill.inflow


def _of_tier_2(view: Tier2View) -> Tensor:
    return view.clean.key_deviation


def _nothing() -> Tensor:
    return torch.ones(1, 1)


def _extra(view: Tier0View, clean: CleanTrace) -> Tensor:
    return clean.key_deviation


def _default(view: Tier0View, *, clean: Tensor = torch.ones(1)) -> Tensor:  # noqa: B008
    return clean


def _positional(view: Tier0View, seed: int = 0) -> Tensor:
    return view.prefill.inflow + seed


def _open(view: Tier0View, **more: Tensor) -> Tensor:
    return more["clean"]


def _closed_over(clean: CleanTrace) -> Callable[[Tier0View], Tensor]:
    def function(view: Tier0View) -> Tensor:
        return clean.key_deviation

    return function


@pytest.mark.parametrize(
    "function",
    [
        _unannotated,
        _wide,
        _of_tier_2,
        _nothing,
        _extra,
        _default,
        _positional,
        _open,
        _closed_over(clean_trace()),
        print,
        Tier0View,
    ],
)
def test_a_function_of_more_than_its_view_is_refused(
    registry: dict[str, selector.Signal], function: Callable[..., Tensor]
) -> None:
    before = dict(registry)
    with pytest.raises(TypeError, match="Signal 'new' of tier 0: expected"):
        signal("new", tier=0)(function)
    assert registry == before


def test_registration_returns_the_function(registry: dict[str, selector.Signal]) -> None:
    assert signal("new", tier=0)(_plain) is _plain
    assert registry["new"] == selector.Signal("new", 0, _plain)
    assert torch.equal(scores("new", everything()), prefill_trace().inflow)
    with pytest.raises(SpanError, match="'new' is already registered"):
        signal("new", tier=0)(_plain)
    for tier in (3, -1):
        with pytest.raises(TypeError, match="tier 0, 1 or 2"):
            signal("newer", tier=tier)(_plain)  # type: ignore[call-overload]


def _short(view: Tier0View) -> Tensor:
    return view.prefill.inflow[:, 1:]


def _nan(view: Tier0View) -> Tensor:
    return view.prefill.inflow / 0 * 0


@pytest.mark.parametrize("function", [_short, _nan])
def test_scores_have_one_finite_number_per_cell(
    registry: dict[str, selector.Signal], function: Callable[[Tier0View], Tensor]
) -> None:
    signal("broken", tier=0)(function)
    with pytest.raises(SpanError, match=r"'broken': expected finite scores of shape \[5, 12\]"):
        scores("broken", everything())


def test_unknown_names_get_near_misses() -> None:
    with pytest.raises(SpanError, match=r"'inflow_accumulate'; did you mean 'inflow_accumulated' or "):
        get_signal("inflow_accumulate")
    with pytest.raises(SpanError, match=r"'zzz'; there are attention_received, .* window, written_and_read\."):
        scores("zzz", everything())


def test_there_are_signals_of_every_tier() -> None:
    by_tier = {tier: [found.name for found in list_signals(tier)] for tier in range(3)}
    assert sum(map(len, by_tier.values())) == len(NAMES) == len(set(NAMES)) >= 20
    assert [*by_tier[0], *by_tier[1], *by_tier[2]] == NAMES
    assert {"inflow_accumulated", "random", "even_columns", "shallow_layers", "boundary", "window"} <= set(by_tier[0])
    assert {"readout", "probe_attention", "sir"} <= set(by_tier[1])
    assert {"attention_shift", "key_deviation", "value_deviation", "kv_deviation"} <= set(by_tier[2])


@pytest.mark.parametrize("found", list_signals(), ids=NAMES)
def test_signals_are_short_and_name_their_source(found: selector.Signal) -> None:
    lines, _ = inspect.getsourcelines(found.function)
    assert len(lines) <= 22
    assert "Source: " in (inspect.getdoc(found.function) or "")


def test_the_registry_fits_on_a_page() -> None:
    assert len(Path(selector.__file__).read_text(encoding="utf-8").splitlines()) <= 160


@pytest.mark.slow
def test_a_type_checker_refuses_the_wrong_view(tmp_path: Path) -> None:
    api = pytest.importorskip("mypy.api")
    lines = [
        "from torch import Tensor",
        "from editable_cache.repair.selector import signal",
        "from editable_cache.repair.signals_prefill import inflow",
        "from editable_cache.repair.view import Tier0View, Tier1View, Tier2View",
        "def right(view: Tier1View) -> Tensor: return inflow(Tier0View(view.prefill)) + view.probe.readout",
        "signal('right', tier=1)(right)",
        "def reads(view: Tier0View) -> Tensor: return view.clean.key_deviation",  # line 7
        "def passes(view: Tier2View) -> Tensor: return inflow(view)",  # line 8
        "signal('wrong', tier=0)(right)",  # line 9
    ]
    source = tmp_path / "smuggler.py"
    source.write_text("\n".join(lines), encoding="utf-8")
    out, _, status = api.run(["--strict", "--no-error-summary", "--cache-dir", str(tmp_path / "cache"), str(source)])
    wrong = {int(line.split(":")[1]) for line in out.splitlines() if "smuggler.py" in line and ": error:" in line}
    assert (status, wrong) == (1, {7, 8, 9})


# -- traces


def test_traces_are_of_one_shape_and_finite() -> None:
    good = vars(prefill_trace())
    for name, value in good.items():
        worse: list[object] = [value[..., :-1], value.to(torch.float64), None]
        if value.dtype == torch.float32:
            worse += [value * math.nan, value * math.inf, -value - 1]
        for bad in worse:
            with pytest.raises(LedgerError, match="PrefillTrace"):
                PrefillTrace(**{**good, name: bad})  # type: ignore[arg-type]
    with pytest.raises(LedgerError, match="negative"):
        PrefillTrace(**{**good, "distance": good["distance"] - 9})
    with pytest.raises(LedgerError, match="ProbeTrace"):
        ProbeTrace(torch.ones(2, 3), torch.ones(3, 2))
    for empty in ((0, 3), (3, 0), (3,), (1, 2, 3)):
        with pytest.raises(LedgerError, match="with a layer and a token"):
            CleanTrace(*[torch.ones(empty)] * 3)
    with pytest.raises(LedgerError, match=r"Tier1View.probe: .*record both of one span"):
        Tier1View(prefill_trace(), probe_trace(num_tokens=TOKENS - 1))


# -- ranks


def test_ranks_average_ties() -> None:
    found = ranks(torch.tensor([[3.0, 1.0], [3.0, 9.0], [-2.0, 3.0]]))
    assert torch.allclose(found, torch.tensor([[0.6, 0.2], [0.6, 1.0], [0.0, 0.6]]))


@given(st.lists(st.integers(-4, 4), min_size=1, max_size=30))
def test_ranks_are_counts_of_what_is_below(values: list[int]) -> None:
    found = ranks(torch.tensor(values, dtype=torch.float32))
    for value, rank in zip(values, found.tolist(), strict=True):
        below, equal = sum(other < value for other in values), values.count(value)
        assert rank == pytest.approx((below + (equal - 1) / 2) / (len(values) - 1) if len(values) > 1 else 0.5)
    assert float(found.mean()) == pytest.approx(0.5)
    assert torch.equal(found, ranks(torch.tensor(values, dtype=torch.float32) * 3 - 1))


def test_ranks_per_layer() -> None:
    values = torch.tensor([[1.0, 2.0, 3.0], [30.0, 20.0, 10.0]])
    assert ranks(values, per_layer=True).tolist() == [[0.0, 0.5, 1.0], [1.0, 0.5, 0.0]]
    assert not torch.equal(ranks(values), ranks(values, per_layer=True))


# -- formulas, cell by cell


def reference(name: str, view: Tier2View, layer: int, token: int) -> float:
    """The score of one cell, by its formula in plain numbers."""
    prefill, probe, clean = view.prefill, view.probe, view.clean
    rows = {key: value.tolist() for trace in (prefill, probe) for key, value in vars(trace).items()}
    inflow, hidden, readout = rows["inflow"], rows["hidden_norm"], rows["readout"]
    num_layers, num_tokens = prefill.shape

    def accumulated(at: int, j: int) -> float:
        return sum(0.8 ** (at - k) * inflow[k][j] for k in range(at + 1))

    def entering(at: int, j: int) -> float:
        return accumulated(at - 1, j) if at else 0.0

    def share(values: list[list[float]]) -> float:
        return values[layer][token] / sum(values[layer])

    def read(at: int, j: int) -> float:
        return readout[at][j]

    def deviation(at: int, j: int) -> float:
        return math.sqrt(float(clean.key_deviation[at, j]) ** 2 + float(clean.value_deviation[at, j]) ** 2)

    def shift() -> float:
        return abs(float(probe.attention[layer, token]) - float(clean.attention[layer, token]))

    def whole(of: Callable[[int, int], float]) -> Callable[[int, int], float]:
        return lambda _, j: sum(of(at, j) for at in range(num_layers))

    def rank_at(of: Callable[[int, int], float], at: int, j: int, layers: range | None = None) -> float:
        every = [of(k, i) for k in layers or range(num_layers) for i in range(num_tokens)]
        below = sum(other < of(at, j) - 1e-9 for other in every)
        equal = sum(abs(other - of(at, j)) <= 1e-9 for other in every)
        return (below + (equal - 1) / 2) / (len(every) - 1)

    def rank(of: Callable[[int, int], float], layers: range | None = None) -> float:
        return rank_at(of, layer, token, layers)

    here = range(layer, layer + 1)

    def inflow_readout(at: int, j: int) -> float:
        return rank_at(accumulated, at, j) * rank_at(read, at, j)

    def both_columns(at: int, j: int) -> float:
        return 2 * rank_at(whole(accumulated), layer, j, here) + rank_at(whole(read), layer, j, here)

    flow = entering(layer, token) * share(readout)
    formulas: dict[str, Callable[[], float]] = {
        "inflow": lambda: inflow[layer][token],
        "inflow_accumulated": lambda: accumulated(layer, token),
        "inflow_entering": lambda: entering(layer, token),
        "inflow_carried": lambda: sum(inflow[k][token] * hidden[k][token] for k in range(layer)) / hidden[layer][token],
        "inflow_absolute": lambda: inflow[layer][token] * hidden[layer][token],
        "inflow_delimiter": lambda: rank(accumulated) * rank(lambda at, j: float(j % 4 == 1)),
        "written_and_read": lambda: rank(accumulated) * rank(lambda at, j: rows["attention_received"][at][j]),
        "attention_to_contamination": lambda: rows["attention_to_contamination"][layer][token],
        "attention_received": lambda: rows["attention_received"][layer][token],
        "value_attention": lambda: rows["attention_received"][layer][token] * rows["value_norm"][layer][token],
        "key_norm": lambda: rows["key_norm"][layer][token],
        "inverse_key_norm": lambda: -rows["key_norm"][layer][token],
        "value_norm": lambda: rows["value_norm"][layer][token],
        "hidden_norm": lambda: hidden[layer][token],
        "recency": lambda: token + 3,
        "seam_distance": lambda: -min(token, num_tokens - 1 - token),
        "delimiter": lambda: float(token % 4 == 1),
        "shallow_layers": lambda: -layer,
        "deep_layers": lambda: layer,
        "boundary": lambda: -(token % 512),
        "window": lambda: -(token + 3),
        "probe_attention": lambda: float(probe.attention[layer, token]),
        "readout": lambda: readout[layer][token],
        "sir": lambda: rank(accumulated) * rank(read),
        "inflow_attention": lambda: rank(accumulated) * rank(lambda at, j: float(probe.attention[at, j])),
        "sir_entering": lambda: rank(entering) * rank(read),
        "sir_layerwise": lambda: rank(accumulated, here) * rank(read, here),
        "column_ranks": lambda: 2 * rank(whole(accumulated), here) + rank(whole(read), here),
        "sir_columns": lambda: rank(whole(inflow_readout), here) + rank(both_columns, here),
        "near_and_read": lambda: 2 * rank(lambda _, j: -(j + 3.0), here) + rank(whole(read), here),
        "contaminated_flow": lambda: flow,
        "flow_discounted": lambda: flow * (num_layers - layer) / num_layers,
        "flow_both": lambda: flow + entering(layer, token) * share(rows["attention_received"]),
        "attention_shift": shift,
        "key_deviation": lambda: float(clean.key_deviation[layer, token]),
        "value_deviation": lambda: float(clean.value_deviation[layer, token]),
        "kv_deviation": lambda: deviation(layer, token),
        "cacheblend": lambda: deviation(min(1, num_layers - 1), token),
        "deviation_readout": lambda: rank(deviation) * rank(read),
        "readout_shift": lambda: (
            shift() * rows["value_norm"][layer][token]
            + float(clean.attention[layer, token]) * float(clean.value_deviation[layer, token])
        ),
    }
    return formulas[name]()


BY_SHAPE = {"random", "even_columns", "sir_window", "sir_diverse"}
"""Signals whose score of a cell depends on other cells or on chance: tested for themselves."""


SYMMETRIC = {"shallow_layers", "deep_layers", "seam_distance"}
"""Signals that read the same from either end of the document."""


@pytest.mark.parametrize("name", [name for name in NAMES if name not in BY_SHAPE])
def test_formulas(name: str) -> None:
    view = everything(4, 9)
    found = scores(name, view)
    cells = [[reference(name, view, layer, token) for token in range(9)] for layer in range(4)]
    wanted = torch.tensor(cells, dtype=torch.float32)
    assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-6)
    if name not in SYMMETRIC:
        assert not torch.allclose(found.flip(1), wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [(1, 1), (1, 5), (3, 1), (2, 700)])
def test_signals_work_at_the_smallest_and_larger_sizes(name: str, size: tuple[int, int]) -> None:
    found = scores(name, everything(*size))
    assert found.dtype == torch.float32
    assert found.shape == size
    assert found.is_contiguous()
    for geometry in ("cells", "prefixes", "columns"):
        assert mask_of(found, 0.1, geometry).any()  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NAMES)
def test_zeros_are_scored(name: str) -> None:
    """No inflow, no readout, no norm: a document that nothing was recorded of divides by nothing."""
    zeros = torch.zeros(3, 4)
    tokens = torch.arange(4)
    prefill = PrefillTrace(*[zeros] * 6, tokens, tokens, tokens > 9)
    view = Tier2View(prefill, ProbeTrace(zeros, zeros), CleanTrace(zeros, zeros, zeros))
    assert scores(name, view).isfinite().all()


# -- signals with a shape


def test_no_cell_of_layer_0_is_worth_anything_to_what_enters() -> None:
    for name in ("inflow_entering", "inflow_carried", "contaminated_flow", "flow_discounted", "flow_both"):
        found = scores(name, everything())
        assert (found[0] == 0).all()
        assert (found[1:] > 0).all()
    assert (scores("inflow_accumulated", everything())[0] > 0).all()


def test_random_scores_are_seeded_and_leave_the_generator_alone() -> None:
    state = torch.get_rng_state()
    view = Tier0View(prefill_trace())
    one, again, other = random_cells(view), random_cells(view, seed=0), random_cells(view, seed=1)
    assert torch.equal(one, again)
    assert torch.equal(one, scores("random", view))
    assert not torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), state)


EVEN = 2
"""How much wider than the average the widest gap between evenly spread columns may be."""


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 64, 100, 513])
def test_even_columns_are_even_for_every_budget(num_tokens: int) -> None:
    found = scores("even_columns", everything(2, num_tokens))
    assert torch.equal(found[0].sort().values, torch.arange(1.0, num_tokens + 1))
    for count in range(1, num_tokens + 1):
        chosen = mask_of(found, count / num_tokens, "columns")[0].nonzero()[:, 0]
        assert len(chosen) == count
        gaps = torch.cat([chosen, chosen[:1] + num_tokens]).diff()
        assert int(gaps.max()) <= EVEN * num_tokens / count + 1


def test_a_window_of_random_columns_would_not_be_even() -> None:
    found = random_cells(Tier0View(prefill_trace(1, 64)))
    gaps = mask_of(found, 0.25, "columns")[0].nonzero()[:, 0].diff()
    assert int(gaps.max()) > EVEN * 4 + 1


def test_boundary_takes_the_head_of_every_chunk() -> None:
    chosen = mask_of(scores("boundary", everything(2, 1200)), 30 / 1200, "columns")[0].nonzero()[:, 0].tolist()
    assert chosen == [*range(10), *range(512, 522), *range(1024, 1034)]
    assert mask_of(scores("window", everything(2, 1200)), 30 / 1200, "columns")[0].nonzero()[:, 0].tolist() == [
        *range(30)
    ]


def test_window_averages_and_diverse_discounts_neighbours() -> None:
    view = narrowed(everything(3, 20), 1)
    assert isinstance(view, Tier1View)
    plain, window, diverse = (scores(name, view) for name in ("sir", "sir_window", "sir_diverse"))
    for token in range(20):
        around = slice(max(0, token - 3), token + 4)
        assert torch.allclose(window[:, token], plain[:, around].mean(1), rtol=1e-5)
        near = plain[:, max(0, token - 2) : token + 3].sum(0)
        higher = int((near > plain[:, token].sum()).sum())
        assert torch.allclose(diverse[:, token], plain[:, token] / (1 + higher), rtol=1e-5)
    assert torch.allclose(sir_window(view, width=1), plain)
    assert not torch.allclose(window, plain)
    assert not torch.allclose(diverse, plain)
