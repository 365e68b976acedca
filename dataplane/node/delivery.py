"""Deliveries: the arena of one dp_rank of a job, the size of its slabs, the streams that hand them
over, the rows that were replaced in them, and the answers to a trainer that waits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from dataplane.arena.memfd import Arena
from dataplane.arena.slab_layout import ALIGN_BYTES, SHAPE_BYTES, row_bytes, row_index_bytes
from dataplane.arena.slots import AHEAD_SLOTS_MIN, SlotLayout, plan_slots
from dataplane.base.meters import JobMeter
from dataplane.base.trace import Trace
from dataplane.index.viewing import left_out
from dataplane.model.changes import BY_BLOCK, ReplacedRow, changes_of
from dataplane.model.config import JobSpec, NodeConfig
from dataplane.model.errors import (
    BudgetTooSmall,
    ConfigError,
    CorruptShard,
    DataplaneError,
    DataStallError,
)
from dataplane.model.records import End, Kind, PackPolicy
from dataplane.model.redact import redacted, unsigned
from dataplane.node.dataset import Dataset
from dataplane.node.fetch import Trouble
from dataplane.plan.packed_blocks import given_counts
from dataplane.rpc import tasks
from dataplane.rpc.membership import REPLACED_MAX
from dataplane.rpc.messages import FromNodeBody, OpenJob, Slab, Working
from dataplane.rpc.tasks import Collation
from dataplane.scheduler import budgets
from dataplane.scheduler.dataset import Ints
from dataplane.scheduler.events import SlabProgress, Stalled
from dataplane.scheduler.records import BlockPhase, SlabPhase
from dataplane.scheduler.stalls import NO_ROOM, PLAN
from dataplane.scheduler.walk import Plan, SlabSizes, Walk
from dataplane.transforms.made_columns import CollatedColumns
from dataplane.transforms.packing import delivered_columns, packed_columns


class DelegatedJob(Struct, frozen=True):
    """The facts that a node needs to make slabs of a job for another one: how to open the job, the
    digest of its spec and its changes, and the software that makes its batches
    (`opener.software_of`).
    """

    opening: OpenJob
    digest: str
    software: str


class DeliveryArena(Struct, eq=False):
    """The memory of one delivery, and the number of members that use it. The orders of its streams
    cover `datasets`, number their blocks consecutively, and need datasets with equal columns.
    Deliveries of one `group` have equal slabs for equal steps; None if slabs are made only for this
    arena. `job`, if set, lets other nodes make its slabs.
    """

    delivery_id: int
    arena: Arena
    layout: SlotLayout
    datasets: tuple[Dataset, ...]
    group: object = None
    is_declared: bool = False
    users: int = 0
    job: DelegatedJob | None = None
    is_light: bool = False
    """Whether only other nodes can make its slabs."""
    names_sources: bool = False
    """Whether the last column of its batches names the dataset of each sample."""
    collated: CollatedColumns | None = None
    """The columns that a collate function makes; None if there is no function, or if the slab is to
    describe what the function returns."""
    job_id: str = ""
    """The job whose slabs these are; "" if the node itself reads them."""
    is_for_nodes: bool = False
    """Whether the slabs are for other nodes, not for trainers of this one."""
    launch: tuple[str, str] = ("", "")
    """The launch of the job, and the digest of what its slabs contain: replaced rows are counted
    for all deliveries together for which both are equal."""
    bad_limit: int | None = None
    """How many rows may be replaced since they cannot be read; None if no limit applies."""
    meter: JobMeter | None = None
    """Counts of the job, if the slabs are for trainers of this node."""
    readers: int = 0
    """How many of its users have not closed the job; `ReplacedRows` counts."""

    def count_sources(self, plan: Plan) -> None:
        """Count the samples that a slab has of each source of a mixture."""
        if self.meter is not None and len(self.datasets) > 1:
            ends = np.cumsum([dataset.manifest.block_count for dataset in self.datasets])
            sources = ends.searchsorted(plan.blocks, side="right")
            rows = sources[plan.row_index[:, 0]]
            self.meter.sources(np.bincount(rows, minlength=len(ends)).tolist())

    @property
    def column_count(self) -> int:
        """The number of columns of its batches."""
        if self.collated is not None:
            return len(self.collated.specs)
        return self.datasets[0].column_count + self.names_sources

    def collate(self, collation: Collation | None) -> Collation | None:
        """Return the description of the collate function for workers."""
        if collation is None or self.collated is None:
            return collation
        return replace(collation, columns=self.collated.specs, code=self.collated.code)

    def sources_of(self, blocks: Ints) -> tuple[int, ...]:
        """Return the dataset of each block of its orders; () if batches do not name their sources.

        Shapes:  blocks: int64[n].
        """
        if not self.names_sources:
            return ()
        counts = [dataset.manifest.block_count for dataset in self.datasets]
        return tuple(np.cumsum(counts).searchsorted(blocks, side="right").tolist())


def bad_limit(spec: JobSpec, datasets: Sequence[Dataset]) -> int | None:
    """Return how many rows of a job may be replaced since they cannot be read; None if no rows are
    replaced, or if any number may be.
    """
    if not spec.bad_max:
        return None
    return math.ceil(spec.bad_max * sum(map(rows_of, datasets)))


def rows_of(dataset: Dataset) -> int:
    """Return how many rows of a dataset a job reads."""
    return int(given_counts(dataset.manifest).sum())


def delegated_job(
    request: OpenJob, spec: JobSpec, software: str, *, has_workers: bool
) -> DelegatedJob | None:
    """Return the facts that other nodes need to make slabs of this job; None if its urls are
    signed, since signed urls are not passed on.

    Raises:  ConfigError: the urls are signed, and this node has no workers to make slabs itself.
    """
    signed = [url for url in request.source.urls if unsigned(url) != url]
    if signed and not has_workers:
        raise ConfigError(
            f"{redacted(signed[0])} is signed, and this node has no workers (worker_count is 0): a "
            "signed url is sent to no other node. Use a url without a signature and credentials on "
            "the nodes that make slabs, or give this node workers",
            field="url",
        )
    digest = changes_of(request.entries).job_digest(spec.slabs_digest)
    return None if signed else DelegatedJob(request, digest, software)


def layout_of(config: NodeConfig, slot_bytes: int) -> SlotLayout:
    """Plan the arena of one dp rank, with slots of this size: at most as many as all workers can
    fill at the same time, and a few more.
    """
    slots_max = config.worker_count_most + AHEAD_SLOTS_MIN
    return plan_slots(config.delivery_bytes_per_rank, slot_bytes, slots_max)


def delivery_bytes_max(config: NodeConfig) -> int:
    """Return the most memory that one delivery arena may take, however large batches are."""
    return max(config.delivery_bytes_per_rank, 2 * config.block_arena_bytes)


def delivery_memory(config: NodeConfig, layout: SlotLayout, batch_bytes: int) -> Arena:
    """Allocate memory for slabs whose batches take about `batch_bytes`.

    Raises:  BudgetTooSmall: the arena would take too much, or the machine has no memory.
    """
    budget = delivery_bytes_max(config)
    if layout.arena_bytes > budget:
        raise budgets.rank_takes_too_much(layout, batch_bytes, config.slab_bytes, budget)
    arena = Arena.create("dataplane-delivery", layout.arena_bytes)
    try:
        # Allocate other slots when they are used: allocating all takes a quarter of a second.
        arena.reserve(0, layout.slot_bytes)
    except BudgetTooSmall:
        arena.close()
        raise
    return arena


# -- streams --------------------------------------------------------------------------------------
#
# A stream that a node serves to a trainer.


Send = Callable[[int, FromNodeBody], None]


class ServedStream(Struct, eq=False):
    """A stream. `send` answers requests of its consumer, to which all steps before `steps_sent`
    were sent. `on_begun` is called once, after the first slab was sent, and `on_planned`
    once, when the last step is planned; then `is_planned` is set, and `has_failed` if planning
    failed. `maps` names the functions that workers call over the stream's blocks.
    """

    stream_id: int
    walk: Walk
    send: Send
    steps_sent: int = 0
    on_begun: Callable[[ServedStream], None] | None = None
    on_planned: Callable[[], None] | None = None
    is_planned: bool = False
    has_failed: bool = False
    is_closed: bool = False
    maps: str = ""

    def answer(self, request_id: int, body: FromNodeBody) -> None:
        """Answer a request of its consumer."""
        self.send(request_id, body)
        if not isinstance(body, Slab):
            return
        self.steps_sent = body.batches[-1].step + 1
        if self.on_begun is not None:
            call, self.on_begun = self.on_begun, None
            call(self)

    def check_consumed(self, cursor: int) -> None:
        """Check the cursor up to which all ranks have consumed samples, according to the consumer.

        Raises:  ConfigError: the cursor is beyond the last sample that the consumer was sent.
        """
        walk, begin = self.walk, self.walk.stream
        steps = max(begin.first_step, self.steps_sent)
        end = walk.steps.after(steps)
        if cursor > end:
            raise ConfigError(
                f"this trainer says that {cursor} samples of epoch {begin.epoch} are consumed, and"
                f" was sent batches up to sample {end}: a trainer counts what it was given",
                field="cursor",
            )

    def tell_planned(self) -> None:
        """Call `on_planned` once, if its last step is planned."""
        call = self.on_planned
        if self.is_planned and call is not None:
            self.on_planned = None
            if not self.has_failed:
                call()


# -- replaced rows --------------------------------------------------------------------------------
#
# Rows of jobs that are replaced by others, since they cannot be read: each is logged once, and
# reported to the coordinator.


ROWS_MAX, _UNREPORTED_MAX = 1024, 1 << 14
"""The most rows that are logged for each job, since more lines would not help anybody, and that
wait to be reported to the coordinator, which counts those of all nodes."""
AT_ONCE, _LISTED = 64, 20
_TEXT_MAX = 1024
"""The most characters of a url or a reason, so that a heartbeat with them can always be sent."""
_RowName = tuple[str, int]
_Launch = tuple[str, tuple[str, str]]


class _Counted(Struct, eq=False):
    """The counted rows of a launch of a job. `blocks` were replaced as a whole, and each is logged
    once. Errors show the `first` rows, by url and reason. The coordinator has not received the
    `unreported` rows. `of_all_nodes`: how many rows all nodes have replaced.
    """

    names: set[_RowName] = field(default_factory=set)
    blocks: set[tuple[str, str]] = field(default_factory=set)
    first: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    unreported: dict[_RowName, ReplacedRow] = field(default_factory=dict)
    of_all_nodes: int = 0


class ReplacedRows:
    """The replaced rows of one node's jobs. They count until all readers of a launch have closed
    its job; slabs may become ready later. Nothing of a launch counts in the next one.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._launches: dict[_Launch, _Counted] = {}

    def begin(self, delivery: DeliveryArena) -> None:
        """Count rows for one more reader, and note shards that are left out, as their first row."""
        delivery.readers += 1
        for dataset in delivery.datasets:
            for shard, why in left_out(dataset.manifest).items():
                url = redacted(unsigned(dataset.manifest.shards.urls[shard]))[:_TEXT_MAX]
                reason = f"the shard is left out, since it cannot be indexed: {why}"
                self._note(delivery, ReplacedRow(url, shard, 0, 0, reason))

    def count(self, job_id: str) -> int:
        """Return how many replaced rows of a job were counted; counting stops at a limit."""
        launches = (rows for (job, _), rows in self._launches.items() if job == job_id)
        return sum(len(rows.names) for rows in launches)

    def end(
        self, delivery: DeliveryArena, others: Iterable[DeliveryArena]
    ) -> tuple[ReplacedRow, ...]:
        """Note that a reader has closed its job; return rows to report when it leaves. Forget the
        rows if all readers of the launch have, also those of `others`: a row may be repaired
        before the job is opened again.
        """
        rows = self.unreported(delivery, REPLACED_MAX)
        self.reported(delivery, rows)
        delivery.readers -= 1
        launch = delivery.job_id, delivery.launch
        left = (one for one in (delivery, *others) if one.readers)
        if launch not in ((one.job_id, one.launch) for one in left):
            self._launches.pop(launch, None)
        return rows

    def checked(self, delivery: DeliveryArena, result: tasks.ResultBody) -> tasks.ResultBody:
        """Note the replaced rows of a slab. Return its result without them, or the error that ends
        the job if more rows are replaced than the job allows. A slab for another node keeps its
        rows: that node counts them.
        """
        if delivery.is_for_nodes:
            return result
        if isinstance(result, tasks.Assembled) and result.replaced:
            for row in result.replaced if delivery.readers else ():
                url, reason = redacted(unsigned(row.url))[:_TEXT_MAX], row.reason[:_TEXT_MAX]
                self._note(delivery, replace(row, url=url, reason=reason))
            result = replace(result, replaced=())
        return self._excess(delivery) or result

    def _excess(self, delivery: DeliveryArena) -> CorruptShard | None:
        limit, counted = delivery.bad_limit, self._of(delivery)
        count = max(len(counted.names), counted.of_all_nodes)
        if limit is None or count <= limit:
            return None
        first, total = counted.first, sum(map(rows_of, delivery.datasets))
        listed = "; ".join(
            f"{url} {_numbers(rows)}: {reason:.320}" for (url, reason), rows in first.items()
        )
        more = "" if len(counted.names) <= sum(map(len, first.values())) else " …"
        if count > len(counted.names):
            more += "; and rows that other nodes have read (`dataplane ledger show` lists them)"
        return CorruptShard(
            f"{count} rows of this epoch cannot be read, more than the {limit} that bad_max= "
            f"allows: {listed}{more}. Repair or leave out these shards (`dataplane verify` lists "
            f"the damage), or raise bad_max=, to {_share(count, total)} for these rows alone",
            shard=next(iter(first))[0] if first else None,
        )

    def heard(self, delivery: DeliveryArena, count: int) -> None:
        """Note how many rows all nodes have replaced in the launch of this delivery."""
        if count:
            launch = delivery.job_id, delivery.launch
            self._launches.setdefault(launch, _Counted()).of_all_nodes = count

    def unreported(self, delivery: DeliveryArena, most: int) -> tuple[ReplacedRow, ...]:
        """Return rows of a launch that are to be reported next."""
        return tuple(self._of(delivery).unreported.values())[:most]

    def reported(self, delivery: DeliveryArena, rows: Iterable[ReplacedRow]) -> None:
        """Note that these rows were reported to the coordinator."""
        unreported = self._of(delivery).unreported
        for row in rows:
            unreported.pop((row.url, row.row), None)

    def _of(self, delivery: DeliveryArena) -> _Counted:
        return self._launches.get((delivery.job_id, delivery.launch)) or _Counted()

    def _note(self, delivery: DeliveryArena, row: ReplacedRow) -> None:
        counted = self._launches.setdefault((delivery.job_id, delivery.launch), _Counted())
        known, name = counted.names, (row.url, row.row)
        if name in known or len(known) >= max(ROWS_MAX, 1 + (delivery.bad_limit or 0)):
            return
        known.add(name)
        reason = (row.url, row.reason)
        if reason in counted.first or len(counted.first) < _LISTED:
            counted.first.setdefault(reason, []).append(row.row)
        if len(counted.unreported) < _UNREPORTED_MAX:
            counted.unreported[name] = row
        if len(known) > ROWS_MAX:
            return
        block = reason if BY_BLOCK in row.reason else None
        if block in counted.blocks:
            return
        counted.blocks.update([block] if block else [])
        last = "; further rows are not told" if len(known) == ROWS_MAX else ""
        self._trace.failed(
            "block replaced" if block else "row replaced", job=delivery.job_id, shard=row.url,
            row=row.row, instead=row.instead, why=row.reason + last,
        )  # fmt: skip


