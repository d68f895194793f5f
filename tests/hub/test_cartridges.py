"""PEFT cartridges: PEFT computes with one what a cache computes that it was spliced into, in both directions."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cache_support import generate, shared_model, shared_tokenizer, some_ids
from huggingface_hub import constants
from peft import CartridgeConfig, PeftModel, get_peft_model, initialize_kv_prefix_from_past_key_values
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DynamicCache
from vision_support import image_ids, inputs, pixels, vision_model

from editable_cache import (
    ArtifactError,
    CompatibilityError,
    EditableCache,
    LedgerError,
    Skill,
    TrustWarning,
    VisionChunk,
)
from editable_cache.adapters import host
from editable_cache.forward.prompt import _filler
from editable_cache.hub import cartridge
from editable_cache.hub.cartridge import CONFIG, TENSOR, WEIGHTS
from editable_cache.testing import oracles

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning"),
]
"""PEFT 0.21 asks for a deprecated property, and passes the cache under its old name."""

FAMILIES = ("llama", "qwen3", "gemma3", "gpt_neox", "phi", "cohere")
TOKENS = 6
TOLERANCE = 1e-4
PROMPT = some_ids(5, seed=4)


def trained(folder: Path, family: str = "llama", **options: Any) -> Path:
    """A cartridge as PEFT makes and saves it, its cells of the size of real ones."""
    wrapped = get_peft_model(
        copy.deepcopy(shared_model(family)),
        CartridgeConfig(task_type="CAUSAL_LM", num_virtual_tokens=TOKENS, **options),
    )
    encoder = wrapped.prompt_encoder["default"]
    generator = torch.Generator().manual_seed(0)
    encoder.load_prompt_embeddings(torch.randn(encoder.weight.shape, generator=generator))
    wrapped.save_pretrained(str(folder))
    return folder


def in_peft(folder: Path, family: str = "llama") -> PeftModel:
    return PeftModel.from_pretrained(copy.deepcopy(shared_model(family)), str(folder)).eval()


def by_peft(wrapped: PeftModel, steps: int = 5) -> tuple[Tensor, list[Tensor]]:
    """Greedy ids behind the prompt and the logits of each step. One forward for each: PEFT's own ``generate`` passes
    its cache under a name that transformers 5.24 ignores, and leaves the cartridge out.
    """
    ids, logits = PROMPT, []
    with torch.no_grad():
        for _ in range(steps):
            last = wrapped(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[:, -1]
            logits.append(last)
            ids = torch.cat((ids, last.argmax(-1, keepdim=True)), dim=1)
    return ids[0, PROMPT.shape[1] :], logits


def by_cache(skill: Any, family: str = "llama", steps: int = 5) -> tuple[Tensor, list[Tensor]]:
    model = shared_model(family)
    cache = EditableCache(model)
    cache.splice(skill, seam_tokens=0)
    given = cache.inputs(PROMPT[0])
    out = generate(cache, given["input_ids"], model=model, attention_mask=given["attention_mask"], max_new_tokens=steps)
    return out.sequences[0, given["input_ids"].shape[1] :], list(out.logits)


def assert_same(mine: tuple[Tensor, list[Tensor]], theirs: tuple[Tensor, list[Tensor]]) -> None:
    assert mine[0].tolist() == theirs[0].tolist()
    for one, other in zip(mine[1], theirs[1], strict=True):
        assert oracles.relative_error(one, other) <= TOLERANCE


def error(mine: tuple[Tensor, list[Tensor]], theirs: tuple[Tensor, list[Tensor]]) -> float:
    return oracles.relative_error(mine[1][0], theirs[1][0])


def load(folder: Path, family: str = "llama", **kwargs: Any) -> Skill:
    return Skill.from_cartridge(folder, model=shared_model(family), name="cartridge", **kwargs)


def holding(folder: Path) -> EditableCache:
    """A cartridge, and a text behind it."""
    cache = EditableCache(shared_model())
    cache.splice(load(folder))
    cache.append(PROMPT[0], name="text")
    return cache


# -- both directions


@pytest.mark.parametrize("family", FAMILIES)
def test_an_imported_cartridge_computes_what_peft_computes(family: str, tmp_path: Path) -> None:
    folder = trained(tmp_path, family)
    assert_same(by_cache(load(folder, family), family), by_peft(in_peft(folder, family)))


def test_one_that_peft_initialised_from_a_cache(tmp_path: Path) -> None:
    """Cells of real tokens, packed by PEFT: the same as a plain prefill of those tokens."""
    model = shared_model()
    ids = some_ids(TOKENS, seed=6)
    held = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=ids, **{host.cache_argument(model): held})
    wrapped = get_peft_model(copy.deepcopy(model), CartridgeConfig(task_type="CAUSAL_LM", num_virtual_tokens=TOKENS))
    initialize_kv_prefix_from_past_key_values(
        wrapped, past_key_values=[(layer.keys, layer.values) for layer in held.layers]
    )
    wrapped.save_pretrained(str(tmp_path))
    skill, expected = load(tmp_path), oracles.full(model, torch.cat((ids, PROMPT), dim=1))
    cache = EditableCache(model)
    cache.splice(skill)
    given = cache.inputs(PROMPT[0])
    with torch.no_grad():
        logits = model(**given, **{host.cache_argument(model): cache}).logits
    assert oracles.relative_error(logits, expected.logits[:, TOKENS:]) <= TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_an_exported_chunk_computes_in_peft_what_it_computes_here(family: str, tmp_path: Path) -> None:
    model = shared_model(family)
    skill = Skill.precompile(model, None, some_ids(9)[0], name="exported", prefix=some_ids(20, seed=2)[0])
    skill.save_cartridge(tmp_path)
    assert_same(by_peft(in_peft(tmp_path, family)), by_cache(skill, family))


@pytest.mark.parametrize("family", FAMILIES)
def test_control_an_export_that_does_not_turn_its_keys_misses(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shared_model(family)
    skill = Skill.precompile(model, None, some_ids(9)[0], name="exported", prefix=some_ids(20, seed=2)[0])
    monkeypatch.setattr(cartridge, "rotate_into", lambda out, cells, _: out.copy_(cells))
    skill.save_cartridge(tmp_path)
    assert error(by_peft(in_peft(tmp_path, family)), by_cache(skill, family)) > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back(family: str, tmp_path: Path) -> None:
    skill = Skill.precompile(shared_model(family), None, some_ids(9)[0], name="exported", prefix=some_ids(3)[0])
    skill.save_cartridge(tmp_path)
    back = load(tmp_path, family)
    caches = [EditableCache(shared_model(family)) for _ in range(2)]
    for cache, each in zip(caches, (skill, back), strict=True):
        cache.splice(each, seam_tokens=0)
    for mine, theirs in zip(caches[0].editable_layers, caches[1].editable_layers, strict=True):
        assert all(oracles.relative_error(theirs.view()[n], t) <= 1e-6 for n, t in mine.view().items())
    back.save_cartridge(tmp_path / "again")
    assert torch.equal(load_file(tmp_path / "again" / WEIGHTS)[TENSOR], load_file(tmp_path / WEIGHTS)[TENSOR])


def test_what_is_written(tmp_path: Path) -> None:
    skill = Skill.precompile(shared_model(), None, some_ids(9)[0], name="exported")
    skill = replace(skill, origin=replace(skill.origin, repo="org/base", revision="abc"))
    skill.save_cartridge(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [CONFIG, WEIGHTS]
    config = json.loads((tmp_path / CONFIG).read_text())
    assert config["peft_type"] == "CARTRIDGE"
    assert (config["base_model_name_or_path"], config["revision"]) == ("org/base", "abc")
    assert [config[k] for k in ("num_virtual_tokens", "num_layers", "num_attention_heads", "token_dim")] == [
        9,
        3,
        2,
        32,
    ]
    assert load_file(tmp_path / WEIGHTS)[TENSOR].shape == (9, 3 * 2 * 32)


def test_a_merged_skill_is_exported_whole(tmp_path: Path) -> None:
    parts = [Skill.precompile(shared_model(), None, some_ids(n, seed=n)[0], name=str(n)) for n in (4, 7)]
    merged = Skill.merge(parts, name="both")
    merged.save_cartridge(tmp_path)
    assert_same(by_peft(in_peft(tmp_path)), by_cache(merged))


# -- what an imported one is


def test_what_an_imported_one_says(tmp_path: Path) -> None:
    skill = load(trained(tmp_path))
    assert isinstance(skill, Skill)
    assert skill.token_ids.tolist() == [-1] * TOKENS
    assert skill.position_ids.tolist() == list(range(TOKENS))
    assert skill.provenance.how == "trained"
    assert skill.provenance.note.startswith("PEFT cartridge, sha256 ")
    plain = Skill.precompile(shared_model(), None, some_ids(3)[0], name="plain")
    assert (skill.model, skill.layout) == (plain.model, plain.layout)
    assert skill.origin == plain.origin


def test_another_dtype_is_said(tmp_path: Path) -> None:
    model = shared_model(dtype=torch.bfloat16)
    skill = Skill.from_cartridge(trained(tmp_path), model=model, name="cartridge")
    assert skill.layers[0]["keys"].dtype == torch.bfloat16
    assert skill.provenance.note.endswith("; converted from float32 to bfloat16")
    cache = EditableCache(model)
    cache.splice(skill)
    assert torch.equal(cache.editable_layers[0].view()["keys"], skill.layers[0]["keys"])


def test_it_needs_no_peft_to_read_and_says_so_to_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(tmp_path)
    monkeypatch.setitem(sys.modules, "peft", None)
    skill = load(tmp_path)
    with pytest.raises(ArtifactError, match=r"pip install 'editable-cache\[peft\]'"):
        skill.save_cartridge(tmp_path / "out")


def test_a_cartridge_for_another_repository_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    for repository in ("one", "other"):
        downloaded = tmp_path / "cache" / f"models--org--{repository}" / "snapshots" / "abc"
        downloaded.mkdir(parents=True)
        (downloaded / "config.json").write_text("{}")
    edit_config(trained(tmp_path), base_model_name_or_path="org/one")
    load(tmp_path)  # the model at hand does not say where it comes from
    model = copy.deepcopy(shared_model())
    model.config._name_or_path = "org/one"
    Skill.from_cartridge(tmp_path, model=model, name="cartridge")
    model.config._name_or_path = "org/other"
    with pytest.warns(TrustWarning, match="trained for org/one, read for org/other") as caught:
        Skill.from_cartridge(tmp_path, model=model, name="cartridge")
    assert Path(caught[0].filename) == Path(__file__)


def test_it_is_stored_and_loaded(tmp_path: Path) -> None:
    skill = load(trained(tmp_path / "peft"))
    merged = Skill.merge([skill, Skill.precompile(shared_model(), None, some_ids(4)[0], name="text")], name="both")
    for each in (skill, merged, Skill._of(skill.slice(2, 5), None)):
        each.save_pretrained(tmp_path / each.provenance.how)
        loaded = Skill.from_pretrained(tmp_path / each.provenance.how, model=shared_model())
        assert loaded.equal_cells(each)
        assert loaded.provenance == each.provenance
    cache = holding(tmp_path / "peft")
    cache.save_pretrained(tmp_path / "cache")
    again = EditableCache.from_pretrained(tmp_path / "cache", model=shared_model())
    assert again.ledger.same(cache.ledger)
    assert torch.equal(again.inputs()["input_ids"], cache.inputs()["input_ids"])


# -- in a cache


def test_a_trained_chunk_has_no_seam(tmp_path: Path) -> None:
    skill = load(trained(tmp_path))
    cache = EditableCache(shared_model())
    done = cache.splice(skill)
    assert (done.tokens_computed, done.tokens_pasted) == (0, TOKENS)
    assert done.notes == ("seam of 0 tokens: no token made the cells behind it",)
    assert all(
        torch.equal(layer.view()[n], t)
        for layer, cells in zip(cache.editable_layers, skill.layers, strict=True)
        for n, t in cells.items()
    )
    text = Skill.precompile(shared_model(), None, some_ids(4)[0], name="text")
    merged = Skill.merge([text, skill], name="both")
    assert EditableCache(shared_model()).splice(merged, seam_tokens=7).tokens_computed == 4


def test_in_front_of_a_text(tmp_path: Path) -> None:
    """Put in the middle it is turned; the same text behind the same cells is the same."""
    model, skill = shared_model(), load(trained(tmp_path))
    cache = EditableCache(model)
    cache.append(some_ids(9)[0], name="before")
    cache.append(PROMPT[0], name="text")
    cache.splice(skill, 9)
    assert cache.ledger.groups[0].tolist() == [0] * 9 + [1] * TOKENS + [0] * 5
    cache.recompute((9 + TOKENS, 14 + TOKENS))
    other = EditableCache(model)
    other.append(some_ids(9)[0])
    other.splice(skill)
    other.append(PROMPT[0])
    for mine, theirs in zip(cache.editable_layers, other.editable_layers, strict=True):
        assert all(oracles.relative_error(mine.view()[n], t) <= TOLERANCE for n, t in theirs.view().items())


def test_the_report_shows_it(tmp_path: Path) -> None:
    row = holding(trained(tmp_path)).report().segments[0]
    assert row[0] == "cartridge"
    assert f"trained: no token made {TOKENS} of {TOKENS}" in row[-1]
    assert "stale" not in row[-1]


REFUSED: dict[str, Callable[[EditableCache], Any]] = {
    "recompute": lambda cache: cache.recompute((2, 8)),
    "recompute all": lambda cache: cache.recompute(slice(None)),
    "verify": lambda cache: cache.verify(),
    "extract": lambda cache: cache.extract("cartridge"),
    "full": lambda cache: cache.edit("status", "delivered", method="full"),
    "sync": lambda cache: cache.sync(PROMPT[0]),
    "prompt that ends in it": lambda cache: generate(cache, some_ids(3)),
    "last logits": lambda cache: (cache.remove("text"), cache.next_token_logits()),
}


@pytest.mark.parametrize("what", REFUSED)
def test_nothing_computes_trained_cells_again(what: str, tmp_path: Path) -> None:
    cache = EditableCache(shared_model(), tokenizer=shared_tokenizer())
    cache.splice(load(trained(tmp_path)))
    cache.append("status: {status} \n", name="text", fields={"status": "pending"})
    before = [{n: t[..., :TOKENS, :].clone() for n, t in layer.view().items()} for layer in cache.editable_layers]
    with pytest.raises(LedgerError, match=r"no token made|trained cell"):
        REFUSED[what](cache)
    for layer, cells in zip(cache.editable_layers, before, strict=True):
        assert all(torch.equal(layer.view()[name][..., :TOKENS, :], old) for name, old in cells.items())


def test_fields_behind_it_are_edited(tmp_path: Path) -> None:
    cache = EditableCache(shared_model(), tokenizer=shared_tokenizer())
    cache.splice(load(trained(tmp_path)))
    cache.append("status: {status} \n", name="text", fields={"status": "pending"})
    cache.edit("status", "delivered", method="suffix")
    fresh = EditableCache(shared_model(), tokenizer=shared_tokenizer())
    fresh.splice(load(tmp_path))
    fresh.append(cache.ledger.ids[0, TOKENS:])
    for mine, theirs in zip(cache.editable_layers, fresh.editable_layers, strict=True):
        assert all(oracles.relative_error(mine.view()[n], t) <= TOLERANCE for n, t in theirs.view().items())


def test_what_saw_it_remembers_so(tmp_path: Path) -> None:
    cache = holding(trained(tmp_path))
    piece = cache.extract("text", name="text")
    assert piece.provenance.prefix_ids == (-1,) * TOKENS
    Skill._of(piece, None).save_pretrained(tmp_path / "piece")
    again = EditableCache(shared_model())
    again.splice(Skill.from_pretrained(tmp_path / "piece", model=shared_model()), seam_tokens=0)
    with pytest.raises(LedgerError, match="no token made"):
        again.verify()  # what it had seen can't be run


def test_moved_cells_are_those_of_the_place(tmp_path: Path) -> None:
    cache = holding(trained(tmp_path))
    cache.reposition("cartridge", position=20)
    other = EditableCache(shared_model())
    other.splice(load(tmp_path), position=20)
    for mine, theirs in zip(cache.editable_layers, other.editable_layers, strict=True):
        assert oracles.relative_error(mine.view()["keys"][..., :TOKENS, :], theirs.view()["keys"]) <= 1e-6
    assert int(cache.ledger.groups[0, :TOKENS].min()) == 1


# -- ids for generate


def test_ids_for_generate_cover_trained_cells(tmp_path: Path) -> None:
    cache = holding(trained(tmp_path))
    given = cache.inputs(some_ids(3)[0])
    assert given["input_ids"].shape == given["attention_mask"].shape == (1, TOKENS + 8)
    assert given["attention_mask"].tolist() == [[1] * (TOKENS + 8)]
    assert given["input_ids"][0, :TOKENS].tolist() == [0] * TOKENS  # this model names no other token
    assert cache.token_ids[0, :TOKENS].tolist() == [-1] * TOKENS


def test_a_second_turn_goes_on(tmp_path: Path) -> None:
    model, folder = shared_model(), trained(tmp_path)
    cache = EditableCache(model)
    cache.splice(load(folder))
    given = cache.inputs(PROMPT[0])
    generate(cache, given["input_ids"], attention_mask=given["attention_mask"], max_new_tokens=3)
    assert cache.ledger.ids[0, :TOKENS].tolist() == [-1] * TOKENS
    second = cache.inputs(some_ids(2)[0])
    out = generate(cache, second["input_ids"], attention_mask=second["attention_mask"], max_new_tokens=1)
    ids = second["input_ids"][:, TOKENS:]
    with torch.no_grad():
        expected = in_peft(folder)(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[:, -1]
    assert oracles.relative_error(out.logits[0], expected) <= TOLERANCE


@pytest.mark.parametrize("fed", [1, 100, 299])
def test_no_slot_of_a_trained_cell_is_ever_embedded(fed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = trained(tmp_path)
    expected = by_cache(load(folder))
    monkeypatch.setattr("editable_cache.forward.prompt._filler", lambda *_: fed)
    assert_same(by_cache(load(folder)), expected)


class Tokens:
    """A tokenizer's special ids."""

    def __init__(self, pad: int | None, bos: int | None, eos: int | list[int] | None) -> None:
        self.pad_token_id, self.bos_token_id, self.eos_token_id = pad, bos, eos


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (Tokens(7, 1, 2), 7),
        (Tokens(2, 1, 2), 1),  # padding that ends texts too
        (Tokens(2, 2, [2, 3]), 0),
        (Tokens(None, 5, None), 5),
        (Tokens(320, 4, 2), 4),  # a token that the model has no embedding for
        (Tokens(None, None, None), 0),
        (None, 0),
    ],
)
def test_the_id_that_stands_for_a_trained_cell(tokens: Any, expected: int) -> None:
    assert _filler(EditableCache(shared_model()), tokens) == expected


