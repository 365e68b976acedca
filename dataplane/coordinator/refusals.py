"""The coordinator's refusals: what was wrong, where, and what to do."""

from __future__ import annotations

from collections.abc import Sequence

from dataplane.coordinator.records import Job, Member, place_of
from dataplane.model.config import PROTOCOL_OLDEST
from dataplane.model.errors import (
    ConfigError,
    LeaseExpired,
    LeaseFenced,
    SpecMismatch,
    VersionMismatch,
)
from dataplane.model.ledger import PLACE_MAX, LedgerPosition
from dataplane.rpc.bounds import (
    URLS_MAX,
    check_count,
    check_data_address,
    check_length,
    check_name,
)
from dataplane.rpc.membership import HeartbeatRequest, JoinRequest, RegisterNodeRequest
from dataplane.rpc.sharing import NodeWork
from dataplane.transforms.pixels_advice import how_to_agree

_PIXELS_LENGTH_MAX = 1024
_TEXT_LENGTH_MAX = 1024
_STORES_MAX, _WORK_MAX = 64, 64
_KNOWN_MAX = 4096
_ARENA_BYTES_MAX = 1 << 50
_WORKER_COUNT_MAX = 1 << 16
_RANK_COUNT_MAX = 1 << 20
_SHOWN_LENGTH_MAX = 160

Difference = tuple[str, str, str]


def check_join(request: JoinRequest) -> None:
    """Refuse a join whose names are too long, or whose place is not valid for a job.

    Raises:  ConfigError: names the field.
    """
    check_name("job_id", request.job_id)
    check_name("incarnation", request.incarnation)
    check_name("member_id", request.member_id)
    check_name("node_id", request.node_id, needed=False)
    check_name("pixels", request.pixels, needed=False, most=_PIXELS_LENGTH_MAX)
    check_count("urls", request.urls, URLS_MAX)
    check_length("source", request.topology.source, needed=False, most=_TEXT_LENGTH_MAX)
    place = request.topology
    if not 0 <= place.dp_rank < place.dp_size <= _RANK_COUNT_MAX:
        raise ConfigError(
            f"job {request.job_id!r}: dp_rank {place.dp_rank} is outside of dp_size "
            f"{place.dp_size}: ranks count from 0 to dp_size - 1",
            field="dp_rank",
        )
    if request.spec.global_batch < 1:
        raise ConfigError(f"job {request.job_id!r}: global_batch is 0", field="global_batch")


def crowded(job: Job, most: int) -> ConfigError:
    """Return the refusal of a member of a job that has its maximum of members."""
    return ConfigError(
        f"job {job.job_id!r} has {most} joined members, the most for dp_size {job.dp_size}: end "
        "processes that are no longer needed, or use fewer DataLoader workers",
        field="member_id",
        job=job.job_id,
    )


def check_node(node: RegisterNodeRequest) -> None:
    """Refuse a node whose names are too long.

    Raises:  ConfigError: names the field.
    """
    check_name("node_id", node.node_id)
    check_name("host", node.host, needed=False)
    check_name("version", node.version, needed=False)
    if node.data_address:
        check_data_address(node.data_address)
    if node.arena_bytes > _ARENA_BYTES_MAX:
        raise ConfigError(
            f"arena_bytes is {node.arena_bytes}: at most {_ARENA_BYTES_MAX} is possible",
            field="arena_bytes",
        )
    if node.worker_count > _WORKER_COUNT_MAX:
        raise ConfigError(
            f"worker_count is {node.worker_count}: at most {_WORKER_COUNT_MAX} is possible",
            field="worker_count",
        )
    check_name("only_job", node.only_job, needed=False)
    check_name("disk_id", node.disk_id, needed=False)


def check_work(work: NodeWork) -> None:
    """Refuse reports of work that a node of ours would not send.

    Raises:  ConfigError: names the field.
    """
    for name in ("what", "dataset", "unit"):
        check_length(name, getattr(work, name), needed=False, most=_TEXT_LENGTH_MAX)


def check_heartbeat(request: HeartbeatRequest) -> None:
    """Refuse a heartbeat that a node of ours would not send.

    Raises:  ConfigError: names the field.
    """
    check_count("stores_away", request.stores_away, _STORES_MAX)
    for away in request.stores_away:
        check_length("store", away.store, needed=False, most=_TEXT_LENGTH_MAX)
        check_length("error", away.error, needed=False, most=_TEXT_LENGTH_MAX)
    check_count("work", request.work, _WORK_MAX)
    for work in request.work:
        check_work(work)
    check_count("known", request.known, _KNOWN_MAX)
    for known in request.known:
        check_name("job_id", known.job_id)
    if len({(member.job_id, member.member_id) for member in request.members}) < len(
        request.members
    ):
        raise ConfigError("a heartbeat names a member twice", field="members")
    for progress in request.members:
        check_name("bound", progress.bound, needed=False)
        places = [("progress", LedgerPosition(progress.epoch, progress.cursor))]
        places += [("began", progress.began)] if progress.began is not None else []
        places += [("mix_from", progress.mix_from)] if progress.mix_from is not None else []
        if progress.promise is not None:
            places.append(("promise", progress.promise.position))
        for field, at in places:
            if max(at.epoch, at.cursor) >= PLACE_MAX:
                raise ConfigError(f"{field} is beyond the end of any epoch", field=field)


