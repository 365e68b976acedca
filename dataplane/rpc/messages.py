"""The messages between a trainer and its node, over one Unix SOCK_SEQPACKET socket.

The trainer sends requests; the node answers with the request's id. A trainer requests the next slab
before it has finished the current one, so the answer usually waits in the socket.
"""

from __future__ import annotations

from typing import NamedTuple

from msgspec import field

from dataplane.model.changes import ReplacedRow, TakenOut
from dataplane.model.config import JobSpec
from dataplane.model.ledger import LedgerEntry, LedgerMark
from dataplane.model.records import (
    ColumnSpec,
    DatasetIdentity,
    Exhausted,
    MixHistory,
    MixUnit,
    Region,
    Topology,
    Unsigned,
    View,
)
from dataplane.rpc.codec import Envelope, Failure, Message


class Hello(Message, frozen=True):
    """A trainer's first message."""

    version: str
    protocol: Unsigned
    pid: Unsigned


class Welcome(Message, frozen=True):
    """The node's first message."""

    version: str
    protocol: Unsigned
    node_id: str
    awaited: str = ""  # the process that the node waits for before it opens jobs; "" if none


class Working(Message, frozen=True):
    """The progress of a request whose answer comes later. The process that waits for the answer
    extends its deadline.
    """

    what: str  # the work in progress, for people: "counting packs"
    done: Unsigned = 0
    total: Unsigned = 0  # the whole work, in `unit`; 0: unknown
    unit: str = "blocks"
    left_s: float = 0.0  # how long the rest of the work may take; 0: unknown


class DatasetSource(Message, frozen=True):
    """A dataset as the user named it."""

    urls: tuple[str, ...]  # may contain globs and braces, or be prefixes
    format: str = ""  # "": derived from the file names
    listed: Unsigned = 0  # the epoch at whose begin the shards are listed


class SourceAsked(Message, frozen=True):
    """One source of a mixture as the user described it: either with a weight, or with the number of
    passes that an epoch makes over the source. A number of 0 was not given.
    """

    name: str
    source: DatasetSource
    weight: float = 0.0
    passes: float = 0.0  # passes over the source in one epoch; 0: `weight` is given instead
    # 0: no limit if exhausted sources are read again (CYCLE), otherwise `passes` rounded up, or 1.
    passes_max: Unsigned = 0
    mean_length: float = 0.0  # mean length of the samples, in tokens; 0: from the index
    view: View = field(default_factory=View)


class ScheduledWeights(Message, frozen=True):
    """The weights of all sources from this step of the job on."""

    step: Unsigned
    weights: tuple[float, ...]  # one per source, in the mixture's `unit`


class MixtureAsked(Message, frozen=True):
    """A mixture as the user described it."""

    sources: tuple[SourceAsked, ...]
    unit: MixUnit = MixUnit.SAMPLES
    exhausted: Exhausted = Exhausted.STOP
    length: Unsigned = 0  # length of an epoch, in `unit`; 0: until sources are exhausted
    # A source of n samples has the share n^(1/temperature); 0: its `weight` or `passes` count.
    temperature: float = 0.0
    source_column: str = ""
    schedule: tuple[ScheduledWeights, ...] = ()  # in rising order of steps


class OpenJob(Message, frozen=True):
    """A rank requests that its node open a job. `spec` has the options as the user gave them: the
    node fills in the dataset and other defaults (`spec_of`), and derives lanes and a window of 0
    from the manifest. `epoch` is the epoch in which a run with former stages continues: the
    datasets of former stages are needed only for the first epoch of the present stage. With
    `finishes`, the node opens the last former stage instead, unless nothing has changed since.
    """

    job_id: str
    incarnation: str
    member_id: str
    source: DatasetSource
    topology: Topology
    spec: JobSpec
    sharing: str = ""  # jobs with the same name share slabs; "": no sharing
    mixture: MixtureAsked | None = None  # with a mixture, `source` has the urls of all its sources
    entries: tuple[LedgerEntry, ...] = ()  # the changes of the launch, which a node sends to makers
    follows: bool = False  # whether the rank acts on WeightsAsked
    epoch: Unsigned = 0
    finishes: bool = False
    gone: tuple[TakenOut, ...] = ()  # removed by the loader; the answer has full names
    # Later stages of the run's schedule, by their numbers: the node opens their datasets first, so
    # that an error in one ends the run at its start.
    ahead: tuple[tuple[Unsigned, OpenJob], ...] = ()


class Finishing(Message, frozen=True):
    """A former stage that was opened instead of the requested job: the request that opens it, and
    the facts of the requested job, which follows.
    """

    request: OpenJob
    spec: JobSpec
    dataset: DatasetIdentity
    sample_count: Unsigned


