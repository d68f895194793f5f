"""Good folders to spoil, each with the model that it belongs to and a context to splice it into."""

from __future__ import annotations

import functools
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from cache_support import make_cache, make_context, policy, shared_model, shared_tokenizer, some_ids

from editable_cache import EditableCache, Skill, VisionChunk

sys.path.insert(0, str(Path(__file__).parents[1] / "compressed"))


class Base(NamedTuple):
    """A folder that loads.

    Attributes:
        files: content of every file by its path in the folder.
        kind: class that reads it.
        model: whose it is.
        context: a cache with something in it; the skill is spliced into forks of it.
    """

    files: dict[str, bytes]
    kind: type
    model: Any
    context: EditableCache

    def write(self, folder: Path) -> None:
        for name, content in self.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


def _skill(storage: str = "original") -> Base:
    return Base(_saved(lambda at: policy().save_pretrained(at, storage=storage)), Skill, shared_model(), make_context())


def _merged() -> Base:
    parts = [policy(), Skill.precompile(shared_model(), shared_tokenizer(), "refund the order", name="other")]
    merged = Skill.merge(parts, name="both")
    return Base(_saved(merged.save_pretrained), Skill, shared_model(), make_context())


def _hybrid() -> Base:
    model, context = shared_model("falcon_h1"), make_cache("falcon_h1")
    context.append(some_ids(6)[0])
    skill = Skill.precompile(model, None, some_ids(14)[0], name="hybrid")
    return Base(_saved(skill.save_pretrained), Skill, model, context)


def _compressed() -> Base:
    import compressed_support as tiny

    context = EditableCache(tiny.model())
    context.append(tiny.ids_of(tiny.ALIGNMENT))
    skill = Skill.precompile(tiny.model(), None, tiny.ids_of(22, seed=2), name="compressed")
    return Base(_saved(skill.save_pretrained), Skill, tiny.model(), context)


def _vision() -> Base:
    import vision_support as vision

    name = "qwen2_5_vl"
    context = EditableCache(vision.vision_model(name))
    context.append(vision.text_ids(6))
    return Base(_saved(vision.chunk(name).save_pretrained), VisionChunk, vision.vision_model(name), context)


def _repository() -> Base:
    other = shared_model(dtype=torch.bfloat16)

    def save(folder: Path) -> None:
        policy().save_pretrained(folder / "builds" / "llama-float32")
        policy().save_pretrained(folder / "builds" / "llama-float32-int8", storage="int8")
        skill = Skill.precompile(other, shared_tokenizer(), "If the order", name="policy")
        skill.save_pretrained(folder / "builds" / "llama-bfloat16")

    return Base(_saved(save), Skill, shared_model(), make_context())


def _cache() -> Base:
    context = make_context()
    context.erratum("status", "delivered")
    return Base(_saved(context.save_pretrained), EditableCache, shared_model(), context)


def _moved_cache() -> Base:
    context = make_context(dtype=torch.bfloat16)
    context.remove("system")
    return Base(_saved(context.save_pretrained), EditableCache, context.model, context)


def _hybrid_cache() -> Base:
    base = _hybrid()
    context = base.context.fork()
    context.append(some_ids(3)[0])
    return Base(_saved(context.save_pretrained), EditableCache, base.model, context)


def _compressed_cache() -> Base:
    base = _compressed()
    return Base(_saved(base.context.save_pretrained), EditableCache, base.model, base.context)


BASES: dict[str, Callable[[], Base]] = {
    "plain": _skill,
    "int8": lambda: _skill("int8"),
    "fp8": lambda: _skill("fp8"),
    "merged": _merged,
    "hybrid": _hybrid,
    "compressed": _compressed,
    "vision": _vision,
    "repository": _repository,
    "cache": _cache,
    "moved cache": _moved_cache,
    "hybrid cache": _hybrid_cache,
    "compressed cache": _compressed_cache,
}


@functools.cache
def base(name: str) -> Base:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return BASES[name]()


def _saved(save: Callable[[Path], None]) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        save(folder)
        files = [path for path in folder.rglob("*") if path.is_file()]
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
