"""Requests and answers of the local hub, and the forms in which it writes trees, commits and dates."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from urllib.parse import parse_qs, unquote

from hub_commits import Commit


@dataclass(frozen=True)
class Request:
    """One request, read to its end. `segments` are the parts of the path, unquoted one by one."""

    method: str
    target: str
    headers: Any
    body: bytes

    @property
    def raw_path(self) -> str:
        return self.target.partition("?")[0]

    @property
    def path(self) -> str:
        return unquote(self.raw_path)

    @property
    def segments(self) -> list[str]:
        return [unquote(part) for part in self.raw_path.strip("/").split("/")]

    @property
    def query(self) -> dict[str, list[str]]:
        return parse_qs(self.target.partition("?")[2])

    @property
    def file(self) -> str | None:
        """The path in its repository of a file that is asked for; None for other requests."""
        parts = self.segments
        if "resolve" not in parts[2:4]:
            return None
        return "/".join(split_revision(parts[parts.index("resolve", 2) + 1 :])[1])

    def flag(self, name: str) -> bool:
        return self.query.get(name, [""])[-1].lower() in {"1", "true"}

    def json(self) -> dict[str, Any]:
        return json.loads(self.body or b"{}")


@dataclass
class Response:
    """An answer. `is_file` marks the content of a repository's file, which download faults apply to."""

    status: int = 200
    body: bytes | memoryview = b""
    headers: dict[str, str] = field(default_factory=dict)
    is_file: bool = False


def as_json(data: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(status, json.dumps(data).encode(), {"Content-Type": "application/json", **(headers or {})})


def split_revision(parts: list[str]) -> tuple[str, list[str]]:
    """The revision at the start of a path: one quoted segment, or the three of an unquoted `refs/pr/1`."""
    count = 3 if parts[:1] == ["refs"] and len(parts) >= 3 else 1
    return "/".join(parts[:count]), parts[count:]


def tree_entries(commit: Commit) -> list[dict[str, Any]]:
    entries = []
    for path, file in commit.files.items():
        entry: dict[str, Any] = {"type": "file", "oid": file.blob_id, "size": len(file.data), "path": path}
        if file.lfs:
            entry["lfs"] = {"oid": file.sha256, "size": len(file.data), "pointerSize": len(file.pointer)}
        entries.append(entry)
    for path in commit.folders():
        oid = hashlib.sha1(f"{commit.sha} {path}".encode()).hexdigest()
        entries.append({"type": "directory", "oid": oid, "size": 0, "path": path})
    return sorted(entries, key=lambda entry: entry["path"])


def commit_entry(commit: Commit) -> dict[str, Any]:
    authors = [{"user": commit.author}]
    text = {"title": commit.title, "message": commit.description}
    return {"id": commit.sha, **text, "authors": authors, "date": as_time(commit.date)}


def as_time(date: datetime) -> str:
    return date.strftime("%Y-%m-%dT%H:%M:%S.") + f"{date.microsecond // 1000:03d}Z"
