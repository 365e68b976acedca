"""Explain how a worker process ended, and make the errors for the log and for waiting tasks.

A task gets a second worker: the first may have been killed for reasons unrelated to the task, or
earlier tasks may have used up its memory. If both end, one error names shard and block, and row and
column if they are known.
"""

from __future__ import annotations

import enum
import errno
import signal
from collections.abc import Sequence
from typing import Self

from msgspec import Struct
from msgspec.structs import replace

from dataplane.base.units import raise_to, show_bytes, ways_to_set
from dataplane.model.config import NodeConfig
from dataplane.model.errors import (
    BudgetTooSmall,
    CorruptShard,
    DataplaneError,
    DataStallError,
    FunctionError,
)

WORDS_BYTES_MAX = 4096
"""The bytes at the end of a process's stderr that are kept, to report how the process ended."""
NOT_STARTED = "no process can be started: "
"""The fork server writes this text to stderr, followed by the reason."""
_AT_A_LIMIT = tuple(f"[Errno {number}]" for number in (errno.EAGAIN, errno.ENOMEM))
# Messages of C++ and Python when memory runs out and no error can be returned.
_MEMORY_WORDS = ("bad_alloc", "MemoryError", "Cannot allocate memory")
_WORDS_MAX = 200
_UNDAMAGED = "If the shard is not damaged, "
_SMALLER_BATCH = "make the batch smaller"
_LARGE_FUNCTION = "If the function needs that much, "
_STUCK = (
    "Either a library loops over damaged bytes or a disk does not answer; if decoding a block can "
    "take this long, raise stall_timeout_s"
)
_DAMAGED = (
    "The bytes are damaged in a way that crashes a library: rewrite the shard, or leave it out"
)
_SLOW_FUNCTION = (
    "If the function does not hang, but takes this long for a block or a batch, raise "
    "stall_timeout_s, or make them smaller (row groups, batch_size)"
)


class Cause(enum.Enum):
    """The reason why a worker ended."""

    CRASHED = "crashed"
    KILLED = "killed"
    MACHINE_SHORT = "the kernel ran out of memory"
    OUT_OF_MEMORY = "it reached its memory limit"
    STUCK = "stuck"
    NOT_STARTED = "it could not be started"


class ProcessEnd(Struct, frozen=True):
    """The end of one worker: the cause, and a phrase to put after its name."""

    cause: Cause
    words: str


class WorkerPlace(Struct, frozen=True):
    """The place at which a worker was working. `block` and `row` count from 0 within the shard;
    `first_row` is the block's first row. `of_view`: rows are counted among those of a view. With a
    `step`, the worker was working at the batch of that step, which has rows of several blocks.
    """

    shard: str
    block: int | None = None
    row: int | None = None
    column: str | None = None
    first_row: int = 0
    of_view: bool = False
    step: int | None = None

    def __str__(self) -> str:
        if self.step is not None:
            return f"the batch of step {self.step}"
        parts = [self.shard]
        parts += [f"block {self.block}"] if self.block is not None else []
        named = " of those in the view" if self.of_view else ""
        parts += [f"row {self.row}{named}"] if self.row is not None else []
        parts += [f"column {self.column!r}"] if self.column is not None else []
        return ", ".join(parts)

    def at_row(self, row: int | None, column: str | None) -> WorkerPlace:
        """Return the place of a row of the block, and of a column of that row."""
        return replace(self, row=None if row is None else self.first_row + row, column=column)

    def at_step(self, step: int) -> WorkerPlace:
        """Return the place of the batch of a step of the epoch, which has rows of this block."""
        return replace(self, step=step)

    @property
    def nouns(self) -> dict[str, str | int | None]:
        """The nouns for errors."""
        if self.step is not None:
            return {"step": self.step}
        return {"shard": self.shard, "block": self.block, "row": self.row, "column": self.column}


def end_of(
    status: int, last_words: str, *, is_machine_short: bool = False, has_started: bool = True
) -> ProcessEnd:
    """Explain the end of a worker by its exit status and the last lines of stderr.
    `is_machine_short`: since the worker was started, the kernel has killed processes because memory
    ran out. `has_started`: the fork server has reported its process id.
    """
    if not has_started and status > 0:
        why = last_words.rpartition(NOT_STARTED)[2].strip()
        return ProcessEnd(Cause.NOT_STARTED, f"could not be started: {why[:_WORDS_MAX]}")
    if status == -signal.SIGKILL:
        if is_machine_short:
            return ProcessEnd(
                Cause.MACHINE_SHORT, "was killed by the kernel, which was out of memory"
            )
        return ProcessEnd(Cause.KILLED, "was killed by SIGKILL")
    words = f"was ended by {_name_of(-status)}" if status < 0 else f"ended with status {status}"
    said = [line.strip() for line in last_words.splitlines()]
    short = next((line for line in said if any(each in line for each in _MEMORY_WORDS)), None)
    if short is None:
        return ProcessEnd(Cause.CRASHED, words)
    return ProcessEnd(Cause.OUT_OF_MEMORY, f"{words} ({short[:_WORDS_MAX]})")


