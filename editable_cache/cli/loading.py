"""Models and skills by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from editable_cache.cli.options import Dtype
from editable_cache.cli.screen import Screen
from editable_cache.errors import ArtifactError, EditableCacheError

if TYPE_CHECKING:
    from editable_cache.hub.remote import Repository
    from editable_cache.hub.resolve import Candidate


@dataclass(frozen=True)
class ModelOptions:
    """Which model, and how to load it."""

    name: str
    adapter: str | None = None
    dtype: Dtype | None = None
    device: str = "cpu"
    revision: str | None = None
    trust: bool = False


@dataclass(frozen=True)
class Loaded:
    """A model in evaluation mode, and its tokenizer unless none was asked for."""

    model: Any
    tokenizer: Any


def load_model(screen: Screen, options: ModelOptions, *, tokenizer: bool = True) -> Loaded:
    """Load a model from the Hub or a folder.

    Raises:
        ArtifactError: if it can't be loaded, whatever transformers raised.
    """
    with screen.stage(f"loading {options.name}", own_bar=True), quiet(screen), loading(options.name):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        how: dict[str, Any] = {"revision": options.revision, "trust_remote_code": options.trust}
        if options.dtype is not None:
            how["dtype"] = options.dtype.value
        model: Any = AutoModelForCausalLM.from_pretrained(options.name, **how)
        if options.adapter is not None:
            model = _adapted(model, options.adapter)
        model = model.to(options.device).eval()
        how.pop("dtype", None)
        return Loaded(model, AutoTokenizer.from_pretrained(options.name, **how) if tokenizer else None)


def _adapted(model: Any, adapter: str) -> Any:
    try:
        from peft import PeftModel
    except ImportError as error:
        raise ArtifactError("--adapter needs peft; install it with: pip install peft") from error
    with loading(adapter):
        return PeftModel.from_pretrained(model, adapter)


@contextmanager
def quiet(screen: Screen) -> Iterator[None]:
    """Errors only from the libraries that load, and their progress bars only where somebody looks."""
    from huggingface_hub.utils import logging as hub_logging
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
    from transformers.utils import logging

    before = logging.get_verbosity(), hub_logging.get_verbosity()
    bars = logging.is_progress_bar_enabled(), not are_progress_bars_disabled()
    logging.set_verbosity_error()
    hub_logging.set_verbosity_error()
    if not screen.is_watched:
        logging.disable_progress_bar()
        disable_progress_bars()
    try:
        yield
    finally:
        logging.set_verbosity(before[0])
        hub_logging.set_verbosity(before[1])
        if bars[0]:
            logging.enable_progress_bar()
        if bars[1]:
            enable_progress_bars()


@contextmanager
def loading(name: str) -> Iterator[None]:
    """Turn whatever transformers or peft raises while loading into an ``ArtifactError`` of one line."""
    try:
        yield
    except EditableCacheError:
        raise
    except Exception as error:  # a config, a file or remote code of a stranger may raise anything
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise ArtifactError(f"{name}: can't be loaded: {type(error).__name__}: {' '.join(lines[:3])[:500]}") from error


@dataclass(frozen=True)
class Found:
    """The builds of a skill, with what speaks against each of them for a model if one was given.

    Attributes:
        source: as the user named it.
        repository: where it lies on the Hub, or None.
        snapshot: the local folder that holds the manifests.
        candidates: all builds.
    """

    source: str
    repository: Repository | None
    snapshot: Path
    candidates: tuple[Candidate, ...]

    def choose(self, label: str | None) -> Candidate:
        """The build with this label, or the only one that fits; see ``hub.resolve.choose``."""
        from editable_cache.hub.resolve import choose

        chosen = choose(self.candidates, self.source, label=label, dtype=None)
        assert chosen.build is not None
        return chosen


def find_builds(
    screen: Screen, source: str, revision: str | None, loaded: Loaded | None = None, *, force_download: bool = False
) -> Found:
    """Read the manifests of a skill; of one on the Hub nothing else is downloaded.

    Raises:
        ArtifactError: if it can't be read.
    """
    from editable_cache.adapters import identify, rounded_digest
    from editable_cache.hub.remote import Repository, is_repo_id
    from editable_cache.hub.resolve import build_folders, candidates

    snapshot, repository = Path(source), None
    if not snapshot.exists() and is_repo_id(source):
        repository = Repository(source, revision, force_download=force_download)
        with screen.stage(f"reading the manifests of {source}", own_bar=True), quiet(screen):
            snapshot = repository.manifests()
    folders = build_folders(snapshot, of_hub=repository is not None)
    identity = None if loaded is None else identify(loaded.model, loaded.tokenizer)
    found = candidates(folders, identity, lambda: "" if loaded is None else rounded_digest(loaded.model))
    return Found(source, repository, snapshot, found)