def test_tokens_nobody_saw_still_need_ids_of_the_caller() -> None:
    model = shared_model()
    cache = EditableCache(model)
    with torch.no_grad():
        model(inputs_embeds=model.get_input_embeddings()(PROMPT), **{host.cache_argument(model): cache})
    with pytest.raises(LedgerError, match="some ids in the cache are unknown"):
        cache.inputs(PROMPT[0])


def test_a_cartridge_is_the_last_thing_held(tmp_path: Path) -> None:
    cache = EditableCache(shared_model())
    cache.splice(load(trained(tmp_path)))
    given = cache.inputs()
    with pytest.raises(LedgerError, match="at a trained cell"):
        generate(cache, given["input_ids"], attention_mask=given["attention_mask"])


# -- what is refused


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**config, **changes}))


def edit_weights(folder: Path, change: Callable[[Tensor], dict[str, Tensor]]) -> None:
    save_file(change(load_file(folder / WEIGHTS)[TENSOR].clone()), folder / WEIGHTS)


def _nan(tensor: Tensor) -> dict[str, Tensor]:
    tensor[3, 5] = float("nan")
    return {TENSOR: tensor}


DAMAGED: dict[str, tuple[Callable[[Path], object], type[Exception], str]] = {
    "no config": (lambda f: (f / CONFIG).unlink(), ArtifactError, "no such file"),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), ArtifactError, "no such file"),
    "a pickle": (
        lambda f: (f / WEIGHTS).rename(f / "adapter_model.bin"),
        ArtifactError,
        "a pickle, which can run code",
    ),
    "no JSON": (lambda f: (f / CONFIG).write_text("{"), ArtifactError, "not readable as JSON"),
    "a key twice": (lambda f: (f / CONFIG).write_text('{"a": 1, "a": 2}'), ArtifactError, "one key twice"),
    "deep": (lambda f: (f / CONFIG).write_text("[" * 100_000), ArtifactError, "not readable as JSON"),
    "huge config": (lambda f: (f / CONFIG).write_text(" " * 2**21), ArtifactError, "at most 1048576 bytes"),
    "a list": (lambda f: (f / CONFIG).write_text("[]"), ArtifactError, "expected an object"),
    "LoRA": (lambda f: edit_config(f, peft_type="LORA"), ArtifactError, "expected one of .*CARTRIDGE"),
    "no tokens": (lambda f: edit_config(f, num_virtual_tokens=0), ArtifactError, "an integer of 1"),
    "other tokens": (lambda f: edit_config(f, num_virtual_tokens=7), ArtifactError, r"expected \[7, 192\]"),
    "text for a number": (lambda f: edit_config(f, num_layers="3"), ArtifactError, "null, or an integer"),
    "two decoders": (lambda f: edit_config(f, num_transformer_submodules=2), ArtifactError, "a decoder"),
    "other layers": (lambda f: edit_config(f, num_layers=4), CompatibilityError, "num_layers: expected 3, got 4"),
    "other heads": (lambda f: edit_config(f, token_dim=64), CompatibilityError, "token_dim: expected 32, got 64"),
    "truncated": (lambda f: (f / WEIGHTS).write_bytes((f / WEIGHTS).read_bytes()[:-4]), ArtifactError, "not that of a"),
    "empty": (lambda f: (f / WEIGHTS).write_bytes(b""), ArtifactError, "header"),
    "not a number": (lambda f: edit_weights(f, _nan), ArtifactError, "expected finite numbers"),
    "integers": (lambda f: edit_weights(f, lambda t: {TENSOR: t.int()}), ArtifactError, "I32"),
    "another shape": (
        lambda f: edit_weights(f, lambda t: {TENSOR: t.T.contiguous()}),
        ArtifactError,
        r"got \[192, 6\]",
    ),
    "another name": (lambda f: edit_weights(f, lambda t: {"weight": t}), ArtifactError, "expected one tensor"),
    "more": (lambda f: edit_weights(f, lambda t: {TENSOR: t, "lora_A": t + 1}), ArtifactError, "expected one tensor"),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_damaged(what: str, tmp_path: Path) -> None:
    change, kind, message = DAMAGED[what]
    change(trained(tmp_path))
    with pytest.raises(kind, match=message):
        load(tmp_path)


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_a_link_that_leads_out_is_refused(name: str, tmp_path: Path) -> None:
    folder = trained(tmp_path / "cartridge")
    (folder / name).rename(tmp_path / "outside")
    (folder / name).symlink_to(tmp_path / "outside")
    with pytest.raises(ArtifactError, match="got a link"):
        load(folder)


