"""What a build says about itself, as JSON and in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from editable_cache.cli.screen import reasons_json

if TYPE_CHECKING:
    from editable_cache.hub.build import Build
    from editable_cache.hub.resolve import Candidate

ELLIPSIS = "..."


def size(num_bytes: int) -> str:
    """``12.3 MiB``."""
    return f"{num_bytes / 2**20:.1f} MiB" if num_bytes >= 2**20 else f"{num_bytes / 2**10:.1f} KiB"


def model_line(build: Build) -> str:
    """Model and dtype in a few words."""
    return f"{build.origin.repo or build.model.model_type} in {build.model.dtype}"


def tail(text: str, most: int) -> str:
    """The last ``most`` characters."""
    return text if len(text) <= most else ELLIPSIS + text[len(text) - most :]


def candidate_json(candidate: Candidate, tokenizer: Any, *, asked: bool, characters: int) -> dict[str, Any]:
    """A build and what speaks against it; ``asked`` tells whether a model was given to compare with."""
    facts: dict[str, Any] = {
        "build": candidate.label,
        "readable": candidate.build is not None,
        "fits": (candidate.build is not None and not candidate.reasons) if asked else None,
        "convertible": candidate.convertible if asked else None,
        "reasons": reasons_json(candidate.reasons),
    }
    return facts if candidate.build is None else {**facts, **build_json(candidate.build, tokenizer, characters)}


def build_json(build: Build, tokenizer: Any, characters: int) -> dict[str, Any]:
    """Everything that a build says about itself but its ids and the whole of its text."""
    from editable_cache.published import control_tokens_of

    ids, origin, provenance = build.token_ids, build.origin, build.provenance
    decoded, prefix = (_decoded(tokenizer, each, characters) for each in (ids.tolist(), provenance.prefix_ids))
    return {
        "name": build.name,
        "tokens": len(build),
        "first_position": int(build.position_ids.min()) if len(build) else None,
        "storage": build.storage,
        "bytes": build.payload.num_bytes,
        "downloaded": build.payload.path.is_file(),
        "holders": len(build.layers),
        "images": len(build.images),
        "live_ends": None if build.live_ends is None else list(build.live_ends),
        "compressed_layers": list(build.compressed),
        "model": {
            "model_type": build.model.model_type,
            "repo": origin.repo,
            "revision": origin.revision,
            "dtype": build.model.dtype,
            "weights": build.model.weights,
            "adapters": build.model.adapters,
            "tokenizer": build.model.tokenizer,
        },
        "origin": {
            "attention": origin.attention,
            "tokenizer": origin.tokenizer,
            "adapters": dict(origin.adapters),
            "versions": dict(origin.versions),
        },
        "provenance": {
            "how": provenance.how,
            "prefix_tokens": len(provenance.prefix_ids),
            "note": provenance.note,
            "parts": [
                {
                    "name": part.name,
                    "start": part.start,
                    "stop": part.stop,
                    "prefix_tokens": len(part.prefix_ids),
                    "note": part.note,
                }
                for part in provenance.parts
            ],
        },
        "control_tokens": [token._asdict() for token in control_tokens_of(build, tokenizer)],
        "text_tail": None if build.text is None else tail(build.text, characters),
        "decoded_tail": decoded,
        "prefix_tail": prefix,
    }


def _decoded(tokenizer: Any, ids: Sequence[int], characters: int) -> str | None:
    """The end of a text as the model sees it; None without a tokenizer, without ids, or if some are unknown."""
    if tokenizer is None or not ids or min(ids) < 0:
        return None
    return tail(str(tokenizer.decode(ids, clean_up_tokenization_spaces=False)), characters)
