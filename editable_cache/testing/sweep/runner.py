"""One worker process that examines types one after the other, and is replaced when it hangs or dies."""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from types import TracebackType

from editable_cache.testing.sweep.row import Row

SECONDS = 90.0
"""Most wall time for one type; nearly all take one or two seconds."""

BYTES = 4 * 2**30
"""Most memory for one type, above what a worker without any model has."""


def _work(names: Connection, rows: Connection, most_bytes: int) -> None:
    import torch

    from editable_cache.testing.sweep.certify import certify

    torch.set_num_threads(1)
    _limit_memory(most_bytes)
    while (name := names.recv()) is not None:
        try:
            row = certify(name)
        except Exception as error:  # whatever a model type may raise: it is one row, not the end
            row = Row(name, "failed", unproven=(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}",))
        rows.send(row.to_dict())


def _limit_memory(most_bytes: int) -> None:
    """Let an allocation that goes too far fail in this process; on Linux only."""
    if not sys.platform.startswith("linux"):
        return
    import resource

    with open("/proc/self/statm", encoding="ascii") as statm:
        data = int(statm.read().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (data + most_bytes, data + most_bytes))


class Worker:
    """A context in which types are examined in another process, with limits on time and memory for each."""

    def __init__(self, *, seconds: float = SECONDS, most_bytes: int = BYTES) -> None:
        self.seconds, self.most_bytes = seconds, most_bytes
        self._process: multiprocessing.process.BaseProcess | None = None

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self._process is not None and self._process.is_alive():
            self._names.send(None)
            self._process.join(10)
            self._stop()

    def examine(self, name: str) -> Row:
        """The row of one type; verdict ``"failed"`` if it hung, died or took too much memory."""
        if self._process is None or not self._process.is_alive():
            self._start()
        start = time.perf_counter()
        self._names.send(name)
        try:
            if self._rows.poll(self.seconds):
                return Row.from_dict(self._rows.recv())
            why = f"no answer within {self.seconds:.0f} s"
        except EOFError:
            why = "its process died"
        self._stop()
        return Row(name, "failed", unproven=(why,), seconds=round(time.perf_counter() - start, 2))

    def rows(self, names: Sequence[str]) -> Iterator[Row]:
        """The row of each type."""
        return map(self.examine, names)

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        names, self._names = context.Pipe(duplex=False)
        self._rows, rows = context.Pipe(duplex=False)
        self._process = context.Process(target=_work, args=(names, rows, self.most_bytes), daemon=True)
        self._process.start()
        names.close()
        rows.close()

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None
