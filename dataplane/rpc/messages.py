"""The messages between a trainer and its node, over one Unix SOCK_SEQPACKET socket.

The trainer sends requests; the node answers with the request's id. A trainer requests the next slab
before it has finished the current one, so the answer usually waits in the socket.
"""

from __future__ import annotations

from typing import NamedTuple

from msgspec import field

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
    """The node's first message. `awaited` names the process that it waits for before it opens
    jobs.
    """

    version: str
    protocol: Unsigned
    node_id: str
    awaited: str = ""  # the process that the node waits for before it opens jobs; "" if none


class Working(Message, frozen=True):
    """Something was done for a request, whose answer comes later: `what`, for people, and how much
    of it is `done`, of a `total` of these units, 0 if unknown. The rest may take `left_s`, 0 if
    unknown. Whoever waits for the answer goes on waiting.
    """

    what: str  # for people: "counting packs"
    done: Unsigned = 0
    total: Unsigned = 0  # how many of `unit` there are; 0: not known
    unit: str = "blocks"
    left_s: float = 0.0  # how long the rest may take; 0: not known


class DatasetSource(Message, frozen=True):
    """A dataset as the user names it."""

    urls: tuple[str, ...]  # globs, braces and prefixes allowed
    format: str = ""  # "": from the file names


class SourceAsked(Message, frozen=True):
    """One source of a mixture as the user names it: with a weight, or with the passes that an epoch
    makes over it. 0 means that a number is not given.
    """

    name: str
    source: DatasetSource
    weight: float = 0.0
    passes: float = 0.0  # of one epoch, instead of a weight; 0: a weight
    passes_max: Unsigned = 0  # 0: one, or no limit where sources are read again
    mean_length: float = 0.0  # of its samples, in tokens; 0: from the index
    view: View = field(default_factory=View)


class ScheduledWeights(Message, frozen=True):
    """The weights of all sources from this step of the job on."""

    step: Unsigned
    weights: tuple[float, ...]  # of each source, in `unit`


class MixtureAsked(Message, frozen=True):
    """A mixture as the user asks for it; `length` is that of an epoch, in `unit`."""

    sources: tuple[SourceAsked, ...]
    unit: MixUnit = MixUnit.SAMPLES
    exhausted: Exhausted = Exhausted.STOP
    length: Unsigned = 0  # of an epoch, in `unit`; 0: until sources are exhausted
    temperature: float = 0.0  # shares n^(1/temperature) of sources with n samples; 0: weights
    source_column: str = ""
    schedule: tuple[ScheduledWeights, ...] = ()  # in rising order of steps


class OpenJob(Message, frozen=True):
    """A rank asks its node to open a job. `spec` has the options as they were given: it names no
    dataset, lanes and a window of 0 follow from the manifest, and the node fills in the rest
    (`spec_of`). With a `mixture`, `source` names the urls of all of its datasets. `entries` are the
    changes of the launch, which a node tells a maker. `follows`: the rank acts on other weights
    that people ask for while it reads. `epoch` is where it continues, if its run has former
    stages: their datasets are needed for the first epoch of its stage alone.
    """

    job_id: str
    incarnation: str
    member_id: str
    source: DatasetSource
    topology: Topology
    spec: JobSpec
    sharing: str = ""  # jobs with the same name share slabs; "": no sharing
    mixture: MixtureAsked | None = None  # absent: one dataset. With it, `source` names all of them
    entries: tuple[LedgerEntry, ...] = ()
    follows: bool = False  # it understands WeightsAsked, and acts on it
    epoch: Unsigned = 0


