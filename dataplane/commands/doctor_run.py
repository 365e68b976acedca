"""A short run of a job: a loop that takes batches of this dataset on this machine. Finds what
limits the run, and which settings would help.

The loop is a trainer without a model: it maps the slabs and takes them batch by batch. Making
tensors as well would take about 10 us more per batch.
"""

from __future__ import annotations

import ast
import inspect
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dataplane.base.units import meant
from dataplane.client.session import Session
from dataplane.client.statistics import Bound, FirstBatch, Stage, Statistics
from dataplane.client.stream import SlabStream
from dataplane.commands import output
from dataplane.commands.doctor_checks import MORE, Probe
from dataplane.model.config import NodeConfig
from dataplane.model.errors import ConfigError
from dataplane.transforms.stacks import Stack
from dataplane.transforms.steps import registry
from dataplane.transforms.steps.registry import Transform

WARM_SHARE = 0.3
"""The share of the run that is ignored at its start, while buffers fill and slabs are small."""

_SLABS_SEEN_MIN = 3
_LONGER = 8
"""How many slabs must be seen in each part of the run, and how many times longer than requested the
run may take for that."""

Progress = Callable[[float, Statistics], None]
"""Called periodically with the share of the run that is done, and the statistics so far."""

_TOLD_EVERY_S = 0.1


@dataclass(frozen=True, slots=True)
class TrialLength:
    """When to stop a run: at the first of these limits at which enough slabs were seen."""

    seconds: float
    steps: int | None


@dataclass(frozen=True, slots=True)
class Trial:
    """The results of a run. `found` does not cover the time before buffers were warm."""

    found: Statistics
    first_batch_s: float
    steps: int
    epochs: int
    is_short: bool
    """Whether there were too few batches to leave out the first ones."""


class _Loop:
    """A trainer's loop without a model."""

    def __init__(
        self, session: Session, step_s: float, length: TrialLength, progress: Progress
    ) -> None:
        self._session, self._step_s = session, step_s
        self._length, self._progress = length, progress
        self._began = self._told = time.monotonic()
        self._steps = 0
        self._warm: Statistics | None = None
        self._pause = threading.Event()

    def run(self) -> Trial:
        """Run epoch after epoch, until a limit is reached."""
        epoch, first_batch_s = 0, 0.0
        while not self._is_done():
            stream = SlabStream(self._session, epoch, 0)
            try:
                step = 0
                while not self._is_done() and (slab := stream.batches_from(step)):
                    first_batch_s = first_batch_s or time.monotonic() - self._began
                    count = sum(len(batches.batches) for batches in slab)
                    step += count
                    self._consume(count)
                    del slab  # so that the next request can reuse its memory
            finally:
                stream.close()
            epoch += step > 0
            if not step:
                break
        total = self._session.statistics()
        warm = self._warm or Statistics()
        is_short = total.samples == warm.samples or not self._warm
        statistics = total if is_short else total.since(warm)
        return Trial(statistics, first_batch_s, self._steps, epoch, is_short)

    def _consume(self, count: int) -> None:
        """Take this many batches of a slab, with one step each."""
        for _ in range(count):
            if self._step_s:
                self._pause.wait(self._step_s)
            self._steps += 1
            if self._is_done():
                break
        done = self._share_done()
        if self._warm is None and done >= WARM_SHARE:
            statistics = self._session.statistics()
            self._warm = statistics if statistics.slabs >= _SLABS_SEEN_MIN else None
        now = time.monotonic()
        if now - self._told >= _TOLD_EVERY_S:
            self._told = now
            self._progress(done, self._session.statistics())

    def _share_done(self) -> float:
        by_steps = self._steps / self._length.steps if self._length.steps else 0.0
        return min(max(self._by_time(), by_steps), 1.0)

    def _by_time(self) -> float:
        return (time.monotonic() - self._began) / self._length.seconds

    def _is_done(self) -> bool:
        if self._share_done() < 1.0:
            return False
        seen = self._session.statistics().slabs - (self._warm.slabs if self._warm else 0)
        return (self._warm is not None and seen >= _SLABS_SEEN_MIN) or self._by_time() >= _LONGER


def run_trial(session: Session, step_s: float, length: TrialLength, progress: Progress) -> Trial:
    """Run the session's job for a while. The time to open the job does not count.

    Raises:  DataplaneError: an error that the node reports.
    """
    session.mount()
    return _Loop(session, step_s, length, progress).run()


# -- advice ------------------------------------------------------------------------------------
#
# Explain a bound, and which settings would help. Pure.