def spec_mismatch(
    job: Job,
    holder: Member,
    request: JoinRequest,
    differences: Sequence[Difference],
    lease_left_s: float,
    table: str,
    *,
    reopened: bool,
) -> SpecMismatch:
    """Return the refusal of a rank whose spec differs. `differences` are (field, the holder's
    value, the newcomer's); `table` lists what each rank declared. If the newcomer's rank has
    `reopened` the job with other arguments, its node retries until the other ranks have left.
    """
    field, expected, found = differences[0]
    rank, is_of_place = request.topology.rank, place_of(request.topology) == holder.place
    newcomer, holding = f"rank {rank}", f"rank {holder.topology.rank}"
    if newcomer == holding and not is_of_place:  # without a launcher, all ranks are rank 0
        newcomer, holding = f"dp_rank {request.topology.dp_rank}", f"dp_rank {holder.place[0]}"
    sentence = (
        f"job {job.job_id!r}: {newcomer} (member {request.member_id}, node {request.node_id}) "
        f"asks for {field}={_shown(found)}, but {holding} (member "
        f"{holder.member_id}, node {holder.node_id}) has joined with {field}={_shown(expected)}"
    )
    if len(differences) > 1:
        others = ", ".join(
            f"{name} ({_shown(asked)}, not {_shown(held)})" for name, held, asked in differences[1:]
        )
        sentence += f"; these differ too: {others}"
    if request.incarnation == job.incarnation and field == "pixels":
        sentence += f". {how_to_agree(expected, found)}"
    elif request.incarnation == job.incarnation and is_of_place:
        sentence += (
            f". Both are rank {rank}: if these are two runs, give each a name= of its own, or "
            "another MASTER_PORT; if they are one, give both the same arguments"
        )
    elif reopened:
        sentence += (
            f". The loader of {newcomer} was closed to open another one, and other ranks"
            " still have theirs: close that of each rank first, or give the new one another name="
        )
    elif request.incarnation == job.incarnation:
        sentence += (
            ". Give every rank of the job the same arguments; if these are two runs, give each a "
            "name= of its own"
        )
    else:
        sentence += (
            ". An older launch of this job still runs: stop it, or give the new job another name. "
            f"If it was killed, its last lease ends in {lease_left_s:.0f} s"
        )
    return SpecMismatch(
        f"{sentence}\n{table}",
        field=field,
        expected=expected,
        found=found,
        job=job.job_id,
        rank=rank,
        **({"reopened": True} if reopened else {}),
    )


def superseded(job: Job, member_id: str) -> LeaseFenced:
    """Return the refusal of a process of an older launch."""
    return LeaseFenced(
        f"job {job.job_id!r}: a newer launch has taken over (generation {job.generation}): "
        f"member {member_id} belongs to an older one and must stop",
        job=job.job_id,
        member=member_id,
        generation=job.generation,
    )


def ambiguous(job: Job, member: Member, request: JoinRequest) -> ConfigError:
    """Return the refusal of a second rank with the same member_id."""
    return ConfigError(
        f"job {job.job_id!r}: member {member.member_id} is rank {member.topology.rank} "
        f"(dp_rank {member.topology.dp_rank}) and also asks to be rank {request.topology.rank} "
        f"(dp_rank {request.topology.dp_rank}): every rank needs a member_id of its own",
        field="member_id",
    )


def expired(job_id: str, member_id: str, lease_s: float) -> LeaseExpired:
    """Return the error for a member that has no lease."""
    return LeaseExpired(
        f"job {job_id!r}: member {member_id} has no lease (it left, or was silent for "
        f"{lease_s:g} s): join again",
        job=job_id,
        member=member_id,
    )


def of_another_node(member: Member) -> LeaseExpired:
    """Return the refusal of a node's claim about a member that has since joined through another
    node.
    """
    return LeaseExpired(
        f"job {member.job_id!r}: member {member.member_id} is on node {member.node_id} now: only "
        "that node renews it. Join again to move it",
        job=member.job_id,
        member=member.member_id,
    )


def version_mismatch(
    node: RegisterNodeRequest, version: str, protocol: int
) -> VersionMismatch | None:
    """Return the refusal of a node that speaks another protocol; None if versions work together."""
    oldest = max(protocol - 1, min(PROTOCOL_OLDEST, protocol))
    if oldest <= node.protocol <= protocol and node.version:
        return None
    spoken = f"{oldest} and {protocol}" if oldest < protocol else f"{protocol}"
    return VersionMismatch(
        f"node {node.node_id} on {node.host} (dataplane {node.version}) speaks protocol "
        f"{node.protocol}, the coordinator (dataplane {version}) speaks {spoken}: "
        "install the same version on both",
        expected=protocol,
        found=node.protocol,
    )


def two_protocols(
    job_id: str, own: RegisterNodeRequest, other: RegisterNodeRequest
) -> VersionMismatch:
    """Return the refusal of a member whose node cannot talk to the other nodes of its job."""
    return VersionMismatch(
        f"job {job_id!r}: node {own.node_id} on {own.host} (dataplane {own.version}) speaks "
        f"protocol {own.protocol}, and {other.node_id} on {other.host} (dataplane "
        f"{other.version}), which serves the job, {other.protocol}: install the same version on "
        "all hosts of a job",
        expected=other.protocol,
        found=own.protocol,
    )


def _shown(value: str) -> str:
    if len(value) <= _SHOWN_LENGTH_MAX:
        return value
    half = _SHOWN_LENGTH_MAX // 2
    return f"{value[:half]} … {value[-half:]}"


def differences(job: Job, request: JoinRequest) -> list[Difference]:
    """Return (field, the job's value, the newcomer's) for each difference. `dp_size` and
    `global_batch` are compared only within one launch.
    """
    found = list(job.spec.differences(request.spec))
    if job.pixels and request.pixels and job.pixels != request.pixels:
        found.append(("pixels", job.pixels, request.pixels))
    if request.incarnation != job.incarnation:
        return [difference for difference in found if difference[0] != "global_batch"]
    if request.topology.dp_size != job.dp_size:
        found.append(("dp_size", str(job.dp_size), str(request.topology.dp_size)))
    return found
