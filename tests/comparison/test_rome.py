"""ROME on tiny random models: the closed form against its definition, the value, the way back."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

from editable_cache.comparison.blocks import Blocks, keys_of
from editable_cache.comparison.covariance import key_covariances
from editable_cache.comparison.replay import Replay
from editable_cache.comparison.request import Prompt, Request, prompt_of, random_prefixes, request_of
from editable_cache.comparison.restore import restored
from editable_cache.comparison.rome import Settings, optimised, rank_one, rome
from editable_cache.errors import TaskError, UnsupportedModelError
from editable_cache.ops import checksum
from editable_cache.testing.tiny_models import tiny_model, tiny_tokenizer

FAMILIES = ("llama", "gemma3", "qwen3")
LAYER = 1
REQUEST = Request(
    (Prompt((5, 9, 23, 40, 7), (1, 3)), Prompt((60, 5, 9, 23, 40, 7), (2, 4))),
    (33, 12),
    Prompt((9, 23, 8), (0, 2)),
)


def checksums(model: nn.Module) -> dict[str, str]:
    return {name: checksum(value) for name, value in model.state_dict().items()}


def covariance(blocks: Blocks, layer: int = LAYER) -> Tensor:
    ids = torch.randint(300, (512,), generator=torch.Generator().manual_seed(1))
    return key_covariances(blocks, ids, (layer,))[layer].matrix


@pytest.fixture(params=FAMILIES)
def blocks(request: pytest.FixtureRequest) -> Blocks:
    return Blocks.of(tiny_model(request.param))


def random_problem() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    weight, key, value = (torch.randn(size, generator=generator, dtype=torch.float64) for size in ((6, 9), (9,), (6,)))
    samples = torch.randn(50, 9, generator=generator, dtype=torch.float64) @ torch.diag(
        torch.arange(1.0, 10.0).double()
    )
    return weight, key, value, samples


# -- the closed form


def test_the_update_writes_the_value_exactly() -> None:
    weight, key, value, samples = random_problem()
    changed = rank_one(weight, key, value, samples.T @ samples)
    torch.testing.assert_close(changed @ key, value, rtol=1e-12, atol=1e-12)
    assert torch.linalg.matrix_rank(changed - weight) == 1


def test_the_update_is_the_least_squares_solution_under_the_constraint() -> None:
    """Against the KKT system of ``min |W' K - W K|^2`` with ``W' k* = v*``, solved as one linear system."""
    weight, key, value, samples = random_problem()
    second = samples.T @ samples
    changed = rank_one(weight, key, value, second)
    system = torch.zeros(10, 10, dtype=torch.float64)
    system[:9, :9], system[:9, 9], system[9, :9] = second, key, key
    right = torch.cat([second @ weight.T, value[None]])
    torch.testing.assert_close(changed, torch.linalg.solve(system, right)[:9].T, rtol=1e-9, atol=1e-9)
    other = rank_one(weight, key, value, torch.eye(9, dtype=torch.float64))
    moved, least = (((each - weight) @ samples.T).norm() for each in (other, changed))
    assert least < 0.9 * moved  # without the covariance other keys suffer more


def test_keys_orthogonal_in_the_metric_are_served_as_before() -> None:
    weight, key, value, samples = random_problem()
    second = samples.T @ samples
    direction = torch.linalg.solve(second, key)
    other = torch.randn(9, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    apart = other - direction * (direction @ other) / (direction @ direction)
    changed = rank_one(weight, key, value, second)
    torch.testing.assert_close(changed @ apart, weight @ apart, rtol=1e-10, atol=1e-10)
    assert float(((changed - weight) @ other).norm()) > 0.1


def test_a_bias_counts() -> None:
    weight, key, value, samples = random_problem()
    bias = torch.ones(6, dtype=torch.float64)
    changed = rank_one(weight, key, value, samples.T @ samples, bias)
    torch.testing.assert_close(changed @ key + bias, value, rtol=1e-12, atol=1e-12)


# -- the value


def test_a_replay_gives_the_models_logits(blocks: Blocks) -> None:
    rows = [list(prompt.ids) for prompt in REQUEST.prompts]
    replay = Replay(blocks, LAYER, rows, [prompt.last for prompt in REQUEST.prompts])
    found = replay.logits(None, [0, 1], [4, 5]).detach()
    model = blocks.model
    with torch.no_grad():
        expected = torch.stack([model(input_ids=torch.tensor([row]), use_cache=False).logits[0, -1] for row in rows])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    shifted = replay.logits(torch.full((64,), 5.0), [0, 1], [4, 5])
    assert float((shifted.detach() - expected).abs().max()) > 0.05


def answer(blocks: Blocks, prompt: Prompt) -> Tensor:
    with torch.no_grad():
        logits: Tensor = blocks.model(input_ids=torch.tensor([prompt.ids]), use_cache=False).logits[0, -1]
    return logits.log_softmax(-1)


def test_optimising_lowers_the_loss(blocks: Blocks) -> None:
    value = optimised(blocks, LAYER, REQUEST, Settings(steps=30))
    assert value.losses[-1] < value.losses[0] - 1


def test_the_shift_stays_within_its_bound(blocks: Blocks) -> None:
    moved = []
    for most in (0.02, 100.0):
        value = optimised(blocks, LAYER, REQUEST, Settings(steps=3, most=most))
        plain = blocks.projections[LAYER].weight.detach().double() @ value.key
        moved.append(float((value.value - plain).norm() / plain.norm()))
    assert moved[0] == pytest.approx(0.02, rel=1e-4)
    assert moved[1] > 0.05


AT_THE_END = Request((Prompt((5, 17, 9, 23), (2, 4)),), (33,))
"""The subject is the last thing said, so that its value reaches the answer without attention."""


def test_the_edit_does_what_the_optimised_shift_did(blocks: Blocks) -> None:
    """For a single prompt the key is the prompt's own, so rewritten weights act as the shift did in the replay."""
    (prompt,), target = AT_THE_END.prompts, AT_THE_END.target[0]
    value = optimised(blocks, LAYER, AT_THE_END)
    replay = Replay(blocks, LAYER, [prompt.ids], [prompt.last])
    shift = value.value - blocks.projections[LAYER].weight.detach().double() @ value.key
    expected = replay.logits(shift.float(), [0], [prompt.last])[0].detach().log_softmax(-1)
    before = answer(blocks, prompt)
    with rome(blocks, AT_THE_END, layer=LAYER, covariance=covariance(blocks), written=value) as edit:
        got = answer(blocks, prompt)
        written = blocks.projections[LAYER].weight.detach().double() @ value.key
    assert edit.layer == LAYER
    torch.testing.assert_close(written, value.value, rtol=1e-4, atol=1e-4)
    assert float(expected[target] - before[target]) > 2
    assert abs(float(got[target] - expected[target])) < 0.5 * float(expected[target] - before[target])


