"""Field reports, class 11, as far as local folders go."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cache_support import Snapshot, generate, make_cache, make_context, policy, shared_model, shared_tokenizer

from editable_cache import ArtifactError, EditableCache, EditableCacheError, Skill
from editable_cache.hub.manifest import sealed


def payload_of(folder: Path) -> Path:
    (found,) = folder.glob("*.safetensors")
    return found


def rewrite(folder: Path, change: dict[str, Any], *, resealed: bool) -> None:
    """Change the manifest; ``resealed`` as someone does who knows the format."""
    path = folder / "manifest.json"
    manifest = {**json.loads(path.read_text()), **change}
    if resealed:
        manifest.pop("seal")
    path.write_bytes(sealed(json.dumps(manifest).encode()) if resealed else json.dumps(manifest).encode())


DAMAGE: dict[str, Any] = {
    "cut_one": lambda data: data[:-1],
    "cut_half": lambda data: data[: len(data) // 2],
    "cut_all": lambda data: b"",
    "longer": lambda data: data + b"\0" * 16,
    "last_byte": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    "one_bit": lambda data: data[:-5000] + bytes([data[-5000] ^ 64]) + data[-4999:],
    "header": lambda data: data[:20] + b"\xff" + data[21:],
    "huge_header": lambda data: b"\xff" * 8 + data[8:],
}


@pytest.mark.parametrize("kind", ["skill", "cache"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_b60_a_damaged_payload(damage: str, kind: str, tmp_path: Path) -> None:
    """osaurus-ai/vmlx-swift#217; Comfy-Org/ComfyUI#14989, #15602: short files load as zeros, trailing bytes pass."""
    saved: Any = policy() if kind == "skill" else make_context()
    saved.save_pretrained(tmp_path)
    path = payload_of(tmp_path)
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    load = Skill if kind == "skill" else EditableCache
    with pytest.raises(ArtifactError, match="cells-") as caught:
        load.from_pretrained(tmp_path, model=shared_model())
    assert isinstance(caught.value, OSError)


def test_b57_a_rejected_skill_leaves_the_cache_alone(tmp_path: Path) -> None:
    """ggml-org/llama.cpp#27068: a rejected restore leaves half-written KV that breaks later answers."""
    cache = make_context()
    before, expected = Snapshot(cache), generate(twin := make_context(), twin.token_ids.clone())
    policy().save_pretrained(tmp_path)
    path = payload_of(tmp_path)
    path.write_bytes(DAMAGE["last_byte"](path.read_bytes()))
    with pytest.raises(ArtifactError):
        cache.splice(Skill.from_pretrained(tmp_path, model=shared_model()), name="again")
    before.check(cache)
    assert torch.equal(generate(cache, cache.token_ids.clone()).sequences, expected.sequences)


@pytest.mark.parametrize("content", ["", "a", "\n", "\n\n\n"], ids=["empty", "one", "newline", "newlines"])
def test_b58_small_things_round_trip(content: str, tmp_path: Path) -> None:
    """ggml-org/llama.cpp#14434; safetensors/safetensors#466: saving an empty slot crashes."""
    skill = Skill.precompile(shared_model(), shared_tokenizer(), content, name="small")
    skill.save_pretrained(tmp_path / "skill")
    loaded = Skill.from_pretrained(tmp_path / "skill", model=shared_model(), tokenizer=shared_tokenizer())
    assert loaded.equal_cells(skill)
    assert loaded.text == content
    cache = make_cache()
    cache.splice(loaded)
    cache.save_pretrained(tmp_path / "cache")
    back = EditableCache.from_pretrained(tmp_path / "cache", model=shared_model(), tokenizer=shared_tokenizer())
    assert back.ledger.same(cache.ledger)
    back.append("the order")
    assert back.verify().ok


def test_b58_a_missing_path_changes_nothing(tmp_path: Path) -> None:
    """ggml-org/llama.cpp#14434: restoring a missing file wipes the slot."""
    cache = make_context()
    before = Snapshot(cache)
    for load in (Skill, EditableCache):
        with pytest.raises(ArtifactError, match="nowhere"):
            load.from_pretrained(tmp_path / "nowhere", model=shared_model())
    before.check(cache)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_b58_a_cache_goes_on_after_a_round_trip_as_if_nothing_was(dtype: torch.dtype, tmp_path: Path) -> None:
    """ggml-org/llama.cpp#14434: equality means equal futures, moves and edits included."""
    cache = make_context("llama", dtype=dtype)
    cache.erratum("status", "delivered")
    cache.reposition("policy", to=2)
    cache.remove((8, 10), close_gap=False)
    cache.save_pretrained(tmp_path)
    back = EditableCache.from_pretrained(tmp_path, model=cache.model, tokenizer=cache.tokenizer)
    Snapshot(cache).check(back)
    for one in (cache, back):
        one.edit("status", "refund it now")
        one.reposition("system", position=400)
        one.consolidate()
    Snapshot(cache).check(back)
    outs = [generate(one, one.inputs("ok")["input_ids"], model=one.model) for one in (cache, back)]
    assert torch.equal(outs[0].sequences, outs[1].sequences)


