"""Requests with sensible defaults, for every test of the coordinator."""

from dataplane.model.config import PROTOCOL_VERSION, JobSpec
from dataplane.model.ledger import LedgerPosition
from dataplane.model.records import Topology
from dataplane.rpc.membership import (
    HeartbeatRequest,
    JoinRequest,
    KnownNodes,
    LeaveRequest,
    MemberProgress,
    RegisterNodeRequest,
)

VERSION = "1.2.3"
SPEC = JobSpec(fingerprint="f" * 32, seed=1, shuffle=True, lanes=4, window=8, global_batch=16)


def node(node_id="n0", version=VERSION, protocol=PROTOCOL_VERSION, **more):
    """With enough workers, unless `more` says otherwise."""
    more.setdefault("worker_count", 4)
    return RegisterNodeRequest(
        node_id, host="host-" + node_id, pid=7, version=version, protocol=protocol, **more
    )


def join(
    dp_rank=0,
    dp_size=2,
    *,
    job="j",
    spec=SPEC,
    incarnation="i1",
    member=None,
    node_id="n0",
    rank=None,
    world=None,
    pixels="",
    urls=(),
    **more,
):
    """A rank asks to join. Without `world` it knows only its dp rank, if it has another rank."""
    rank, world = (dp_rank, dp_size) if rank is None else (rank, world or 1)
    place = Topology(dp_rank=dp_rank, dp_size=dp_size, rank=rank, world_size=world, **more)
    member = f"m{rank}-{incarnation}" if member is None else member
    return JoinRequest(
        job, "s3://b/*.parquet", spec, place, incarnation, member, node_id, 1000, pixels, urls
    )


def beat(*members, node_id="n0", version=VERSION, known=(), is_short=False, **more):
    """`known` are those of the job j."""
    known = tuple(KnownNodes("j", one) for one in known)
    request = node(node_id, version, **more)
    return HeartbeatRequest(request, tuple(members), known=known, is_short=is_short)


def progress(
    member="m0-i1", generation=1, epoch=0, cursor=0, *, job="j", speed=0.0, stall=0.0, began=None,
    mix=None, replaced=(),
):  # fmt: skip
    """`began` is (epoch, cursor), or None if it has not begun to read; so is that of `mix`, which
    the weights follow.
    """
    at = None if began is None else LedgerPosition(*began)
    since, weights = (None, None) if mix is None else (LedgerPosition(*mix[0]), mix[1])
    return MemberProgress(
        job,
        member,
        generation,
        epoch,
        cursor,
        speed,
        stall,
        "",
        at,
        weights,
        since,
        replaced=replaced,
    )


def leave(member="m0-i1", *, job="j", lost=False, node_id="n0"):
    return LeaveRequest(job, member, lost, node_id=node_id)
