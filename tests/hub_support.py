"""What tests of the local hub share: a commit of the real client, and the files of a snapshot."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi

REPO = "org/skill"
WEIGHTS = bytes(range(256)) * 400  # 100 kB, no two neighbours the same
CARD = """---
license: apache-2.0
library_name: editable-cache
base_model: org/base
base_model_relation: adapter
tags: [kv-cache, editable-cache]
---
# A skill
"""


def push(files: dict[str, bytes | None], *, message: str = "push", repo: str = REPO, **kwargs: object) -> CommitInfo:
    """One commit of the real client to a repository that may have to be made. None as content deletes the file."""
    api = HfApi()
    api.create_repo(repo, exist_ok=True)
    operations = [
        CommitOperationDelete(path) if data is None else CommitOperationAdd(path, data) for path, data in files.items()
    ]
    return api.create_commit(repo, operations, commit_message=message, **kwargs)


def contents(folder: str) -> dict[str, bytes]:
    """The files of a snapshot, without the .gitattributes that the hub adds."""
    paths = [path for path in Path(folder).rglob("*") if path.is_file() and path.name != ".gitattributes"]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