def test_the_value_of_another_target_does_not_give_this_one(blocks: Blocks) -> None:
    (prompt,), target = AT_THE_END.prompts, AT_THE_END.target[0]
    right, wrong = (optimised(blocks, LAYER, Request((prompt,), (each,))) for each in (target, 77))
    matrix, found = covariance(blocks), []
    for value in (right, wrong):
        with rome(blocks, AT_THE_END, layer=LAYER, covariance=matrix, written=value):
            found.append(float(answer(blocks, prompt)[target]))
    assert found[0] > found[1] + 2


def test_the_key_is_the_mean_over_all_contexts(blocks: Blocks) -> None:
    """Against the inputs of the projection in plain forwards; what stands behind the subject does not matter."""
    further = Prompt((70, 71, 9, 23, 40, 41), (2, 4))
    request = Request(REQUEST.prompts, (33,), keyed=(further,))
    keys = [
        keys_of(blocks, torch.tensor([each.ids]), (LAYER,))[LAYER][0, each.last].double()
        for each in (*REQUEST.prompts, further)
    ]
    found = optimised(blocks, LAYER, request, Settings(steps=0)).key
    torch.testing.assert_close(found, torch.stack(keys).mean(0), rtol=1e-4, atol=1e-5)
    assert float((found - keys[0]).abs().max()) > 1e-2


