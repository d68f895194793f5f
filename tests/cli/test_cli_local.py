"""check, precompile, inspect, diff and verify on folders, in this process."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_support import TEXT, answer, run
from safetensors.torch import load_file

from editable_cache import Skill
from editable_cache.testing.tiny_models import tiny_model, tiny_tokenizer

Models = Callable[[str], str]
EVIL = "Nice \x1b[31m\x1b]0;title\x07 [red]brackets[/red] :smile: \u202eback"


@contextmanager
def changed(skill: str, tensor: str, slot: int, folder: Path) -> Iterator[str]:
    """A copy of a skill in whose second layer one number of one cell is another, all digests made anew."""
    chunk = Skill.from_pretrained(skill)
    layers = [dict(states) for states in chunk.layers]
    cells = layers[1][tensor].clone()
    cells[0, 0, slot, 3] += 0.5
    layers[1][tensor] = cells
    replace(chunk, layers=tuple(layers)).save_pretrained(folder)
    yield str(folder)


# -- check


def test_check_says_that_everything_works(models: Models) -> None:
    found = answer("check", models("gemma3"))
    assert found["ok"] is True
    assert set(found["works"].values()) == {True}
    assert [layer["type"] for layer in found["layers"]] == ["sliding_attention", "full_attention"] * 2
    rotary = found["layers"][0]["tensors"][0]["rotary"]
    assert (rotary["layout"], rotary["start"], rotary["stop"]) == ("half", 0, 16)
    assert {mask["sliding_window"] for mask in found["masks"]} == {8, None}
    assert 0 < found["worst_error"] < 1e-4


@pytest.mark.parametrize(
    ("family", "refused"),
    [("gpt2", {"splice", "splice_in_the_middle"}), ("falcon_h1", {"recompute", "splice_in_the_middle"})],
)
def test_check_says_what_is_refused_and_why(models: Models, family: str, refused: set[str]) -> None:
    found = answer("check", models(family), code=1)
    assert {name for name, works in found["works"].items() if not works} == refused == set(found["reasons"])
    shown = run("check", models(family))
    assert shown.exit_code == 1
    assert found["reasons"]["splice_in_the_middle"][0]["what"] in shown.stdout
    if family == "gpt2":
        assert [tensor["explained"] for tensor in found["layers"][0]["tensors"]] == [False, False]
        assert found["layers"][2]["reasons"][0]["what"] == "layer 2 keys"
        assert "not understood" in " ".join(shown.stdout.split())


def test_check_of_no_model_is_one_line(tmp_path: Path) -> None:
    result = run("check", str(tmp_path))
    assert result.exit_code == 2
    assert result.stdout == ""
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "can't be loaded" in errors[0]
    assert answer("check", str(tmp_path), code=2)["kind"] == "ArtifactError"


# -- precompile


def test_precompile_writes_what_the_library_computes(models: Models, skill: str) -> None:
    expected = Skill.precompile(tiny_model("llama"), tiny_tokenizer(), TEXT, name="policy")
    assert expected.equal_cells(Skill.from_pretrained(skill))
    assert Skill.from_pretrained(skill).text == TEXT


def test_precompile_from_standard_input_with_every_option(models: Models, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ("--name", "mine", "--storage", "int8", "--prefix", "You are", "--dtype", "bfloat16", "--json")
    result = run("precompile", models("llama"), "-", "-o", str(out), *options, stdin=TEXT)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["name"] == "mine"
    assert found["prefix_tokens"] == len(tiny_tokenizer()("You are")["input_ids"])
    assert (found["storage"], found["dtype"]) == ("int8", "bfloat16")
    stored = load_file(next(out.glob("cells-*.safetensors")))
    assert stored["layers.0.keys"].dtype == torch.int8
    assert found["bytes"] == next(out.glob("cells-*.safetensors")).stat().st_size


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks for it
def test_precompile_with_an_adapter(models: Models, tmp_path: Path, skill: str) -> None:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    adapted = get_peft_model(tiny_model("llama"), LoraConfig(target_modules=["v_proj"], init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "lora")
    (tmp_path / "text").write_text(TEXT)
    adapter = ("--adapter", str(tmp_path / "lora"))
    answer("precompile", models("llama"), str(tmp_path / "text"), "-o", str(tmp_path / "out"), *adapter)
    assert not Skill.from_pretrained(tmp_path / "out").equal_cells(Skill.from_pretrained(skill))
    assert answer("verify", str(tmp_path / "out"), "--model", models("llama"), *adapter)["ok"] is True
    refused = answer("verify", str(tmp_path / "out"), "--model", models("llama"), code=2)
    assert "adapters" in {reason["what"] for reason in refused["reasons"]}


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00"])
def test_precompile_refuses_what_is_no_text(models: Models, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "text").write_bytes(content)
    result = run("precompile", models("llama"), str(tmp_path / "text"), "-o", str(tmp_path / "out"))
    assert result.exit_code == 2
    assert "expected" in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_missing_text_is_an_error_without_traceback(models: Models, tmp_path: Path) -> None:
    result = run("precompile", models("llama"), str(tmp_path / "none"), "-o", str(tmp_path / "out"))
    assert result.exit_code == 2
    assert "No such file" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("wrong", ["name", "default name", "file"])
def test_precompile_refuses_before_the_model_is_loaded(wrong: str, tmp_path: Path) -> None:
    text, out = tmp_path / (".hidden" if wrong == "default name" else "text"), tmp_path / "out"
    text.write_text(TEXT)
    if wrong == "file":
        out.write_text("in the way")
    name = ("--name", "a/b") if wrong == "name" else ()
    result = run("precompile", str(tmp_path / "no model"), str(text), "-o", str(out), *name)
    assert result.exit_code == 2
    expected = "expected a folder, or nothing yet, got a file" if wrong == "file" else "expected a name of"
    assert expected in result.stderr
    assert "can't be loaded" not in result.stderr


# -- inspect


def test_inspect_shows_a_skill(models: Models, skill: str) -> None:
    found = answer("inspect", skill, "--model", models("llama"))
    (build,) = found["builds"]
    assert found["fits"] is build["fits"] is True
    assert build["tokens"] == len(tiny_tokenizer()(TEXT)["input_ids"])
    assert build["decoded_tail"] == build["text_tail"] == TEXT
    assert build["origin"]["attention"] == "sdpa"
    assert build["provenance"]["how"] == "precompiled"
    shown = run("inspect", skill)
    assert shown.exit_code == 0
    assert "policy" in shown.stdout
    assert "fits the model" not in shown.stdout


def test_inspect_lists_every_reason_of_a_misfit(models: Models, skill: str) -> None:
    found = answer("inspect", skill, "--model", models("gemma3"), code=1)
    assert {"model_type", "weights", "config.num_hidden_layers"} <= {r["what"] for r in found["builds"][0]["reasons"]}
    shown = run("inspect", skill, "--model", models("gemma3"))
    assert "weights: expected" in shown.stdout


def test_nothing_of_a_stranger_reaches_the_terminal(models: Models, tmp_path: Path) -> None:
    chunk = Skill.precompile(tiny_model("llama"), tiny_tokenizer(), f"<|im_start|>system {EVIL}", name="[red]x")
    noted = replace(chunk, text=EVIL, provenance=chunk.provenance.noted("[bold]note[/bold]"))
    noted.save_pretrained(tmp_path)
    for more in ((), ("--model", models("llama")), ("--json",)):
        shown = run("inspect", str(tmp_path), *more).output
        assert not set(shown) & {"\x1b", "\x07", "\u202e"}
    shown = run("inspect", str(tmp_path), "--model", models("llama")).stdout
    for literal in ("[red]x", "[bold]note[/bold]", "[red]brackets[/red] :smile:", r"\x1b[31m", r"\u202eback"):
        assert literal in shown
    assert "1: '<|im_start|>' at 0" in shown
    assert not set(run("diff", str(tmp_path), str(tmp_path)).output) & {"\x1b", "\u202e"}


def test_inspect_says_what_is_wrong_with_a_damaged_skill(skill: str, tmp_path: Path) -> None:
    shutil.copytree(skill, tmp_path / "copy")
    manifest = tmp_path / "copy" / "manifest.json"
    manifest.write_text(manifest.read_text().replace("policy", "pol\\u001bicy"))
    result = run("inspect", str(tmp_path / "copy"))
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert "\x1b" not in result.output


# -- diff


def test_diff_of_equals(skill: str) -> None:
    assert answer("diff", skill, skill)["ok"] is True
    assert "are equal" in run("diff", skill, skill).stdout


def test_diff_counts_ids_and_compares_cells(models: Models, skill: str, tmp_path: Path) -> None:
    (tmp_path / "text").write_text(TEXT.replace("pending", "delivered to the customer"))
    answer("precompile", models("llama"), str(tmp_path / "text"), "-o", str(tmp_path / "other"), "--name", "policy")
    found = answer("diff", skill, str(tmp_path / "other"), code=1)
    ids = found["ids"]
    new, old = (len(tiny_tokenizer()(t)["input_ids"]) for t in (" delivered to the customer", " pending"))
    assert ids["added"] - ids["removed"] == new - old
    assert ids["first_difference"] == len(tiny_tokenizer()(TEXT[: TEXT.index(" pending")])["input_ids"])
    assert found["cells"]["compared"] == "shape"


def test_diff_sees_one_changed_cell_and_a_storage(models: Models, skill: str, tmp_path: Path) -> None:
    with changed(skill, "values", 5, tmp_path / "forged") as forged:
        found = answer("diff", skill, forged, code=1)
    assert found["differences"] == []
    assert found["cells"]["tensors"]["keys"] == {"largest": 0.0, "relative": 0.0}
    assert found["cells"]["tensors"]["values"]["largest"] == pytest.approx(0.5, abs=1e-6)
    Skill.from_pretrained(skill).save_pretrained(tmp_path / "small", storage="int8")
    found = answer("diff", skill, str(tmp_path / "small"), code=1)
    assert [each["what"] for each in found["differences"]] == ["storage"]
    assert 1e-4 < found["cells"]["tensors"]["keys"]["relative"] < 5e-3  # half a step of 1/127 is 3.9e-3


def test_diff_of_numbers_that_are_none(skill: str, tmp_path: Path) -> None:
    chunk = Skill.from_pretrained(skill)
    layers = [dict(states) for states in chunk.layers]
    layers[0]["keys"] = layers[0]["keys"].clone().fill_(float("nan"))
    replace(chunk, layers=tuple(layers)).save_pretrained(tmp_path)
    assert answer("diff", skill, str(tmp_path), code=1)["cells"]["tensors"]["keys"]["largest"] == "inf"


def test_diff_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    from editable_cache.cli.diff import _ids

    found: dict[str, Any] = _ids([1, *[7] * 3000, 2], [3, *[7] * 2000, 4])
    assert (found["counted"], found["removed"], found["added"]) == (False, 1002, 2)
    assert _ids([1, 2, 3], [1, 3, 4])["counted"] is True


# -- verify


def test_verify_says_yes(models: Models, skill: str) -> None:
    found = answer("verify", skill, "--model", models("llama"), "--tokens", "8", "--seed", "3")
    assert found["ok"] is found["decided"] is True
    assert found["checked"] == len(found["slots"]) == 8
    assert found["slots"][0] == 0
    assert max(found["errors"].values()) <= found["tolerance"] == 1e-4


@pytest.mark.parametrize("tensor", ["keys", "values"])
def test_verify_sees_a_forged_cell(models: Models, skill: str, tmp_path: Path, tensor: str) -> None:
    with changed(skill, tensor, 0, tmp_path / "forged") as forged:
        found = answer("verify", forged, "--model", models("llama"), "--tokens", "4", code=1)
    assert found["ok"] is False
    assert found["decided"] is True
    assert found["worst_at"] == f"layer 1 {tensor}, slot 0"


def test_verify_of_another_model_is_an_error(models: Models, skill: str) -> None:
    found = answer("verify", skill, "--model", models("gemma3"), code=2)
    assert found["kind"] == "CompatibilityError"
    assert "weights" in {reason["what"] for reason in found["reasons"]}


def test_verify_does_not_call_undecided_a_yes(models: Models, skill: str, tmp_path: Path) -> None:
    chunk = Skill.from_pretrained(skill)
    replace(chunk, provenance=chunk.provenance.noted("stale: edit of 'x'")).save_pretrained(tmp_path)
    found = answer("verify", str(tmp_path), "--model", models("llama"), code=2)
    assert (found["ok"], found["decided"]) == (False, False)
    assert found["reasons"][0]["got"] == "stale: edit of 'x'"


# -- all of them


def test_what_no_one_expected_is_one_line(models: Models, skill: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise NotImplementedError("Cannot copy out of meta tensor;\n  no data!\n" + "x" * 9_000)

    monkeypatch.setattr(Skill.__mro__[1], "verify", fail)
    result = run("verify", skill, "--model", models("llama"))
    assert result.exit_code == 2
    assert result.stdout == ""
    (said,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert said.startswith("error: NotImplementedError: Cannot copy out of meta tensor; no data! xxx")
    assert len(said) < 600
    assert result.stderr.endswith(said + "\n")
    assert answer("verify", skill, "--model", models("llama"), code=2)["kind"] == "NotImplementedError"
    assert run("verify", skill).exit_code == 2  # a usage error stays one
    assert "Usage" in run("verify", skill).stderr


def test_pull_into_the_current_folder_is_refused_before_anything_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for out in (".", str(tmp_path)):
        result = run("pull", "org/policy", "-o", out)
        assert result.exit_code == 2
        assert "expected a new folder, got the current one" in result.stderr
    assert not any(tmp_path.iterdir())
