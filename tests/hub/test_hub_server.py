"""The local hub, asked by the real client: what it stores, refuses, and spoils on request."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest
from hub_server import HubServer
from hub_support import CARD, REPO, WEIGHTS, contents, push
from huggingface_hub import (
    CommitOperationAdd,
    HfApi,
    ModelCard,
    file_exists,
    hf_hub_download,
    list_models,
    snapshot_download,
)
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

VERSION = tuple(int(part) for part in huggingface_hub.__version__.split(".")[:2])


def test_commit_and_snapshot_round_trip(hub: HubServer) -> None:
    files = {"config.json": b"{}", "a/b/model.safetensors": WEIGHTS, "empty.txt": b""}
    info = push(files)
    assert info.oid == hub.head(REPO).sha
    assert info.repo_url.repo_id == REPO
    folder = snapshot_download(REPO)
    assert contents(folder) == files
    assert Path(folder).name == info.oid
    assert Path(folder).is_relative_to(hub.home)
    stored = hub.head(REPO).files
    assert stored["a/b/model.safetensors"].lfs
    assert not stored["config.json"].lfs
    assert Path(hf_hub_download(REPO, "a/b/model.safetensors")).resolve().name == hashlib.sha256(WEIGHTS).hexdigest()
    assert [call.status for call in hub.calls("POST", "*/commit/*")] == [200]
    assert len(hub.calls("PUT", "/lfs/*")) == 1
    assert not hub.calls(path="*xet*")


def test_a_file_from_disk_is_uploaded_like_one_from_memory(hub: HubServer, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(WEIGHTS)
    HfApi().create_repo(REPO)
    HfApi().upload_file(path_or_fileobj=path, path_in_repo="m.safetensors", repo_id=REPO)
    assert hub.head(REPO).files["m.safetensors"].data == WEIGHTS


def test_what_the_hub_has_is_not_uploaded_again(hub: HubServer) -> None:
    first = push({"m.safetensors": WEIGHTS})
    again = push({"m.safetensors": WEIGHTS})
    assert again.oid == first.oid  # the client makes no empty commit
    assert push({"copy.safetensors": WEIGHTS}).oid != first.oid
    assert len(hub.calls("PUT", "/lfs/*")) == 1


def test_revisions_are_snapshots(hub: HubServer) -> None:
    first = push({"f.txt": b"one"}).oid
    HfApi().create_tag(REPO, tag="v1")
    HfApi().create_branch(REPO, branch="dev/old", revision=first)
    second = push({"f.txt": b"two"}).oid
    for revision, expected in (
        (first, b"one"),
        ("v1", b"one"),
        ("dev/old", b"one"),
        ("main", b"two"),
        (second, b"two"),
    ):
        assert Path(hf_hub_download(REPO, "f.txt", revision=revision)).read_bytes() == expected
        assert contents(snapshot_download(REPO, revision=revision)) == {"f.txt": expected}
    push({"f.txt": b"three"}, revision="dev/old")
    assert Path(hf_hub_download(REPO, "f.txt", revision="dev/old")).read_bytes() == b"three"
    assert HfApi().model_info(REPO, revision=first[:8]).sha == first
    refs = HfApi().list_repo_refs(REPO)
    assert {ref.name for ref in refs.branches} == {"main", "dev/old"}
    assert [(ref.name, ref.target_commit) for ref in refs.tags] == [("v1", first)]
    with pytest.raises(HfHubHTTPError, match="already exists"):
        HfApi().create_tag(REPO, tag="v1")
    HfApi().create_tag(REPO, tag="v1", exist_ok=True)
    with pytest.raises(HfHubHTTPError, match="isn't a branch"):
        push({"f.txt": b"four"}, revision="v1")


def test_one_commit_adds_and_deletes(hub: HubServer) -> None:
    push({"old.txt": b"1", "dir/a": b"2", "dir/b": b"3"})
    push({"old.txt": None, "dir/": None, "new.txt": b"4", "dir2/c": b"5"}, message="swap")
    assert set(HfApi().list_repo_files(REPO)) == {".gitattributes", "new.txt", "dir2/c"}
    history = HfApi().list_repo_commits(REPO)
    assert [commit.title for commit in history] == ["swap", "push", "initial commit"]
    assert history[0].authors == ["alice"]
    assert [commit.created_at for commit in history] == sorted((c.created_at for c in history), reverse=True)


def test_commit_in_the_middle_of_a_race_is_refused(hub: HubServer) -> None:
    seen = push({"f.txt": b"one"}).oid
    push({"g.txt": b"mine"}, parent_commit=seen)
    with pytest.raises(HfHubHTTPError) as error:
        push({"g.txt": b"late"}, parent_commit=seen)
    assert error.value.response.status_code == 412
    assert hub.head(REPO).files["g.txt"].data == b"mine"


def test_a_failing_commit_leaves_nothing(hub: HubServer) -> None:
    before = push({"f.txt": b"one"}).oid
    with pytest.raises(RemoteEntryNotFoundError, match="doesn't exist"):
        push({"f.txt": b"two", "missing.txt": None})
    fault = hub.fault("commit_error", status=503)
    with pytest.raises(HfHubHTTPError, match="503"):
        push({"f.txt": b"two", "m.safetensors": WEIGHTS})
    assert fault.left == 0
    assert hub.head(REPO).sha == before
    assert list(hub.repo(REPO).commits) == [commit.sha for commit in reversed(hub.repo(REPO).history("main"))]
    push({"f.txt": b"two", "m.safetensors": WEIGHTS})
    assert contents(snapshot_download(REPO)) == {"f.txt": b"two", "m.safetensors": WEIGHTS}


def test_an_answer_lost_after_the_commit(hub: HubServer) -> None:
    before = push({"f.txt": b"one"}).oid
    hub.fault("lost_commit_answer")
    with pytest.raises(Exception, match="disconnected"):
        push({"f.txt": b"two"})
    assert hub.head(REPO).parent == before
    assert hub.head(REPO).files["f.txt"].data == b"two"


def test_cut_uploads(hub: HubServer) -> None:
    hub.fault("cut_upload", after=1000)
    push({"m.safetensors": WEIGHTS})  # the client tries again
    assert len(hub.calls("PUT", "/lfs/*")) == 2
    before = hub.head(REPO).sha
    hub.fault("cut_upload", after=1000, times=99)
    with pytest.raises(RuntimeError, match="Error while uploading"):
        push({"m.safetensors": WEIGHTS[::-1]})
    assert hub.head(REPO).sha == before
    assert len(hub.store.large_files) == 1


def test_what_is_not_there_has_its_own_error(hub: HubServer, log_in: Callable[[str | None], None]) -> None:
    push({"f.txt": b"one"})
    for token in (hub.token, None):
        log_in(token)
        with pytest.raises(RepositoryNotFoundError):
            hf_hub_download("org/nothing", "f.txt")
        with pytest.raises(RepositoryNotFoundError):
            HfApi().model_info("org/nothing")
        with pytest.raises(RepositoryNotFoundError):
            snapshot_download("nothing")
        with pytest.raises(RevisionNotFoundError):
            hf_hub_download(REPO, "f.txt", revision="v9")
        with pytest.raises(RevisionNotFoundError):
            snapshot_download(REPO, revision="0" * 40)
        with pytest.raises(RemoteEntryNotFoundError):
            hf_hub_download(REPO, "g.txt")
        assert [file_exists(REPO, name) for name in ("f.txt", "g.txt")] == [True, False]
        assert [HfApi().repo_exists(name) for name in (REPO, "org/nothing")] == [True, False]
    with pytest.raises(RepositoryNotFoundError):
        HfApi(token=hub.token).create_commit("org/nothing", [CommitOperationAdd("f", b"")], commit_message="m")


def test_trees_and_paths(hub: HubServer) -> None:
    push({"a/b/m.safetensors": WEIGHTS, "a/c.txt": b"c", "d.txt": b"d"})
    hub.page_size = 2
    tree = {entry.path: entry for entry in HfApi().list_repo_tree(REPO, recursive=True)}
    assert set(tree) == {".gitattributes", "a", "a/b", "a/b/m.safetensors", "a/c.txt", "d.txt"}
    assert tree["a/b/m.safetensors"].lfs.sha256 == hashlib.sha256(WEIGHTS).hexdigest()
    assert {entry.path for entry in HfApi().list_repo_tree(REPO, "a")} == {"a/b", "a/c.txt"}
    with pytest.raises(RemoteEntryNotFoundError):
        list(HfApi().list_repo_tree(REPO, "z"))
    infos = HfApi().get_paths_info(REPO, ["d.txt", "a", "missing"])
    assert {info.path for info in infos} == {"d.txt", "a"}
    siblings = {s.rfilename: s for s in HfApi().model_info(REPO, files_metadata=True).siblings}
    assert siblings["a/b/m.safetensors"].size == len(WEIGHTS)
    assert siblings["d.txt"].blob_id == tree["d.txt"].blob_id


def test_only_the_wanted_files_are_fetched(hub: HubServer) -> None:
    push({"index.json": b"{}", "x/m.safetensors": WEIGHTS, "y/m.safetensors": WEIGHTS[::-1]})
    hub.log.clear()
    folder = snapshot_download(REPO, allow_patterns=["index.json", "x/*"])
    assert set(contents(folder)) == {"index.json", "x/m.safetensors"}
    assert sorted(hub.downloaded()) == ["index.json", "x/m.safetensors"]
    hub.log.clear()
    snapshot_download(REPO, allow_patterns=["index.json", "x/*"])
    assert hub.downloaded() == []


def test_a_cut_download_resumes(hub: HubServer) -> None:
    push({"m.safetensors": WEIGHTS})
    fault = hub.fault("cut_download", path="m.safetensors", after=70_000)
    assert Path(hf_hub_download(REPO, "m.safetensors")).read_bytes() == WEIGHTS
    assert fault.left == 0
    first, second = hub.calls("GET", "*/resolve/*")
    assert (first.range, first.status, first.sent) == (None, 200, len(WEIGHTS))
    assert (second.range, second.status, second.sent) == ("bytes=65536-", 206, len(WEIGHTS) - 65536)


def test_a_download_cut_again_and_again_leaves_no_file(hub: HubServer) -> None:
    push({"m.safetensors": WEIGHTS, "f.txt": b"f"})
    hub.fault("cut_download", path="m.safetensors", after=0, times=99)
    with pytest.raises(Exception, match="peer closed connection"):
        snapshot_download(REPO)
    kept = [path for path in hub.home.rglob("*") if path.is_file() and path.stat().st_size >= 10_000]
    assert kept == []
    hub.clear_faults()
    assert contents(snapshot_download(REPO)) == {"m.safetensors": WEIGHTS, "f.txt": b"f"}


def test_wrong_bytes_arrive_as_they_are(hub: HubServer) -> None:
    push({"m.safetensors": WEIGHTS})
    hub.fault("flip_download", path="m.safetensors", offset=5)
    got = Path(hf_hub_download(REPO, "m.safetensors")).read_bytes()
    assert [i for i, (a, b) in enumerate(zip(got, WEIGHTS, strict=True)) if a != b] == [5]


def test_a_truncated_answer_is_noticed_by_the_client(hub: HubServer) -> None:
    push({"m.safetensors": WEIGHTS})
    hub.fault("truncate_download", path="m.safetensors", size=10)
    with pytest.raises(OSError, match="Consistency check failed"):
        hf_hub_download(REPO, "m.safetensors")


def test_private_and_gated_repositories(hub: HubServer, log_in: Callable[[str | None], None]) -> None:
    HfApi().create_repo(REPO, private=True)
    push({"f.txt": b"one"})
    assert HfApi().model_info(REPO).private
    gated = hub.create("org/gated", {"f.txt": b"one"})
    gated.gated = frozenset({"carol"})
    for token in (None, hub.add_user("bob")):
        log_in(token)
        with pytest.raises(RepositoryNotFoundError):
            snapshot_download(REPO, cache_dir=hub.home / "other")
        with pytest.raises(GatedRepoError):
            hf_hub_download("org/gated", "f.txt")
        assert [model.id for model in list_models()] == ["org/gated"]
    log_in(hub.add_user("carol"))
    hf_hub_download("org/gated", "f.txt")


def test_who_may_write(hub: HubServer, log_in: Callable[[str | None], None]) -> None:
    push({"f.txt": b"one"})
    assert HfApi().whoami()["name"] == "alice"
    assert str(HfApi().create_repo("mine").repo_id) == "alice/mine"
    for token, status in ((None, 401), (hub.add_user("bob"), 403), ("hf_unknown", 401)):
        log_in(token)
        with pytest.raises(HfHubHTTPError) as error:
            HfApi().create_commit(REPO, [CommitOperationAdd("f.txt", b"two")], commit_message="m")
        assert error.value.response.status_code == status
    log_in(hub.token)
    hub.fault("unauthorized", path="*/commit/*")
    with pytest.raises(HfHubHTTPError, match="401"):
        push({"f.txt": b"two"})
    with pytest.raises(HfHubHTTPError, match="409"):
        HfApi().create_repo(REPO)
    HfApi().delete_repo(REPO)
    assert not HfApi().repo_exists(REPO)


def test_pull_requests(hub: HubServer, log_in: Callable[[str | None], None]) -> None:
    before = push({"f.txt": b"one"}).oid
    log_in(hub.add_user("bob"))
    operations = [CommitOperationAdd("f.txt", b"two"), CommitOperationAdd("m.safetensors", WEIGHTS)]
    info = HfApi().create_commit(REPO, operations, commit_message="mine", create_pr=True)
    assert (info.pr_num, info.pr_revision) == (1, "refs/pr/1")
    assert hub.head(REPO).sha == before
    assert Path(hf_hub_download(REPO, "f.txt", revision="refs/pr/1")).read_bytes() == b"two"
    assert snapshot_download(REPO, revision="refs/pr/1").endswith(info.oid)
    assert "m.safetensors" in hub.downloaded()
    assert HfApi().list_repo_refs(REPO, include_pull_requests=True).pull_requests[0].target_commit == info.oid
    log_in(hub.token)
    HfApi().merge_pull_request(REPO, 1)
    assert hub.head(REPO).sha == info.oid


def test_cards_become_tags_that_can_be_searched(hub: HubServer) -> None:
    push({"README.md": CARD.encode()})
    push({"README.md": CARD.replace("org/base", "org/other").encode()}, repo="alice/second")
    push({"f.txt": b""}, repo="org/plain")
    info = HfApi().model_info(REPO)
    assert {"kv-cache", "editable-cache", "license:apache-2.0", "base_model:org/base"} <= set(info.tags)
    assert "base_model:adapter:org/base" in info.tags
    assert info.card_data.base_model == "org/base"
    assert ModelCard.load(REPO).data.tags == ["kv-cache", "editable-cache"]

    def found(**kwargs: object) -> set[str]:
        return {model.id for model in HfApi().list_models(**kwargs)}

    assert found(filter=["kv-cache", "editable-cache"]) == {REPO, "alice/second"}
    assert found(filter=["kv-cache", "base_model:org/other"]) == {"alice/second"}
    assert found(filter="kv-cache", author="org") == {REPO}
    assert found(filter="kv-cache", search="SECOND") == {"alice/second"}
    assert found(filter="nothing") == set()
    hub.repo("alice/second").downloads = 7
    hub.page_size = 1
    listed = list(list_models(sort="downloads", full=True, cardData=True))
    assert [model.id for model in listed] == ["alice/second", REPO, "org/plain"]
    assert listed[0].card_data.base_model == "org/other"
    assert listed[0].last_modified > listed[1].last_modified
    assert [model.id for model in list_models(sort="downloads", limit=2)] == ["alice/second", REPO]


def test_bad_cards_are_refused(hub: HubServer) -> None:
    bad = CARD.replace("adapter", "cousin")
    with pytest.raises(ValueError, match="base_model_relation"):
        push({"README.md": bad.encode()})
    assert hub.calls("POST", "*/commit/*") == []
    with pytest.warns(UserWarning, match="empty or missing yaml metadata"):
        push({"README.md": b"# no metadata"})


@pytest.mark.skipif(VERSION < (2,), reason="the client sends cards to the public hub whatever its endpoint is")
def test_cards_are_validated_here(hub: HubServer) -> None:
    card = ModelCard(CARD)
    card.validate()
    card.push_to_hub(push({"f.txt": b""}).repo_url.repo_id)
    assert hub.head(REPO).files["README.md"].data.decode() == str(card)
    with pytest.raises(ValueError, match="base_model_relation"):
        ModelCard(CARD.replace("adapter", "cousin")).validate()