class JobOpened(Message, frozen=True):
    """The open job; equal on every rank except for `advice`. Sent with the descriptor of the
    delivery arena.
    """

    spec: JobSpec  # with every default filled in
    digest: str
    dataset: DatasetIdentity
    sample_count: Unsigned
    columns: tuple[ColumnSpec, ...]
    arena_bytes: Unsigned
    held_bytes_max: Unsigned  # bytes the trainer may hold before it must copy batches
    generation: Unsigned
    stall_timeout_s: float
    pixels: str = ""  # image decoding software of this node; "" without transforms
    index_s: float = 0.0  # time in which the node listed and indexed the dataset, in seconds
    plan_s: float = 0.0  # time from the end of indexing until the job was open, in seconds
    advice: tuple[str, ...] = ()  # for the user: how to improve the shuffle and other options
    entries: tuple[LedgerEntry, ...] = ()  # the changes of the launch
    # As in JoinResponse. Both are absent if the node is its own coordinator, because the ledger
    # then ends with the node.
    mark: LedgerMark | None = None
    marks: tuple[LedgerMark, ...] = ()
    finishing: Finishing | None = None
    gone: tuple[TakenOut, ...] = ()


class DescribeColumns(Message, frozen=True):
    """Request the types of a job's columns, from column number `first` on."""

    job_id: str
    first: Unsigned = 0  # the first requested column, in the order of JobOpened.columns


class DescribedColumn(Message, frozen=True):
    """The type of one column."""

    spec: ColumnSpec
    stored_type: str = ""  # Arrow type name in the shards; "" for columns that a node adds
    unit: str = ""  # for times: D, s, ms, us or ns; else ""
    time_zone: str = ""
    length_max: Unsigned = 0  # for lists: the maximum length; 0: no limit
    category_count: Unsigned | None = None  # for codes: the number of distinct values


class ColumnsDescribed(Message, frozen=True):
    """Some of a job's columns, and the number of all its columns."""

    columns: tuple[DescribedColumn, ...]
    column_count: Unsigned  # the number of all columns of the job


class ReadCategories(Message, frozen=True):
    """Request the values of a column's codes, from the code `first` on."""

    job_id: str
    column: str
    first: Unsigned = 0  # the first requested code


class CategoriesRead(Message, frozen=True):
    """Some of a column's distinct values, and the number of all its distinct values."""

    values: bytes  # an Arrow IPC stream of one column, from `first` on
    value_count: Unsigned  # the number of all distinct values


class DescribeEpoch(Message, frozen=True):
    """Request the length of an epoch; for a mixture, with these weights."""

    job_id: str
    epoch: Unsigned
    mix: MixHistory | None


class EpochDescribed(Message, frozen=True):
    """The number of samples of the epoch."""

    sample_count: Unsigned


class ChangeWeights(Message, frozen=True):
    """Request the place from which other weights take effect, after the weights of `mix`: this
    place or a later one. The request changes nothing at the node: from that place on, the trainer
    opens streams with the weights of the answer.
    """

    job_id: str
    epoch: Unsigned
    cursor: Unsigned
    mix: MixHistory
    weights: tuple[float, ...] = ()  # one per source; (): the weights at the opening of the job


class WeightsChanged(Message, frozen=True):
    """All weights of the job, including the new weights, and the place where those take effect."""

    mix: MixHistory
    epoch: Unsigned  # the new weights take effect in this epoch, at `position`
    position: Unsigned


class WeightsAsked(Message, frozen=True):
    """Sent instead of a slab: other weights that people have requested, and that the trainer must
    know before it continues to read.
    """

    entries: tuple[LedgerEntry, ...]


class OpenStream(Message, frozen=True):
    """Open a stream over the steps of this rank's slice that remain at `cursor`."""

    job_id: str
    epoch: Unsigned
    cursor: Unsigned  # samples consumed before this stream starts
    first_step: Unsigned = 0  # step 0 is the first of the steps that remain at `cursor`
    step_stride: Unsigned = 1  # 1, or the number of consumers that share a rank's steps
    mix: MixHistory | None = None  # absent: the weights of the job's spec
    known_entry: Unsigned = 0  # the last ledger entry of other weights that the trainer knows


class StreamOpened(Message, frozen=True):
    """The stream's id and its length in steps."""

    stream_id: Unsigned
    step_count: Unsigned  # steps of this rank from the cursor to the end of the epoch


class Waited(Message, frozen=True):
    """The trainer's waits since its last report, without the wait for the first slab; and, in one
    report only, the time until its first batch.
    """

    waits_us: tuple[Unsigned, ...]  # one per stage of `WAIT_STAGES`
    first_batch_s: tuple[float, ...] = ()  # one per stage of `FIRST_BATCH_STAGES`; (): not reported


