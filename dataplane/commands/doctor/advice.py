"""Explains a bound, and which settings would help. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from dataplane.client.bound import Bound, Stage
from dataplane.client.statistics import Statistics
from dataplane.commands import output
from dataplane.commands.doctor.checks import MORE, Probe
from dataplane.config import NodeConfig

_NEAR = 0.7
_MORE_MIN = 1.3
_LATENCY_MIN_S = 0.005
_SLOW_BYTES_PER_S = 1e8
# Fewer slabs than these in an epoch: larger ones would change nothing.
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
    """The facts about a run on which advice depends. `dataset_bytes` is the decoded size;
    `can_skip_columns`: the format can leave unused columns unread, as Parquet can.
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


def verdict(bound: Bound, found: Statistics) -> str:
    """Explain the bound in a few sentences."""
    what = f"This run is bound by {_MEANINGS[bound.stage]}."
    if bound.stage is Stage.CONSUMER:
        what += f" It waits for {bound.waited_share:.0%} of its time."
    else:
        what += f" The trainer waits for {bound.waited_share:.0%} of its time."
        step_ms = (found.elapsed_s - found.consumed_s) / found.batches * 1e3
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


def advice(bound: Bound, found: Statistics, at: TrialSetup) -> list[str]:
    """List the settings to change, the most promising first."""
    told = {
        Stage.STORAGE: _storage,
        Stage.DECODE: _decode,
        Stage.ASSEMBLE: _assemble,
        Stage.WORKERS: _workers,
        Stage.ROOM: _room,
        Stage.NODE: _node,
        Stage.CONSUMER: _consumer,
    }[bound.stage](found, at)
    if bound.stage is not Stage.CONSUMER and at.dataset_bytes < at.config.slab_bytes:
        size = output.approximate_bytes(at.dataset_bytes)
        told.append(
            f"run over more data to learn more: an epoch is {size}, less than one slab, so most "
            f"of the time is spent on starting the next"
        )
    if found.copied_slabs > found.slabs / 10:
        told.append(
            f"{found.copied_slabs} of {found.slabs} slabs were copied, since the trainer held too "
            f"many batches: release them sooner, or raise delivery_bytes_per_rank"
        )
    return told


def _more_workers(found: Statistics, at: TrialSetup) -> list[str]:
    count = found.worker_count
    if at.block_count <= count and at.dataset_bytes <= count * at.config.slab_bytes:
        return []  # there is not enough work for the present workers
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


def _storage(found: Statistics, at: TrialSetup) -> list[str]:
    told = _windows(at)
    if found.disk_wait_s > found.reading_s:
        slow = "local files are read from disk: use a faster disk, more memory, or "
        return [*told, slow + "smaller shards (compressed ones)"]
    reached, probe = found.read_bytes / found.elapsed_s, at.probe
    some, more = f"{probe.bytes_per_s / 1e6:,.1f}", f"{probe.bytes_per_s_of_more / 1e6:,.1f}"
    has_all = at.dataset_bytes <= at.config.block_arena_bytes
    if (
        probe.bytes_per_s_of_more > _MORE_MIN * probe.bytes_per_s
        and at.block_count > at.config.fetch_count
    ):
        reads = MORE * at.config.fetch_count
        told.append(f"fetch_count {reads}: that many reads at once got {more} MB/s, and not {some}")
    elif reached < _NEAR * probe.bytes_per_s and has_all:
        told.append("nothing to change: the whole dataset stays in memory once it was read")
    elif reached < _NEAR * probe.bytes_per_s:
        got = f"{reached / 1e6:,.1f} MB/s are read, while the probe got {some}"
        told.append(f"more block_arena_bytes, to read further ahead: {got}")
    else:
        used = f"the store and the network give {some} MB/s, and the run uses all of it"
        told.append(f"{used}: smaller shards (compressed ones), or a store closer to this host")
    if probe.latency_s > _LATENCY_MIN_S and probe.bytes_per_s < _SLOW_BYTES_PER_S:
        latency = f"a read waits {probe.latency_s * 1e3:,.0f} ms for its first byte"
        told.append(f"larger blocks (row groups of 1 to 16 MiB): {latency}")
    if at.has_all_columns and at.can_skip_columns:
        told.append("columns=[…]: leave out unused columns, which are then not read")
    elif not at.has_all_columns and not at.can_skip_columns:
        told.append(
            "Parquet or Arrow shards with larger blocks (1 MiB or more): of these shards all "
            "columns are read, even unused ones"
        )
    return told


def _decode(found: Statistics, at: TrialSetup) -> list[str]:
    told = [*_windows(at), *_more_workers(found, at)]
    if at.has_all_columns:
        told.append("columns=[…]: leave out unused columns, which are then not decoded")
    if at.is_compressed:
        told.append(
            "uncompressed Arrow files (`pyarrow.ipc.new_file`), which need no decoding; or a "
            "faster compression (lz4)"
        )
    return told


def _assemble(found: Statistics, at: TrialSetup) -> list[str]:
    told = _more_workers(found, at)
    if at.has_images:
        return [*told, "smaller stored images: decoding them takes nearly all of this time"]
    if at.has_all_columns:
        told.append("columns=[…]: leave out unused columns, which are then not copied")
    return told


def _workers(found: Statistics, at: TrialSetup) -> list[str]:
    return _more_workers(found, at)


def _room(_: Statistics, at: TrialSetup) -> list[str]:
    told = ["release batches as soon as they were used"]
    room = at.config.delivery_bytes_per_rank
    if at.dataset_bytes > room:
        told.insert(0, f"delivery_bytes_per_rank {output.approximate_bytes(2 * room)}")
    return told


def _node(_: Statistics, at: TrialSetup) -> list[str]:
    told = ["larger batches"]
    slab = at.config.slab_bytes
    if at.dataset_bytes >= _SLABS_MIN * slab:
        size = output.approximate_bytes(2 * slab)
        told.insert(0, f"slab_bytes {size}: fewer messages per sample")
    return told


def _consumer(_: Statistics, __: TrialSetup) -> list[str]:
    return ["nothing: the loader keeps up, and the time is spent in the trainer's own steps"]