def _numbers(rows: list[int]) -> str:
    """Name rows: "row 3", "rows 0 to 49", or "5 rows from 3 to 40"."""
    first, last = min(rows), max(rows)
    if first == last:
        return f"row {first}"
    is_run = last - first + 1 == len(rows)
    return f"rows {first} to {last}" if is_run else f"{len(rows)} rows from {first} to {last}"


def _share(count: int, total: int) -> str:
    """Return a share of the total, rounded up, that is enough for this count."""
    return f"{min(1.0, math.ceil(count / max(total, 1) * 1e4) / 1e4):g}"


# -- sizes of slabs -------------------------------------------------------------------------------
#
# Estimate the size of a job's slabs before any of its samples is read.


_BATCHES_MAX = 256
# One packet describes a slab: the most bytes for all batches, and the bytes per batch and column.
_TOLD_BYTES_MAX = 128 << 10
_TOLD_BYTES_A_PIECE = 16
# Room for batches of variable-length rows, which may be larger than the mean suggests.
_SPREAD = 1.25
# Bytes of a row in the column that names the source of a sample.
_SOURCE_BYTES = 4
# Slabs of a collate function are smaller by this factor: one worker makes each of them alone, and
# more slabs keep more workers busy.
_COLLATED_PARTS = 4
# The time that a worker takes for an image, assumed until workers have decoded some.
_IMAGE_S = 0.0005
# Weight of image-like bytes in a stored sample, relative to text or lists.
_BYTES_PARTS = 8