def test_numbers_too_large_for_the_dtype(tmp_path: Path) -> None:
    edit_weights(trained(tmp_path), lambda t: {TENSOR: t * 1e6})
    with pytest.raises(ArtifactError, match=r"others in torch\.float16"):
        Skill.from_cartridge(tmp_path, model=shared_model(dtype=torch.float16), name="cartridge")


def test_fields_that_config_leaves_out(tmp_path: Path) -> None:
    edit_config(trained(tmp_path), num_layers=None, token_dim=None, num_attention_heads=None)
    assert len(load(tmp_path)) == TOKENS


@pytest.mark.parametrize(
    ("family", "reason"),
    [("deepseek_v3", "layer 0"), ("falcon_h1", "recurrent layers|layer 0")],
)
def test_models_whose_cells_the_format_can_not_hold(family: str, reason: str, tmp_path: Path) -> None:
    skill = Skill.precompile(shared_model(family), None, some_ids(9)[0], name="exported")
    with pytest.raises(CompatibilityError, match=reason):
        skill.save_cartridge(tmp_path)
    assert not list(tmp_path.iterdir())
    with pytest.raises(CompatibilityError, match="a PEFT cartridge holds"):
        Skill.from_cartridge(trained(tmp_path), model=shared_model(family), name="cartridge")


