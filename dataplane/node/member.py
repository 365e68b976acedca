"""One rank of one job, served by this node."""

from __future__ import annotations

import asyncio
import time

from msgspec import Struct, field

from dataplane.model.changes import Changes, changes_of
from dataplane.model.config import JobSpec
from dataplane.model.errors import DataplaneError
from dataplane.model.ledger import LedgerEntry, LedgerPosition
from dataplane.model.records import MixHistory
from dataplane.node.dataset import Dataset
from dataplane.node.delivery import DeliveryArena, ServedStream
from dataplane.node.following import Following
from dataplane.node.opener import OpenedJob
from dataplane.rpc import messages
from dataplane.rpc.membership import JoinRequest, JoinResponse, MemberProgress
from dataplane.scheduler.walk import SlabSizes


class ServedMember(Struct, eq=False):
    """One rank of one job; `opened` is what it reads. If `error` is set, its requests get that
    error. `holder` holds its slabs. `joining` is its request for its place. `began` is where its
    first stream began, `mix_from` where its last one did, whose weights are `mix`. `closed`: it
    reads no more, though it may hold slabs until it is `released`. `has_left`: it has given its
    place back, since it left, or `was_lost`.

    `next_epoch` is the stream expected to follow its only stream. It is prepared while the last
    slabs of this epoch are consumed. `following` handles changed weights of a mixture. `joined` is
    the coordinator's answer when it joined, `opened_at` the time of that, and `gathered` is set
    once all ranks have joined.
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
    seen: tuple[float, int, int] = (0.0, 0, 0)
    error: DataplaneError | None = None
    closed: bool = False
    released: bool = False
    has_left: bool = False
    was_lost: bool = False
    described: tuple[messages.DescribedColumn, ...] | None = None
    following: Following | None = None
    joined: JoinResponse | None = None
    opened_at: float = field(default_factory=time.monotonic)
    gathered: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def host_count(self) -> int:
        """The hosts of its launch."""
        place = self.request.topology
        return place.world_size // place.local_world_size

    @property
    def spec(self) -> JobSpec:
        """The spec of its job."""
        return self.opened.spec

    @property
    def entries(self) -> tuple[LedgerEntry, ...]:
        """The entries of its launch's changes."""
        return self.request.entries

    @property
    def changes(self) -> Changes:
        """The changes that people have made to its job, as known to its launch."""
        return changes_of(self.entries)

    @property
    def dataset(self) -> Dataset:
        """The dataset it reads, or one of those with equal columns."""
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
        """The place that it has reached; None if it has not begun."""
        return None if self.began is None else LedgerPosition(self.epoch, self.cursor)

    def reached(self, epoch: int, cursor: int) -> None:
        """Note the samples that all ranks have consumed, as reported by its trainer. Never goes
        back.
        """
        self.epoch, self.cursor = max((self.epoch, self.cursor), (epoch, cursor))


def progress_of(member: ServedMember) -> MemberProgress:
    """The progress of a member, and its rate since the last call."""
    now = time.monotonic()
    then, epoch, cursor = member.seen
    if then and epoch == member.epoch and now > then:
        gained = max(member.cursor - cursor, 0) / member.request.topology.dp_size
        member.rate = gained / (now - then)
    member.seen = (now, member.epoch, member.cursor)
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
