"""What a command shows: an answer on stdout, everything else on stderr, and no character of a stranger unescaped."""

from __future__ import annotations

import contextlib
import io
import json
import math
import sys
import time
import unicodedata
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn, TextIO

import typer
from rich.console import Console, RenderableType
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from editable_cache.errors import ContextWarning, EditableCacheError, Reason, TokenBoundaryWarning, TrustWarning

YES, NO, ERROR, INTERRUPTED = 0, 1, 2, 130
WIDTH = 120
"""Columns where nobody looks: in pipes and files."""

MOST_MESSAGE = 500
"""Characters shown of an error that comes from elsewhere."""

STEERING = ("C", "Zl", "Zp")
"""Categories of Unicode that can move a cursor, turn the direction of writing or break a line."""


def shown(text: str, *, lines: bool = False) -> str:
    """``text`` with every character that steers a terminal written as an escape; line breaks too unless ``lines``."""
    return "".join(
        char if (lines and char == "\n") or not unicodedata.category(char).startswith(STEERING) else _escape(char)
        for char in text
    )


def _escape(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")


class Screen:
    """One command's output. Markup is off: brackets of a stranger are brackets.

    Attributes:
        as_json: print one JSON object instead of text.
        code: the exit code of the command.
    """

    def __init__(self, as_json: bool, out: TextIO) -> None:
        self.as_json, self.code = as_json, YES
        self._out = out
        self._console = _console(out)
        self._errors = _console(sys.stderr)

    def answer(self, facts: Mapping[str, Any], parts: Iterable[RenderableType], code: int = YES) -> None:
        """Print the answer: ``facts`` as JSON, or ``parts`` for people, where texts come from ``line``."""
        self.code = code
        if self.as_json:
            self._out.write(json.dumps(_plain(facts), indent=2) + "\n")
            self._out.flush()
            return
        for part in parts:
            self._console.print(part, soft_wrap=isinstance(part, str))

    def note(self, text: str) -> None:
        """One line on stderr."""
        self._errors.print(shown(text), soft_wrap=True)

    def fail(self, error: Exception, kind: str = "") -> None:
        """Say on stderr what went wrong: one red line, and each reason on a line of its own.

        With a ``kind`` all is one line, which names it, shortened: nobody wrote that message for this program.
        """
        first, *rest = str(error).splitlines() or [type(error).__name__]
        if kind:
            first, rest = f"{kind}: {' '.join(str(error).split())[:MOST_MESSAGE]}", []
        self._errors.print("error: " + shown(first), style="red", soft_wrap=True)
        for line in rest:
            self._errors.print(shown(line), soft_wrap=True)
        if self.as_json:
            reasons = getattr(error, "reasons", ())
            facts = {"ok": False, "error": str(error), "kind": type(error).__name__, "reasons": reasons_json(reasons)}
            self._out.write(json.dumps(facts, indent=2) + "\n")
        self.code = ERROR

    def warn(self, message: Warning | str, *_: Any) -> None:
        """Stands in for ``warnings.showwarning``."""
        self._errors.print("warning: " + shown(str(message)), style="yellow", soft_wrap=True)

    @property
    def is_watched(self) -> bool:
        """Whether stderr is a terminal."""
        return self._errors.is_terminal

    @contextmanager
    def stage(self, what: str, *, own_bar: bool = False) -> Iterator[None]:
        """Show a spinner with the elapsed time while something takes long; a line at the end where nobody looks.

        ``own_bar`` says that a library shows a bar of its own, which a spinner would disturb.
        """
        if self.is_watched and own_bar:
            self.note(what)
            yield
            return
        if self.is_watched:
            columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
            with Progress(*columns, console=self._errors, transient=True) as progress:
                progress.add_task(shown(what), total=None)
                yield
            return
        start = time.perf_counter()
        yield
        self.note(f"{what}: {time.perf_counter() - start:.1f} s")


@contextmanager
def command(as_json: bool) -> Iterator[Screen]:
    """Run a command: whatever it raises but a usage error becomes a message and exit code 2, never a traceback."""
    _never_fail_to_print()
    screen = Screen(as_json, sys.stdout)
    with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):  # stdout is for the answer alone
        warnings.simplefilter("ignore")
        for kind in (TrustWarning, ContextWarning, TokenBoundaryWarning):
            warnings.simplefilter("always", kind)
        warnings.showwarning = screen.warn  # type: ignore[assignment]
        try:
            yield screen
        except (EditableCacheError, OSError) as error:
            screen.fail(error)
        except (typer.BadParameter, typer.Exit, typer.Abort):  # a usage error, or an end that was asked for
            raise
        except Exception as error:  # of torch, of a model's code: a message, not a stack of calls
            screen.fail(error, kind=type(error).__name__)
        except KeyboardInterrupt:
            screen.note("interrupted")
            screen.code = INTERRUPTED
    _leave(screen.code)


def _leave(code: int) -> NoReturn:
    raise typer.Exit(code)


def _never_fail_to_print() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _console(stream: TextIO) -> Console:
    console = Console(file=stream, markup=False, emoji=False, highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    return console


def table(title: str, columns: Iterable[str], rows: Iterable[Iterable[Any]]) -> Table:
    """A table of escaped cells; None is shown as nothing."""
    made = Table(title=title or None, title_justify="left", show_edge=False, pad_edge=False)
    for column in columns:
        made.add_column(Text(shown(column)), overflow="fold")
    for row in rows:
        made.add_row(*(Text("" if cell is None else shown(str(cell))) for cell in row))
    return made


def line(text: str) -> str:
    """A line of text, escaped."""
    return shown(text)


def reasons_json(reasons: Iterable[Reason]) -> list[dict[str, str]]:
    """Reasons as JSON."""
    return [{"what": each.what, "expected": each.expected, "got": each.got} for each in reasons]


def _plain(value: Any) -> Any:
    """``value`` for JSON, which has no numbers that are not finite."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
