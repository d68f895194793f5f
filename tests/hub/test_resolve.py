"""Loading from the hub: the build that fits, its cells only, pinned, offline, private, interrupted, damaged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_server import HubServer
from huggingface_hub import HfApi
from skill_support import SKILL, TEXT, builds_of, built, files_of, payloads_fetched, readable, tokenizer

from editable_cache import ArtifactError, CompatibilityError, EditableCache, Skill
from editable_cache.testing.tiny_models import tiny_model, tiny_tokenizer

LogIn = Callable[[str | None], None]


def publish_all() -> dict[str, tuple[Any, Skill]]:
    """Builds for four models in one repository."""
    made = {
        "float32": built(),
        "bfloat16": built(torch.bfloat16),
        "other weights": built(seed=1),
        "qwen3": built(family="qwen3"),
    }
    for _, skill in made.values():
        skill.push_to_hub(SKILL)
    return made


def payload(hub: HubServer) -> str:
    [path] = [path for path in files_of(hub) if path.endswith(".safetensors")]
    return path


# -- which build


def test_each_model_gets_its_own_build_and_no_other_cells(hub: HubServer) -> None:
    made = publish_all()
    fetched = []
    for model, skill in made.values():
        hub.log.clear()
        assert Skill.from_pretrained(SKILL, model=model).equal_cells(skill)
        fetched += payloads_fetched(hub)
    assert sorted(fetched) == builds_of(hub)  # one for each model, each another
    hub.log.clear()
    Skill.from_pretrained(SKILL, model=built()[0])
    assert hub.downloaded() == []  # all there


def test_cells_in_full_are_taken_before_smaller_ones(hub: HubServer) -> None:
    model, skill = built()
    for storage in ("fp8", "int8", "original"):
        skill.push_to_hub(SKILL, storage=storage)  # type: ignore[arg-type]
        found = Skill.from_pretrained(SKILL, model=model)
        assert found.equal_cells(skill) == (storage == "original")
        assert ("stored as int8" in found.provenance.note) == (storage == "int8")
        assert ("stored as fp8" in found.provenance.note) == (storage == "fp8")
    small = next(label for label in builds_of(hub) if label.endswith("-int8"))
    cache = EditableCache(model, tokenizer=tokenizer())
    cache.append("You are a support agent.\n")
    cache.splice(Skill.from_pretrained(SKILL, model=model, build=small))
    assert "stale: stored as int8" in str(cache.report())


def test_without_a_model_several_builds_are_a_question(hub: HubServer) -> None:
    made = publish_all()
    hub.log.clear()
    with pytest.raises(CompatibilityError, match="several builds fit") as caught:
        Skill.from_pretrained(SKILL)
    assert all(label in str(caught.value) for label in builds_of(hub))
    assert payloads_fetched(hub) == []
    label = next(label for label in builds_of(hub) if label.startswith("qwen3"))
    assert Skill.from_pretrained(SKILL, build=label).equal_cells(made["qwen3"][1])
    assert payloads_fetched(hub) == [label]
    with pytest.raises(ArtifactError, match="expected a build 'nothing'"):
        Skill.from_pretrained(SKILL, build="nothing")


def test_the_widest_of_several_builds_is_converted(hub: HubServer) -> None:
    half, exact = built(torch.bfloat16)
    wide, single = (
        Skill.precompile(tiny_model("llama", dtype=torch.bfloat16).to(dtype), tokenizer(), TEXT, name="refunds")
        for dtype in (torch.float64, torch.float32)
    )
    assert exact.origin.rounded_weights == wide.origin.rounded_weights == single.origin.rounded_weights
    wide.push_to_hub(SKILL, storage="int8")
    single.push_to_hub(SKILL)
    assert "from float32 to bfloat16" in str(converted_to(half).provenance)  # in full before more bits
    wide.push_to_hub(SKILL)
    assert "from float64 to bfloat16" in str(converted_to(half).provenance)
    exact.push_to_hub(SKILL)
    assert converted_to(half).equal_cells(exact)
    with pytest.raises(CompatibilityError, match="several builds fit"):  # control: without a model nothing is wider
        Skill.from_pretrained(SKILL)


def converted_to(model: Any) -> Skill:
    found = Skill.from_pretrained(SKILL, model=model, tokenizer=tokenizer(), dtype=model.dtype)
    assert isinstance(found, Skill)
    return found


def test_what_stays_ambiguous_gets_advice_that_fits(hub: HubServer) -> None:
    narrow, model = (tiny_model("llama", dtype=torch.bfloat16) for _ in range(2))
    model, float16 = model.to(torch.float32), tiny_model("llama", dtype=torch.float16)
    float16.load_state_dict(narrow.state_dict())
    found = [Skill.precompile(each, tokenizer(), TEXT, name="refunds") for each in (narrow, float16)]
    assert found[0].origin.rounded_weights == found[1].origin.rounded_weights
    for each in found:
        each.push_to_hub(SKILL)
    with pytest.raises(CompatibilityError, match="several builds can be converted; pass build=") as caught:
        converted_to(model)
    assert "model=" not in str(caught.value)
    with_bos = tiny_tokenizer(add_bos=True)
    for each in (tokenizer(), with_bos):
        Skill.precompile(model, each, TEXT, name="refunds").push_to_hub("org/tokenizers")
    with pytest.raises(CompatibilityError, match=r"several builds fit; .* or model= and tokenizer= to take"):
        Skill.from_pretrained("org/tokenizers", model=model)
    Skill.from_pretrained("org/tokenizers", model=model, tokenizer=with_bos)


def test_a_build_that_is_named_must_fit(hub: HubServer) -> None:
    made = publish_all()
    label = next(label for label in builds_of(hub) if label.startswith("qwen3"))
    with pytest.raises(CompatibilityError) as caught:
        Skill.from_pretrained(SKILL, model=made["float32"][0], build=label)
    assert {reason.what.split(": ")[0] for reason in caught.value.reasons} == {label}


def test_a_damaged_manifest_does_not_hide_the_others(hub: HubServer) -> None:
    made = publish_all()
    label = next(label for label in builds_of(hub) if label.startswith("qwen3"))
    hub.repo(SKILL).write({f"builds/{label}/manifest.json": b"{}"})
    model, skill = made["float32"]
    assert Skill.from_pretrained(SKILL, model=model).equal_cells(skill)
    with pytest.raises(CompatibilityError) as caught:
        Skill.from_pretrained(SKILL, model=made["qwen3"][0])
    assert f"{label} (unreadable)" in str(caught.value)
    with pytest.raises(ArtifactError, match="kind"):
        Skill.from_pretrained(SKILL, build=label)
    skill.push_to_hub(SKILL)  # and somebody can go on publishing
    made["qwen3"][1].push_to_hub(SKILL)
    assert Skill.from_pretrained(SKILL, model=made["qwen3"][0]).equal_cells(made["qwen3"][1])


def test_a_local_copy_of_a_repository_is_resolved_too(hub: HubServer, tmp_path: Path) -> None:
    made = publish_all()
    folder = HfApi().snapshot_download(SKILL, local_dir=tmp_path / "copy")
    hub.close()
    for model, skill in made.values():
        assert Skill.from_pretrained(folder, model=model).equal_cells(skill)
    with pytest.raises(CompatibilityError, match="no build fits"):
        Skill.from_pretrained(folder, model=built(seed=2)[0])


def test_a_manifest_at_the_root_is_no_build_of_the_repository(hub: HubServer, tmp_path: Path) -> None:
    model, skill = built()
    skill.push_to_hub(SKILL)
    built(seed=1)[1].save_pretrained(tmp_path / "other")
    hub.repo(SKILL).write({path.name: path.read_bytes() for path in (tmp_path / "other").iterdir()})
    assert Skill.from_pretrained(SKILL, model=model).equal_cells(skill)
    HfApi().snapshot_download(SKILL)  # now it lies in the same snapshot
    assert Skill.from_pretrained(SKILL, model=model).equal_cells(skill)


# -- pinned, offline


def test_a_revision_is_pinned(hub: HubServer) -> None:
    model, old = built()
    old.push_to_hub(SKILL)
    sha = hub.head(SKILL).sha
    HfApi().create_tag(SKILL, tag="v1")
    HfApi().create_branch(SKILL, branch="stable")
    new = Skill.precompile(model, tokenizer(), old.token_ids[:7], name="refunds")
    new.push_to_hub(SKILL)
    for revision in (sha, "v1", "stable"):
        assert Skill.from_pretrained(SKILL, model=model, revision=revision).equal_cells(old)
    for revision in (None, "main", hub.head(SKILL).sha):
        assert Skill.from_pretrained(SKILL, model=model, revision=revision).equal_cells(new)


@pytest.mark.parametrize("revision", [None, "main", "v1", "sha"])
def test_what_was_downloaded_needs_no_hub(hub: HubServer, revision: str | None, tmp_path: Path) -> None:
    made = publish_all()
    HfApi().create_tag(SKILL, tag="v1")
    model, skill = made["float32"]
    wanted: dict[str, Any] = {"revision": hub.head(SKILL).sha if revision == "sha" else revision}
    with pytest.raises(ArtifactError) as caught:
        Skill.from_pretrained(SKILL, model=model, local_files_only=True, cache_dir=tmp_path / "cache", **wanted)
    readable(caught.value, SKILL, "not downloaded before")
    Skill.from_pretrained(SKILL, model=model, cache_dir=tmp_path / "cache", **wanted)
    hub.log.clear()
    back = Skill.from_pretrained(SKILL, model=model, local_files_only=True, cache_dir=tmp_path / "cache", **wanted)
    assert back.equal_cells(skill)
    assert hub.log == []
    with pytest.raises(ArtifactError) as caught:  # known, but its cells never came
        Skill.from_pretrained(
            SKILL, model=made["qwen3"][0], local_files_only=True, cache_dir=tmp_path / "cache", **wanted
        )
    readable(caught.value, SKILL, "not downloaded before", "builds/qwen3-")
    hub.close()
    assert Skill.from_pretrained(SKILL, model=model, cache_dir=tmp_path / "cache", **wanted).equal_cells(skill)


def test_the_environment_can_forbid_the_hub(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    model, skill = built()
    skill.push_to_hub(SKILL)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ArtifactError) as caught:
        Skill.from_pretrained("org/never", model=model)
    readable(caught.value, "org/never", "not downloaded before")
    with pytest.raises(ArtifactError) as caught:
        skill.push_to_hub(SKILL)
    readable(caught.value, SKILL, "HF_HUB_OFFLINE")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    Skill.from_pretrained(SKILL, model=model)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    hub.log.clear()
    assert Skill.from_pretrained(SKILL, model=model).equal_cells(skill)
    assert hub.log == []


def test_a_cache_dir_is_used(hub: HubServer, tmp_path: Path) -> None:
    model, skill = built()
    skill.push_to_hub(SKILL)
    back = Skill.from_pretrained(SKILL, model=model, cache_dir=tmp_path / "elsewhere")
    assert back.equal_cells(skill)
    assert [path.name for path in (tmp_path / "elsewhere").glob("models--*")] == ["models--org--refunds"]
    assert not (hub.home / "hub" / "models--org--refunds").exists()


# -- who may read


def test_a_private_skill_is_for_those_who_may_read_it(hub: HubServer, log_in: LogIn, tmp_path: Path) -> None:
    model, skill = built()
    skill.push_to_hub(SKILL, private=True)
    stranger, owner = hub.add_user("bob"), hub.token
    log_in(None)
    for token in (None, False, stranger):
        with pytest.raises(ArtifactError) as caught:
            Skill.from_pretrained(SKILL, model=model, token=token, cache_dir=tmp_path)
        readable(caught.value, SKILL, "no such repository, or a private one")
    assert Skill.from_pretrained(SKILL, model=model, token=owner, cache_dir=tmp_path).equal_cells(skill)
    log_in(owner)
    assert Skill.from_pretrained(SKILL, model=model).equal_cells(skill)


def test_a_gated_skill_says_so(hub: HubServer, log_in: LogIn) -> None:
    model, skill = built()
    skill.push_to_hub(SKILL)
    hub.repo(SKILL).gated = frozenset()
    log_in(hub.add_user("bob"))
    with pytest.raises(ArtifactError) as caught:
        Skill.from_pretrained(SKILL, model=model)
    readable(caught.value, SKILL, "restricted")


# -- what is not there


def test_what_is_not_there_is_named(hub: HubServer, tmp_path: Path) -> None:
    model, skill = built()
    skill.push_to_hub(SKILL)
    hub.create("org/plain", {"config.json": b"{}", "model.safetensors": b"x" * 100})
    with pytest.raises(ArtifactError) as caught:
        Skill.from_pretrained("org/nothing", model=model)
    readable(caught.value, "org/nothing", "no such repository")
    with pytest.raises(ArtifactError) as caught:
        Skill.from_pretrained(SKILL, model=model, revision="v9")
    readable(caught.value, f"{SKILL} at v9", "no such branch, tag, commit")
    with pytest.raises(ArtifactError, match=r"org/plain: expected 1 to 256 builds .* Is it a repository of a skill\?"):
        Skill.from_pretrained("org/plain", model=model)
    hub.repo(SKILL).write({payload(hub): None})
    with pytest.raises(ArtifactError) as caught:
        Skill.from_pretrained(SKILL, model=model)
    readable(caught.value, SKILL, "no such file", "builds/llama-float32-")
    for nothing in (tmp_path / "nothing", "nothing", "x" * 300, "a\0b"):
        with pytest.raises(ArtifactError, match="no such folder, and no repository on the Hub"):
            Skill.from_pretrained(nothing, model=model)
    assert not (tmp_path / "nothing").exists()
    with pytest.raises(ArtifactError, match="expected a folder written by save_pretrained"):
        Skill.from_pretrained(tmp_path, model=model)


@pytest.mark.parametrize("status", [500, 503])
def test_a_broken_hub_says_so(hub: HubServer, status: int) -> None:
    model, skill = built()
    skill.push_to_hub(SKILL)
    hub.fault("status", status=status, times=99)
    with pytest.raises(ArtifactError) as caught:
        Skill.from_pretrained(SKILL, model=model)
    readable(caught.value, SKILL, f"answered {status}")
    hub.clear_faults()
    assert Skill.from_pretrained(SKILL, model=model).equal_cells(skill)


def test_a_hub_that_is_down_says_so(hub: HubServer) -> None:
    hub.close()
    with pytest.raises(ArtifactError) as caught:
        Skill.from_pretrained(SKILL, model=built()[0])
    readable(caught.value, SKILL, "not downloaded before", "refused")
    with pytest.raises(ArtifactError) as caught:
        built()[1].push_to_hub(SKILL)
    readable(caught.value, SKILL, "refused")


# -- on the way


@pytest.mark.parametrize("fault", ["cut_download", "truncate_download"])
@pytest.mark.parametrize("file", ["*.safetensors", "*manifest.json"])
def test_an_interrupted_download_goes_on(hub: HubServer, fault: str, file: str) -> None:
    model, skill = built()
    skill.push_to_hub(SKILL)
    hub.fault(fault, path=f"*/resolve/{file}", times=99, after=0, size=50)
    with pytest.raises(ArtifactError) as caught:
        Skill.from_pretrained(SKILL, model=model)
    readable(caught.value, SKILL)
    hub.clear_faults()
    assert Skill.from_pretrained(SKILL, model=model).equal_cells(skill)


def test_a_download_that_is_cut_once_is_taken_up_again(hub: HubServer) -> None:
    model, short = built()
    skill = Skill.precompile(model, None, short.token_ids.repeat(8), name="refunds")
    skill.push_to_hub(SKILL)
    size = len(files_of(hub)[payload(hub)])
    hub.log.clear()
    hub.fault("cut_download", path="*.safetensors", after=size - 100)
    assert Skill.from_pretrained(SKILL, model=model).equal_cells(skill)
    ranges = [call.range for call in hub.calls("GET", "*.safetensors")]
    assert len(ranges) == 2
    assert ranges[1] is not None


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("where", ["cells", "header", "end"])
def test_a_damaged_payload_is_repaired_by_force(hub: HubServer, where: str, exact: bool) -> None:
    model, skill = built()
    skill.push_to_hub(SKILL)
    size = len(files_of(hub)[payload(hub)])
    hub.fault("flip_download", path="*.safetensors", offset={"cells": size // 2, "header": 9, "end": size - 1}[where])
    for _ in range(2):  # the damaged bytes stay in huggingface_hub's cache
        with pytest.raises(ArtifactError) as caught:
            Skill.from_pretrained(SKILL, model=model, exact=exact)
        readable(caught.value, SKILL, "force_download=True")
    hub.log.clear()
    assert Skill.from_pretrained(SKILL, model=model, exact=exact, force_download=True).equal_cells(skill)
    assert len(payloads_fetched(hub)) == 1
    assert Skill.from_pretrained(SKILL, model=model, exact=exact).equal_cells(skill)


def test_a_damaged_manifest_is_repaired_by_force(hub: HubServer) -> None:
    model, skill = built()
    skill.push_to_hub(SKILL)
    [manifest] = [data for path, data in files_of(hub).items() if path.endswith("manifest.json")]
    hub.fault("flip_download", path="*manifest.json", offset=manifest.index(b'"token_ids"') + 14)
    with pytest.raises(ArtifactError) as caught:
        Skill.from_pretrained(SKILL, model=model)
    readable(caught.value, SKILL, "force_download=True")
    assert Skill.from_pretrained(SKILL, model=model, force_download=True).equal_cells(skill)


def test_damage_among_several_builds_names_the_way_out(hub: HubServer) -> None:
    made = publish_all()
    label = next(label for label in builds_of(hub) if label.startswith("qwen3"))
    hub.fault("flip_download", path=f"*{label}/manifest.json", offset=300)
    with pytest.raises(CompatibilityError) as caught:
        Skill.from_pretrained(SKILL, model=made["qwen3"][0])
    assert "force_download=True" in str(caught.value)
    assert Skill.from_pretrained(SKILL, model=made["qwen3"][0], force_download=True).equal_cells(made["qwen3"][1])


def test_a_repository_that_changes_while_it_is_read_is_told(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    model, skill = built()
    skill.push_to_hub(SKILL)
    asked = HfApi.model_info

    def model_info(self: HfApi, *arguments: Any, **options: Any) -> Any:
        found = asked(self, *arguments, **options)
        hub.repo(SKILL).write({"more.txt": b"x"})
        return found

    with monkeypatch.context() as patch:
        patch.setattr(HfApi, "model_info", model_info)
        with pytest.raises(ArtifactError, match="changed while it was read; try again"):
            Skill.from_pretrained(SKILL, model=model)
    assert Skill.from_pretrained(SKILL, model=model).equal_cells(skill)