_NEAR = 0.7
_MORE_MIN = 1.3
_LATENCY_MIN_S = 0.005
_SLOW_BYTES_PER_S = 1e8
# If an epoch has fewer slabs than this, larger slabs would change nothing.
_SLABS_MIN = 4
_MEANINGS = {
    Stage.STORAGE: "reading from storage",
    Stage.DECODE: "decoding blocks",
    Stage.ASSEMBLE: "assembling batches",
    Stage.WORKERS: "workers that are busy with other jobs",
    Stage.ROOM: "delivery memory: no slot was free for the next batches",
    Stage.NODE: "the node itself: planning and messages",
    Stage.CONSUMER: "the trainer",
}


@dataclass(frozen=True, slots=True)
class TrialSetup:
    """The facts about a run on which advice depends. `dataset_bytes` is the decoded size.
    `can_skip_columns` means that the format allows unused columns not to be read, as Parquet does.
    """

    config: NodeConfig
    cpu_count: int
    probe: Probe
    open_window_bytes: int
    dataset_bytes: int
    block_count: int
    has_images: bool
    has_all_columns: bool
    can_skip_columns: bool
    is_shuffled: bool
    is_compressed: bool


def verdict(bound: Bound, statistics: Statistics) -> str:
    """Explain the bound in a few sentences."""
    what = f"This run is bound by {_MEANINGS[bound.stage]}."
    if bound.stage is Stage.CONSUMER:
        what += f" It waits for {bound.waited_share:.0%} of its time."
    else:
        what += f" The trainer waits for {bound.waited_share:.0%} of its time."
        step_ms = (statistics.elapsed_s - statistics.consumed_s) / statistics.batches * 1e3
        digits = 1 if step_ms >= 1 else 3
        what += f" If steps took {step_ms:,.{digits}f} ms longer, it would not wait at all."
    without = bound.samples_per_s_without
    if without is None:
        return what
    times = without / bound.samples_per_s
    if bound.stage is Stage.CONSUMER:
        gain = "so a faster trainer would get batches at" if times > 1 else "and cannot be faster"
        return f"{what} The loader alone could deliver {_rate(without)}, {gain} {_times(times)}."
    return f"{what} Without this limit it would run at about {_rate(without)}: {_times(times)}."


def _rate(samples_per_s: float) -> str:
    return f"{samples_per_s:,.0f} samples/s"


def _times(factor: float) -> str:
    return f"{factor:.1f} times the speed"


def advice(bound: Bound, statistics: Statistics, at: TrialSetup) -> list[str]:
    """List the settings to change, the most promising first."""
    suggestions = {
        Stage.STORAGE: _storage,
        Stage.DECODE: _decode,
        Stage.ASSEMBLE: _assemble,
        Stage.WORKERS: _more_workers,
        Stage.ROOM: _room,
        Stage.NODE: _node,
        Stage.CONSUMER: lambda *_: [
            "nothing: the loader keeps up, and the time is spent in the trainer's own steps"
        ],
    }[bound.stage](statistics, at)
    if bound.stage is not Stage.CONSUMER and at.dataset_bytes < at.config.slab_bytes:
        size = output.approximate_bytes(at.dataset_bytes)
        suggestions.append(
            f"run over more data to learn more: an epoch is {size}, less than one slab, so most "
            f"of the time is spent on starting the next"
        )
    if statistics.copied_slabs > statistics.slabs / 10:
        suggestions.append(
            f"{statistics.copied_slabs} of {statistics.slabs} slabs were copied, since the "
            f"trainer held too many batches: release them sooner, or raise delivery_bytes_per_rank"
        )
    return suggestions


def _more_workers(statistics: Statistics, at: TrialSetup) -> list[str]:
    count = statistics.worker_count
    if at.block_count <= count and at.dataset_bytes <= count * at.config.slab_bytes:
        return []  # the present workers already lack work
    if count < at.cpu_count:
        return [
            f"worker_count {at.cpu_count}: there are that many processors, but only {count} workers"
        ]
    return [f"more processors: all {at.cpu_count} already have a worker"]


def _windows(at: TrialSetup) -> list[str]:
    if not at.is_shuffled or at.open_window_bytes <= at.config.block_arena_bytes:
        return []
    need = output.approximate_bytes(at.open_window_bytes)
    has = output.approximate_bytes(at.config.block_arena_bytes)
    more = f"block_arena_bytes {need}: the open windows of an epoch need that much, and with {has} "
    return [more + "blocks are loaded more than once; or use fewer lanes, or a smaller window"]


