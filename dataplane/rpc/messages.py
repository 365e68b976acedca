"""The messages between a trainer and its node.

Frozen values, used outside this package instead of protobuf classes. Names and fields equal those
of proto/dataplane/rpc/v1/local.proto, whose comments are the specification; a test compares the
two. Repeated fields are tuples, an absent optional is None.
"""

from __future__ import annotations

from typing import NamedTuple

from msgspec import Struct, field

from dataplane.config import JobSpec
from dataplane.errors import DataplaneError
from dataplane.ledger import LedgerEntry, LedgerMark
from dataplane.model import (
    ColumnOptions,
    ColumnSpec,
    DatasetIdentity,
    End,
    Exhausted,
    ImageSpec,
    MixUnit,
    Region,
    Topology,
    View,
)
from dataplane.weights import MixHistory


class Hello(Struct, frozen=True):
    """A trainer's first message."""

    version: str
    protocol: int
    pid: int


class Welcome(Struct, frozen=True):
    """The node's first message. `awaited` names the process that it waits for before it opens
    jobs.
    """

    version: str
    protocol: int
    node_id: str
    awaited: str = ""


class Working(Struct, frozen=True):
    """Something was done for a request, whose answer comes later: `what`, for people, and how much
    of it is `done`, of a `total` of these units, 0 if unknown. The rest may take `left_s`, 0 if
    unknown.
    """

    what: str
    done: int = 0
    total: int = 0
    unit: str = "blocks"
    left_s: float = 0.0


class DatasetSource(Struct, frozen=True):
    """A dataset as the user names it."""

    urls: tuple[str, ...]
    format: str = ""


class SourceAsked(Struct, frozen=True):
    """One source of a mixture as the user names it: with a weight, or with the passes that an epoch
    makes over it. 0 means that a number is not given.
    """

    name: str
    source: DatasetSource
    weight: float = 0.0
    passes: float = 0.0
    passes_max: int = 0
    mean_length: float = 0.0
    view: View = field(default_factory=View)


class ScheduledWeights(Struct, frozen=True):
    """The weights of all sources from this step of the job on."""

    step: int
    weights: tuple[float, ...]


class MixtureAsked(Struct, frozen=True):
    """A mixture as the user asks for it; `length` is that of an epoch, in `unit`."""

    sources: tuple[SourceAsked, ...]
    unit: MixUnit = MixUnit.SAMPLES
    exhausted: Exhausted = Exhausted.STOP
    length: int = 0
    temperature: float = 0.0
    source_column: str = ""
    schedule: tuple[ScheduledWeights, ...] = ()


class OpenJob(Struct, frozen=True):
    """A rank asks its node to open a job. With a `mixture`, `source` names the urls of all of its
    datasets. `entries` are the changes of the launch, which a node tells a maker. `follows`: the
    rank acts on other weights that people ask for while it reads.
    """

    job_id: str
    incarnation: str
    member_id: str
    source: DatasetSource
    topology: Topology
    seed: int = 0
    shuffle: bool = False
    lanes: int | None = None
    window: int | None = None
    global_batch: int = 1
    end: End = End.RAGGED
    transforms: tuple[ImageSpec, ...] = ()
    sharing: str = ""
    column_options: ColumnOptions = field(default_factory=ColumnOptions)
    view: View = field(default_factory=View)
    mixture: MixtureAsked | None = None
    entries: tuple[LedgerEntry, ...] = ()
    follows: bool = False


class JobOpened(Struct, frozen=True):
    """The job, equal on every rank but for its advice; sent with the delivery arena's
    descriptor. The node spent `index_s` on the dataset's index and `plan_s` on everything after
    that, both in seconds. `entries` are the changes of the launch. `mark` is the last entry of the
    job's ledger when its generation began, and `marks` are the last ones now.
    """

    spec: JobSpec
    digest: str
    dataset: DatasetIdentity
    sample_count: int
    columns: tuple[ColumnSpec, ...]
    arena_bytes: int
    held_bytes_max: int
    generation: int
    stall_timeout_s: float
    pixels: str = ""
    index_s: float = 0.0
    plan_s: float = 0.0
    advice: tuple[str, ...] = ()
    entries: tuple[LedgerEntry, ...] = ()
    mark: LedgerMark | None = None
    marks: tuple[LedgerMark, ...] = ()


class DescribeColumns(Struct, frozen=True):
    """Requests the types of a job's columns, from column number `first` on."""

    job_id: str
    first: int = 0


class DescribedColumn(Struct, frozen=True):
    """One column: its stored type, the maximum length of its lists (0: no limit), and for codes the
    number of distinct values.
    """

    spec: ColumnSpec
    stored_type: str = ""
    unit: str = ""
    time_zone: str = ""
    length_max: int = 0
    category_count: int | None = None


class ColumnsDescribed(Struct, frozen=True):
    """Some of a job's columns, and how many it has in all."""

    columns: tuple[DescribedColumn, ...]
    column_count: int


