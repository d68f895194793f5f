"""What the local hub stores: repositories with real history, branches, tags, pull requests and users."""

from __future__ import annotations

import fnmatch
import hashlib
import re
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from functools import cached_property

# A new repository starts with this file, as on the real hub; its patterns decide what is stored with LFS.
GITATTRIBUTES = "".join(
    f"*{ending} filter=lfs diff=lfs merge=lfs -text\n"
    for ending in (".safetensors", ".bin", ".gguf", ".npz", ".npy", ".pt", ".pth", ".tar", ".zip", ".gz", ".onnx")
).encode()
LFS_SIZE = 10_000_000  # bytes: larger files go to LFS whatever their name is


class HubError(Exception):
    """An HTTP answer that isn't a success: status, X-Error-Code (may be empty), text, and more fields of the body."""

    def __init__(
        self, status: int, code: str, message: str, headers: Mapping[str, str] | None = None, **body: str
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.headers = status, code, message, dict(headers or {})
        self.body = {"error": message, **body}


@dataclass(frozen=True)
class User:
    """An account: it reads and writes `name/*` and `org/*` for its organisations, unless its role is `read`."""

    name: str
    orgs: tuple[str, ...] = ()
    role: str = "write"

    def belongs_to(self, namespace: str) -> bool:
        return namespace == self.name or namespace in self.orgs


@dataclass(frozen=True)
class StoredFile:
    """The bytes of one file and where they are kept: in git, or in the large file storage."""

    data: bytes
    lfs: bool = False

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    @cached_property
    def pointer(self) -> bytes:
        """What git holds for a file of the large file storage."""
        return b"version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize %d\n" % (
            self.sha256.encode(),
            len(self.data),
        )

    @cached_property
    def blob_id(self) -> str:
        """The git object id: sha1 over a header and the content, or the pointer."""
        content = self.pointer if self.lfs else self.data
        return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()

    @property
    def etag(self) -> str:
        return self.sha256 if self.lfs else self.blob_id


@dataclass(frozen=True)
class Commit:
    """One snapshot: every file of the repository at that moment, and the commit before it."""

    sha: str
    parent: str | None
    files: Mapping[str, StoredFile]
    title: str
    description: str
    author: str
    date: datetime

    def file(self, path: str) -> StoredFile:
        try:
            return self.files[path]
        except KeyError:
            raise HubError(404, "EntryNotFound", "Entry not found", {"X-Repo-Commit": self.sha}) from None

    def folders(self) -> list[str]:
        parents = {"/".join(parts[:i]) for parts in (p.split("/") for p in self.files) for i in range(1, len(parts))}
        return sorted(parents)


@dataclass(frozen=True)
class Operation:
    """A line of a commit: `add` (with its file), `delete` or `delete_folder`, and the path."""

    kind: str
    path: str
    file: StoredFile | None = None


@dataclass
class Repo:
    """One repository. `downloads` counts file fetches and may be set; `gated` lists who may fetch files."""

    repo_id: str
    repo_type: str = "model"
    private: bool = False
    gated: frozenset[str] | None = None
    downloads: int = 0
    likes: int = 0
    commits: dict[str, Commit] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    pulls: dict[int, str] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock, repr=False)

    def __post_init__(self) -> None:
        first = [Operation("add", ".gitattributes", StoredFile(GITATTRIBUTES))]
        self.branches["main"] = self._record(None, {}, first, "initial commit", "", "hub").sha

    @property
    def namespace(self) -> str:
        return self.repo_id.split("/")[0]

    @property
    def head(self) -> Commit:
        return self.commits[self.branches["main"]]

    @property
    def created(self) -> datetime:
        return min(c.date for c in self.commits.values())

    def resolve(self, revision: str) -> Commit:
        """The commit of a branch, tag, `refs/pr/N`, full sha, or a unique sha prefix of at least 7 digits."""
        short = revision.removeprefix("refs/heads/").removeprefix("refs/tags/")
        pull = re.fullmatch(r"refs/pr/(\d+)", revision)
        sha = self.branches.get(short) or self.tags.get(short) or (pull and self.pulls.get(int(pull[1])))
        if not sha and re.fullmatch(r"[0-9a-f]{7,40}", revision):
            found = [full for full in self.commits if full.startswith(revision)]
            sha = found[0] if len(found) == 1 else None
        if not sha:
            raise HubError(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return self.commits[sha]

    def history(self, revision: str) -> list[Commit]:
        """Commits from the newest to the first."""
        found: list[Commit] = [self.resolve(revision)]
        while (parent := found[-1].parent) is not None:
            found.append(self.commits[parent])
        return found

    def wants_lfs(self, path: str, size: int, revision: str) -> bool:
        """Whether a file of that name and size is stored with LFS, by the .gitattributes of the revision."""
        attributes = self.resolve(revision).files.get(".gitattributes", StoredFile(b"")).data.decode()
        patterns = [line.split()[0] for line in attributes.splitlines() if "filter=lfs" in line]
        name = path.split("/")[-1]
        return size > LFS_SIZE or any(fnmatch.fnmatch(path, p) or fnmatch.fnmatch(name, p) for p in patterns)

    def commit(
        self,
        operations: Iterable[Operation],
        *,
        revision: str = "main",
        title: str = "commit",
        description: str = "",
        author: str = "hub",
        parent: str | None = None,
        create_pr: bool = False,
    ) -> tuple[Commit, int | None]:
        """Add one commit to a branch or a pull request, all or nothing. Returns it and the new pull request, if any.

        `parent` is the commit that the caller saw last: if the branch has moved on, the answer is 412.
        """
        with self.lock:
            base = self.resolve(revision)
            if parent is not None and self.resolve(parent).sha != base.sha:
                raise HubError(412, "", "A commit has happened since. Please refresh and try again.")
            pull = re.fullmatch(r"refs/pr/(\d+)", revision)
            branch = revision.removeprefix("refs/heads/")
            if not create_pr and not pull and branch not in self.branches:
                raise HubError(400, "", f"Cannot commit to {revision}: it isn't a branch")
            made = self._record(base.sha, base.files, operations, title, description, author)
            if create_pr:
                number = len(self.pulls) + 1
                self.pulls[number] = made.sha
                return made, number
            if pull:
                self.pulls[int(pull[1])] = made.sha
            else:
                self.branches[branch] = made.sha
            return made, None

    def write(
        self, files: Mapping[str, bytes | None], *, title: str = "written by the test", revision: str = "main"
    ) -> Commit:
        """A commit made by the server itself: no client, no check of the names. None as content deletes the file."""
        operations = [
            Operation("delete", path)
            if data is None
            else Operation("add", path, StoredFile(data, self.wants_lfs(path, len(data), revision)))
            for path, data in files.items()
        ]
        return self.commit(operations, revision=revision, title=title)[0]

    def merge(self, number: int) -> None:
        """Move main to a pull request that starts at its head; 409 if main has moved on."""
        with self.lock:
            if number not in self.pulls:
                raise HubError(404, "", f"Discussion {number} not found")
            if self.branches["main"] not in {c.sha for c in self.history(f"refs/pr/{number}")}:
                raise HubError(409, "", "This branch has conflicts that must be resolved")
            self.branches["main"] = self.pulls[number]

    def _record(
        self,
        parent: str | None,
        files: Mapping[str, StoredFile],
        operations: Iterable[Operation],
        title: str,
        description: str,
        author: str,
    ) -> Commit:
        tree = dict(files)
        for op in operations:
            if op.kind == "add":
                assert op.file is not None
                tree[op.path] = op.file
            elif op.kind == "delete":
                if op.path not in tree:
                    raise HubError(404, "EntryNotFound", f"A file with this name doesn't exist: {op.path}")
                del tree[op.path]
            else:
                inside = [path for path in tree if path.startswith(op.path.rstrip("/") + "/")]
                if not inside:
                    raise HubError(404, "EntryNotFound", f"A folder with this name doesn't exist: {op.path}")
                for path in inside:
                    del tree[path]
        date = datetime.now(timezone.utc)
        if parent is not None:  # dates order the history even when two commits share a tick of the clock
            date = max(date, self.commits[parent].date + timedelta(milliseconds=1))
        listing = "".join(f"{file.blob_id} {path}\n" for path, file in sorted(tree.items()))
        text = f"{self.repo_type} {self.repo_id}\n{parent}\n{date.isoformat()}\n{author}\n{title}\n{listing}"
        sha = hashlib.sha1(text.encode("utf-8", "surrogatepass")).hexdigest()
        self.commits[sha] = Commit(sha, parent, tree, title, description, author, date)
        return self.commits[sha]


class HubStore:
    """All repositories and large files of the local hub, in memory."""

    def __init__(self) -> None:
        self.repos: dict[tuple[str, str], Repo] = {}
        self.large_files: dict[str, bytes] = {}
        self.users: dict[str, User] = {}
        self.lock = threading.RLock()

    def create(self, repo_id: str, *, repo_type: str = "model", private: bool = False) -> Repo:
        """A new repository with its first commit; 409 if the name is taken."""
        with self.lock:
            if not re.fullmatch(r"[\w.-]{1,96}/[\w.-]{1,96}", repo_id, re.ASCII) or "--" in repo_id or ".." in repo_id:
                raise HubError(400, "", f"Invalid repository name: {repo_id}")
            if (repo_type, repo_id) in self.repos:
                raise HubError(409, "", f"You already created this {repo_type} repo: {repo_id}")
            repo = self.repos[repo_type, repo_id] = Repo(repo_id, repo_type, private)
            return repo

    def find(self, repo_type: str, repo_id: str, user: User | None) -> Repo:
        """A repository that the user may see. What is private doesn't exist for others: 401 or 404, as on the hub."""
        repo = self.repos.get((repo_type, repo_id))
        if repo is None or (repo.private and not (user and user.belongs_to(repo.namespace))):
            raise HubError(404 if user else 401, "RepoNotFound", "Repository not found")
        return repo

    def visible(self, repo_type: str, user: User | None) -> list[Repo]:
        """Every repository that the user may see."""
        with self.lock:
            repos = [repo for (kind, _), repo in self.repos.items() if kind == repo_type]
        return [repo for repo in repos if not repo.private or (user and user.belongs_to(repo.namespace))]