class JobOpened(Message, frozen=True):
    """The job, equal on every rank but for its advice; sent with the delivery arena's
    descriptor. The node spent `index_s` on the dataset's index and `plan_s` on everything after
    that, both in seconds. `entries` are the changes of the launch. `mark` is the last entry of the
    job's ledger when its generation began, and `marks` are the last ones now.
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
    index_s: float = 0.0  # how long the node listed and indexed the dataset
    plan_s: float = 0.0  # from then on, until the job was open
    advice: tuple[str, ...] = ()  # for the user: what is poor about the shuffle, and what helps
    entries: tuple[LedgerEntry, ...] = ()  # the changes of the launch
    # As in JoinResponse. Of a job whose node is its own coordinator both are absent: its ledger
    # ends with the node.
    mark: LedgerMark | None = None
    marks: tuple[LedgerMark, ...] = ()


class DescribeColumns(Message, frozen=True):
    """Requests the types of a job's columns, from column number `first` on."""

    job_id: str
    first: Unsigned = 0  # the first requested column, in the order of JobOpened.columns


class DescribedColumn(Message, frozen=True):
    """One column: its stored type, the maximum length of its lists (0: no limit), and for codes the
    number of distinct values.
    """

    spec: ColumnSpec
    stored_type: str = ""  # Arrow type name in the shards; "" for columns that a node adds
    unit: str = ""  # for times: D, s, ms, us or ns; else ""
    time_zone: str = ""
    length_max: Unsigned = 0  # for lists; 0: no limit
    category_count: Unsigned | None = None  # for codes: the number of distinct values


class ColumnsDescribed(Message, frozen=True):
    """Some of a job's columns, and how many it has in all."""

    columns: tuple[DescribedColumn, ...]
    column_count: Unsigned  # of the whole job


class ReadCategories(Message, frozen=True):
    """Requests the values of a column's codes, from the code `first` on."""

    job_id: str
    column: str
    first: Unsigned = 0  # the first requested code


class CategoriesRead(Message, frozen=True):
    """Some of a column's values, as an Arrow stream, and how many there are in all."""

    values: bytes  # an Arrow IPC stream of one column, from `first` on
    value_count: Unsigned  # of the whole column


class DescribeEpoch(Message, frozen=True):
    """Requests the length of an epoch, of a mixture with these weights."""

    job_id: str
    epoch: Unsigned
    mix: MixHistory | None


class EpochDescribed(Message, frozen=True):
    """The samples of the epoch."""

    sample_count: Unsigned


class ChangeWeights(Message, frozen=True):
    """Asks from where other weights take effect after those of `mix`: at this place or later.
    Without `weights`, those that the job was opened with. It changes nothing at the node: streams
    are opened with the answer from there on.
    """

    job_id: str
    epoch: Unsigned
    cursor: Unsigned
    mix: MixHistory
    weights: tuple[float, ...] = ()  # of each source; none: those that the job was opened with


class WeightsChanged(Message, frozen=True):
    """All weights of the job, with the new ones, which take effect at this place."""

    mix: MixHistory
    epoch: Unsigned  # where they take effect
    position: Unsigned


class WeightsAsked(Message, frozen=True):
    """In place of a slab: other weights that people have asked for, and that the trainer has to
    know before it reads on.
    """

    entries: tuple[LedgerEntry, ...]


class OpenStream(Message, frozen=True):
    """Opens a stream over the steps of this rank's slice that remain at `cursor`. `known_entry` is
    the last entry of other weights that the trainer knows.
    """

    job_id: str
    epoch: Unsigned
    cursor: Unsigned  # samples consumed before this stream starts
    first_step: Unsigned = 0  # counted among the steps that remain at the cursor
    step_stride: Unsigned = 1  # 1, or the number of consumers that share a rank's steps
    mix: MixHistory | None = None  # absent: the weights of the job's spec
    known_entry: Unsigned = 0  # the last entry of other weights that the trainer knows


class StreamOpened(Message, frozen=True):
    """The stream's name and its length in steps."""

    stream_id: Unsigned
    step_count: Unsigned  # steps of this rank from the cursor to the end of the epoch


class Waited(Message, frozen=True):
    """The trainer's waits since its last report, beyond the first slab, by stage (`WAIT_STAGES`);
    and once the stages of its first batch (`FIRST_BATCH_STAGES`).
    """

    waits_us: tuple[Unsigned, ...]  # of each stage
    first_batch_s: tuple[float, ...] = ()  # (): it was reported before


