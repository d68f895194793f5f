"""The endpoints of the local hub: what each request of the huggingface_hub client is answered with."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qs, quote, urlencode

import hub_cards
from hub_commits import Commit, HubError, HubStore, Operation, Repo, StoredFile, User
from hub_messages import Request, Response, as_json, as_time, commit_entry, split_revision, tree_entries

KINDS = {"models": "model", "datasets": "dataset", "spaces": "space"}
SORT_KEYS = {
    "downloads": lambda repo: (repo.downloads, repo.repo_id),
    "likes": lambda repo: (repo.likes, repo.repo_id),
    "trendingScore": lambda repo: (repo.downloads + repo.likes, repo.repo_id),
    "lastModified": lambda repo: (repo.head.date, repo.repo_id),
    "createdAt": lambda repo: (repo.created, repo.repo_id),
}
LISTED = ["id", "modelId", "likes", "private", "downloads", "tags", "pipeline_tag", "library_name", "createdAt"]
LISTED_FULL = [*LISTED, "author", "sha", "lastModified", "gated", "disabled", "siblings"]


def answer(store: HubStore, base_url: str, page_size: int, request: Request) -> Response:
    """The answer to a request, or a HubError."""
    return _Router(store, base_url, page_size, request).answer()


class _Router:
    def __init__(self, store: HubStore, base_url: str, page_size: int, request: Request) -> None:
        self.store, self.url, self.page_size, self.request = store, base_url, page_size, request
        self.user = self._login()

    def _login(self) -> User | None:
        scheme, _, token = self.request.headers.get("Authorization", "").partition(" ")
        if not scheme:
            return None
        user = self.store.users.get(token)
        if user is None:
            raise HubError(401, "", "Invalid credentials in Authorization header")
        return user

    def answer(self) -> Response:
        method, parts = self.request.method, self.request.segments
        if method == "PUT" and parts[0] == "lfs":
            return self.upload(parts[1])
        if parts[0] == "api":
            return self.api(method, parts[1:])
        kind = KINDS[parts.pop(0)] if parts[0] in KINDS else "model"
        if len(parts) >= 4 and parts[2] == "resolve" and method in {"GET", "HEAD"}:
            revision, rest = split_revision(parts[3:])
            return self.download(self.store.find(kind, "/".join(parts[:2]), self.user), revision, "/".join(rest))
        if method == "POST" and parts[2:5] == ["info", "lfs", "objects"] and parts[1].endswith(".git"):
            repo = self.store.find(kind, f"{parts[0]}/{parts[1].removesuffix('.git')}", self.user)
            return self.lfs_batch(repo) if parts[5:] == ["batch"] else self.lfs_verify()
        raise self._unknown()

    def api(self, method: str, parts: list[str]) -> Response:
        match (method, parts):
            case ("GET", ["whoami-v2"]):
                return self.whoami()
            case ("POST", ["validate-yaml"]):
                return self.validate_yaml()
            case ("GET", ["agent-harnesses"]):
                return as_json({"standardEnvVars": [], "harnesses": {}})
            case ("POST", ["repos", "create"]):
                return self.create_repo()
            case ("DELETE", ["repos", "delete"]):
                return self.delete_repo()
            case ("GET", [kind]) if kind in KINDS:
                return self.list_repos(KINDS[kind])
            case (_, [kind, namespace, name, *rest]) if kind in KINDS:
                return self.repo_api(method, self.store.find(KINDS[kind], f"{namespace}/{name}", self.user), rest)
            case ("GET", [kind, _]) if kind in KINDS:
                raise HubError(404 if self.user else 401, "RepoNotFound", "Repository not found")
        raise self._unknown()

    def repo_api(self, method: str, repo: Repo, rest: list[str]) -> Response:
        action = rest[0] if rest else ""
        revision, tail = split_revision(rest[1:]) if len(rest) > 1 else ("main", [])
        match (method, action):
            case ("GET", "" | "revision"):
                return as_json(self.info(repo, repo.resolve(revision), files_metadata=self.request.flag("blobs")))
            case ("GET", "tree"):
                return self.tree(repo.resolve(revision), "/".join(tail).rstrip("/"))
            case ("POST", "paths-info"):
                return self.paths_info(repo.resolve(revision))
            case ("GET", "refs"):
                return self.refs(repo)
            case ("GET", "commits"):
                return self.page([commit_entry(commit) for commit in repo.history(revision)])
            case ("GET", "auth-check"):
                if rest[1:] == ["write"]:
                    self.writer(repo)
                return as_json({})
            case ("POST", "preupload"):
                self.writer(repo, pull_request=self.request.flag("create_pr"))
                return self.preupload(repo, revision)
            case ("POST", "commit"):
                return self.commit(repo, revision)
            case ("POST" | "DELETE", "branch" | "tag"):
                return self.ref(method, action, repo, revision)
            case ("PUT", "settings"):
                return self.settings(repo)
            case ("POST", "discussions") if rest[2:] == ["merge"]:
                self.writer(repo)
                repo.merge(int(rest[1]))
                return as_json({})
        raise self._unknown()

    def _unknown(self) -> HubError:
        return HubError(404, "", f"The local hub has no endpoint {self.request.method} {self.request.path}")

    def url_of(self, repo: Repo) -> str:
        return f"{self.url}/{'' if repo.repo_type == 'model' else repo.repo_type + 's/'}{repo.repo_id}"

    def writer(self, repo: Repo, *, pull_request: bool = False) -> User:
        """The user, if it may write to the repository; any user may open a pull request where it can read."""
        if self.user is None:
            raise HubError(401, "", "Invalid username or password.")
        if self.user.role != "write" or not (pull_request or self.user.belongs_to(repo.namespace)):
            raise HubError(403, "", f"You don't have the rights to write to {repo.repo_id}")
        return self.user

    def whoami(self) -> Response:
        if self.user is None:
            raise HubError(401, "", "Invalid username or password.")
        access = {"type": "access_token", "accessToken": {"displayName": "test", "role": self.user.role}}
        orgs = [{"type": "org", "name": org, "fullname": org} for org in self.user.orgs]
        name = self.user.name
        return as_json({"type": "user", "id": name, "name": name, "fullname": name, "orgs": orgs, "auth": access})

    def validate_yaml(self) -> Response:
        errors, warnings = hub_cards.check(self.request.json()["content"])
        said = {"errors": errors, "warnings": warnings}
        data = {kind: [{"message": text} for text in texts] for kind, texts in said.items()}
        return as_json(data, 400 if errors else 200)

    def create_repo(self) -> Response:
        if self.user is None:
            raise HubError(401, "", "Invalid username or password.")
        asked = self.request.json()
        namespace = asked.get("organization") or self.user.name
        if self.user.role != "write" or not self.user.belongs_to(namespace):
            raise HubError(403, "", f"You don't have the rights to create a model under the namespace {namespace}")
        private = bool(asked.get("private")) or asked.get("visibility") == "private"
        kind = asked.get("type") or "model"
        repo_id = f"{namespace}/{asked['name']}"
        if (kind, repo_id) in self.store.repos:
            url = self.url_of(self.store.repos[kind, repo_id])
            raise HubError(409, "", f"You already created this {kind} repo: {repo_id}", url=url)
        repo = self.store.create(repo_id, repo_type=kind, private=private)
        return as_json({"url": self.url_of(repo), "name": repo_id, "id": repo.head.sha[:24]})

    def delete_repo(self) -> Response:
        asked = self.request.json()
        namespace = asked.get("organization") or (self.user.name if self.user else "")
        repo = self.store.find(asked.get("type") or "model", f"{namespace}/{asked['name']}", self.user)
        self.writer(repo)
        with self.store.lock:
            del self.store.repos[repo.repo_type, repo.repo_id]
        return as_json({})

    def settings(self, repo: Repo) -> Response:
        self.writer(repo)
        asked = self.request.json()
        if "private" in asked or "visibility" in asked:
            repo.private = bool(asked.get("private")) or asked.get("visibility") == "private"
        if "gated" in asked:
            repo.gated = frozenset() if asked["gated"] else None
        return as_json({})

    def list_repos(self, kind: str) -> Response:
        query = self.request.query
        repos = self.store.visible(kind, self.user)
        if "author" in query:
            repos = [repo for repo in repos if repo.namespace == query["author"][-1]]
        if "search" in query:
            wanted = query["search"][-1].lower()
            repos = [repo for repo in repos if wanted in repo.repo_id.lower()]
        if "filter" in query:
            tags = {tag for value in query["filter"] for tag in value.split(",")}
            repos = [repo for repo in repos if tags <= set(hub_cards.tags(repo.head))]
        sort = query.get("sort", ["trendingScore"])[-1]
        if sort not in SORT_KEYS:
            raise HubError(400, "", f"sort must be one of {sorted(SORT_KEYS)}")
        repos.sort(key=SORT_KEYS[sort], reverse=True)
        keys = query.get("expand") or (LISTED_FULL if self.request.flag("full") else LISTED)
        keys = ["id", *keys, *(["cardData"] if self.request.flag("cardData") else [])]
        entries = ({key: value for key, value in self.info(r, r.head).items() if key in keys} for r in repos)
        return self.page(list(entries), size=int(query.get("limit", [self.page_size])[-1]))

    def info(self, repo: Repo, commit: Commit, *, files_metadata: bool = False) -> dict[str, Any]:
        card = hub_cards.card_data(commit)
        siblings: list[dict[str, Any]] = [{"rfilename": path} for path in sorted(commit.files)]
        for entry in siblings if files_metadata else ():
            file = commit.files[entry["rfilename"]]
            entry |= {"size": len(file.data), "blobId": file.blob_id}
            if file.lfs:
                entry["lfs"] = {"sha256": file.sha256, "size": len(file.data), "pointerSize": len(file.pointer)}
        return {
            "id": repo.repo_id,
            "modelId": repo.repo_id,
            "author": repo.namespace,
            "sha": commit.sha,
            "lastModified": as_time(repo.head.date),
            "createdAt": as_time(repo.created),
            "private": repo.private,
            "gated": "manual" if repo.gated is not None else False,
            "disabled": False,
            "downloads": repo.downloads,
            "likes": repo.likes,
            "tags": hub_cards.tags(commit),
            "pipeline_tag": card.get("pipeline_tag"),
            "library_name": card.get("library_name"),
            "cardData": card or None,
            "siblings": siblings,
            "usedStorage": sum(len(file.data) for file in commit.files.values()),
        }

    def page(self, entries: list[Any], *, size: int | None = None) -> Response:
        """One page of a list, with a Link header where there is more."""
        size = min(size or self.page_size, self.page_size)
        start = int(self.request.query.get("cursor", ["0"])[-1])
        headers = {}
        if start + size < len(entries):
            query = [(key, value) for key, values in self.request.query.items() for value in values if key != "cursor"]
            more = urlencode([*query, ("cursor", start + size)])
            headers["Link"] = f'<{self.url}{self.request.raw_path}?{more}>; rel="next"'
        return as_json(entries[start : start + size], headers=headers)

    def tree(self, commit: Commit, folder: str) -> Response:
        prefix = f"{folder}/" if folder else ""
        entries = [entry for entry in tree_entries(commit) if entry["path"].startswith(prefix)]
        if folder and not entries:
            raise HubError(
                404, "EntryNotFound", f"{folder} does not exist on {commit.sha}", {"X-Repo-Commit": commit.sha}
            )
        if not self.request.flag("recursive"):
            entries = [entry for entry in entries if "/" not in entry["path"][len(prefix) :]]
        return self.page(entries)

    def paths_info(self, commit: Commit) -> Response:
        asked = parse_qs(self.request.body.decode()).get("paths", [])
        wanted = {path.strip("/") for path in asked}
        return as_json([entry for entry in tree_entries(commit) if entry["path"] in wanted])

    def refs(self, repo: Repo) -> Response:
        def entries(refs: dict[str, str], folder: str) -> list[dict[str, str]]:
            return [{"name": n, "ref": f"refs/{folder}/{n}", "targetCommit": sha} for n, sha in refs.items()]

        data = {"branches": entries(repo.branches, "heads"), "converts": [], "tags": entries(repo.tags, "tags")}
        if self.request.flag("include_prs"):
            pulls = {f"refs/pr/{number}": sha for number, sha in repo.pulls.items()}
            data["pullRequests"] = [{"name": ref, "ref": ref, "targetCommit": sha} for ref, sha in pulls.items()]
        return as_json(data)

    def ref(self, method: str, kind: str, repo: Repo, name: str) -> Response:
        """Make or delete a branch or a tag. Making a tag names the revision in the path and the tag in the body."""
        self.writer(repo)
        refs = repo.branches if kind == "branch" else repo.tags
        if method == "DELETE":
            if name not in refs:
                raise HubError(404, "RevisionNotFound", f"Invalid rev id: {name}")
            if name == "main":
                raise HubError(403, "", "Cannot delete the main branch")
            del refs[name]
            return as_json({})
        asked = self.request.json()
        start, name = (asked.get("startingPoint", "main"), name) if kind == "branch" else (name, asked["tag"])
        if name in refs:
            raise HubError(409, "", f"Reference {name} already exists")
        refs[name] = repo.resolve(start).sha
        return as_json({})

    def preupload(self, repo: Repo, revision: str) -> Response:
        files = []
        for asked in self.request.json()["files"]:
            path = asked["path"]
            mode = "lfs" if repo.wants_lfs(path, asked["size"], revision) else "regular"
            there = repo.resolve(revision).files.get(path)
            known = {"oid": there.etag} if there else {}
            files.append({"path": path, "uploadMode": mode, "shouldIgnore": False, **known})
        return as_json({"files": files})

    def lfs_batch(self, repo: Repo) -> Response:
        """Where to upload each large file. The transfer is always `basic`, whatever else the client offers."""
        if self.user is None:
            raise HubError(401, "", "Invalid username or password.")
        objects = []
        for asked in self.request.json()["objects"]:
            entry: dict[str, Any] = {"oid": asked["oid"], "size": asked["size"]}
            if asked["oid"] not in self.store.large_files:
                verify = f"{self.url_of(repo)}.git/info/lfs/objects/verify"
                entry["actions"] = {"upload": {"href": f"{self.url}/lfs/{asked['oid']}"}, "verify": {"href": verify}}
            objects.append(entry)
        return as_json({"transfer": "basic", "objects": objects})

    def lfs_verify(self) -> Response:
        asked = self.request.json()
        if len(self.store.large_files.get(asked["oid"], b"")) != asked["size"]:
            raise HubError(404, "", f"No large file {asked['oid']} of {asked['size']} bytes")
        return as_json({})

    def upload(self, oid: str) -> Response:
        if hashlib.sha256(self.request.body).hexdigest() != oid:
            raise HubError(400, "", "The content doesn't have the digest of its name")
        self.store.large_files[oid] = self.request.body
        return Response()

    def commit(self, repo: Repo, revision: str) -> Response:
        create_pr = self.request.flag("create_pr")
        user = self.writer(repo, pull_request=create_pr)
        lines = [json.loads(line) for line in self.request.body.splitlines() if line.strip()]
        header = next(line["value"] for line in lines if line["key"] == "header")
        made, number = repo.commit(
            list(self._operations(lines)),
            revision=revision,
            title=header["summary"],
            description=header.get("description", ""),
            author=user.name,
            parent=header.get("parentCommit"),
            create_pr=create_pr,
        )
        page = self.url_of(repo)
        data = {"success": True, "commitOid": made.sha, "commitUrl": f"{page}/commit/{made.sha}", "hookOutput": ""}
        if number is not None:
            data["pullRequestUrl"] = f"{page}/discussions/{number}"
        return as_json(data)

    def _operations(self, lines: list[dict[str, Any]]) -> Iterator[Operation]:
        for line in lines:
            kind, value = line["key"], line["value"]
            if kind == "header":
                continue
            path = value["path"]
            if path.startswith("/") or any(part in {"", ".", "..", ".git"} for part in path.rstrip("/").split("/")):
                raise HubError(400, "", f"Invalid path: {path!r}")
            if kind == "file":
                yield Operation("add", path, StoredFile(base64.b64decode(value["content"], validate=True)))
            elif kind == "lfsFile":
                data = self.store.large_files.get(value["oid"])
                if data is None:
                    raise HubError(400, "", f"{path}: the LFS pointer points to a file that does not exist")
                yield Operation("add", path, StoredFile(data, lfs=True))
            else:
                yield Operation({"deletedFile": "delete", "deletedFolder": "delete_folder"}[kind], path)

    def download(self, repo: Repo, revision: str, path: str) -> Response:
        allowed = self.user and (self.user.belongs_to(repo.namespace) or self.user.name in (repo.gated or ()))
        if repo.gated is not None and not allowed:
            raise HubError(403 if self.user else 401, "GatedRepo", f"Access to model {repo.repo_id} is restricted")
        commit = repo.resolve(revision)
        file = commit.file(path)
        size = len(file.data)
        headers = {
            "ETag": f'"{file.etag}"',
            "X-Repo-Commit": commit.sha,
            "Accept-Ranges": "bytes",
            "Content-Type": "application/octet-stream",
            "Content-Disposition": f"inline; filename*=UTF-8''{quote(path.split('/')[-1])}",
        }
        if file.lfs:
            headers |= {"X-Linked-Etag": f'"{file.sha256}"', "X-Linked-Size": str(size)}
        if self.request.method == "GET":
            repo.downloads += 1
        span = re.fullmatch(r"bytes=(\d*)-(\d*)", self.request.headers.get("Range", ""))
        if span is None or not any(span.groups()):
            return Response(200, memoryview(file.data), headers, is_file=True)
        first, last = span.groups()
        start = int(first) if first else max(0, size - int(last))
        end = min(int(last) + 1, size) if first and last else size
        if start >= end:
            raise HubError(416, "", "Range not satisfiable", {"Content-Range": f"bytes */{size}"})
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
        return Response(206, memoryview(file.data)[start:end], headers, is_file=True)
