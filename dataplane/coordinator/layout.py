"""Check that the ranks of a job fit together, and print a table of what each has declared. Pure.

Ranks are compared as they join, each in constant time, without waiting for all of them: a training
loop may read only on some stages or tensor ranks.

Invariants, for joined members that know their global rank (others are only counted by dp rank):
1. All of them declare the same world size.
2. A rank has one dp rank, whichever of its processes declares it.
3. A place (dp_rank, pp_rank, cp_rank) has at most as many ranks as an equal division gives it:
   world_size / (dp_size * pp_size * cp_size). So once all ranks have joined, every replica group
   contains each dp rank once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from dataplane.coordinator.records import Member
from dataplane.model.errors import SpecMismatch
from dataplane.model.records import Topology
from dataplane.rpc.membership import JoinRequest

ROWS_MAX = 10
_SOURCE_LENGTH_MAX = 90
_DIGEST_LENGTH = 8

Place = tuple[int, int, int]
HostOf = Callable[[str], str]
"""Returns the host of a node, by the node's id."""


class Conflict(NamedTuple):
    """The reason why a rank does not fit: the field, a sentence, and the members that the rank
    contradicts.
    """

    field: str
    sentence: str
    member_ids: list[str]


class Seats:
    """The joined members of a generation that know their rank, by rank and by place."""

    def __init__(self) -> None:
        self._at_rank: dict[int, dict[str, Topology]] = {}
        self._ranks: dict[Place, dict[int, int]] = {}

    def add(self, member: Member) -> None:
        """Add a member that has joined; called once for each."""
        topology = member.topology
        if _knows_its_rank(topology):
            self._at_rank.setdefault(topology.rank, {})[member.member_id] = topology
            ranks = self._ranks.setdefault(_place(topology), {})
            ranks[topology.rank] = ranks.get(topology.rank, 0) + 1

    def remove(self, member: Member) -> None:
        """Remove a member that is gone."""
        topology = member.topology
        if not _knows_its_rank(topology):
            return
        at_rank, ranks = self._at_rank[topology.rank], self._ranks[_place(topology)]
        del at_rank[member.member_id]
        ranks[topology.rank] -= 1
        if not at_rank:
            del self._at_rank[topology.rank]
        if not ranks[topology.rank]:
            del ranks[topology.rank]
        if not ranks:
            del self._ranks[_place(topology)]

    def conflict(self, asked: Topology) -> Conflict | None:
        """Return why a rank with this topology does not fit; None if it fits."""
        if not _knows_its_rank(asked):
            return None
        for member_id, topology in self._at_rank.get(asked.rank, {}).items():
            if topology.dp_rank != asked.dp_rank:
                return Conflict(
                    "dp_rank",
                    f"rank {asked.rank} asks for the batches of dp_rank {asked.dp_rank}, but it "
                    f"has already joined with dp_rank {topology.dp_rank}",
                    [member_id],
                )
        for members in self._at_rank.values():
            member_id, topology = next(iter(members.items()))
            if topology.world_size != asked.world_size:
                return Conflict(
                    "world_size",
                    f"rank {asked.rank} counts {asked.world_size} ranks in all, but rank "
                    f"{topology.rank} counts {topology.world_size}",
                    [member_id],
                )
            break  # one comparison suffices, since joined members agree with each other
        return self._crowd(asked)

    def _crowd(self, asked: Topology) -> Conflict | None:
        place = _place(asked)
        ranks = self._ranks.get(place, {})
        share = asked.world_size // (asked.dp_size * asked.pp_size * asked.cp_size)
        if asked.rank in ranks or len(ranks) < max(share, 1):
            return None
        within = ""
        if asked.pp_size > 1 or asked.cp_size > 1:
            within = f" (pp_rank {asked.pp_rank}, cp_rank {asked.cp_rank})"
        holders = [next(iter(self._at_rank[rank])) for rank in list(ranks)[:ROWS_MAX]]
        return Conflict(
            "dp_rank",
            f"{len(ranks) + 1} ranks ask for the batches of dp_rank {asked.dp_rank}{within}, but "
            f"with {asked.world_size} ranks and dp_size {asked.dp_size} only {max(share, 1)} can, "
            "or other dp ranks would lack some",
            holders,
        )


def does_not_fit(
    conflict: Conflict,
    request: JoinRequest,
    members: Sequence[Member],
    table: str,
) -> SpecMismatch:
    """Return the refusal of a rank that contradicts others."""
    field = conflict.field
    return SpecMismatch(
        f"job {request.job_id!r}: {conflict.sentence}. All ranks must find their places in the "
        f"same way: pass the same device_mesh= on each, or dp_rank= and dp_size=\n{table}",
        field=field,
        expected=getattr(members[0].topology, field),
        found=getattr(request.topology, field),
        job=request.job_id,
        rank=request.topology.rank,
    )


def who_said_what(
    request: JoinRequest, members: Iterable[Member], digest: str, host_of: HostOf, count: int
) -> str:
    """Return a table of the newcomer and of some of the `count` members of its job, in this order.
    All of these members have joined with a spec of this joint digest.
    """
    rows: list[tuple[str, ...]] = [("host", "rank", "dp_rank", "spec", "place from")]
    rows.append(
        _row(host_of(request.node_id), request.topology, request.spec.joint_digest, "  <- refused")
    )
    rows += [_row(host_of(member.node_id), member.topology, digest) for member in members]
    more = count - (len(rows) - 2)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"  {'  '.join(map(str.ljust, row, widths))}".rstrip() for row in rows]
    return "\n".join([*lines, *([f"  … and {more} more"] if more > 0 else [])])


def _row(host: str, at: Topology, digest: str, mark: str = "") -> tuple[str, ...]:
    source = at.source or "not told"
    if len(source) > _SOURCE_LENGTH_MAX:
        source = f"{source[:_SOURCE_LENGTH_MAX]}…"
    rank = f"{at.rank} of {at.world_size}" if _knows_its_rank(at) else "?"
    return host, rank, f"{at.dp_rank} of {at.dp_size}", digest[:_DIGEST_LENGTH], source + mark


def _knows_its_rank(at: Topology) -> bool:
    """Return whether the global rank is known: not if dp_rank is explicit without a launcher."""
    return at.world_size > 1 and at.world_size >= at.dp_size


def _place(at: Topology) -> Place:
    return at.dp_rank, at.pp_rank, at.cp_rank