def _storage(statistics: Statistics, at: TrialSetup) -> list[str]:
    suggestions = _windows(at)
    if statistics.disk_wait_s > statistics.reading_s:
        slow = "local files are read from disk: use a faster disk, more memory, or "
        return [*suggestions, slow + "smaller shards (compressed ones)"]
    reached, probe = statistics.read_bytes / statistics.elapsed_s, at.probe
    some, more = f"{probe.bytes_per_s / 1e6:,.1f}", f"{probe.bytes_per_s_of_more / 1e6:,.1f}"
    has_all = at.dataset_bytes <= at.config.block_arena_bytes
    if (
        probe.bytes_per_s_of_more > _MORE_MIN * probe.bytes_per_s
        and at.block_count > at.config.fetch_count
    ):
        reads = MORE * at.config.fetch_count
        suggestions.append(
            f"fetch_count {reads}: {reads} reads at once got {more} MB/s, not {some}"
        )
    elif reached < _NEAR * probe.bytes_per_s and has_all:
        suggestions.append("nothing to change: the whole dataset stays in memory once it was read")
    elif reached < _NEAR * probe.bytes_per_s:
        got = f"{reached / 1e6:,.1f} MB/s are read, while the probe got {some}"
        suggestions.append(f"more block_arena_bytes, to read further ahead: {got}")
    else:
        used = f"the store and the network give {some} MB/s, and the run uses all of it"
        suggestions.append(
            f"{used}: smaller shards (compressed ones), or a store closer to this host"
        )
    if probe.latency_s > _LATENCY_MIN_S and probe.bytes_per_s < _SLOW_BYTES_PER_S:
        latency = f"a read waits {probe.latency_s * 1e3:,.0f} ms for its first byte"
        suggestions.append(f"larger blocks (row groups of 1 to 16 MiB): {latency}")
    if at.has_all_columns and at.can_skip_columns:
        suggestions.append("columns=[…]: leave out unused columns, which are then not read")
    elif not at.has_all_columns and not at.can_skip_columns:
        suggestions.append(
            "Parquet or Arrow shards with larger blocks (1 MiB or more): of these shards all "
            "columns are read, even unused ones"
        )
    return suggestions


def _decode(statistics: Statistics, at: TrialSetup) -> list[str]:
    suggestions = [*_windows(at), *_more_workers(statistics, at)]
    if at.has_all_columns:
        suggestions.append("columns=[…]: leave out unused columns, which are then not decoded")
    if at.is_compressed:
        suggestions.append(
            "uncompressed Arrow files (`pyarrow.ipc.new_file`), which need no decoding; or a "
            "faster compression (lz4)"
        )
    return suggestions


def _assemble(statistics: Statistics, at: TrialSetup) -> list[str]:
    suggestions = _more_workers(statistics, at)
    if at.has_images:
        return [*suggestions, "smaller stored images: decoding them takes nearly all of this time"]
    if at.has_all_columns:
        suggestions.append("columns=[…]: leave out unused columns, which are then not copied")
    return suggestions


def _room(_: Statistics, at: TrialSetup) -> list[str]:
    suggestions = ["release batches as soon as they were used"]
    room = at.config.delivery_bytes_per_rank
    if at.dataset_bytes > room:
        suggestions.insert(0, f"delivery_bytes_per_rank {output.approximate_bytes(2 * room)}")
    return suggestions


def _node(_: Statistics, at: TrialSetup) -> list[str]:
    suggestions = ["larger batches"]
    slab = at.config.slab_bytes
    if at.dataset_bytes >= _SLABS_MIN * slab:
        size = output.approximate_bytes(2 * slab)
        suggestions.insert(0, f"slab_bytes {size}: fewer messages per sample")
    return suggestions


# -- start -------------------------------------------------------------------------------------
#
# Explain the time until the first batch, stage by stage. Pure.

_STAGE_MEANINGS = {
    "node": "the node started, or was found",
    "connect": "messages, and memory shared with the node",
    "index": "shards were listed and indexed",
    "plan": "columns and memory were planned",
    "fetch": "the first blocks were read from storage",
    "decode": "they were decoded",
    "room": "for a free slot",
    "queue": "for a free worker",
    "assemble": "the first batches were made",
    "hand over": "their rows were planned, and the slab was handed over",
}
_SHORTER = {
    "node": "run `dataplane serve` on this host and pass service=: that node has started already",
    "connect": "a host that is less busy, since this stage does almost nothing by itself",
    "index": "run `dataplane index URL -o FILE` once, and pass that file in place of the URL",
    "plan": "columns=[…]: choose only columns that the trainer needs, since each one is planned",
    "fetch": "fewer lanes or a smaller window, since a first shuffled batch needs a block of each "
    "open window; or smaller blocks, or a store closer to this host",
    "decode": "smaller blocks (row groups), or shards that need no decoding (uncompressed Arrow)",
    "room": "delivery_bytes_per_rank: a larger one has free slots sooner",
    "queue": "worker_count: more workers, or `dataplane serve`, whose workers have started already",
    "assemble": "more workers, or smaller batches or images: the first slab is one batch",
    "hand over": "fewer jobs on this node: planning one batch and its messages take milliseconds",
}