def _name_of(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def blame(
    doing: str,
    place: WorkerPlace,
    ends: Sequence[ProcessEnd],
    limit_bytes: int,
    function: str = "",
) -> DataplaneError:
    """Return the error for a task at which these workers ended. `doing` is a phrase about the
    place; `limit_bytes` is the memory limit of each worker; `function` the user's function that the
    task calls.
    """
    if function:
        doing = f"{doing} and calling {function!r}"
    last = ends[-1]
    who = "a worker process ended" if len(ends) == 1 else f"{len(ends)} worker processes ended"
    ended = f"{place}: {who} while {doing}; the last one {last.words}."
    match last.cause:
        case Cause.OUT_OF_MEMORY:
            return BudgetTooSmall(
                f"{place}: {doing} takes more memory than the {show_bytes(limit_bytes)} that a "
                f"worker process may have. {_LARGE_FUNCTION if function else _UNDAMAGED}"
                f"{raise_to('worker_memory_bytes', 2 * limit_bytes)}, or "
                f"{'write smaller blocks (row groups)' if place.step is None else _SMALLER_BATCH}",
                budget=limit_bytes,
                **place.nouns,
            )
        case Cause.MACHINE_SHORT:
            return BudgetTooSmall(
                f"{ended} Give this machine or container more memory, or let the node use less: "
                "lower worker_count, worker_memory_bytes or block_arena_bytes "
                f"({ways_to_set('worker_count', 'N')}; the others likewise; `dataplane config "
                "show` prints their values)",
                **place.nouns,
            )
        case Cause.NOT_STARTED:
            return nobody_alive(last)
        case Cause.STUCK:
            return DataStallError(
                f"{place}: a worker process was killed, because {doing} {last.words}. "
                f"{_SLOW_FUNCTION if function else _STUCK}",
                stage=doing,
                **place.nouns,
            )
        case Cause.KILLED:
            return DataplaneError(
                f"{ended} The kernel does that when memory runs out (see `dmesg`); otherwise a "
                "user or another process did",
                **place.nouns,
            )
        case Cause.CRASHED if function:
            return FunctionError(
                f"{ended} The function, or a library that it calls, ends the process: call it on "
                "these rows in a process of its own",
                function=function,
                **place.nouns,
            )
        case Cause.CRASHED:
            return CorruptShard(f"{ended} {_DAMAGED}", **place.nouns)


def nobody_alive(end: ProcessEnd) -> DataplaneError:
    """Return the error for all waiting jobs if no worker can be started."""
    if end.cause is Cause.NOT_STARTED:
        return not_started(end.words.partition(": ")[2])
    return DataplaneError(
        f"no worker process stays alive: the last one {end.words}; look at the node's output for "
        "the reason"
    )


def not_started(why: str) -> DataplaneError:
    """Return the error if the machine cannot start a process for a task, whatever the
    task's data.
    """
    if not why.startswith(_AT_A_LIMIT):
        return DataplaneError(
            f"a process of the node cannot be started: {why}. Look at the node's output, and "
            "whether its Python and packages are whole"
        )
    return DataplaneError(
        f"a process of the node cannot be started: {why}. This machine or container has reached "
        "its limit of processes and threads, or has no memory for another one; the data is not to "
        "blame. Raise the limit (pids.max of the cgroup: `docker run --pids-limit`, podPidsLimit, "
        "TasksMax=; or `ulimit -u`), end other processes, or let the node start fewer: lower "
        f"worker_count ({ways_to_set('worker_count', 'N')})"
    )


# -- memory limits ---------------------------------------------------------------------------------
#
# These are limits of processes that parse untrusted bytes.

_MIB = 1 << 20
# Allow this many times a block's decoded size: decoding holds the columns as the library made them,
# their canonical form, and one column more.
_DECODING_TIMES = 3


class WorkerBytes(Struct, frozen=True):
    """The private memory that a worker may take: `base`, plus the need of a dataset's largest
    block, up to `most` in total.
    """

    base: int
    most: int

    @classmethod
    def of(cls, config: NodeConfig) -> Self:
        """Return the limits of a node's configuration."""
        return cls(config.worker_memory_bytes, config.worker_memory_bytes_max)

    def for_blocks_of(self, decoded_bytes: int) -> int:
        """Return enough memory to decode a block of this size."""
        wanted = -(-(self.base + _DECODING_TIMES * decoded_bytes) // _MIB) * _MIB
        return max(self.base, min(wanted, self.most))