class NextSlab(Message, frozen=True):
    """Request the next slab, and report the trainer's progress."""

    stream_id: Unsigned
    cursor: Unsigned = 0  # progress: samples consumed so far by all ranks
    stall_s: float = 0.0  # progress: time waited for data so far
    bound: str = ""  # the stage that limited the last seconds; "": unknown
    waited: Waited | None = None  # progress; absent: nothing to report


class Batch(NamedTuple):
    """One batch of a slab. The steps of a slab's batches are evenly spaced."""

    step: Unsigned
    rows: Unsigned
    valid: Unsigned


class Column(Message, frozen=True):
    """The place of each batch's piece of one column, in bytes from the slab's start. The pieces of
    a FIXED column follow one another without a gap.
    """

    values: tuple[Unsigned, ...] = ()  # one per batch: where the values begin
    # One per batch: where the lengths (PADDED), the offsets (RAGGED, BYTES, STRING) or the shape
    # (ARRAY) begin.
    lengths: tuple[Unsigned, ...] = ()
    # One per batch: the padded length T (PADDED), the number of values (RAGGED, ARRAY) or the
    # number of bytes (BYTES, STRING, OBJECT).
    width: tuple[Unsigned, ...] = ()


class Layout(Message, frozen=True):
    """The places of all columns in a slab."""

    columns: tuple[Column, ...]  # one per column of the job, in the order of JobOpened.columns


class StageTimes(Message, frozen=True):
    """The time that a slab spent in each stage, in microseconds, and the work done for its dataset
    since the previous slab. The stages follow one another until the slab is sent, so a trainer that
    waited for the slab waited during the last stages.
    """

    fetch: Unsigned = 0  # from the slab's plan until its last block was read from storage
    decode: Unsigned = 0  # from then on, until all of the slab's blocks were decoded
    room: Unsigned = 0  # waiting for a free slot in the delivery arena
    queue: Unsigned = 0  # waiting for a worker
    assemble: Unsigned = 0  # gathering rows and making images
    ready: Unsigned = 0  # waiting for the trainer's request
    # The following fields are sums over all slabs of the dataset, since the previous report.
    read_bytes: Unsigned = 0  # read from stores, from neighbours and from the node's own disk
    reading: Unsigned = 0  # time during which a read from storage was in flight
    decoding: Unsigned = 0  # time that workers spent
    disk: Unsigned = 0  # the part of the workers' time spent waiting for local files
    workers: Unsigned = 0  # the number of workers
    disk_bytes: Unsigned = 0  # the part of read_bytes that came from the node's own disk
    neighbour_bytes: Unsigned = 0  # the part of read_bytes that came from neighbours
    memory_bytes: Unsigned = 0  # needed, but not read because it was already in memory


class Slab(Message, frozen=True):
    """Consecutive batches of one stream, in a region of the delivery arena."""

    stream_id: Unsigned
    slab_id: Unsigned
    region: Region  # in the delivery arena
    batches: tuple[Batch, ...]
    layout: bytes  # an encoded Layout; the node passes it on undecoded
    # Copy the batches and release the slab at once: the batch is oversized, or consumers hold too
    # many slabs.
    copy_out: bool = False
    times: StageTimes = StageTimes()
    bytes_used: Unsigned = 0  # only this many bytes of the region, from its start, are used
    replaced: tuple[ReplacedRow, ...] = ()  # of a slab for another node, which counts them


class EndOfStream(Message, frozen=True):
    """The stream has no more steps."""

    stream_id: Unsigned


class Release(Message, frozen=True):
    """The trainer holds no tensor of these slabs any more."""

    job_id: str
    slab_ids: tuple[Unsigned, ...]


class CloseStream(Message, frozen=True):
    """The trainer stopped reading the stream, when all ranks had consumed `cursor` samples."""

    stream_id: Unsigned
    cursor: Unsigned = 0  # progress, as in NextSlab
    waited: Waited | None = None  # progress, as in NextSlab


class CloseJob(Message, frozen=True):
    """The trainer closed its loader, at this position of its last stream, and leaves the job."""

    job_id: str
    epoch: Unsigned = 0  # progress: the epoch of the last stream
    cursor: Unsigned = 0  # progress, as in NextSlab
    holds_slabs: bool = False  # the trainer may read its slabs until Release or the socket's end


Question = DescribeColumns | ReadCategories | DescribeEpoch | ChangeWeights
"""A question about an open job."""

ToNodeBody = Hello | OpenJob | OpenStream | NextSlab | Release | CloseStream | CloseJob | Question
FromNodeBody = (
    Failure
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


class ToNode(Message, frozen=True):
    """The envelope of a trainer's message."""

    request_id: Unsigned  # 0: no answer is needed
    body: ToNodeBody


class FromNode(Envelope, frozen=True):
    """The envelope of a node's answer."""

    request_id: Unsigned  # the id of the answered request
    body: FromNodeBody
