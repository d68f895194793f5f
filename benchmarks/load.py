"""A skill from disk into a cache: `python benchmarks/load.py [--quick]` writes `results/load.json`.

Load, and load + splice, against a plain copy of the skill's bytes (`tensor.clone()` of every stored tensor). Timed with
memory that the allocator kept from the round before, and with fresh pages, which the kernel clears on first touch.
Outputs are verified before they are timed.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import mmap
import os
import resource
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import compose
import timing
import torch

from editable_cache import EditableCache, Skill
from editable_cache.adapters import identify, weights_state
from editable_cache.ops import checksum
from editable_cache.testing import oracles
from editable_cache.testing.real_models import load_smollm2

MEGABYTE = 1e6
TOLERANCE = 1e-4
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)


class Bench:
    """A skill on disk, and a cache with a few tokens to splice it behind."""

    def __init__(self, folder: str, length: int) -> None:
        self.model, self.tokenizer = load_smollm2()
        self.folder, self.length, self.libc = Path(folder), length, ctypes.CDLL(None, use_errno=True)
        ids = compose._ids(self.tokenizer, length)
        Skill.precompile(self.model, self.tokenizer, ids, name="policy").save_pretrained(folder)
        self.payload = next(self.folder.glob("*.safetensors"))
        self.base = EditableCache(self.model, tokenizer=self.tokenizer)
        self.base.append(self.tokenizer(compose.SYSTEM, add_special_tokens=False)["input_ids"])
        self.held: dict[str, Any] = {}
        self.faults: dict[str, list[int]] = {}

    def load(self) -> Skill:
        return Skill.from_pretrained(self.folder)

    def fresh(self, *, trim: bool) -> None:
        """Let go of what the last call made and fork the cache; with ``trim``, give its pages back to the kernel."""
        self.held.clear()
        gc.collect()
        if trim:
            self.libc.malloc_trim(0)
        self.held["cache"] = self.base.fork()

    def counted(self, name: str, run: Callable[[], Any]) -> Callable[[], None]:
        """Hold what ``run`` makes until the next round, and count the page faults that it took."""

        def go() -> None:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            self.held["made"] = run()
            self.faults.setdefault(name, []).append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

        return go


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--quick", action="store_true", help="short skill, few rounds, no result file")
    quick = arguments.parse_args().quick
    warnings.simplefilter("ignore")
    torch.set_num_threads(2)
    torch.set_grad_enabled(False)
    rounds = 3 if quick else 15
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(folder, 256 if quick else 2048)
        result: dict[str, Any] = {
            "model": "SmolLM2-135M-Instruct, float32",
            "seed": 0,
            "skill_tokens": bench.length,
            "skill_mb": round(bench.load().nbytes / MEGABYTE, 1),
            "largest_error": verify(bench),
            "cold": cold(bench, max(rounds // 3, 1)),
            "memory": memory(bench),
            "shared_pages": shared_pages(bench),
            "fresh_pages": warm(bench, rounds, trim=True),
            "fresh_pages_one_thread_cpu": warm(bench, rounds, trim=True, threads=1),
        }
        bench.libc.mallopt(M_MMAP_THRESHOLD, 2**25)
        bench.libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
        result["kept_pages"] = warm(bench, rounds, trim=False)
        result["kept_pages_one_thread_cpu"] = warm(bench, rounds, trim=False, threads=1)
        result["parts_one_thread_cpu"] = parts(bench, rounds)
    for name, values in result.items():
        print(name, values)
    if not quick:
        print(timing.write("load", result))


def verify(bench: Bench) -> dict[str, float]:
    """Largest error of the spliced cells against the ISO oracle, which computes the chunk at its new positions.

    Values do not depend on the positions, so what two runs of the oracle at old and new positions differ by is the
    model's own rounding; an error is allowed up to 1e-4 or that.
    """
    skill, found = bench.load(), {}
    start = bench.base.get_seq_length()
    prefix = torch.tensor(skill.provenance.prefix_ids, dtype=torch.int64)

    def computed(shift: int) -> oracles.OracleResult:
        return oracles.iso(
            bench.model,
            skill.token_ids,
            skill.position_ids + shift,
            prefix_ids=prefix if len(prefix) else None,
            prefix_positions=torch.arange(len(prefix)) + shift if len(prefix) else None,
        )

    before, expected = computed(0), computed(start - int(skill.position_ids[0]))
    pairs = zip(before.values, expected.values, strict=True)
    rounding = max(oracles.relative_error(old, new) for old, new in pairs)
    for seam in (0, 1):
        cache = bench.base.fork()
        cache.splice(skill, seam_tokens=seam)
        found[f"seam_{seam}"] = max(
            oracles.relative_error(getattr(layer, name)[..., start + seam :, :], cells[name][..., seam:, :])
            for layer, cells in zip(cache.layers, expected.layers, strict=True)
            for name in ("keys", "values")
        )
    control = oracles.relative_error(skill.layers[0]["keys"], expected.layers[0]["keys"])
    first = cache.layers[0].keys[..., start + 1 :, :], expected.layers[0]["keys"][..., 1:, :]
    found["first_layer_keys"] = oracles.relative_error(*first)
    assert found["first_layer_keys"] < TOLERANCE, found
    assert max(found.values()) < max(TOLERANCE, 1.1 * rounding) < control, (found, rounding, control)
    return {**found, "rounding_of_the_model": rounding, "control_not_rotated": control}


def warm(bench: Bench, rounds: int, *, trim: bool, threads: int = 2) -> dict[str, Any]:
    """The file in the page cache. One thread is timed in processor time, whatever else the machine does."""
    source = bench.load()
    tensors = [tensor for states in source.layers for tensor in states.values()]

    def spliced(seam_tokens: int) -> Callable[[], None]:
        return lambda: bench.held["cache"].splice(bench.load(), seam_tokens=seam_tokens)

    runs: dict[str, Callable[[], Any]] = {
        "plain_copy": lambda: [tensor.clone() for tensor in tensors],
        "read_file": bench.payload.read_bytes,
        "load": bench.load,
        "splice": lambda: bench.held["cache"].splice(source, seam_tokens=0),
        "load_splice_seam_0": spliced(0),
        "load_splice_seam_1": spliced(1),
    }
    bench.faults.clear()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    seconds = timing.paired(
        {name: bench.counted(name, run) for name, run in runs.items()},
        rounds=rounds,
        prepare=lambda: bench.fresh(trim=trim),
        clock=time.perf_counter if threads > 1 else time.process_time,
    )
    torch.set_num_threads(before)
    copy = seconds["plain_copy"]
    return {
        "milliseconds": {name: timing.milliseconds(values) for name, values in seconds.items()},
        "over_plain_copy": {
            name: timing.ratios(values, copy) for name, values in seconds.items() if values is not copy
        },
        "over_reading_the_file": timing.ratios(seconds["load_splice_seam_0"], seconds["read_file"]),
        "page_faults": {name: sorted(counts)[len(counts) // 2] for name, counts in bench.faults.items()},
    }


def parts(bench: Bench, rounds: int) -> dict[str, dict[str, float]]:
    """What load and splice do besides moving bytes, and the checksum alone, in processor time of one thread."""
    skill, state = bench.load(), weights_state(bench.model)
    tensors = [tensor for states in skill.layers for tensor in states.values()]
    torch.set_num_threads(1)
    seconds = timing.paired(
        {
            "read_once": lambda: [tensor.view(torch.int64).sum() for tensor in tensors],
            "checksums": lambda: [checksum(tensor) for tensor in tensors],
            "state_of_the_model": lambda: weights_state(bench.model),
            "identify": lambda: identify(bench.model, bench.tokenizer, state=state),
        },
        rounds=rounds,
        clock=time.process_time,
    )
    torch.set_num_threads(2)
    return {name: timing.milliseconds(values) for name, values in seconds.items()}


def cold(bench: Bench, rounds: int) -> dict[str, Any]:
    """The file dropped from the page cache first, against a plain read of it; how much was still there is told."""
    left: list[float] = []
    with bench.payload.open("rb") as file:
        os.fsync(file.fileno())

    def drop() -> None:
        bench.fresh(trim=True)
        with bench.payload.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        left.append(resident(bench))

    seconds = timing.paired(
        {
            "read": bench.counted("read", bench.payload.read_bytes),
            "load": bench.counted("load", bench.load),
            "load_splice": bench.counted(
                "load_splice", lambda: bench.held["cache"].splice(bench.load(), seam_tokens=0)
            ),
        },
        rounds=rounds,
        prepare=drop,
    )
    bench.held.clear()
    return {
        "largest_part_still_in_page_cache": round(max(left), 4),
        "dropped": max(left) < 0.01,
        "part_in_page_cache_when_warm": round(_warmed(bench), 4),
        **{name: timing.milliseconds(values) for name, values in seconds.items()},
        "load_over_read": timing.ratios(seconds["load"], seconds["read"]),
        "load_splice_over_read": timing.ratios(seconds["load_splice"], seconds["read"]),
    }


def _warmed(bench: Bench) -> float:
    bench.payload.read_bytes()
    return resident(bench)


def resident(bench: Bench) -> float:
    """Part of the payload that is in the page cache, by mincore(2)."""
    with bench.payload.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as view:
        pages = -(-len(view) // mmap.PAGESIZE)
        found, start = (ctypes.c_ubyte * pages)(), ctypes.c_char.from_buffer(view)
        failed = bench.libc.mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(len(view)), found)
        del start
    if failed:
        raise OSError(ctypes.get_errno(), "mincore")
    return sum(byte & 1 for byte in found) / pages


def memory(bench: Bench) -> dict[str, Any]:
    """Growth of the process's memory over the skill's bytes: pages of the file, which can be dropped, and its own."""
    bench.fresh(trim=True)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # forgets the peak
    size, start = bench.payload.stat().st_size, _status()
    skill = bench.load()
    loaded = _status()
    bench.held["cache"].splice(skill, seam_tokens=0)
    spliced = _status()

    def growth(now: dict[str, int], name: str) -> float:
        return round((now[name] - start[name]) / size, 3)

    return {
        "load_file_backed": growth(loaded, "RssFile"),
        "load_anonymous": growth(loaded, "RssAnon"),
        "load_splice_file_backed": growth(spliced, "RssFile"),
        "load_splice_anonymous": growth(spliced, "RssAnon"),
        "peak_of_both": round((spliced["VmHWM"] - start["VmRSS"]) / size, 3),
    }


def _status() -> dict[str, int]:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith(" kB")}


def shared_pages(bench: Bench) -> dict[str, Any]:
    """Two loads of one skill: resident (counted for each) and proportional (counted once) size of their mappings."""
    bench.fresh(trim=True)
    first, second = bench.load(), bench.load()
    assert first.equal_cells(second)
    rss, pss, count, ours = 0, 0, 0, False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if "-" in line.split(" ")[0]:
            ours = line.endswith(bench.payload.name)
            count += ours
        elif ours and line.startswith(("Rss:", "Pss:")):
            kilobytes = int(line.split()[1])
            rss, pss = (rss + kilobytes, pss) if line.startswith("Rss:") else (rss, pss + kilobytes)
    size = bench.payload.stat().st_size / 1024
    return {"mappings": count, "rss_over_file": round(rss / size, 3), "pss_over_file": round(pss / size, 3)}


if __name__ == "__main__":
    main()
