"""What the tests of the command line share: tiny models in folders, and a skill."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from cli_support import TEXT, run

from editable_cache.testing.tiny_models import tiny_model, tiny_tokenizer


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The folder of a tiny model of a family, with a tokenizer; made once."""
    root = tmp_path_factory.mktemp("models")

    def folder(family: str) -> str:
        path = root / family
        if not path.exists():
            tiny_model(family).save_pretrained(path)
            tiny_tokenizer().save_pretrained(path)
        return str(path)

    return folder


@pytest.fixture(scope="session")
def skill(models: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a skill for the tiny Llama; leave it unchanged."""
    folder = tmp_path_factory.mktemp("skill")
    (folder / "policy.txt").write_text(TEXT)
    result = run("precompile", models("llama"), str(folder / "policy.txt"), "-o", str(folder / "policy"))
    assert result.exit_code == 0, result.output
    return str(folder / "policy")
