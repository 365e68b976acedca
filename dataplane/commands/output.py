"""Output of commands: results on stdout, progress and errors on stderr, each error as one block."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Iterable, Sequence
from typing import TextIO

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from dataplane.base.trace import Trace, configure, printable
from dataplane.model import errors
from dataplane.model.redact import redacted

EXIT_OK = 0
EXIT_BAD_DATA = 1
EXIT_USAGE = 2
EXIT_UNREACHABLE = 3
EXIT_BUG = 70
EXIT_NOT_WRITTEN = 74
EXIT_INTERRUPTED = 130
EXIT_PIPE_CLOSED = 141

EXIT_CODES = """\
Exit status:
  0    success
  1    the data is corrupt or has changed, or a check failed
  2    the command line or a setting is wrong
  3    the store or a peer did not answer, or refused the request
  70   a bug in dataplane
  74   the output could not be written
  130  interrupted with Ctrl-C
"""

# An error has the status of the first of its base classes that is listed here.
_EXIT_OF: dict[type[BaseException], int] = {
    errors.AccessDenied: EXIT_UNREACHABLE,
    errors.ConfigError: EXIT_USAGE,
    errors.CorruptShard: EXIT_BAD_DATA,
    errors.DatasetChangedError: EXIT_BAD_DATA,
    errors.DataplaneError: EXIT_UNREACHABLE,
}

NON_TERMINAL_WIDTH = 200


def _console(stream: TextIO) -> Console:
    # Use a large width for a file or a pipe: rich would fold tables to 80 columns there.
    width = None if stream.isatty() else NON_TERMINAL_WIDTH
    return Console(file=stream, width=width, highlight=False)


def stdout() -> Console:
    """Return the console for results."""
    return _console(sys.stdout)


def stderr() -> Console:
    """Return the console for progress, warnings and errors."""
    return _console(sys.stderr)


def write_json(value: object, *, on_one_line: bool = False) -> None:
    """Write one JSON document to stdout. Values that JSON lacks are written as text."""
    indent = None if on_one_line else 2
    text = json.dumps(value, indent=indent, default=str, ensure_ascii=False)
    sys.stdout.write(printable(text, of_lines=True) + "\n")


def write_table(
    headings: Sequence[str], rows: Iterable[Sequence[object]], title: str | None = None
) -> None:
    """Write a plain table to stdout; numbers are right-aligned."""
    stdout().print(table(headings, rows, title))


def table(
    headings: Sequence[str], rows: Iterable[Sequence[object]], title: str | None = None
) -> Table:
    """Return a table, for live display."""
    found = [list(row) for row in rows]
    made = Table(title=title, title_justify="left", box=None, pad_edge=False, title_style="bold")
    for index, heading in enumerate(headings):
        numeric = bool(found) and all(isinstance(row[index], int | float) for row in found)
        made.add_column(heading, justify="right" if numeric else "left", overflow="fold")
    for row in found:
        made.add_row(*(escape(show(cell)) for cell in row))
    return made


def show(cell: object) -> str:
    """Format a cell: large numbers with separators, floats short, None as a dash."""
    if cell is None:
        return "-"
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, int):
        return f"{cell:,}"
    if isinstance(cell, float):
        return f"{cell:,.1f}"
    return printable(str(cell))


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: "2 shards" for (2, "shard")."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def approximate_bytes(size: float) -> str:
    """Return a size as text: "1.2 MiB" for 1234567."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:,.0f} {unit}" if unit == "B" else f"{size:,.1f} {unit}"
        size /= 1024
    return f"{size:,.1f} TiB"


def progress() -> Progress:
    """Return a progress bar on stderr, which is invisible if stderr is not a terminal."""
    console = stderr()
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[note]}"),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )


def warn(message: str) -> None:
    """Write a one-line warning to stderr."""
    stderr().print(f"[yellow]warning:[/] {escape(printable(message))}", soft_wrap=True)


def write_error(error: BaseException) -> None:
    """Print what was wrong, where, and what to do, as one block on stderr."""
    console = stderr()
    what = printable(redacted(str(error)), of_lines=True) or type(error).__name__
    console.print(f"[bold red]error:[/] {escape(what)}", soft_wrap=True)
    if isinstance(error, errors.DataplaneError):
        for noun, value in error.nouns.items():
            if value is not None:
                console.print(f"  {noun + ':':<12} {escape(printable(str(value)))}", soft_wrap=True)
        console.print(f"  {'kind:':<12} {type(error).__name__}")
        console.print(f"  {'what to do:':<12} {escape(error.remedy)}", soft_wrap=True)


def log_error(error: BaseException, status: int, *, with_traceback: bool) -> None:
    """Log the error that ends a service, as JSON."""
    facts = _facts_of(error, status, with_traceback=with_traceback)
    nouns = facts.pop("nouns")
    assert isinstance(nouns, dict)
    configure("info", "json")
    Trace("serve").ended("the service ends with an error", **{**nouns, **facts})


def _facts_of(error: BaseException, status: int, *, with_traceback: bool) -> dict[str, object]:
    ours = error if isinstance(error, errors.DataplaneError) else None
    facts: dict[str, object] = {
        "error": type(error).__name__,
        "message": redacted(str(error)),
        "nouns": {} if ours is None else dict(ours.nouns),
        "what_to_do": None if ours is None else ours.remedy,
        "exit_status": status,
    }
    if with_traceback:
        facts["traceback"] = redacted("".join(traceback.format_exception(error)))
    return facts


def write_error_as_json(error: BaseException, status: int, *, with_traceback: bool) -> None:
    """Print an error for programs, as one JSON object on one line of stderr."""
    told = _facts_of(error, status, with_traceback=with_traceback)
    sys.stderr.write(printable(json.dumps(told, default=str, ensure_ascii=False)) + "\n")


def write_traceback(error: BaseException) -> None:
    """Print the traceback on stderr, with secrets in urls removed."""
    told = "".join(traceback.format_exception(error))
    stderr().print(printable(redacted(told), of_lines=True), markup=False, soft_wrap=True)


def exit_code(error: BaseException) -> int:
    """Return the exit status for an error."""
    return next((_EXIT_OF[kind] for kind in type(error).__mro__ if kind in _EXIT_OF), EXIT_BUG)
