"""One rank of one job, served by this node: its place, the weights of its mixture, and answers to
its questions about the job.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence

import pyarrow as pa
from msgspec import Struct, field

from dataplane.base.meters import JobMeter, RankMeter
from dataplane.model.changes import Changes, ReplacedRow, changes_of
from dataplane.model.config import JobSpec, MixtureSpec
from dataplane.model.errors import ConfigError, DataplaneError
from dataplane.model.ledger import LedgerEntry, LedgerPosition
from dataplane.model.records import MixHistory, ScheduledShares, ShareChange
from dataplane.node.counts import stream_of
from dataplane.node.dataset import Dataset
from dataplane.node.datasets import check_left, shares_of
from dataplane.node.delivery import DeliveryArena, ServedStream
from dataplane.node.opener import OpenedJob
from dataplane.node.own_reads import Categories
from dataplane.node.places import Following
from dataplane.plan.changes import (
    Changes as PlannedChanges,
)
from dataplane.plan.changes import (
    Place,
    changed,
    check_steps,
    next_boundary,
    scheduled,
    steps_before,
)
from dataplane.plan.counting import SHARES_SUM
from dataplane.plan.mixture import Mixed
from dataplane.plan.orders import is_reduced, mixed_of, sample_count_of, with_mix
from dataplane.rpc import messages
from dataplane.rpc.membership import (
    JoinRequest,
    JoinResponse,
    MemberProgress,
    MixProposal,
)
from dataplane.rpc.messages import (
    CategoriesRead,
    ChangeWeights,
    ColumnsDescribed,
    DescribedColumn,
    DescribeEpoch,
    EpochDescribed,
    Question,
    ReadCategories,
    WeightsChanged,
)
from dataplane.scheduler.walk import SlabSizes
from dataplane.transforms.codes import shown_as
from dataplane.transforms.columns import LeafPart, shown
from dataplane.transforms.leaves import Leaf, value_type
from dataplane.transforms.lists import AS_THEY_ARE
from dataplane.transforms.packing import delivered_columns
from dataplane.worker.stacking import StackedPlan

# -- members ---------------------------------------------------------------------------------------


class ServedMember(Struct, eq=False):
    """One rank of one job, which reads `opened`. If `error` is set, the rank's requests get that
    error. `holder` is the name under which its slabs are held. `joining` is the request for its
    place. The first stream began at `began`; the last stream began at `mix_from`, with the weights
    `mix`. `closed`: the rank reads no more, but may hold slabs until it is `released`. `has_left`:
    its place was given back, because the rank left, or because it `was_lost`. `replaced` are the
    rows that it reports when it leaves.

    `next_epoch` is the stream that is expected to follow the rank's only stream, and is prepared
    while the last slabs of this epoch are consumed. `following` handles changed weights of a
    mixture. `joined` is the coordinator's answer to the join, `opened_at` the time of the join, and
    `gathered` is set once all ranks have joined.

    `handed` counts the samples that were handed over. `rate` is computed from them: `seen` is when
    a beat last saw the count change, and the count; `gain` is how long that took, and the samples.
    """

    request: messages.OpenJob
    opened: OpenedJob
    delivery: DeliveryArena
    sizes: SlabSizes
    generation: int
    holder: int
    joining: JoinRequest
    streams: dict[int, ServedStream] = field(default_factory=dict)
    next_epoch: ServedStream | None = None
    epoch: int = 0
    cursor: int = 0
    began: LedgerPosition | None = None
    mix: MixHistory | None = None
    mix_from: LedgerPosition | None = None
    stall_s: float = 0.0
    bound: str = ""
    rate: float = 0.0
    handed: int = 0
    seen: tuple[float, int] = (0.0, 0)
    gain: tuple[float, int] = (0.0, 0)
    error: DataplaneError | None = None
    closed: bool = False
    released: bool = False
    has_left: bool = False
    was_lost: bool = False
    replaced: tuple[ReplacedRow, ...] = ()
    described: tuple[messages.DescribedColumn, ...] | None = None
    following: Following | None = None
    joined: JoinResponse | None = None
    meter: RankMeter = field(default_factory=lambda: RankMeter(JobMeter()))
    opened_at: float = field(default_factory=time.monotonic)
    gathered: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def host_count(self) -> int:
        """The number of hosts of its launch."""
        place = self.request.topology
        return place.world_size // place.local_world_size

    @property
    def spec(self) -> JobSpec:
        """The spec of its job."""
        return self.opened.spec

    @property
    def entries(self) -> tuple[LedgerEntry, ...]:
        """The ledger entries of the changes that its launch knows."""
        return self.request.entries

    @property
    def changes(self) -> Changes:
        """The changes that people have made to its job, as known to its launch."""
        return changes_of(self.entries)

    @property
    def dataset(self) -> Dataset:
        """The dataset that the rank reads; of a mixture, the first, as all have equal columns."""
        return self.opened.datasets[0]

    @property
    def job_id(self) -> str:
        """The id of its job."""
        return self.request.job_id

    @property
    def pixels(self) -> str:
        """Names the software that decodes images here; "" without images."""
        return self.joining.pixels

    @property
    def member_id(self) -> str:
        """The id of the member."""
        return self.request.member_id

    @property
    def place_reached(self) -> LedgerPosition | None:
        """The place that the rank has reached; None if it has not begun to read."""
        return None if self.began is None else LedgerPosition(self.epoch, self.cursor)

    def reached(self, epoch: int, cursor: int) -> None:
        """Note the samples that all ranks have consumed, as reported by its trainer. Earlier
        positions are ignored.
        """
        self.epoch, self.cursor = max((self.epoch, self.cursor), (epoch, cursor))

    def count_slab(self, slab: messages.Slab) -> None:
        """Count a slab that is handed over."""
        times, count = slab.times, sum(batch.valid for batch in slab.batches)
        self.handed += count
        self.meter.samples += count
        self.meter.job.slab(
            {
                "fetch": times.fetch, "decode": times.decode, "room": times.room,
                "queue": times.queue, "assemble": times.assemble, "ready": times.ready,
            }
        )  # fmt: skip

    def count_wait(self, waited: messages.Waited | None) -> None:
        """Count the waits that its trainer reports."""
        if waited is not None:
            self.meter.waited(waited.waits_us, waited.first_batch_s)


_RATE_S_MIN = 0.2
"""Beats may follow each other at once; over less time than this, no rate is computed."""


def rate_of(member: ServedMember) -> float:
    """Return how many samples a second a member gets at present.

    Slabs are larger than what a trainer reads between two beats. So the rate is that of the last
    interval between two slabs, until the next slab takes longer than that.
    """
    now, count = time.monotonic(), member.handed
    then, seen = member.seen
    elapsed = now - then
    if not seen:  # the wait for the first slab says nothing about the rate
        member.seen = (now, count)
    elif elapsed >= _RATE_S_MIN and count > seen:
        member.seen, member.gain = (now, count), (elapsed, count - seen)
    interval, gained = member.gain
    return gained / max(interval, now - member.seen[0], _RATE_S_MIN)


def progress_of(member: ServedMember) -> MemberProgress:
    """Return the progress of a member, and set its rate."""
    member.rate = rate_of(member)
    return MemberProgress(
        member.job_id,
        member.member_id,
        member.generation,
        member.epoch,
        member.cursor,
        member.rate,
        member.stall_s,
        member.bound,
        member.began,
        member.mix,
        member.mix_from,
        None if member.following is None else member.following.promise,
        0 if member.following is None else member.following.known_entry,
    )


# -- changes of weights ----------------------------------------------------------------------------
#
# Answer questions about changed weights of a mixture. Trainers keep the weights, and pass them when
# they open streams; the node keeps no weights.
#
# 1. An answer depends only on the job, its weights so far and the place. So all ranks get the same
#    answer to the same question, from any node, at any time.


def mix_of(spec: JobSpec, mix: MixHistory | None) -> MixHistory | None:
    """Return the weights for a requested stream: `mix`, or those of the spec if `mix` is None. None
    if the job is not a mixture.

    Raises:  ConfigError: `mix` does not fit this mixture.
    """
    if spec.mixture is None or mix is None:
        return None if spec.mixture is None else spec.mixture.history
    _check(spec.mixture, mix)
    return mix


def epoch_described(member: ServedMember, question: DescribeEpoch) -> EpochDescribed:
    """Return the length of an epoch.

    Raises:  ConfigError: these are not weights of this mixture, or the epoch cannot be planned.
    """
    check_left(member.request, member.spec, question.epoch)
    spec = with_mix(member.spec, mix_of(member.spec, question.mix))
    return EpochDescribed(sample_count_of(spec, member.opened.manifests, question.epoch))


def weights_changed(member: ServedMember, question: ChangeWeights) -> WeightsChanged:
    """Return all weights of the mixture after the requested change, and the place where it applies.

    Raises:  ConfigError: the job is not a mixture, the weights do not fit it, or an epoch cannot be
    planned with them.
    """
    spec, request = member.spec, member.request.mixture
    if spec.mixture is None or request is None:
        raise ConfigError(
            "this job reads one dataset: only a Mixture has weights", field="set_weights"
        )
    mix_of(spec, question.mix)
    if is_reduced(spec, member.opened.manifests, question.epoch):
        raise ConfigError(
            f"epoch {question.epoch} has only what was unread when the recipe was changed, and its"
            " weights cannot change within it: set them from the next epoch on, or begin a stage"
            ' with change="restart"',
            field="weight",
        )
    counts = [manifest.sample_count for manifest in member.opened.manifests]
    mixed = mixed_of(with_mix(spec, question.mix), counts)
    changes, place = question.mix.changes[1:], (question.epoch, question.cursor)
    if question.weights:
        shares = shares_of(request, question.weights, member.opened.datasets)
        share_changes, at = changed(mixed, changes, place, shares)
        check_steps(mixed, share_changes, spec.global_batch, spec.end)
    else:
        share_changes, at = _as_opened(spec, spec.mixture, mixed, changes, place)
    if not share_changes or share_changes[0].place != (0, 0):
        share_changes = (ShareChange(0, 0, mixed.shares), *share_changes)
    return WeightsChanged(MixHistory(share_changes, question.mix.length), *at)


def refusal_of(member: ServedMember, proposal: MixProposal) -> str:
    """Return why a member cannot read the proposed weights from the proposed place on, or, if there
    is none, from the place that the member has reached; "" if it can.
    """
    mixture, at = member.request.mixture, proposal.at or member.place_reached
    mix = mix_of(member.spec, member.mix)
    if mixture is None or mix is None or at is None or not proposal.sources:
        return ""
    given = dict(zip(proposal.sources, proposal.weights, strict=True))
    weights = tuple(given.get(source.name, 0.0) for source in mixture.sources)
    try:
        weights_changed(member, ChangeWeights(member.job_id, at.epoch, at.cursor, mix, weights))
    except DataplaneError as error:
        return str(error)
    return ""


def _as_opened(
    spec: JobSpec, mixture: MixtureSpec, mixed: Mixed, changes: PlannedChanges, place: Place
) -> tuple[PlannedChanges, Place]:
    """Return the changes that restore, from this place on, the weights with which the job was
    opened: those that its schedule has for this step and for later ones. Also return the place.
    """
    before = tuple(change for change in changes if change.place < place)
    now = steps_before(mixed, before, place, spec.global_batch, spec.end)
    all_of_it = (ScheduledShares(0, mixture.shares), *mixture.schedule)
    past = [change for change in all_of_it if change.step <= now]
    coming = [
        ScheduledShares(change.step - now, change.shares)
        for change in all_of_it
        if change.step > now
    ]
    schedule: Sequence[ScheduledShares] = (ScheduledShares(0, past[-1].shares), *coming)
    scheduled_changes = scheduled(mixed, before, place, schedule, spec.global_batch, spec.end)
    return scheduled_changes, next_boundary(mixed, before, place)


def _check(mixture: MixtureSpec, mix: MixHistory) -> None:
    places = [change.place for change in mix.changes]
    is_right = (
        bool(places)
        and places[0] == (0, 0)
        and all(before < after for before, after in itertools.pairwise(places))
        and all(len(change.shares) == len(mixture.sources) for change in mix.changes)
        and all(0 < sum(change.shares) <= SHARES_SUM for change in mix.changes)
    )
    if not is_right:
        raise ConfigError(
            f"these are not the weights of a mixture of {len(mixture.sources)} sources: its state"
            " is damaged",
            field="mix",
        )


# -- answers about a job ---------------------------------------------------------------------------
#
# Answers questions about a job: types of columns, values of codes, weights of a mixture.


# These limits keep an answer, which is one packet, far below the size limit of packets.
_TEXT_BYTES_MAX = 64 << 10
_TYPE_LENGTH_MAX = 2000
_COLUMN_BYTES = 64


Told = ColumnsDescribed | CategoriesRead | EpochDescribed | WeightsChanged


async def describe(member: ServedMember, question: Question) -> Told:
    """Answer a question about the member's job. An answer that is a list has as many entries as
    fit, from the requested entry on.

    Raises:  ConfigError: a column does not come as codes, or weights are invalid.
    """
    if isinstance(question, DescribeEpoch):
        return await asyncio.to_thread(epoch_described, member, question)
    if isinstance(question, ChangeWeights):
        return await asyncio.to_thread(weights_changed, member, question)
    if isinstance(question, ReadCategories):
        return await asyncio.to_thread(_categories, member.dataset, question)
    if member.described is None:
        member.described = await asyncio.to_thread(described_columns, member.opened)
    columns, described, room = member.described, list[DescribedColumn](), _TEXT_BYTES_MAX
    for column in columns[question.first :]:
        room -= _COLUMN_BYTES + 4 * (len(column.spec.name) + len(column.stored_type))
        if room < 0 and described:
            break
        described.append(column)
    return ColumnsDescribed(tuple(described), len(columns))


def _categories(dataset: Dataset, question: ReadCategories) -> CategoriesRead:
    values = dataset.categories.get(question.column)
    if values is None:
        raise ConfigError(
            f"column {question.column!r} does not come as codes; the columns that do: "
            f"{shown(dataset.categories) or 'none'}. Name it in codes=[…]",
            field=question.column,
        )
    leaf = next(leaf for leaf in dataset.columns.leaves.leaves if leaf.name == question.column)
    count, left = 1, len(values) - question.first
    part = values.slice(question.first, 1)
    while (
        count < left and (more := values.slice(question.first, 2 * count)).nbytes < _TEXT_BYTES_MAX
    ):
        count, part = 2 * count, more
    return CategoriesRead(stream_of(shown_as(part, leaf)), len(values))


def described_columns(job: OpenedJob) -> tuple[DescribedColumn, ...]:
    """Describe all columns of a batch, in order."""
    if job.collated is not None:
        return tuple(map(DescribedColumn, job.collated.specs))
    dataset = job.datasets[0]
    return tuple(_described(dataset.columns, job.spec, dataset.categories))


def _described(
    plan: StackedPlan, spec: JobSpec, categories: Categories
) -> Iterator[DescribedColumn]:
    leaves = {
        column.name: leaf
        for column, leaf, part in zip(
            plan.leaves.specs, plan.leaves.leaves, plan.leaves.parts, strict=True
        )
        if part is not LeafPart.IS_NULL
    }
    stacks = {stack.name: stack.columns for stack in plan.stacks}
    for at, column in enumerate(delivered_columns(plan.specs, spec)):
        length_max = plan.lists.get(at, AS_THEY_ARE).length_max
        if column.name in stacks:
            yield DescribedColumn(column, _types_of(stacks[column.name], leaves))
        elif column.name in leaves:
            kind = leaves[column.name].type
            if column.name in categories:
                count = len(categories[column.name])
                yield DescribedColumn(
                    column, _text(kind), length_max=length_max, category_count=count
                )
                continue
            yield DescribedColumn(column, _text(kind), *_unit(kind), length_max)
        else:
            yield DescribedColumn(column)


def _types_of(members: tuple[str, ...], leaves: Mapping[str, Leaf]) -> str:
    """Return the types in a stack, each once; "" for a stack of masks."""
    kinds = (_text(leaves[name].type) for name in members if name in leaves)
    return ", ".join(dict.fromkeys(kinds))[:_TYPE_LENGTH_MAX]


def _text(kind: pa.DataType) -> str:
    text = str(kind)
    return text if len(text) <= _TYPE_LENGTH_MAX else f"{text[:_TYPE_LENGTH_MAX]}…"


def _unit(kind: pa.DataType) -> tuple[str, str]:
    """Return the unit, as numpy.datetime64 names it, and the time zone of the times in a column."""
    kind = value_type(kind)
    if pa.types.is_date32(kind):
        return "D", ""
    if pa.types.is_date64(kind):
        return "ms", ""
    if pa.types.is_timestamp(kind):
        return kind.unit, kind.tz or ""
    is_time = pa.types.is_time(kind) or pa.types.is_duration(kind)
    return (kind.unit, "") if is_time else ("", "")
