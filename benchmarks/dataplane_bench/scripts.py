"""One way for the scripts beside this package to take arguments, to time, and to print.

A script is a few functions, each of them a subcommand. The parameters of a function are its
arguments, and its docstring is the help. It yields rows, which are printed as they come.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dataplane_bench.trial import watch

T = TypeVar("T")
Command = Callable[..., "Iterable[Row] | None"]


@dataclass(frozen=True, slots=True)
class Row:
    """A line of a table: numbers by unit or column. `least` and `most` are bars of the first."""

    name: str
    values: Mapping[str, float]
    least: float | None = None
    most: float | None = None

    @property
    def value(self) -> float:
        return next(iter(self.values.values()))

    @property
    def missed(self) -> bool:
        is_below = self.least is not None and self.value < self.least
        return is_below or (self.most is not None and self.value > self.most)

    def __str__(self) -> str:
        cells = (f"{_number(value):>12} {unit}" for unit, value in self.values.items())
        bar = self.least if self.most is None else self.most
        verdict = "" if bar is None else f"  bar {bar:g}: {'MISSED' if self.missed else 'ok'}"
        return f"{self.name:<54}{'  '.join(cells)}{verdict}".rstrip()


def row(
    name: str,
    value: float,
    unit: str = "",
    *,
    least: float | None = None,
    most: float | None = None,
) -> Row:
    """A line with one number."""
    return Row(name, {unit: value}, least, most)


def _number(value: float) -> str:
    if isinstance(value, int) or value.is_integer():
        return f"{value:,.0f}"
    return f"{value:,.3f}" if abs(value) < 100 else f"{value:,.1f}"


def run(doc: str | None, *commands: Command) -> int:
    """Carry out the command line of a script; the result is its exit status, 1 if a bar was missed.

    A parameter without a default is a positional argument, `*names` are any number of them; one
    whose default is False is a flag, and a tuple takes several values. A command whose name begins
    with "_" is for the script itself.
    """
    raw = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=doc, formatter_class=raw)
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in commands:
        about = inspect.getdoc(command) or ""
        name = command.__name__.replace("_", "-").lstrip("-")
        shown: Any = {} if command.__name__[0] == "_" else {"help": about.partition("\n")[0]}
        sub = subparsers.add_parser(name, description=about, formatter_class=raw, **shown)
        for parameter in inspect.signature(command, eval_str=True).parameters.values():
            _add(sub, parameter)
        sub.add_argument("--json", action="store_true", help="one JSON object instead of a table")
        sub.set_defaults(command=command)
    given = vars(parser.parse_args())
    command, as_json = given.pop("command"), given.pop("json")
    rows = []
    arguments: list[Any] = []
    for parameter in inspect.signature(command).parameters.values():
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            arguments.append(given.pop(parameter.name))
        elif parameter.kind is parameter.VAR_POSITIONAL:
            arguments += given.pop(parameter.name)
    for line in command(*arguments, **given) or ():
        rows.append(line)
        if not as_json:
            print(line, flush=True)
    if as_json:
        shown_rows = [{**asdict(line), "missed": line.missed} for line in rows]
        print(json.dumps({"rows": shown_rows}, default=float))
    return int(any(line.missed for line in rows))


def _add(parser: argparse.ArgumentParser, parameter: inspect.Parameter) -> None:
    default, kind = parameter.default, parameter.annotation
    if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
        parser.add_argument(parameter.name, nargs="*")
        return
    if default is inspect.Parameter.empty:
        parser.add_argument(parameter.name, type=Path if kind is Path else kind)
        return
    flag = f"--{parameter.name.replace('_', '-')}"
    if default is False:
        parser.add_argument(flag, action="store_true")
    elif isinstance(default, tuple):
        parser.add_argument(flag, nargs="+", type=type(default[0]), default=default)
    else:
        parse: Any = Path if default is None else type(default)
        parser.add_argument(flag, type=parse, default=default, help=f"({default})")


def timed(call: Callable[[], T]) -> tuple[T, float]:
    """The result of a call, and its seconds."""
    began = time.perf_counter()
    result = call()
    return result, time.perf_counter() - began


def best_s(call: Callable[[], object], times: int = 7) -> float:
    """The seconds of the fastest of several calls: other load can only add to it."""
    return min(timed(call)[1] for _ in range(times))


def best_cpu_s(calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """CPU seconds of this thread for each call, in turns, so that other load slows all of them; the
    best round of each counts.
    """
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, call in calls.items():
            began = time.thread_time()
            call()
            best[name] = min(best[name], time.thread_time() - began)
    return best


def family_cpu_s(pid: int | None = None) -> float:
    """CPU seconds of a process, or of this one, and of all below it, ended ones included."""
    return watch.cpu_s([pid or os.getpid()])


def on_one_core() -> None:
    """Keep this process on one core, since a rate is that of one."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def exit_with(status: int) -> None:
    """End this process without waiting for a node that it started."""
    sys.stdout.flush()
    os._exit(status)


def started(
    stack: contextlib.ExitStack, *command: str, stderr: int | IO[str] | None = None
) -> subprocess.Popen[str]:
    """A process with pipes, which ends with the stack."""
    pipe = subprocess.PIPE
    process = stack.enter_context(
        subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=stderr, text=True)
    )
    stack.callback(process.kill)
    return process


def line_of(out: IO[str] | None) -> str:
    assert out is not None
    line = out.readline()
    assert line, "a process has ended"
    return line


def send(process: subprocess.Popen[str], line: str = "go\n") -> None:
    assert process.stdin is not None
    process.stdin.write(line)
    process.stdin.flush()


def serve(stack: contextlib.ExitStack, *arguments: str) -> tuple[int, str]:
    """Start a part of a service. Returns its process id, and its address if it is a coordinator."""
    process = started(stack, sys.executable, "-m", "dataplane", "serve", *arguments)
    return process.pid, line_of(process.stdout).split()[-1]


def rows_of_json(text: str | bytes) -> list[Row]:
    """The rows that a command of a script wrote with --json."""
    return [Row(line["name"], line["values"]) for line in json.loads(text)["rows"]]


def lists(values: NDArray[Any], length: int) -> pa.FixedSizeListArray:
    """An Arrow array of rows of this many numbers."""
    return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), length)


def tokens_table(random: np.random.Generator, row_count: int, length: int = 2048) -> pa.Table:
    """Rows of random tokens."""
    values = random.integers(0, 50_000, row_count * length, dtype=np.int32)
    return pa.table({"tokens": lists(values, length)})


def shard(table: pa.Table, form: str, block_rows: int) -> bytes:
    """A table as Parquet, or as Arrow with the compression in the form's name."""
    out = pa.BufferOutputStream()
    if form == "parquet":
        pq.write_table(
            table, out, row_group_size=block_rows, compression="NONE", use_dictionary=False,
            write_statistics=False,
        )  # fmt: skip
    else:
        options = pa.ipc.IpcWriteOptions(compression=form.partition("-")[2] or None)
        with pa.ipc.new_file(out, table.schema, options=options) as writer:
            writer.write_table(table, max_chunksize=block_rows)
    content: bytes = out.getvalue().to_pybytes()
    return content
