"""Ways to spoil a folder: as accidents do, and as someone does who knows the format and computes every digest anew."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load, save

from editable_cache.hub.manifest import sealed
from editable_cache.ops import checksum

Draw = Callable[[Any], Any]

MARK = "@@raw@@"
RAW = (
    "1e400",
    "-1e400",
    "NaN",
    "Infinity",
    "1" + "0" * 30,
    "1" * 5_000,
    "-0",
    "1E5",
    '"\\ud800"',
    '{"a": 1, "a": 2}',
    "[" * 500 + "]" * 500,
    "[" * 20_000 + "]" * 20_000,
    '{"a":' * 900 + "1" + "}" * 900,
    "[" + "[]," * 3_000 + "[]]",
)
"""JSON, or nearly, that no Python value is written as."""

VALUES = (
    *(None, True, False, -1, 0, 1, 2, 7, 2**31 - 1, 2**31, 2**53, 2**62, 2**63, -(2**63), 10**18, 1.5, -2.5, 1e300),
    *(
        "",
        "x",
        "a/b",
        "../x",
        "\0",
        "\x1b[31m",
        "\u202e",
        "keys",
        "layers.0.keys",
        "float8_e4m3fn",
        "bool",
        "9" * 5_000,
    ),
    *([], {}, [[]], [None], [0] * 100, [1, 2, 3], [["a", 1]], {"a": {}}, {"keys": {}}, [-1], [2**40], [0.5]),
)

DTYPES = ("F32", "F16", "BF16", "F64", "I8", "U8", "I64", "F8_E4M3", "F8_E5M2", "F4", "C64", "BOOL", "x", "", None, 3)
SHAPES = ([], [0], [1], [-1, 2], [2**62, 4], [2**32, 2**32], [1.0, 2], ["1"], None, [0, 2**62], [1] * 70, [True], 5)
OFFSETS = (
    [0, 0],
    [0, 4],
    [-4, 0],
    [4, 0],
    [0, 2**63],
    [2**62, 2**62 + 4],
    [0],
    [0, 1, 2],
    None,
    [0.0, 4.0],
    ["0", "4"],
)

EXTRA = ("layers.0.more", "layers.00.keys", "layers.0.keys.x", "states.0.conv.9", "compressed.0.keys.x", "x")


def spoil(draw: Draw, files: dict[str, bytes]) -> dict[str, bytes]:
    """The files of a folder with one to three faults."""
    files = dict(files)
    folders = sorted({str(Path(name).parent) for name in files})
    for _ in range(draw(st.sampled_from([1, 1, 1, 2, 3]))):
        folder = Path(draw(st.sampled_from(folders)))
        manifest = (folder / "manifest.json").as_posix()
        payload = next((n for n in files if Path(n).parent == folder and n.endswith(".safetensors")), manifest)
        how = draw(st.sampled_from(HOW))
        faults = (LookupError, ValueError, TypeError, AttributeError, RecursionError, RuntimeError, SafetensorError)
        with contextlib.suppress(*faults):
            how(draw, files, manifest, payload)  # a second fault may find nothing that it knows any more
    return files


def _manifest(draw: Draw, files: dict[str, bytes], manifest: str, payload: str) -> None:
    tree = json.loads(files[manifest])
    _spoil_tree(draw, tree)
    files[manifest] = _dumped(draw, tree, resealed=draw(st.integers(0, 9)) > 0)


def _header(draw: Draw, files: dict[str, bytes], manifest: str, payload: str) -> None:
    data = files[payload]
    length = int.from_bytes(data[:8], "little")
    header, cells = json.loads(data[8 : 8 + length]), data[8 + length :]
    names = [name for name in header if name != "__metadata__"]
    name = draw(st.sampled_from(names))
    what = draw(st.integers(0, 8))
    if what == 0:
        header[name]["dtype"] = draw(st.sampled_from(DTYPES))
    elif what == 1:
        header[name]["shape"] = draw(st.sampled_from(SHAPES))
    elif what == 2:
        header[name]["data_offsets"] = draw(st.sampled_from(OFFSETS))
    elif what == 3:
        header[name]["data_offsets"] = header[draw(st.sampled_from(names))]["data_offsets"]
    elif what == 4:
        del header[name]
    elif what == 5:
        header[draw(st.sampled_from(["extra", "", "layers.0.keys", "x" * 3_000, "__metadata__"]))] = header[name]
    elif what == 6:
        header["__metadata__"] = draw(st.sampled_from([{"a": "b"}, {"a": 1}, [], "x", None]))
    else:
        _spoil_tree(draw, header)
    text = _raw(json.dumps(header), draw).encode("utf-8", "surrogatepass")
    if what == 8:
        text = text[:-1] + b"," + json.dumps(name).encode() + b":" + json.dumps(header.get(name)).encode() + b"}"
    size = draw(st.sampled_from([len(text)] * 6 + [0, 1, 2**63, 2**64 - 1, len(text) + 8, 2**25]))
    files[payload] = size.to_bytes(8, "little") + text + cells
    _recompute(draw, files, manifest, payload)


def _bytes(draw: Draw, files: dict[str, bytes], manifest: str, payload: str) -> None:
    name = draw(st.sampled_from([manifest, payload]))
    data = bytearray(files[name])
    where = draw(st.integers(0, max(min(len(data), 2_000) - 1, 0))) if draw(st.booleans()) else len(data) // 2
    what = draw(st.integers(0, 4))
    if what == 0:
        data[where] ^= 1 << draw(st.integers(0, 7))
    elif what == 1:
        del data[where:]
    elif what == 2:
        data[where:where] = draw(st.sampled_from([b"\0", b"\xff\xfe", b"{", b'"', b"\n" * 9, b"\xc3"]))
    elif what == 3:
        del data[where : where + draw(st.integers(1, 64))]
    else:
        data += b"\0" * draw(st.integers(1, 64))
    files[name] = bytes(data)
    if name == payload:
        _recompute(draw, files, manifest, payload)


def _cells(draw: Draw, files: dict[str, bytes], manifest: str, payload: str) -> None:
    """Other tensors in a file that is whole, and a manifest that says so."""
    tensors, tree = load(files[payload]), json.loads(files[manifest])
    name = draw(st.sampled_from(sorted(tensors)))
    tensors[name] = changed = draw(st.sampled_from(CHANGES))(tensors[name]).contiguous()
    if draw(st.integers(0, 5)) == 0:
        del tensors[name]
    elif draw(st.integers(0, 5)) == 0:
        tensors[
            draw(st.sampled_from(["layers.0.more", "layers.00.keys", "layers.0.keys.x", "states.0.conv.9", "x"]))
        ] = changed.clone()
    where, _, rest = name.partition(".")
    if where == "layers" and "layers" in tree and not isinstance(tree["layers"], dict):
        holder, _, own = rest.partition(".")
        facts = tree["layers"][int(holder)][own]
        facts["shape"] = list(changed.shape)
        if facts["dtype"] not in ("float32", "bfloat16") or tree["storage"] == "original":
            facts["dtype"] = str(changed.dtype).removeprefix("torch.")
    files[payload] = save(tensors)
    files[manifest] = json.dumps(tree).encode()
    _recompute(draw, files, manifest, payload)


def _shorter(draw: Draw, files: dict[str, bytes], manifest: str, payload: str) -> None:
    """Every list of one number per token, and every tensor, cut or doubled along the tokens: all of it agrees."""
    tensors, tree = load(files[payload]), json.loads(files[manifest])
    length = len(tree["token_ids"])
    keep = draw(st.sampled_from([0, 1, 2, length - 1, 2 * length]))
    index = torch.arange(keep) % max(length, 1)
    for key in ("token_ids", "position_ids", "axes"):
        tree[key] = tree[key] and [tree[key][i] for i in index.tolist()]
    for states in tree["layers"]:
        for facts in states.values():
            facts["shape"][2] = keep
    for name, tensor in tensors.items():
        if name.startswith(("layers.", "scales.")) and tensor.dim() == 4 and tensor.shape[2] == length:
            tensors[name] = tensor[:, :, index].contiguous()
    files[payload], files[manifest] = save(tensors), json.dumps(tree).encode()
    _recompute(draw, files, manifest, payload)


def _forged(draw: Draw, files: dict[str, bytes], manifest: str, payload: str) -> None:
    """A skill that agrees with itself in every way, and with the model's identity, but is none of the model's."""
    tensors, tree = load(files[payload]), json.loads(files[manifest])
    length = len(tree["token_ids"])
    what = draw(st.integers(0, 11))
    if what <= 4:
        changes = (
            lambda t: torch.cat((t, t), dim=1),
            lambda t: torch.cat((t, t), dim=-1) if t.shape[-1] > 1 else t,
            lambda t: t.to(torch.float64) if t.dtype == torch.float32 else t,
            lambda t: t[:, :0],
            lambda t: torch.full_like(t, 1e30) if t.dtype == torch.float32 else t,
        )
        for name in [name for name in tensors if name.startswith(("layers.", "scales."))]:
            tensors[name] = changes[what](tensors[name]).contiguous()
        for holder, states in enumerate(tree["layers"]):
            for name, facts in states.items():
                facts["shape"] = list(tensors[f"layers.{holder}.{name}"].shape)
                facts["dtype"] = "float64" if what == 2 else facts["dtype"]
        tree["layout"] = None if draw(st.booleans()) else tree["layout"]
    elif what == 5:
        last = len(tree["layers"]) - 1
        tree["layers"], tree["layout"] = tree["layers"][:-1], None
        tensors = {
            name: t for name, t in tensors.items() if not name.startswith((f"layers.{last}.", f"scales.{last}."))
        }
    elif what == 6:
        tree["layers"], tree["layout"] = [*tree["layers"], *[{}] * draw(st.sampled_from([1, 60_000]))], None
    elif what == 7:
        tree["token_ids"][draw(st.integers(0, length - 1))] = draw(
            st.sampled_from([-1, 319, 320, 321, 5_000, 2**31 - 1])
        )
    elif what == 8:
        tree["position_ids"] = [draw(st.sampled_from([0, 1, 5_000, 2**30, 2**31 - 1])) + i for i in range(length)]
    elif what == 9:
        width = draw(st.integers(1, 4))
        tree["axes"] = [[draw(st.sampled_from([0, 1, 7, 2**31 - 1]))] * width for _ in range(length)]
    elif what == 10:
        tree["images"] = [[1, 3, draw(st.sampled_from(["x", "", "x" * 200]))]]
    else:
        tree["provenance"]["prefix_ids"] = [draw(st.sampled_from([-1, 5, 321, 2**31 - 1]))] * draw(st.integers(0, 50))
    files[payload], files[manifest] = save(tensors), json.dumps(tree).encode()
    _recompute(draw, files, manifest, payload)


CHANGES: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    lambda t: t.to(torch.float64),
    lambda t: t.to(torch.float16),
    lambda t: t.to(torch.int64),
    lambda t: t.to(torch.float8_e4m3fn),
    lambda t: t.to(torch.bool),
    lambda t: -t,
    lambda t: torch.zeros_like(t),
    lambda t: torch.full_like(t, float("nan")) if t.is_floating_point() else torch.full_like(t, -1),
    lambda t: torch.full_like(t, float("inf")) if t.is_floating_point() else t + 2**40,
    lambda t: torch.full(t.shape, 1e38).to(t.dtype),
    lambda t: t[..., :-1],
    lambda t: t[..., :0],
    lambda t: t[:, :1],
    lambda t: t[:, :0],
    lambda t: t[:0],
    lambda t: torch.cat((t, t), dim=0),
    lambda t: torch.cat((t, t), dim=1),
    lambda t: torch.cat((t, t), dim=-1),
    lambda t: torch.cat((t, t), dim=-2),
    lambda t: t.transpose(-1, -2),
    lambda t: t.flatten(),
    lambda t: t[None],
    lambda t: t.reshape(-1)[:1].reshape(()),
    lambda t: t.view(torch.uint8) if t.element_size() == 1 else t.view(torch.int32) if t.element_size() == 4 else t,
)

HOW = (_manifest, _manifest, _manifest, _header, _header, _bytes, _cells, _cells, _shorter, _forged, _forged)


def _spoil_tree(draw: Draw, tree: Any) -> None:
    node, key, parent = tree, None, None
    while isinstance(node, (dict, list)) and node and (parent is None or draw(st.integers(0, 3))):
        keys = sorted(node) if isinstance(node, dict) else range(len(node))
        parent, key = node, draw(st.sampled_from(keys))
        node = node[key]
    what = draw(st.integers(0, 9))
    if parent is None:
        return
    if what == 0:
        del parent[key]
    elif what == 1 and isinstance(parent, dict):
        parent[draw(st.sampled_from(["x", "", "keys", "seal", "\x1b", "kind", "0.0", "00.1"]))] = copy.deepcopy(node)
    elif what == 1:
        parent.insert(key, copy.deepcopy(node))
    elif what == 2:
        parent[key] = f"{MARK}{draw(st.integers(0, len(RAW) - 1))}{MARK}"
    elif what == 3 and type(node) is int:
        parent[key] = node + draw(st.sampled_from([-1, 1, 100, 5_000, 2**40]))
    elif what == 4 and isinstance(node, list):
        parent[key] = node * draw(st.sampled_from([0, 2, 3]))
    elif what == 5 and isinstance(parent, dict):
        other = draw(st.sampled_from(sorted(parent)))
        parent[key], parent[other] = parent[other], parent[key]
    else:
        parent[key] = copy.deepcopy(draw(st.sampled_from(VALUES)))


def _raw(text: str, draw: Draw) -> str:
    for number, raw in enumerate(RAW):
        text = text.replace(f'"{MARK}{number}{MARK}"', raw)
    return text


def _dumped(draw: Draw, tree: Any, *, resealed: bool) -> bytes:
    if resealed and isinstance(tree, dict):
        tree = {key: value for key, value in tree.items() if key != "seal"}
    text = _raw(json.dumps(tree), draw).encode("utf-8", "surrogatepass")
    return sealed(text) if resealed and isinstance(tree, dict) else text


def _recompute(draw: Draw, files: dict[str, bytes], manifest: str, payload: str) -> None:
    """Digests of what the payload holds now, most of the time."""
    if draw(st.integers(0, 7)) == 0:
        return
    tree, data = json.loads(files[manifest]), files[payload]
    tree |= {"payload_bytes": len(data), "payload_sha256": hashlib.sha256(data).hexdigest()}
    with contextlib.suppress(Exception):  # what safetensors can't read keeps its old checksums
        tree["checksums"] = {name: checksum(tensor) for name, tensor in load(data).items()}
    files[manifest] = _dumped(draw, tree, resealed=True)
