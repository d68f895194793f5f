"""`PublishedChunk`: what skills and vision chunks share: they are saved, published, found and loaded."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import nn

from editable_cache.adapters import identify, rounded_digest, special_tokens
from editable_cache.chunk import KVChunk
from editable_cache.errors import ArtifactError, CompatibilityError, TrustWarning
from editable_cache.forward.text import adds_bos
from editable_cache.forward.verify_chunk import ChunkVerification, verify_chunk
from editable_cache.hub.build import Build
from editable_cache.hub.chunk_store import load_chunk, save_chunk
from editable_cache.hub.remote import Repository, is_repo_id
from editable_cache.hub.resolve import build_folders, candidates, choose
from editable_cache.hub.schema import NAME, is_name
from editable_cache.hub.trust import ControlToken
from editable_cache.hub.trust import control_tokens as control_tokens_in
from editable_cache.ops.convert import converted
from editable_cache.ops.quantize import Storage

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, eq=False, repr=False)
class PublishedChunk(KVChunk):
    """A named chunk with the text it was compiled from (for people; the ids are the truth)."""

    text: str | None = None
    _of_images: ClassVar[bool] = False

    def save_pretrained(self, folder: str | Path, *, storage: Storage = "original") -> None:
        """Write the chunk to a folder: one safetensors file and one JSON manifest (docs/skill-format.md).

        The old contents of the folder stay valid until the end, whenever the writing stops.

        Args:
            storage: ``"original"`` keeps every bit. ``"int8"`` and ``"fp8"`` store cells in 8 bits with scales; what
                that costs in accuracy stands in docs/skill-format.md, and a chunk that is loaded from it says so.

        Raises:
            ArtifactError: if the folder can't be written.
            SpanError: if cells that are not finite are to be stored in 8 bits.
        """
        save_chunk(self, folder, text=self.text, storage=storage)

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path,
        *,
        model: nn.Module | None = None,
        tokenizer: Any = None,
        build: str | None = None,
        dtype: torch.dtype | str | None = None,
        exact: bool = False,
        control_tokens: Literal["warn", "allow", "refuse"] = "warn",
        revision: str | None = None,
        cache_dir: str | Path | None = None,
        token: str | bool | None = None,
        local_files_only: bool = False,
        force_download: bool = False,
    ) -> Self:
        """Read a chunk from a folder or from the Hub; its cells are memory-mapped, and no byte is copied.

        Of several builds the one that fits ``model`` is taken, and of a repository on the Hub only that one's cells are
        downloaded.

        Args:
            source: a folder written by ``save_pretrained``, a local copy of a repository, or ``"organization/name"`` on
                the Hub.
            model, tokenizer: compared with the producer if given; a splice compares again.
            build: name of the build to take, where no model is given to choose by or several fit.
            dtype: the model's dtype: convert a build for the same weights in another dtype if none fits as it is. The
                chunk's provenance, and so every report, says so.
            exact: compare the file's SHA-256 too, at a tenth of the speed. The default notices damage, not forgery.
            control_tokens: what to do about tokens inside the chunk that control a model (``<|im_start|>``): a skill
                from a stranger is a prompt from a stranger.
            revision: branch, tag or commit on the Hub.
            cache_dir, token, local_files_only, force_download: as in ``huggingface_hub.snapshot_download``.

        Raises:
            ArtifactError: for a missing, damaged, truncated or unknown file, and if the Hub can't be read.
            CompatibilityError: if no build fits the model, with every build and what speaks against it; or with
                ``control_tokens="refuse"``.

        Warns:
            TrustWarning: if the chunk holds control tokens, or if its text is not what its ids say.
        """
        if control_tokens not in ("warn", "allow", "refuse"):
            raise CompatibilityError(
                f"from_pretrained: expected control_tokens= 'warn', 'allow' or 'refuse', got {control_tokens!r:.80}."
            )
        identity = None if model is None else identify(model, tokenizer)
        wanted = _dtype_name(dtype, identity.dtype if identity is not None else None)
        remote, snapshot = None, Path(source)
        if _is_there(snapshot):
            if revision is not None:
                raise ArtifactError(f"{source}: a folder has no revisions; expected none, got {revision!r:.80}.")
        else:
            if not is_repo_id(source):
                raise ArtifactError(
                    f"{str(source)!r:.200}: no such folder, and no repository on the Hub ('organization/name')."
                )
            remote = Repository(str(source), revision, cache_dir, token, local_files_only, force_download)
            snapshot = remote.manifests()
        with nullcontext() if remote is None else remote.repairable():
            folders = build_folders(snapshot, of_hub=remote is not None)
            found = candidates(folders, identity, lambda: "" if model is None else rounded_digest(model))
            chosen = choose(found, str(source), label=build, dtype=wanted)
        assert chosen.build is not None
        if remote is not None:
            remote.payload(snapshot, chosen.build.payload.path)
        with nullcontext() if remote is None else remote.repairable():
            chunk, facts = load_chunk(chosen.build, exact=exact)
        if chosen.reasons and identity is not None:
            chunk = converted(chunk, replace(identity, tokenizer=chunk.model.tokenizer))
        _report_trust(facts, tokenizer, str(source), control_tokens, of_images=cls._of_images)
        return cls._of(chunk, facts.text)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        token: str | bool | None = None,
        revision: str | None = None,
        create_pr: bool = False,
        commit_message: str | None = None,
        license: str | None = None,
        fidelity: Mapping[str, Any] | None = None,
        storage: Storage = "original",
        replace: bool = False,
    ) -> str:
        """Publish the chunk on the Hub: a build for its model and a card, in one commit.

        A repository holds builds for several models, dtypes and storages; a build of the same three is replaced. Makes
        the repository if there is none. A failed upload leaves nothing.

        Args:
            repo_id: ``"organization/name"``.
            private, token, revision, create_pr, commit_message: as in ``huggingface_hub.HfApi.create_commit``.
            license: identifier of a licence on the Hub (``"apache-2.0"``), for the card.
            fidelity: measured figures by name, for the card.
            storage: as in ``save_pretrained``.
            replace: delete the builds that were compiled from another text, in the same commit, instead of refusing.

        Returns:
            The address of the commit, or of the pull request.

        Raises:
            ArtifactError: if it can't be published, or if somebody else committed meanwhile.
        """
        from editable_cache.hub.publish import Upload, publish

        how = Upload(private, token, revision, create_pr, commit_message, license, fidelity, storage, replace)
        return publish(self, self.text, repo_id, how)

    def verify(
        self, model: nn.Module, tokenizer: Any = None, *, num_tokens: int = 32, seed: int = 0
    ) -> ChunkVerification:
        """Compute sampled tokens again, with the stored cells before them, and compare: is this what its ids give?

        Forged or damaged cells of sampled tokens show; those of other tokens need not. Nothing is changed.

        Args:
            model: the one that the chunk was compiled for, in evaluation mode.
            tokenizer: compared with the producer's if given.
            num_tokens: how many tokens at most; the first is always among them.
            seed: of the sample.

        Raises:
            CompatibilityError: if another model computed the chunk.
            UnsupportedModelError: if the self-test can't prove how the model's cells move.
            SpanError: for ``num_tokens`` below 1, or beyond the model's positions.
        """
        return verify_chunk(model, self, num_tokens, seed, tokenizer=tokenizer)

    def control_tokens(self, tokenizer: Any = None) -> tuple[ControlToken, ...]:
        """Tokens that control a model, of the chunk or of the prefix that it was compiled behind (negative slots): by
        the given tokenizer, or by what the chunk itself names.
        """
        return control_tokens_of(self, tokenizer)

    @classmethod
    def from_chunk(cls, chunk: KVChunk, *, name: str | None = None, text: str | None = None) -> Self:
        """A chunk that was cut out of a cache (``EditableCache.extract``) or of another chunk, to be saved and
        published.

        Shares storage with ``chunk``. What stood before it goes along in its provenance: don't publish a private
        context.

        Args:
            name: what it is called; the chunk's own name by default.
            text: for people; it should be what the ids say.

        Raises:
            CompatibilityError: without a name that can be stored.
        """
        return cls._of(chunk if name is None else chunk.renamed(name), text)

    @classmethod
    def _of(cls, chunk: KVChunk, text: str | None) -> Self:
        if not is_name(chunk.name):
            raise CompatibilityError(f"{cls.__name__}: expected a name of {NAME}, got {chunk.name!r:.80}.")
        return cls(**{field.name: getattr(chunk, field.name) for field in fields(KVChunk)}, text=text)


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name that no file can have
        return False


def _dtype_name(dtype: torch.dtype | str | None, of_model: str | None) -> str | None:
    if dtype is None:
        return None
    name = str(dtype).removeprefix("torch.")
    if of_model != name:
        raise CompatibilityError(
            f"from_pretrained: expected dtype= the dtype of model=, {of_model or 'which was not given'}, got {name}: "
            "cells are converted for a model that has the same weights in that dtype."
        )
    return name


def control_tokens_of(chunk: KVChunk | Build, tokenizer: Any) -> tuple[ControlToken, ...]:
    """Control tokens of a chunk, as ``PublishedChunk.control_tokens`` gives them, without its cells."""
    if tokenizer is None:
        return control_tokens_in(chunk.token_ids, chunk.provenance, dict(chunk.origin.special_ids))
    bos = [tokenizer.bos_token_id] if adds_bos(tokenizer) else []
    return control_tokens_in(chunk.token_ids, chunk.provenance, special_tokens(tokenizer), bos)


def _report_trust(build: Build, tokenizer: Any, source: str, how: str, *, of_images: bool) -> None:
    found = control_tokens_of(build, tokenizer)
    if found and how != "allow":
        shown = ", ".join(f"{each.text!r} at {each.slot}" for each in found[:5])
        behind = "; below 0 it was compiled behind them" if found[0].slot < 0 else ""
        message = (
            f"{source}: holds {len(found)} control tokens ({shown}{behind}): whoever wrote it can speak as system, "
            "user or assistant there. If that is meant, pass control_tokens='allow'."
        )
        if how == "refuse":
            raise CompatibilityError(message)
        warnings.warn(message, TrustWarning, stacklevel=3)
    if tokenizer is None or build.text is None or (of_images and build.images):
        return  # an image's text shows one mark where the ids have a placeholder for each of its tokens
    if tokenizer(build.text, add_special_tokens=False)["input_ids"] != build.token_ids.tolist():
        warnings.warn(
            f"{source}: its text is not what its ids say. The ids are the truth: read "
            "tokenizer.decode(skill.token_ids) before you use it.",
            TrustWarning,
            stacklevel=3,
        )