def _chunk() -> Skill:
    return Skill.precompile(shared_model(), None, some_ids(9)[0], name="exported")


def _with_layer(change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Skill:
    skill = _chunk()
    return replace(skill, layers=(skill.layers[0], change(dict(skill.layers[1])), skill.layers[2]))


NOT_HELD: dict[str, tuple[Callable[[], Skill], str]] = {
    "adapters": (
        lambda: replace(_chunk(), model=replace(_chunk().model, adapters="digest")),
        "adapters: expected none",
    ),
    "no layout": (lambda: replace(_chunk(), layout=()), "layout: expected how its tensors rotate"),
    "more tensors": (
        lambda: _with_layer(lambda c: {**c, "indexer_keys": c["keys"]}),
        "layer 1: expected keys and values",
    ),
    "other heads": (
        lambda: _with_layer(lambda c: {n: t[:, :1] for n, t in c.items()}),
        "layer 1 keys: expected 2 heads",
    ),
    "other dims": (
        lambda: _with_layer(lambda c: {**c, "values": c["values"][..., :8]}),
        "layer 1 values: .* 8 channels",
    ),
    "float64": (
        lambda: replace(_chunk(), layers=tuple({n: t.double() for n, t in c.items()} for c in _chunk().layers)),
        "dtype: expected float32",
    ),
}


@pytest.mark.parametrize("what", NOT_HELD)
def test_chunks_that_the_format_can_not_hold(what: str, tmp_path: Path) -> None:
    make, message = NOT_HELD[what]
    with pytest.raises(CompatibilityError, match=message):
        make().save_cartridge(tmp_path)
    assert not list(tmp_path.iterdir())


def test_images_on_several_axes_are_refused(tmp_path: Path) -> None:
    name = "qwen2_5_vl"
    image = VisionChunk.precompile(vision_model(name), None, inputs(name, image_ids(name), pixels(name)), name="image")
    with pytest.raises(CompatibilityError, match="several"):
        Skill._of(image, None).save_cartridge(tmp_path)


def test_an_empty_chunk_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CompatibilityError, match="at least one"):
        Skill._of(_chunk().slice(0, 0), None).save_cartridge(tmp_path)


def test_a_failed_export_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _chunk().save_cartridge(tmp_path)
    old = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(CartridgeConfig, "save_pretrained", fail)
    with pytest.raises(ArtifactError, match="disk full"):
        Skill._of(_chunk().slice(0, 4), None).save_cartridge(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == old