# -- the way back


def test_weights_come_back_bit_by_bit(blocks: Blocks) -> None:
    before, matrix = checksums(blocks.model), covariance(blocks)
    with rome(blocks.model, REQUEST, layer=LAYER, covariance=matrix, settings=Settings(steps=2)):
        assert checksums(blocks.model) != before
    assert checksums(blocks.model) == before


def test_weights_come_back_after_an_exception(blocks: Blocks) -> None:
    before, matrix = checksums(blocks.model), covariance(blocks)
    with (
        pytest.raises(RuntimeError, match="inside"),
        rome(blocks, REQUEST, layer=LAYER, covariance=matrix, settings=Settings(steps=1)),
    ):
        raise RuntimeError("inside")
    assert checksums(blocks.model) == before


def test_a_singular_covariance_changes_nothing(blocks: Blocks) -> None:
    before = checksums(blocks.model)
    zero = torch.zeros(96, 96)
    with (
        pytest.raises(RuntimeError, match="singular"),
        rome(blocks, REQUEST, layer=LAYER, covariance=zero, settings=Settings(steps=1)),
    ):
        pass
    assert checksums(blocks.model) == before


def test_restored_keeps_odd_bits() -> None:
    odd = torch.tensor([-0.0, float("nan"), 1e-45])
    before = odd.view(torch.int32).clone()
    with restored(odd):
        odd.zero_()
    assert torch.equal(odd.view(torch.int32), before)


# -- what can't be edited


@pytest.mark.parametrize(
    ("family", "named"),
    [("gpt2", ".layers, .norm"), ("phi", ".layers, .norm"), ("deepseek_v3", "mlp.down_proj")],
)
def test_models_without_the_projection_are_refused(family: str, named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=re.escape(named)):
        Blocks.of(tiny_model(family))


def test_squeezed_logits_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="relative error of the logits"):
        Blocks.of(tiny_model("gemma2"))


def test_a_layer_that_is_not_there_is_refused() -> None:
    blocks = Blocks.of(tiny_model("llama"))
    with pytest.raises(UnsupportedModelError, match="from 0 to 2, got 3"):
        optimised(blocks, 3, REQUEST)


# -- requests


def test_the_subject_is_found_in_the_text() -> None:
    tokenizer = tiny_tokenizer()
    prompt = prompt_of(tokenizer, "The tower of ", "Pisa", " leans")
    start, end = prompt.subject
    assert "Pisa" in tokenizer.decode(list(prompt.ids[start:end]))
    assert "leans" not in tokenizer.decode(list(prompt.ids[start:end]))
    assert prompt.last == end - 1
    words = random_prefixes(" ".join(f"w{i}" for i in range(200)), 5)
    request = request_of(tokenizer, "{} is in", "Pisa", " Rome", prefixes=words[:3], keyed=words[3:])
    assert (len(request.prompts), len(request.keyed)) == (4, 2)
    assert len({prompt.ids for prompt in (*request.prompts, *request.keyed)}) == 6


@pytest.mark.parametrize(
    "make",
    [
        lambda: Prompt((1, 2), (1, 1)),
        lambda: Prompt((1, 2), (1, 3)),
        lambda: Request((), (1,)),
        lambda: Request(REQUEST.prompts, ()),
        lambda: request_of(tiny_tokenizer(), "no place", "x", " y"),
        lambda: prompt_of(tiny_tokenizer(), "a", "", "b"),
        lambda: random_prefixes("too short", 2),
    ],
)
def test_bad_requests_are_refused(make: object) -> None:
    assert callable(make)
    with pytest.raises(TaskError):
        make()
