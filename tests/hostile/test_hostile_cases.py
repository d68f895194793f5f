"""One folder for each kind of lie, the smallest that tells it: what the lie is refused by, and where."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cache_support import Snapshot, make_context, policy, shared_model
from hostile_bases import base
from safetensors.torch import load, save

from editable_cache import ArtifactError, CompatibilityError, EditableCache, Skill
from editable_cache.hub.manifest import MAX_MANIFEST_BYTES, sealed
from editable_cache.ops import checksum

Tree, Tensors = dict[str, Any], dict[str, torch.Tensor]


def payload_of(folder: Path) -> Path:
    (found,) = folder.glob("*.safetensors")
    return found


def forge(folder: Path, lie: Callable[[Tree, Tensors], Any]) -> None:
    """Change tensors and manifest and compute every digest anew."""
    path, payload = folder / "manifest.json", payload_of(folder)
    tree, tensors = json.loads(path.read_text()), load(payload.read_bytes())
    lie(tree, tensors)
    data = save({name: tensor.contiguous() for name, tensor in tensors.items()})
    payload.write_bytes(data)
    tree |= {"payload_bytes": len(data), "payload_sha256": hashlib.sha256(data).hexdigest()}
    tree["checksums"] = {name: checksum(tensor) for name, tensor in tensors.items()}
    write(folder, tree)


def write(folder: Path, tree: Tree) -> None:
    tree.pop("seal", None)
    (folder / "manifest.json").write_bytes(sealed(json.dumps(tree).encode()))


def every(tree: Tree, tensors: Tensors, change: Callable[[torch.Tensor], torch.Tensor], **facts: Any) -> None:
    """The same change to all cells, and a manifest that agrees."""
    for holder, states in enumerate(tree["layers"]):
        for name, each in states.items():
            tensors[key] = tensor = change(tensors[key := f"layers.{holder}.{name}"])
            each |= {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch."), **facts}
    tree["layout"] = None


def drop_layer(tree: Tree, tensors: Tensors) -> None:
    tree["layers"], tree["layout"] = tree["layers"][:-1], None
    for name in ("keys", "values"):
        del tensors[f"layers.{len(tree['layers'])}.{name}"]


def empty_layer(tree: Tree, tensors: Tensors) -> None:
    tree["layers"][1], tree["layout"] = {}, None
    del tensors["layers.1.keys"], tensors["layers.1.values"]


def rename(tree: Tree, tensors: Tensors) -> None:
    tree["layers"][1]["indexer_keys"], tree["layout"] = tree["layers"][1].pop("values"), None
    tensors["layers.1.indexer_keys"] = tensors.pop("layers.1.values")


LOADS: dict[str, Callable[[Tree, Tensors], Any]] = {
    "one layer less": drop_layer,
    "a layer without cells": empty_layer,
    "60,000 layers more": lambda tree, _: tree.update(layers=[*tree["layers"], *[{}] * 60_000], layout=None),
    "a tensor of another name": rename,
    "more heads": lambda tree, tensors: every(tree, tensors, lambda t: torch.cat((t, t), dim=1)),
    "no heads": lambda tree, tensors: every(tree, tensors, lambda t: t[:, :0]),
    "longer heads": lambda tree, tensors: every(tree, tensors, lambda t: torch.cat((t, t), dim=-1)),
    "shorter heads": lambda tree, tensors: every(tree, tensors, lambda t: t[..., :8]),
    "another dtype": lambda tree, tensors: every(tree, tensors, lambda t: t.double()),
    "integers": lambda tree, tensors: every(tree, tensors, lambda t: t.long()),
    "an id beyond the vocabulary": lambda tree, _: tree["token_ids"].__setitem__(-1, 5_000),
    "a prefix beyond the vocabulary": lambda tree, _: tree["provenance"].update(prefix_ids=[2**31 - 1]),
    "positions on more axes": lambda tree, _: tree.update(axes=[[0, 0]] * len(tree["token_ids"])),
}
"""Lies that only a model can tell: they load, and a splice refuses them."""


@pytest.mark.parametrize("lie", LOADS)
@pytest.mark.parametrize("at", [None, 0])
@pytest.mark.parametrize("filled", [True, False])
def test_a_splice_refuses(lie: str, at: int | None, filled: bool, tmp_path: Path) -> None:
    policy().save_pretrained(tmp_path)
    forge(tmp_path, LOADS[lie])
    skill = Skill.from_pretrained(tmp_path, model=shared_model())
    cache = make_context() if filled else EditableCache(shared_model())
    before = Snapshot(cache)
    for seam in (0, 1):
        with pytest.raises(CompatibilityError, match="damaged or forged") as caught:
            cache.splice(skill, at=at, seam_tokens=seam, name="again")
        assert 0 < len(caught.value.reasons) <= 13
        assert len(str(caught.value)) < 3_000
    before.check(cache)


def test_a_splice_accepts_what_the_model_made(tmp_path: Path) -> None:
    """The control: forged in nothing but the digests, which come out the same."""
    policy().save_pretrained(tmp_path)
    forge(tmp_path, lambda tree, _: tree.update(layout=None))
    cache = EditableCache(shared_model())
    cache.splice(Skill.from_pretrained(tmp_path, model=shared_model()))
    assert cache.verify().ok


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3.0])
def test_cells_can_lie_and_verify_tells(value: float, tmp_path: Path) -> None:
    """Nobody can see in a number whether a model computed it; a recomputation can."""
    policy().save_pretrained(tmp_path)
    forge(tmp_path, lambda _, tensors: tensors["layers.1.values"][..., 5, :].fill_(value))
    skill = Skill.from_pretrained(tmp_path, model=shared_model(), exact=True)
    cache = EditableCache(shared_model())
    cache.splice(skill)
    assert not cache.verify().ok
    assert not skill.verify(shared_model(), num_tokens=len(skill)).ok
    assert policy().verify(shared_model(), num_tokens=len(skill)).ok


def layout_of(tree: Tree) -> Any:
    return tree["layout"]["rotaries"][0]


REFUSED: dict[str, Callable[[Tree, Tensors], Any]] = {
    "a position that overflows": lambda tree, _: tree["position_ids"].__setitem__(0, 2**62),
    "a position as a float": lambda tree, _: tree["position_ids"].__setitem__(0, 1.0),
    "a huge id": lambda tree, _: tree["token_ids"].__setitem__(0, 10**30),
    "an id below -1": lambda tree, _: tree["token_ids"].__setitem__(0, -2),
    "ragged axes": lambda tree, _: tree.update(axes=[[0], *[[0, 0]] * (len(tree["token_ids"]) - 1)]),
    "empty axes": lambda tree, _: tree.update(axes=[[]] * len(tree["token_ids"])),
    "axes below 0": lambda tree, _: tree.update(axes=[[-(2**30)]] * len(tree["token_ids"])),
    "an image that steers the terminal": lambda tree, _: tree.update(images=[[0, 1, "\x1b[2J"]]),
    "a note that steers the terminal": lambda tree, _: tree["provenance"].update(note="\x1b[2Jall fine"),
    "a dtype that is a list": lambda tree, _: tree["layers"][0]["keys"].update(dtype=["float32"]),
    "a tensor name with a path": lambda tree, _: tree["layers"][0].update({"../x": tree["layers"][0].pop("keys")}),
    "a layout that turns channels beyond the head": lambda tree, _: layout_of(tree).update(start=12),
    "a layout of other tensors": lambda tree, _: tree["layout"]["holders"][0]["tensors"].pop(),
    "a frequency that is no number": lambda tree, _: layout_of(tree)["inv_freq"].__setitem__(0, "x"),
    "a counter that is none": lambda tree, _: tree["layout"]["holders"][0]["tensors"][1].update(counter=True),
    "cells of fewer tokens": lambda tree, tensors: every(tree, tensors, lambda t: t[..., :-1, :]),
    "an extra tensor": lambda _, tensors: tensors.update(more=torch.zeros(3)),
    "tokens without cells": lambda tree, tensors: (tensors.clear(), tree.update(layers=[{}] * 3, layout=None)),
    "a deep config": lambda tree, _: tree["model"].update(config=json.loads('{"a":' * 300 + "1" + "}" * 300)),
    "a wide config": lambda tree, _: tree["model"].update(config={str(i): 0 for i in range(100_000)}),
    "a config with a long text": lambda tree, _: tree["model"].update(config={"a": "x" * 2**21}),
    "merged parts that overlap": lambda tree, _: tree["provenance"].update(
        how="merged", parts=[{"start": 0, "stop": 9, "prefix_ids": [], "name": None, "note": ""}] * 2
    ),
}


@pytest.mark.parametrize("lie", REFUSED)
def test_loading_refuses(lie: str, tmp_path: Path) -> None:
    policy().save_pretrained(tmp_path)
    forge(tmp_path, REFUSED[lie])
    for model in (None, shared_model()):
        with pytest.raises(ArtifactError) as caught:
            Skill.from_pretrained(tmp_path, model=model)
        assert len(str(caught.value)) < 1_000
        assert str(caught.value).isprintable()


def test_a_config_with_many_differences_is_told_in_short(tmp_path: Path) -> None:
    policy().save_pretrained(tmp_path)
    forge(tmp_path, lambda tree, _: tree["model"].update(config={f"\x1b[2J{i}": "y" * 999 for i in range(900)}))
    with pytest.raises(CompatibilityError) as caught:
        Skill.from_pretrained(tmp_path, model=shared_model())
    assert len(str(caught.value)) < 40_000
    assert "more fields" in str(caught.value)
    assert "\x1b" not in str(caught.value)


TEXTS = {
    "a number without end": lambda text: text.replace('"position_ids": [0', '"position_ids": [1e400'),
    "no number": lambda text: text.replace('"position_ids": [0', '"position_ids": [NaN'),
    "half a surrogate pair": lambda text: text.replace('"name": "policy"', '"name": "\\ud800"'),
    "one key twice": lambda text: text.replace('"kind":', '"version": 1, "kind":'),
    "depth": lambda text: text.replace('"axes": null', '"axes": ' + "[" * 100_000 + "]" * 100_000),
    "some depth": lambda text: text.replace('"axes": null', '"axes": ' + "[" * 900 + "]" * 900),
    "lists without end": lambda text: text.replace('"axes": null', '"axes": [' + "[]," * 2**21 + "[]]"),
    "too many bytes": lambda text: text + " " * MAX_MANIFEST_BYTES,
    "no object": lambda text: "[]",
    "no UTF-8": lambda text: text.encode().replace(b"policy", b"\xff\xff"),
}


@pytest.mark.parametrize("fault", TEXTS)
def test_what_json_can_hide(fault: str, tmp_path: Path) -> None:
    policy().save_pretrained(tmp_path)
    path = tmp_path / "manifest.json"
    spoiled = TEXTS[fault](path.read_text())
    assert spoiled != path.read_text()
    path.write_bytes(spoiled if isinstance(spoiled, bytes) else spoiled.encode())
    with pytest.raises(ArtifactError, match=r"not readable|at most|seal") as caught:
        Skill.from_pretrained(tmp_path)
    assert len(str(caught.value)) < 1_000


HEADERS: dict[str, Callable[[Tree], Any]] = {
    "dtype as a list": lambda header: header["layers.0.keys"].update(dtype=["F32"]),
    "a shape that overflows": lambda header: header["layers.0.keys"].update(shape=[2**40, 2**40]),
    "an empty shape that overflows": lambda header: header["layers.0.keys"].update(
        shape=[0, 2**62], data_offsets=[0, 0]
    ),
    "offsets outside": lambda header: header["layers.0.keys"].update(data_offsets=[2**62, 2**62 + 4]),
    "tensors that overlap": lambda header: header.update({"layers.0.keys": dict(header["layers.0.values"])}),
    "a gap": lambda header: header.pop("layers.0.keys"),
    "a name without end": lambda header: header.update(
        {"x" * 2**16: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}
    ),
}


@pytest.mark.parametrize("fault", HEADERS)
def test_headers(fault: str, tmp_path: Path) -> None:
    policy().save_pretrained(tmp_path)
    payload = payload_of(tmp_path)
    data = payload.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    HEADERS[fault](header)
    text = json.dumps(header).encode()
    payload.write_bytes(spoiled := len(text).to_bytes(8, "little") + text + data[8 + length :])
    tree = json.loads((tmp_path / "manifest.json").read_text())
    tree |= {"payload_bytes": len(spoiled), "payload_sha256": hashlib.sha256(spoiled).hexdigest()}
    tree["checksums"] = {name: tree["checksums"].get(name, "0") for name in header if name != "__metadata__"}
    write(tmp_path, tree)
    with pytest.raises(ArtifactError, match="header") as caught:
        Skill.from_pretrained(tmp_path)
    assert len(str(caught.value)) < 1_000


@pytest.mark.parametrize(
    "part", ["scales negative", "scales NaN", "scales of another shape", "a cell that is no number"]
)
def test_quantized_cells(part: str, tmp_path: Path) -> None:
    policy().save_pretrained(tmp_path, storage="fp8")

    def lie(_: Tree, tensors: Tensors) -> None:
        scales, cells = tensors["scales.1.keys"], tensors["layers.1.keys"]
        if part == "scales of another shape":
            tensors["scales.1.keys"] = scales.flatten()
        elif part == "a cell that is no number":
            tensors["layers.1.keys"].view(torch.uint8).view(-1)[3] = 0x7F
        else:
            scales.view(-1)[2] = -1.0 if part == "scales negative" else float("nan")
        assert cells is not None

    forge(tmp_path, lie)
    with pytest.raises(ArtifactError, match=r"layers\.1\.keys"):
        Skill.from_pretrained(tmp_path)


TRANSITIONS: dict[str, Callable[[Tree, Tensors, str], Any]] = {
    "8 bits": lambda _, tensors, key: tensors.update({key: tensors[key].to(torch.float8_e4m3fn)}),
    "integers": lambda _, tensors, key: tensors.update({key: tensors[key].long()}),
    "another rank": lambda _, tensors, key: tensors.update({key: tensors[key].flatten()}),
    "another form": lambda tree, _, key: tree["recurrence"]["forms"].update({key.split(".offset")[0][12:]: "replace"}),
    "one state twice": lambda tree, _, key: tree["recurrence"]["forms"].update({"00.0": "replace"}),
    "a head beyond the chunk": lambda tree, _, key: tree["recurrence"].update(head=99),
    "no head": lambda tree, _, key: tree["recurrence"].update(head=0),
}


@pytest.mark.parametrize("lie", TRANSITIONS)
def test_transitions_that_are_none(lie: str, tmp_path: Path) -> None:
    good = base("hybrid")
    good.write(tmp_path)
    forge(
        tmp_path,
        lambda tree, tensors: TRANSITIONS[lie](tree, tensors, next(k for k in tensors if k.endswith(".offset"))),
    )
    with pytest.raises(ArtifactError):
        Skill.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "change", [lambda t: t[..., :-1], lambda t: torch.full_like(t, float("nan"))], ids=["shape", "nan"]
)
@pytest.mark.parametrize("part", ["offset", "conv", "factor"])
def test_transitions_of_another_state(part: str, change: Any, tmp_path: Path) -> None:
    good = base("hybrid")
    good.write(tmp_path)

    def lie(_: Tree, tensors: Tensors) -> None:
        key = [key for key in sorted(tensors) if key.endswith(f".{part}")][-1]  # the last layer: all others have moved
        tensors[key] = change(tensors[key])

    forge(tmp_path, lie)
    skill, cache = Skill.from_pretrained(tmp_path, model=good.model), good.context.fork()
    before = Snapshot(cache)
    states = [layer.state_value() for layer in cache.state_layers]
    with pytest.raises(CompatibilityError):
        cache.splice(skill)
    before.check(cache)
    for layer, kept in zip(cache.state_layers, states, strict=True):
        assert all(torch.equal(layer.recurrent_states[i], t) for i, t in kept.recurrent.items() if t is not None)
        assert all(torch.equal(layer.conv_states[i], t) for i, t in kept.conv.items() if t is not None)


ENTRIES: dict[str, Callable[[Tree, Tensors], Any]] = {
    "a layer is missing": lambda tree, tensors: (
        tree.update(compressed=tree["compressed"][:-1]),
        [tensors.pop(key) for key in list(tensors) if key.startswith(f"compressed.{tree['compressed'][-1] + 1}.")],
    ),
    "one entry too many": lambda _, tensors: _entries(tensors, lambda t: torch.cat((t, t[:, :1]), dim=1)),
    "no entries": lambda _, tensors: _entries(tensors, lambda t: t[:, :0]),
    "entries of another width": lambda _, tensors: _entries(tensors, lambda t: t[..., :-2]),
    "no tensor of entries": lambda _, tensors: tensors.pop(_last(tensors)),
    "another dtype": lambda _, tensors: _entries(tensors, lambda t: t.double()),
}


def _last(tensors: Tensors) -> str:
    return [key for key in sorted(tensors) if "compressed_kv" in key][-1]


def _entries(tensors: Tensors, change: Any) -> None:
    tensors[_last(tensors)] = change(tensors[_last(tensors)])


@pytest.mark.parametrize("lie", ENTRIES)
def test_entries_of_another_model(lie: str, tmp_path: Path) -> None:
    good = base("compressed")
    good.write(tmp_path)
    forge(tmp_path, ENTRIES[lie])
    skill, cache = Skill.from_pretrained(tmp_path, model=good.model), good.context.fork()
    before = [layer.state_value().leaves for layer in cache.state_layers]
    with pytest.raises(CompatibilityError, match="forged"):
        cache.splice(skill)
    for layer, kept in zip(cache.state_layers, before, strict=True):
        for path, leaf in layer.state_value().leaves.items():
            same = torch.equal(leaf, kept[path]) if isinstance(leaf, torch.Tensor) else leaf == kept[path]
            assert same, path


CACHES: dict[str, Callable[[Tree, Tensors], Any]] = {
    "ids beyond the vocabulary": lambda _, tensors: tensors["ledger.ids"].fill_(5_000),
    "ids of another dtype": lambda _, tensors: tensors.update({"ledger.ids": tensors["ledger.ids"].double()}),
    "positions below 0": lambda _, tensors: tensors["ledger.positions"].fill_(-5),
    "groups below 0": lambda _, tensors: tensors["ledger.groups"].fill_(-5),
    "offsets beyond their chunk": lambda _, tensors: tensors["ledger.offsets"].fill_(999),
    "no rows": lambda _, tensors: tensors.update({k: t[:0] for k, t in tensors.items()}),
    "cells of other heads": lambda _, tensors: tensors.update({"layers.2.keys": tensors["layers.2.keys"][..., :-1]}),
    "cells of another dtype": lambda _, tensors: tensors.update({"layers.2.keys": tensors["layers.2.keys"].double()}),
    "a holder without cells": lambda _, tensors: (tensors.pop("layers.2.keys"), tensors.pop("layers.2.values")),
    "cells of another name": lambda _, tensors: tensors.update({"layers.2.x": tensors.pop("layers.2.keys")}),
    "an extra tensor": lambda _, tensors: tensors.update(x=torch.zeros(1)),
    "pristine keys of other tokens": lambda _, tensors: tensors.update({"pristine.0.keys": torch.zeros(1, 2, 999, 16)}),
    "an origin that is none": lambda tree, _: tree["segments"][0].update(origin="x"),
    "a name that is a list": lambda tree, _: tree["segments"][0].update(name=["x"]),
    "one name twice": lambda tree, _: tree["segments"][0].update(name=tree["segments"][1]["name"]),
    "a template of a field that is lost": lambda tree, _: tree["fields"].pop(0),
    "tokens that no model knows": lambda tree, _: tree.update(unfed=[[2**30]]),
}


@pytest.mark.parametrize("lie", CACHES)
def test_caches(lie: str, tmp_path: Path) -> None:
    make_context().save_pretrained(tmp_path)
    forge(tmp_path, CACHES[lie])
    with pytest.raises(ArtifactError):
        EditableCache.from_pretrained(tmp_path, model=shared_model())


def test_what_nobody_could_read_is_not_written(tmp_path: Path) -> None:
    """A writer that is as strict as the reader: the old skill stays."""
    policy().save_pretrained(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    lost = policy().renamed("a/b")
    from editable_cache.hub.chunk_store import save_chunk

    with pytest.raises(ArtifactError, match="name"):
        save_chunk(lost, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("what", ["manifest", "payload"])
@pytest.mark.parametrize("kind", ["pipe", "folder", "circle", "outside", "device"])
def test_what_is_no_file(what: str, kind: str, tmp_path: Path) -> None:
    """A pipe would block whoever opens it, and a link can lead anywhere."""
    folder = tmp_path / "skill"
    policy().save_pretrained(folder)
    path = folder / "manifest.json" if what == "manifest" else payload_of(folder)
    content = path.read_bytes()
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "circle":
        path.symlink_to(path.name)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        (tmp_path / "secret").write_bytes(content)
        path.symlink_to("../secret")
    with pytest.raises(ArtifactError):
        Skill.from_pretrained(folder)


def test_links_that_are_meant(tmp_path: Path) -> None:
    """A linked folder, and files as the cache of huggingface_hub links them."""
    folder = tmp_path / "hub" / "snapshots" / "main"
    policy().save_pretrained(folder)
    blobs = tmp_path / "hub" / "blobs"
    blobs.mkdir()
    for path in list(folder.iterdir()):
        path.rename(blobs / path.name)
        path.symlink_to(f"../../blobs/{path.name}")
    (tmp_path / "linked").symlink_to(folder)
    for place in (folder, tmp_path / "linked"):
        assert Skill.from_pretrained(place).equal_cells(policy())
    blobs.rename(tmp_path / "elsewhere")
    blobs.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ArtifactError, match="link"):
        Skill.from_pretrained(folder)


def test_builds_that_lead_out_of_their_repository(tmp_path: Path) -> None:
    good = tmp_path / "elsewhere"
    policy().save_pretrained(good)
    (tmp_path / "repo" / "builds").mkdir(parents=True)
    (tmp_path / "repo" / "builds" / "llama").symlink_to(good)
    with pytest.raises(ArtifactError, match="link"):
        Skill.from_pretrained(tmp_path / "repo")
