"""The `hub` fixture: a local hub, and a huggingface_hub in this process that knows no other."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from hub_server import HubServer
from huggingface_hub import constants, hf_api
from huggingface_hub.utils import _http

# The client uploads large files with an argument that its HTTP library calls out of date.
_CLIENT_WARNING = "ignore:Use 'content=<...>' to upload raw bytes/text content:DeprecationWarning"
_CLIENT_PACKAGES = ("huggingface_hub", "transformers")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "hub" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.filterwarnings(_CLIENT_WARNING))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A hub on loopback that every client in this process and in `hub.env()` uses by default.

    The user is `alice`, of the organisation `org`, with a token. Cache and home are in tmp_path / "home".
    """
    with HubServer(tmp_path / "home") as server:
        server.token = server.add_user("alice", orgs=("org",))
        _point_client(server, monkeypatch)
        huggingface_hub.close_session()  # its proxies were read from the old environment
        try:
            yield server
        finally:
            huggingface_hub.close_session()
    assert server.errors == []


@pytest.fixture
def log_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None], None]:
    """Change the token that this process sends by default; None for none."""

    def change(token: str | None) -> None:
        if token is None:
            monkeypatch.delenv("HF_TOKEN", raising=False)
        else:
            monkeypatch.setenv("HF_TOKEN", token)

    return change


def _point_client(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the environment would do at import, done to modules that are imported already."""
    env = server.env()
    for name in set(hub_names()) | {n.lower() for n in hub_names()}:
        monkeypatch.delenv(name, raising=False)
    for name, value in server.variables(server.token).items():
        monkeypatch.setenv(name, value)
    home, cache = env["HF_HOME"], env["HF_HUB_CACHE"]
    values = {
        "ENDPOINT": server.url,
        "HUGGINGFACE_CO_URL_TEMPLATE": server.url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HOME": home,
        "HF_HUB_CACHE": cache,
        "HUGGINGFACE_HUB_CACHE": cache,
        "HF_ASSETS_CACHE": env["HF_ASSETS_CACHE"],
        "HUGGINGFACE_ASSETS_CACHE": env["HF_ASSETS_CACHE"],
        "HF_XET_CACHE": env["HF_XET_CACHE"],
        "HF_TOKEN_PATH": f"{home}/token",
        "HF_STORED_TOKENS_PATH": f"{home}/stored_tokens",
        "AGENT_HARNESSES_PATH": f"{home}/.agent_harnesses.json",
        "DOWNLOAD_CHUNK_SIZE": 1 << 14,  # bytes that a cut download may lose; by default more than a test has
        "HF_HUB_OFFLINE": False,
        "HF_HUB_DISABLE_IMPLICIT_TOKEN": False,
        "HF_HUB_DISABLE_TELEMETRY": True,
        "HF_HUB_DISABLE_PROGRESS_BARS": True,
        "HF_HUB_DISABLE_XET": True,  # without it, the client uploads large files to Xet and asks no one
    }
    _set_everywhere(values, monkeypatch)
    monkeypatch.setattr(hf_api.api, "endpoint", server.url)  # the functions of the module are its methods
    monkeypatch.setattr(hf_api.api, "_whoami_cache", {}, raising=False)
    origins = {("http", "127.0.0.1", int(server.url.rpartition(":")[2]))}
    monkeypatch.setattr(_http, "_HUB_ORIGINS", frozenset(origins), raising=False)
    agent = sys.modules.get("huggingface_hub.utils._detect_agent")
    if agent is not None:
        monkeypatch.setattr(agent, "_registry", {"standardEnvVars": [], "harnesses": {}}, raising=False)
    clock = SimpleNamespace(**{**vars(time), "sleep": lambda seconds: time.sleep(min(seconds, 0.01))})
    for name in ("huggingface_hub.file_download", "huggingface_hub.utils._http"):
        monkeypatch.setattr(sys.modules[name], "time", clock)  # retries wait for milliseconds


def hub_names() -> list[str]:
    """The variables of the environment that a client of the hub reads."""
    proxies = ["HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"]
    return [*proxies, "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_OIDC_RESOURCE", "HF_HUB_OFFLINE", "HF_ENDPOINT"]


def _set_everywhere(values: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Set constants where they are defined and in each module that took a copy of one at import."""
    old = {name: vars(constants)[name] for name in values if name in vars(constants)}
    for module_name, module in list(sys.modules.items()):
        if module is None or module_name.split(".")[0] not in _CLIENT_PACKAGES:
            continue
        for name, value in old.items():
            mine = vars(module)
            if name in mine and mine[name] == value:
                monkeypatch.setitem(mine, name, values[name])
