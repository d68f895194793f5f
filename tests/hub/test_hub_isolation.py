"""The local hub is the only one: offline, closed, in a subprocess, and no way out to another host."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest
from hub_server import HubServer
from hub_support import CARD, REPO, WEIGHTS, push
from huggingface_hub import get_session, snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError


def test_offline_after_a_download(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    push({"f.txt": b"one", "m.safetensors": WEIGHTS})
    with pytest.raises(LocalEntryNotFoundError):
        snapshot_download(REPO, local_files_only=True)
    folder = snapshot_download(REPO)
    hub.log.clear()
    assert snapshot_download(REPO, local_files_only=True) == folder
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert snapshot_download(REPO) == folder
    assert hub.log == []


def test_a_closed_hub_is_an_unreachable_one(hub: HubServer) -> None:
    push({"f.txt": b"one"})
    folder = snapshot_download(REPO)
    hub.close()
    hub.close()
    get_session().close()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", int(hub.url.rpartition(":")[2])), timeout=1)
    assert snapshot_download(REPO, local_files_only=True) == folder


def test_nothing_else_is_contacted(hub: HubServer) -> None:
    with pytest.raises(Exception, match="refused"):  # by the proxy that isn't there
        get_session().get("http://hub.invalid/")
    assert get_session().get(f"{hub.url}/api/agent-harnesses").json() == {"standardEnvVars": [], "harnesses": {}}


def test_a_subprocess_uses_the_same_hub(hub: HubServer) -> None:
    push({"README.md": CARD.encode(), "m.safetensors": WEIGHTS})
    program = (
        "from huggingface_hub import HfApi, list_models, snapshot_download\n"
        "print(snapshot_download('org/skill'))\n"
        "print(*[model.id for model in list_models(filter='kv-cache')], HfApi().whoami()['name'])\n"
        "HfApi().upload_file(path_or_fileobj=b'w' * 100, path_in_repo='n.safetensors', repo_id='org/skill')\n"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=hub.env(), capture_output=True, text=True, timeout=60, check=True)
    folder = hub.home / "hub/models--org--skill/snapshots" / str(hub.head(REPO).parent)
    assert done.stdout.split() == [str(folder), REPO, "alice"]
    assert hub.head(REPO).files["n.safetensors"].lfs
    assert not hub.calls(path="*xet*")
    failed = subprocess.run(command, env=hub.env(token=None), capture_output=True, text=True, timeout=60)
    assert failed.returncode == 1


def test_faults_are_named(hub: HubServer) -> None:
    with pytest.raises(KeyError, match="cut_download"):
        hub.fault("typo")


def test_a_broken_server_is_told_apart_from_an_answer(hub: HubServer) -> None:
    answer = get_session().post(f"{hub.url}/api/validate-yaml", content=b"not json")
    assert answer.status_code == 500
    assert "JSONDecodeError" in hub.errors.pop()