class NextSlab(Message, frozen=True):
    """Requests the next slab, and reports the trainer's progress."""

    stream_id: Unsigned
    cursor: Unsigned = 0  # progress: samples consumed so far by all ranks
    stall_s: float = 0.0  # progress: time waited for data so far
    bound: str = ""  # the stage that limited the last seconds; "": unknown
    waited: Waited | None = None  # progress; absent: nothing


class Batch(NamedTuple):
    """One batch of a slab. The steps of a slab's batches are evenly spaced."""

    step: Unsigned
    rows: Unsigned
    valid: Unsigned


class Column(Message, frozen=True):
    """Where each batch's piece of one column lies, in bytes from the slab's start. The pieces of a
    FIXED column follow one another without a gap.
    """

    values: tuple[Unsigned, ...] = ()  # one per batch: the values
    # One per batch: the lengths (PADDED), offsets (RAGGED, BYTES, STRING) or the shape (ARRAY)
    lengths: tuple[Unsigned, ...] = ()
    # One per batch: PADDED: T; RAGGED, ARRAY: values; BYTES.., OBJECT: bytes
    width: tuple[Unsigned, ...] = ()


class Layout(Message, frozen=True):
    """Where everything in a slab lies: one entry a column of the job."""

    columns: tuple[Column, ...]  # in the order of JobOpened.columns


class StageTimes(Message, frozen=True):
    """The time that a slab spent in each stage, in microseconds, and the work done for its dataset
    since the slab before. The stages follow one another up to the hand-over, so a trainer that
    waited for the slab waited during the last of them.
    """

    fetch: Unsigned = 0  # from its plan until its last block was read from storage
    decode: Unsigned = 0  # until all of its blocks were decoded
    room: Unsigned = 0  # for a free slot in the delivery arena
    queue: Unsigned = 0  # for a worker
    assemble: Unsigned = 0  # rows gathered and images made
    ready: Unsigned = 0  # for its trainer
    # For the whole dataset, over all slabs, since the last slab that reported it.
    read_bytes: Unsigned = 0  # from wherever: the store, neighbours, the node's own disk
    reading: Unsigned = 0  # time with a read from storage in flight
    decoding: Unsigned = 0  # workers' time
    disk: Unsigned = 0  # part of the workers' time: waiting for local files
    workers: Unsigned = 0  # the number of workers
    disk_bytes: Unsigned = 0  # of read_bytes: from the node's own disk
    neighbour_bytes: Unsigned = 0  # of read_bytes: from neighbours
    memory_bytes: Unsigned = 0  # not read: needed, and found in memory


class Slab(Message, frozen=True):
    """Consecutive batches of one stream, in the first `bytes_used` bytes of a part of the delivery
    arena. `layout` is an encoded Layout.
    """

    stream_id: Unsigned
    slab_id: Unsigned
    region: Region  # in the delivery arena
    batches: tuple[Batch, ...]
    layout: bytes  # an encoded Layout; the node passes it on undecoded
    copy_out: bool = False  # an oversized batch: copy it and release the slab at once
    times: StageTimes = StageTimes()
    bytes_used: Unsigned = 0  # of the region, from its start


class EndOfStream(Message, frozen=True):
    """No step remains."""

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
    """The trainer closed its loader, at this position of its last stream, and leaves the job. If it
    `holds_slabs`, it may read them until it releases them or the socket closes.
    """

    job_id: str
    epoch: Unsigned = 0  # progress: of the last stream
    cursor: Unsigned = 0  # progress, as in NextSlab
    holds_slabs: bool = False  # whether the trainer still holds slabs


Question = DescribeColumns | ReadCategories | DescribeEpoch | ChangeWeights
"""A question about a job that is open."""

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
    """The envelope of a trainer's message; request 0 needs no answer."""

    request_id: Unsigned  # 0: no answer needed
    body: ToNodeBody


class FromNode(Envelope, frozen=True):
    """The envelope of a node's answer."""

    request_id: Unsigned  # the id of the request that it answers
    body: FromNodeBody
