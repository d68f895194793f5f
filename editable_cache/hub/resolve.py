"""Which build of a skill fits a model, and why the others don't."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from editable_cache.errors import ArtifactError, CompatibilityError, Reason
from editable_cache.hub.build import Build, open_build
from editable_cache.hub.manifest import MANIFEST, require_own
from editable_cache.hub.storage import STORAGES
from editable_cache.spec import ModelIdentity, compare

BUILDS = "builds"
LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,119}")
MOST_BUILDS = 256
BITS = {"float64": 64, "float32": 32}
"""Of the dtypes with more than 16."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """A build, and what speaks against it.

    Attributes:
        label: its name in the repository; empty for a folder that holds one build and nothing else.
        build: what it says about itself, or None if that can't be read.
        reasons: why it does not fit; empty if it fits as it is.
        convertible: it would fit once its cells are converted to the model's dtype.
    """

    label: str
    build: Build | None
    reasons: tuple[Reason, ...] = ()
    convertible: bool = False

    def __str__(self) -> str:
        facts = "unreadable"
        if self.build is not None:
            model = self.build.model
            facts = f"{self.build.origin.repo or model.model_type}, {model.dtype}, {self.build.storage}"
        lines = [f"{self.label or 'the only build'} ({facts})", *(f"    - {reason}" for reason in self.reasons)]
        return "\n".join(lines)


def label_of(build: Build) -> str:
    """The name of a build in its repository: one model in one dtype and storage has one place.

    The weights come by their first 8 hex digits, all else that identifies the model by 4 of a SHA-256.
    """
    model = build.model
    kind = re.sub(r"[^A-Za-z0-9._-]", "-", model.model_type)[:60].strip(".-") or "model"
    everything = json.loads(model.config)
    config = {name: value for name, value in everything.items() if value is not None and value is not False}
    rest = json.dumps([config, model.rotary, model.adapters, model.tokenizer], sort_keys=True)
    parts = [kind, model.dtype, model.weights[:8], hashlib.sha256(rest.encode()).hexdigest()[:4]]
    return "-".join(parts + ([] if build.storage == "original" else [build.storage]))


def build_folders(folder: Path, *, of_hub: bool = False) -> dict[str, Path]:
    """The builds of a local folder by label: those of a repository, or itself unless it is a snapshot ``of_hub``.

    Raises:
        ArtifactError: if it holds none, or too many.
    """
    if not of_hub and ((folder / MANIFEST).exists() or (folder / MANIFEST).is_symlink()):
        return {"": folder}
    root = folder / BUILDS
    found = {path.name: path for path in sorted(root.iterdir()) if path.is_dir()} if root.is_dir() else {}
    if not found or len(found) > MOST_BUILDS:
        raise ArtifactError(
            f"{folder}: expected a folder written by save_pretrained, or a repository with 1 to {MOST_BUILDS} builds "
            f"in {BUILDS}/, got {len(found)}."
        )
    for name, path in found.items():
        if not LABEL.fullmatch(name):
            raise ArtifactError(
                f"{root}: expected builds named by letters, digits, '.', '_' and '-', got {name[:80]!r}."
            )
        require_own(path)
    return found


def candidates(
    folders: dict[str, Path], identity: ModelIdentity | None, rounded: Callable[[], str]
) -> tuple[Candidate, ...]:
    """Every build with what speaks against it for a model.

    Args:
        folders: builds by label.
        identity: the model, or None to compare nothing.
        rounded: the digest of the model's weights rounded to bfloat16, computed where it is needed.
    """
    return tuple(_candidates(folders, identity, rounded))


def _candidates(
    folders: dict[str, Path], identity: ModelIdentity | None, rounded: Callable[[], str]
) -> Iterator[Candidate]:
    for label, path in folders.items():
        try:
            build = open_build(path)
        except ArtifactError as error:
            yield Candidate(label, None, (Reason("manifest", "a readable one", str(error)),))
            continue
        reasons = () if identity is None else compare(identity, build.model)
        convertible = bool(reasons) and identity is not None and _is_convertible(identity, build, rounded)
        yield Candidate(label, build, reasons, convertible)


def choose(found: Sequence[Candidate], source: str, *, label: str | None, dtype: str | None) -> Candidate:
    """The build to take: one that fits as it is, best stored as it was computed, else one to be converted.

    Of several to be converted, one that is stored as it was computed goes first, then the one with most bits.

    Args:
        source: where they are, for messages.
        label: the only one that may be taken, or None.
        dtype: convert cells to this dtype if no build fits as it is; None never converts.

    Raises:
        CompatibilityError: if none fits, with all candidates and reasons; or if several do and nothing decides.
        ArtifactError: if there is no such label, or the only build is damaged.
    """
    if label is not None:
        named = [candidate for candidate in found if candidate.label == label]
        if not named:
            raise ArtifactError(f"{source}: expected a build {label!r}, got only {[c.label for c in found]}.")
        found = named
    fitting = [each for each in found if each.build is not None and not each.reasons]
    if dtype is not None and not fitting:
        fitting = [each for each in found if each.convertible]
    if fitting:
        ranks = [_rank(each.build, each.convertible) for each in fitting if each.build is not None]
        best = [each for each, rank in zip(fitting, ranks, strict=True) if rank == min(ranks)]
        differing = _differing([each.build.model for each in best if each.build is not None])
        if not differing:
            return best[0]
        advice = f"pass build= with one of {[each.label for each in best]}"
        if differing == {"tokenizer"}:
            advice += ", or model= and tokenizer= to take the one that is theirs"
        elif not best[0].convertible:
            advice += ", or model= to take the one that is its own"
        verb = "can be converted" if best[0].convertible else "fit"
        raise CompatibilityError(f"{source}: several builds {verb}; {advice}.")
    if all(each.build is None for each in found):
        raise ArtifactError(" ".join(each.reasons[0].got for each in found[:5]))
    lines = "".join(f"\n  {each}" for each in found)
    hint = ""
    if any(each.convertible for each in found):
        hint = " The model's weights are those of a build in another dtype: pass dtype= to convert its cells."
    if any(each.build is None for each in found):
        hint += " A build that can't be read: save it again, or download it again with force_download=True."
    reasons = tuple(replace(r, what=f"{c.label}: {r.what}" if c.label else r.what) for c in found for r in c.reasons)
    error = CompatibilityError(f"{source}: no build fits this model.{hint} Candidates:{lines}")
    error.reasons = reasons
    raise error


def _rank(build: Build, converts: bool) -> tuple[int, int, bool]:
    """The less, the better are the cells once they are in the dtype of the model, and the more is known of them."""
    bits = -BITS.get(build.model.dtype, 16) if converts else 0
    return STORAGES.index(build.storage), bits, not build.model.tokenizer


def _differing(models: Sequence[ModelIdentity]) -> set[str]:
    return {field.name for field in fields(ModelIdentity) if len({getattr(model, field.name) for model in models}) > 1}


def _is_convertible(identity: ModelIdentity, build: Build, rounded: Callable[[], str]) -> bool:
    differs = {reason.what for reason in compare(identity, build.model)}
    if not differs <= {"dtype", "weights"} or "dtype" not in differs:
        return False
    plain = build.live_ends is None and not build.compressed
    return plain and bool(build.origin.rounded_weights) and build.origin.rounded_weights == rounded()