BAD_NAMES = ["../x", "/etc/x", "a/../../x", "a\\b", "x" * 300, "a\0b", "a\nb", "\u202egpj", "", ".", "..", ".hidden"]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_b62_names_that_are_paths_or_unprintable(name: str, tmp_path: Path) -> None:
    """ggml-org/llama.cpp#26315, #26316: a save name follows a link out of the directory."""
    with pytest.raises(EditableCacheError, match="name"):
        Skill.precompile(shared_model(), shared_tokenizer(), "If", name=name)
    policy().save_pretrained(tmp_path)
    rewrite(tmp_path, {"name": name}, resealed=True)
    with pytest.raises(ArtifactError, match="name"):
        Skill.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["CON", "ｓkill", "cells-0.safetensors", "x" * 200, "refund policy (v2)"])
def test_b62_names_never_leave_the_folder(name: str, tmp_path: Path) -> None:
    """ggml-org/llama.cpp#26315, #26316: names are never paths, whatever they are."""
    folder = tmp_path / "inner" / "skill"
    Skill.precompile(shared_model(), shared_tokenizer(), "If", name=name).save_pretrained(folder)
    written = {path.relative_to(tmp_path).parts[:2] for path in tmp_path.rglob("*") if path.is_file()}
    assert written == {("inner", "skill")}
    assert Skill.from_pretrained(folder).name == name


@pytest.mark.parametrize("target", ["../outside.safetensors", "/etc/passwd", "link", "manifest.json", "a\0b", 5, None])
def test_b62_a_manifest_cannot_point_outside(target: Any, tmp_path: Path) -> None:
    """ggml-org/llama.cpp#26316: the same when the name comes from a file's metadata."""
    folder = tmp_path / "skill"
    policy().save_pretrained(folder)
    outside = tmp_path / "outside.safetensors"
    payload = payload_of(folder)
    outside.write_bytes(payload.read_bytes())
    if target == "link":
        payload.unlink()
        payload.symlink_to(outside)
    else:
        rewrite(folder, {"payload": target}, resealed=True)
    with pytest.raises(ArtifactError, match=r"payload|no such file|expected a file"):
        Skill.from_pretrained(folder)


@pytest.mark.parametrize("sealed_again", [True, False])
@pytest.mark.parametrize("key", ["token_ids", "position_ids", "model", "provenance", "layers", "kind", "version"])
@pytest.mark.parametrize("value", [None, -1, [1], "x", {}])
def test_hostile_skill_manifests(key: str, value: Any, sealed_again: bool, tmp_path: Path) -> None:
    """Comfy-Org/ComfyUI#14989: whatever stands in the manifest, the answer is an `ArtifactError`."""
    policy().save_pretrained(tmp_path)
    rewrite(tmp_path, {key: value}, resealed=sealed_again)
    with pytest.raises(ArtifactError):
        Skill.from_pretrained(tmp_path, model=shared_model())


@pytest.mark.parametrize("key", ["segments", "fields", "stale", "chunks", "model", "kind"])
@pytest.mark.parametrize(
    "value",
    [None, -1, [1], "x", [{}], [{"start": 3, "stop": 900, "cause": "x"}], [{"name": "a", "start": 0, "stop": 1}]],
)
def test_hostile_cache_manifests(key: str, value: Any, tmp_path: Path) -> None:
    """Comfy-Org/ComfyUI#15602: a ledger that contradicts itself or its cells is not believed."""
    make_context().save_pretrained(tmp_path)
    rewrite(tmp_path, {key: value}, resealed=True)
    with pytest.raises(ArtifactError):
        EditableCache.from_pretrained(tmp_path, model=shared_model())


@pytest.mark.parametrize("kind", ["skill", "cache"])
def test_one_number_changed_in_the_manifest(kind: str, tmp_path: Path) -> None:
    """Comfy-Org/ComfyUI#15602: ids and cells must not part in silence."""
    (policy() if kind == "skill" else make_context()).save_pretrained(tmp_path)
    path = tmp_path / "manifest.json"
    manifest = json.loads(path.read_text())
    if kind == "skill":
        manifest["token_ids"][3] += 1
    else:
        manifest["fields"][0]["value"] = "delivered"
    path.write_text(json.dumps(manifest))
    with pytest.raises(ArtifactError, match="seal"):
        (Skill if kind == "skill" else EditableCache).from_pretrained(tmp_path, model=shared_model())


def test_saving_again_replaces_and_leaves_one_payload(tmp_path: Path) -> None:
    """ggml-org/llama.cpp#26315: what stood there before is either whole or gone."""
    policy().save_pretrained(tmp_path)
    other = Skill.precompile(shared_model(), shared_tokenizer(), "something else", name="other")
    other.save_pretrained(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    assert Skill.from_pretrained(tmp_path).equal_cells(other)
    blocked = tmp_path / "file"
    blocked.write_text("x")
    with pytest.raises(ArtifactError, match="file"):
        other.save_pretrained(blocked)