def slab_sizes(
    dataset: Dataset,
    spec: JobSpec,
    dp_size: int,
    slab_bytes: int,
    samples: int = 0,
    collated: CollatedColumns | None = None,
) -> SlabSizes:
    """Estimate slab sizes from the mean size of a sample: as many batches as fit into `slab_bytes`,
    at least one. `samples` is the length of an epoch; 0 for that of the dataset. A collate function
    makes batches of the `collated` columns.
    """
    samples = samples or dataset.manifest.sample_count
    if collated is not None:
        slab_bytes //= _COLLATED_PARTS
    largest = spec.global_batch if spec.end is End.PAD else min(spec.global_batch, samples)
    rows = -(-largest // dp_size)
    column_count = dataset.column_count if collated is None else len(collated.specs)
    padding = ALIGN_BYTES * (column_count + 1)
    exactly, others = _row_bytes(dataset, spec) if collated is None else (0, collated.row_bytes)
    batch_bytes = rows * exactly + int(rows * others * _SPREAD) + padding
    exact = rows * (exactly + others) + padding
    told_bytes = _TOLD_BYTES_A_PIECE * (column_count + 1)
    most = max(min(_BATCHES_MAX, _TOLD_BYTES_MAX // told_bytes), 1)
    batches = max(min(most, slab_bytes // exact), 1)
    index_bytes = row_index_bytes(batches * rows)
    slot_bytes = max(slab_bytes, batch_bytes) + index_bytes
    is_divisible = collated is None and _is_divisible(dataset, spec)
    row_s = _IMAGE_S * len(spec.transforms)
    return SlabSizes(batches, most, slot_bytes, batch_bytes, is_divisible, row_s, column_count)


def _is_divisible(dataset: Dataset, spec: JobSpec) -> bool:
    """Whether workers can write the rows of a slab in parallel, since each knows where its own rows
    go. They cannot if the places of rows depend on a function's result, on Arrow values, or on
    whether another row's image can be decoded. Slabs of texts and lists alone are not divided:
    finding the places of all rows takes about as long as copying them.
    """
    pack, columns = spec.view.pack, dataset.columns.specs
    if pack is not None:
        is_plain = pack.policy is not PackPolicy.PAD
    else:
        is_fixed = all(column.kind is Kind.FIXED for column in columns)
        is_plain = is_fixed or bool(spec.transforms)
        is_plain &= all(column.kind is not Kind.OBJECT for column in columns)
    replaces = any(image.replaces for image in spec.transforms)
    return is_plain and not replaces and not spec.view.collate


def _row_bytes(dataset: Dataset, spec: JobSpec) -> tuple[int, int]:
    """Return the bytes of one sample in a slab: exact for images and packs, approximate
    for others.
    """
    if (pack := spec.view.pack) is not None:
        columns = packed_columns(dataset.columns.specs, pack)
        shapes = SHAPE_BYTES * (pack.policy is PackPolicy.PAD)
        return sum(map(row_bytes, columns)) + shapes + _SOURCE_BYTES * (spec.mixture is not None), 0
    if not spec.transforms:
        return _SOURCE_BYTES * (spec.mixture is not None), dataset.row_bytes
    names = {image.column for image in spec.transforms}
    pixels, others, stored_parts, other_parts = 0, 0, 0, 0
    for column in delivered_columns(dataset.columns.specs, spec):
        size = row_bytes(column)
        if column.name in names:
            pixels += size
            stored_parts += _BYTES_PARTS
        elif column.kind is Kind.FIXED:
            others += size
        else:
            other_parts += _BYTES_PARTS if column.kind is Kind.BYTES else 1
    share = dataset.row_bytes * other_parts // (stored_parts + other_parts)
    return pixels, others + share


# -- trainers that wait ---------------------------------------------------------------------------
#
# Answer a rank that waits for a batch: with the progress of its slab, or why there is none.


_URLS_ASKED_MAX = 64
_RAISE = "or raise stall_timeout_s"
_STORE = f"check that the store answers (`dataplane doctor URL` tries it), {_RAISE}"
_MEMORY = (
    "raise block_arena_bytes, or close other jobs of this node (`dataplane status` shows how full"
    " its memory is)"
)
_WORKERS = "check in the node's log and with `top` what its workers wait for: a disk may not answer"
_TRAINER = "let go of batches that are no longer needed, or raise delivery_bytes_per_rank"
_NODE = "see the node's log"


class Called(Struct, frozen=True):
    """The names of the functions of a job that workers call; "" if there is none."""

    map: str = ""
    collate: str = ""


def working(progress: SlabProgress, called: Called) -> Working:
    """Return the progress of a slab, for the trainer that waits for it."""
    return Working(_words(progress, called)[0], progress.done, progress.total)


def stall_error(
    stalled: Stalled, urls: Sequence[str], called: Called, node_id: str, trouble: Trouble
) -> DataplaneError:
    """Return the store's error, if the next slab lacks blocks that the store does not deliver; else
    a DataStallError that names the stage and the function. `urls` are those of the blocks' shards.
    """
    waited_s, shard = stalled.waited_s, urls[0] if urls else None
    for url in [*dict.fromkeys(urls)][:_URLS_ASKED_MAX]:
        error = trouble(url)
        if error is not None:
            return type(error)(
                f"no batch for {waited_s:.0f} s, since {url} cannot be read: {error} "
                f"(node {node_id}). Repair the store, or raise stall_timeout_s",
                **{**error.nouns, "shard": url, "node": node_id},
            )
    progress = stalled.progress
    words, function, advice = _words(progress, called)
    ready = f", {progress.done} of {progress.total} blocks are ready" if progress.phase else ""
    return DataStallError(
        f"no batch for {waited_s:.0f} s, and no progress: the node is {words}{ready}"
        + (f", the first missing one of {shard}" if shard else "")
        + f" (node {node_id}); {advice}",
        stage=progress.stage,
        shard=shard,
        node=node_id,
        function=function or None,
        done=progress.done,
        total=progress.total,
    )


def _words(progress: SlabProgress, called: Called) -> tuple[str, str, str]:
    """Describe the node's work for this slab, the function that it calls, and advice for the case
    that this work hangs.
    """
    stage = progress.stage
    if stage == SlabPhase.WAITING.value:
        if progress.phase is BlockPhase.FETCHING:
            return "reading blocks", "", _STORE
        if progress.phase is not BlockPhase.DECODING:
            return "waiting for memory for blocks", "", _MEMORY
        if called.map:
            return f"calling map={called.map!r} over blocks", called.map, _WORKERS
        return "decoding blocks", "", _WORKERS
    if stage == SlabPhase.ASSEMBLING.value:
        if called.collate:
            return f"calling collate={called.collate!r}", called.collate, _WORKERS
        return "making the batch", "", _WORKERS
    if stage == NO_ROOM:
        return stage, "", f"{_TRAINER}, {_RAISE}"
    if stage == PLAN:
        return "planning the batch", "", _NODE
    return stage, "", f"`dataplane status` shows the nodes of the job, {_RAISE}"


def undecided(waited_s: float, job: str, coordinator: str, node_id: str) -> DataStallError:
    """Return the error for a rank whose next batches may have changed weights of a mixture."""
    return DataStallError(
        f"no batch for {waited_s:.0f} s: the coordinator at {coordinator} has not said where the"
        f" new weights of `dataplane mix {job}` begin, and the next batches may lie behind it"
        f" (node {node_id}). If it does not answer, restart it; then resume the job",
        stage="coordinator",
        job=job,
        coordinator=coordinator,
        node=node_id,
    )