def first_batch_rows(first: FirstBatch) -> list[tuple[str, str, str]]:
    """Return a table of stage, time and meaning; empty if there was no batch."""
    if not first.total_s:
        return []
    rows = [("first batch", f"{first.total_s * 1e3:,.0f} ms", "from a new loader, divided into")]
    for stage, seconds in _named(first).items():
        rows.append((f"  {stage}", f"{seconds * 1e3:,.0f} ms", _STAGE_MEANINGS[stage]))
    return rows


def first_batch_advice(first: FirstBatch) -> str:
    """Return advice about the longest stage; "" if there was no batch."""
    if not first.total_s:
        return ""
    named = _named(first)
    stage = max(named, key=lambda name: named[name])
    share = named[stage] / first.total_s
    most = f"The first batch waited most for {stage} ({share:.0%})."
    return f"{most} To shorten it: {_SHORTER[stage]}."


def _named(first: FirstBatch) -> dict[str, float]:
    return {name.replace("_", " "): seconds for name, seconds in first.stages().items()}


# -- the job on the command line ---------------------------------------------------------------

_STEPS = ", ".join(sorted(kind.name for kind in registry.STEPS))
_EXAMPLE = '--transform "jpg=RandomResizedCrop(224), RandomHorizontalFlip()"'


def transforms_of(options: Sequence[str]) -> dict[str, Sequence[Transform]]:
    """Parse each COLUMN=STEP(…), STEP(…) into the form of `DataLoader(transforms=…)`.

    Raises:  ConfigError: an option cannot be parsed; the message says what is allowed.
    """
    transforms: dict[str, Sequence[Transform]] = {}
    for option in options:
        column, equals, steps = option.partition("=")
        if not equals or not column.strip():
            raise ConfigError(f"--transform {option!r} names no column: write it as in {_EXAMPLE}")
        transforms[column.strip()] = [_step(call, option) for call in _calls(steps, option)]
    return transforms


def stacks_of(options: Sequence[str]) -> dict[str, Stack]:
    """Parse each NAME=COLUMN,COLUMN or NAME=COLUMN,COLUMN:DTYPE for `DataLoader(stack=…)`.

    Raises:  ConfigError: an option cannot be parsed.
    """
    stacks = {}
    for option in options:
        name, equals, rest = option.partition("=")
        columns, _, dtype = rest.partition(":")
        if not equals or not name or not columns:
            raise ConfigError(
                f"--stack {option!r} is not NAME=A,B,…: write it as in "
                '--stack "x=age,price:float32"'
            )
        stacks[name] = Stack(columns.split(","), dtype)
    return stacks


def _calls(steps: str, option: str) -> Sequence[ast.expr]:
    try:
        return ast.parse(f"[{steps}]", mode="eval").body.elts  # type: ignore[attr-defined, no-any-return]
    except SyntaxError as error:
        raise _unreadable(option, "it is not COLUMN=STEP(…), STEP(…)") from error


def _step(call: ast.expr, option: str) -> Transform:
    known: Mapping[str, Any] = {kind.name: kind.step for kind in registry.STEPS}
    name = call.func if isinstance(call, ast.Call) else call
    if not isinstance(name, ast.Name):
        raise _unreadable(option, f"{ast.unparse(call)} is not a step")
    if name.id not in known:
        raise _unreadable(option, f"there is no step {name.id!r}{meant(name.id, known)}")
    given = call if isinstance(call, ast.Call) else ast.Call(name, [], [])
    try:
        positional = [ast.literal_eval(value) for value in given.args]
        named = {str(word.arg): ast.literal_eval(word.value) for word in given.keywords}
        made: Transform = known[name.id](*positional, **named)
    except (TypeError, ValueError) as error:
        takes = ", ".join(inspect.signature(known[name.id]).parameters)
        raise _unreadable(option, f"{ast.unparse(call)} is not {name.id}({takes})") from error
    return made


def _unreadable(option: str, why: str) -> ConfigError:
    end = "" if why.endswith("?") else "."
    return ConfigError(
        f"--transform {option!r}: {why}{end} Write it as in {_EXAMPLE}; steps are {_STEPS}",
        allowed=_STEPS,
    )