class ReadCategories(Struct, frozen=True):
    """Requests the values of a column's codes, from the code `first` on."""

    job_id: str
    column: str
    first: int = 0


class CategoriesRead(Struct, frozen=True):
    """Some of a column's values, as an Arrow stream, and how many there are in all."""

    values: bytes
    value_count: int


class DescribeEpoch(Struct, frozen=True):
    """Requests the length of an epoch of a mixture with these weights."""

    job_id: str
    epoch: int
    mix: MixHistory


class EpochDescribed(Struct, frozen=True):
    """The samples of the epoch."""

    sample_count: int


class ChangeWeights(Struct, frozen=True):
    """Asks from where other weights take effect after those of `mix`: at this place or later.
    Without `weights`, those that the job was opened with.
    """

    job_id: str
    epoch: int
    cursor: int
    mix: MixHistory
    weights: tuple[float, ...] = ()


class WeightsChanged(Struct, frozen=True):
    """All weights of the job, with the new ones, which take effect at this place."""

    mix: MixHistory
    epoch: int
    position: int


class WeightsAsked(Struct, frozen=True):
    """In place of a slab: other weights that people have asked for, and that the trainer has to
    know before it reads on.
    """

    entries: tuple[LedgerEntry, ...]


class OpenStream(Struct, frozen=True):
    """Opens a stream over the steps of this rank's slice that remain at `cursor`. `known_entry` is
    the last entry of other weights that the trainer knows.
    """

    job_id: str
    epoch: int
    cursor: int
    first_step: int = 0
    step_stride: int = 1
    mix: MixHistory | None = None
    known_entry: int = 0


class StreamOpened(Struct, frozen=True):
    """The stream's name and its length in steps."""

    stream_id: int
    step_count: int


class NextSlab(Struct, frozen=True):
    """Requests the next slab, and reports the trainer's progress."""

    stream_id: int
    cursor: int = 0
    stall_s: float = 0.0
    bound: str = ""


class Batch(NamedTuple):
    """One batch of a slab. The steps of a slab's batches are evenly spaced."""

    step: int
    rows: int
    valid: int


class Column(Struct, frozen=True):
    """Where each batch's piece of one column lies, in bytes from the slab's start."""

    values: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()
    width: tuple[int, ...] = ()


class Layout(Struct, frozen=True):
    """Where everything in a slab lies: one entry a column of the job."""

    columns: tuple[Column, ...]


class StageTimes(Struct, frozen=True):
    """The time that a slab spent in each stage, in microseconds, and the work done for its dataset
    since the slab before.
    """

    fetch: int = 0
    decode: int = 0
    room: int = 0
    queue: int = 0
    assemble: int = 0
    ready: int = 0
    read_bytes: int = 0
    reading: int = 0
    decoding: int = 0
    disk: int = 0
    workers: int = 0
    disk_bytes: int = 0
    neighbour_bytes: int = 0
    memory_bytes: int = 0


class Slab(Struct, frozen=True):
    """Consecutive batches of one stream, in the first `bytes_used` bytes of a part of the delivery
    arena. `layout` is an encoded Layout.
    """

    stream_id: int
    slab_id: int
    region: Region
    batches: tuple[Batch, ...]
    layout: bytes
    copy_out: bool = False
    times: StageTimes = StageTimes()
    bytes_used: int = 0


class EndOfStream(Struct, frozen=True):
    """No step remains."""

    stream_id: int


class Release(Struct, frozen=True):
    """The trainer holds no tensor of these slabs any more."""

    job_id: str
    slab_ids: tuple[int, ...]


class CloseStream(Struct, frozen=True):
    """The trainer stopped reading the stream, when all ranks had consumed `cursor` samples."""

    stream_id: int
    cursor: int = 0


class CloseJob(Struct, frozen=True):
    """The trainer closed its loader, at this position of its last stream, and leaves the job. If it
    `holds_slabs`, it may read them until it releases them or the socket closes.
    """

    job_id: str
    epoch: int = 0
    cursor: int = 0
    holds_slabs: bool = False


Question = DescribeColumns | ReadCategories | DescribeEpoch | ChangeWeights
"""What is asked about a job that is open."""

ToNodeBody = Hello | OpenJob | OpenStream | NextSlab | Release | CloseStream | CloseJob | Question
FromNodeBody = (
    DataplaneError
    | Welcome
    | JobOpened
    | StreamOpened
    | Slab
    | EndOfStream
    | Working
    | ColumnsDescribed
    | CategoriesRead
    | EpochDescribed
    | WeightsChanged
    | WeightsAsked
)


class ToNode(Struct, frozen=True):
    """The envelope of a trainer's message; request 0 needs no answer."""

    request_id: int
    body: ToNodeBody


class FromNode(Struct, frozen=True):
    """The envelope of a node's answer."""

    request_id: int
    body: FromNodeBody
