"""Skills of tiny models that the local hub serves too, for tests that publish and load them."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hub_server import HubServer
from huggingface_hub import HfApi
from transformers import AutoModelForCausalLM, AutoTokenizer

from editable_cache import Skill
from editable_cache.testing.tiny_models import tiny_model, tiny_tokenizer

SKILL, TINY = "org/refunds", "org/tiny"
TEXT = "If the order is pending the agent must not refund it.\n"
MARKS = "<!-- editable-cache:builds -->", "<!-- /editable-cache:builds -->"


@functools.cache
def model_files(seed: int) -> dict[str, bytes]:
    """The files of a repository with a tiny Llama and its tokenizer."""
    with tempfile.TemporaryDirectory() as folder:
        tiny_model("llama", seed=seed).save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def serve(hub: HubServer, repo: str = TINY, *, seed: int = 0) -> None:
    """Put the repository of a tiny model onto the hub."""
    hub.create(repo, model_files(seed))


def load(repo: str = TINY, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """Model and tokenizer from the hub, as a user gets them."""
    return AutoModelForCausalLM.from_pretrained(repo, dtype=dtype).eval(), AutoTokenizer.from_pretrained(repo)


@functools.cache
def tokenizer() -> Any:
    return tiny_tokenizer()


@functools.cache
def built(dtype: torch.dtype = torch.float32, seed: int = 0, family: str = "llama") -> tuple[Any, Skill]:
    """A model, to be left unchanged, and its skill; not from the hub."""
    model = tiny_model(family, seed=seed, dtype=dtype)
    return model, Skill.precompile(model, tokenizer(), TEXT, name="refunds")


def files_of(hub: HubServer, repo: str = SKILL) -> dict[str, bytes]:
    """The files of a repository at its head."""
    return {path: file.data for path, file in hub.head(repo).files.items()}


def builds_of(hub: HubServer, repo: str = SKILL) -> list[str]:
    """The builds in a repository at its head."""
    return sorted(path.split("/")[1] for path in files_of(hub, repo) if path.endswith("/manifest.json"))


def payloads_fetched(hub: HubServer) -> list[str]:
    """The builds whose cells were downloaded since the log was cleared."""
    return [path.split("/")[1] for path in hub.downloaded() if path.endswith(".safetensors")]


def readable(error: BaseException, *words: str) -> str:
    """The message of an error of the hub, which people can read and which names no secret."""
    text = str(error)
    lost = [word for word in words if word not in text]
    foul = [part for part in ("http://", "https://", "<html", "Traceback", "hf_alice", "Request ID") if part in text]
    assert (lost, foul) == ([], []), text
    assert "\n" not in text, text
    assert error.__cause__ is not None
    return text


def meanwhile(monkeypatch: pytest.MonkeyPatch, what: Callable[[], object]) -> None:
    """Do something on the hub once, between what a publisher reads and what it commits."""
    import hub_routes

    answer, waiting = hub_routes._Router.preupload, [what]

    def preupload(self: Any, *arguments: Any) -> Any:
        if waiting:
            waiting.pop()()
        return answer(self, *arguments)

    monkeypatch.setattr(hub_routes._Router, "preupload", preupload)


@functools.cache
def turned() -> Any:
    """The model of ``built()`` with other rope settings."""
    config = tiny_model("llama").config
    config.rope_parameters = {"rope_type": "default", "rope_theta": 20_000.0}
    other = AutoModelForCausalLM.from_config(config).eval()
    other.load_state_dict(built()[0].state_dict())
    return other


def card_of(hub: HubServer) -> str:
    return files_of(hub)["README.md"].decode()


def front_matter(text: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(text.split("---\n")[1])
    return found


def edit_card(old: str, new: str) -> None:
    api = HfApi()
    with open(api.hf_hub_download(SKILL, "README.md"), encoding="utf-8", newline="") as file:
        text = file.read()
    assert old in text
    edited = text.replace(old, new)
    api.upload_file(path_or_fileobj=edited.encode(), path_in_repo="README.md", repo_id=SKILL)
