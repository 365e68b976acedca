"""The behaviour of every Coordination, in this process or behind gRPC."""

import asyncio
import contextlib

import pytest
from membership import SPEC, VERSION, progress
from msgspec import structs
from trusted import N0, OWN, TRUSTED, beat, join, leave, node

from dataplane.coordinator.front import Coordinator, CoordinatorConfig
from dataplane.coordinator.server import CoordinatorServer
from dataplane.model.config import PROTOCOL_VERSION
from dataplane.model.errors import (
    ConfigError,
    LeaseExpired,
    LeaseFenced,
    SpecMismatch,
    VersionMismatch,
)
from dataplane.model.records import ColumnOptions
from dataplane.rpc.base import Coordination
from dataplane.rpc.calls import CoordinatorClient
from dataplane.rpc.membership import LeaveResponse, StatusRequest

CONFIG = CoordinatorConfig(version=VERSION, lease_s=60.0)


@contextlib.asynccontextmanager
async def in_process():
    coordinator = Coordinator(CONFIG)
    await coordinator.start()
    try:
        yield coordinator
    finally:
        await coordinator.close()


@contextlib.asynccontextmanager
async def over(address):
    server = CoordinatorServer(CONFIG, address, TRUSTED)
    client = CoordinatorClient(await server.start(), TRUSTED, identity=OWN)
    try:
        yield client
    finally:
        await client.close()
        await server.stop()


@pytest.fixture(params=["in-process", "tcp", "unix"])
def converse(request, tmp_path):
    """Run a conversation with a fresh coordinator."""
    opened = {
        "in-process": in_process,
        "tcp": lambda: over("127.0.0.1:0"),
        "unix": lambda: over(f"unix:{tmp_path}/c.sock"),
    }[request.param]

    def run(conversation):
        async def main():
            async with opened() as coordination:
                await conversation(coordination)

        asyncio.run(main())

    return run


def test_a_job_forms_runs_and_goes_idle(converse):
    async def conversation(coordination: Coordination):
        registered = await coordination.register_node(node())
        assert registered.lease_s == 60.0
        joined = await coordination.join(join(0))
        assert (joined.generation, joined.lease_s) == (1, 60.0)
        (verdict,) = (await coordination.heartbeat(beat(progress()))).verdicts
        assert (verdict.member_id, verdict.error) == ("m0-i1", None)
        assert verdict.missing_dp_ranks == (1,)
        assert verdict.missing_for_s >= 0.0
        assert (await coordination.status(StatusRequest())).jobs[0].state == "forming"

        await coordination.join(join(1))
        reported = progress(epoch=2, cursor=640, speed=10.5, stall=0.25)
        (verdict,) = (await coordination.heartbeat(beat(reported))).verdicts
        assert (verdict.error, verdict.missing_dp_ranks) == (None, ())
        status = await coordination.status(StatusRequest("j"))
        assert status.coordinator_id == registered.coordinator_id
        assert status.version == VERSION
        (job,) = status.jobs
        assert (job.job_id, job.state, job.spec, job.digest) == (
            "j",
            "running",
            SPEC,
            SPEC.digest(),
        )
        assert (job.dataset, job.sample_count, job.dp_size) == ("s3://b/*.parquet", 1000, 2)
        assert (job.epoch, job.cursor) == (2, 640)
        first, second = job.members
        assert (first.state, first.epoch, first.cursor) == ("joined", 2, 640)
        assert (first.samples_per_s, first.stall_s) == (10.5, 0.25)
        assert 0 < first.lease_left_s <= 60.0
        assert (second.node_id, second.topology.dp_rank) == (N0, 1)
        assert [(one.node_id, one.host, one.pid) for one in status.nodes] == [(N0, f"host-{N0}", 7)]

        for member in ("m0-i1", "m1-i1", "m1-i1"):
            assert await coordination.leave(leave(member)) == LeaveResponse()
        (job,) = (await coordination.status(StatusRequest())).jobs
        assert (job.state, [one.state for one in job.members]) == ("idle", ["left", "left"])
        assert (job.epoch, job.cursor) == (2, 640)

    converse(conversation)


def test_every_call_may_be_repeated(converse):
    async def conversation(coordination: Coordination):
        for _ in range(3):
            await coordination.register_node(node())
            assert (await coordination.join(join(0, 1))).generation == 1
            answer = await coordination.heartbeat(beat(progress(cursor=3)))
            assert [verdict.error for verdict in answer.verdicts] == [None]
        for _ in range(2):
            await coordination.leave(leave())
        (job,) = (await coordination.status(StatusRequest())).jobs
        assert len(job.members) == 1

    converse(conversation)


def test_errors_arrive_by_class_with_sentence_and_nouns(converse):
    async def conversation(coordination: Coordination):
        await coordination.join(join(0))
        columns = ColumnOptions(tuple(map(str, range(3000))))
        other = structs.replace(SPEC, seed=2**64 - 1, column_options=columns)
        with pytest.raises(SpecMismatch, match="asks for seed=18446744073709551615") as caught:
            await coordination.join(join(1, spec=other))
        assert caught.value.nouns["field"] == "seed"
        assert caught.value.nouns["expected"] == "1"
        assert caught.value.nouns["rank"] == 1
        assert f"rank 0 (member m0-i1, node {N0})" in str(caught.value)

        assert (await coordination.join(join(0, incarnation="i2"))).generation == 2
        with pytest.raises(LeaseFenced) as caught:
            await coordination.join(join(0))
        assert caught.value.nouns == {"job": "j", "member": "m0-i1", "generation": 2}
        asked = beat(progress(), progress("who", 2), progress("m0-i2", 2), progress(job="nojob"))
        verdicts = (await coordination.heartbeat(asked)).verdicts
        assert [one.member_id for one in verdicts] == ["m0-i1", "who", "m0-i2", "m0-i1"]
        kinds = [type(one.error) for one in verdicts]
        assert kinds == [LeaseExpired, LeaseExpired, type(None), LeaseExpired]

        with pytest.raises(VersionMismatch, match="install the same version on both"):
            await coordination.register_node(node(protocol=PROTOCOL_VERSION + 1))
        with pytest.raises(VersionMismatch):
            await coordination.heartbeat(beat(protocol=PROTOCOL_VERSION + 1))
        with pytest.raises(ConfigError, match="dp_rank 5 is outside"):
            await coordination.join(join(5))
        with pytest.raises(ConfigError, match="no job is called 'x'; there are: j"):
            await coordination.status(StatusRequest("x"))

    converse(conversation)


def test_ranks_that_join_together_all_get_their_place(converse):
    async def conversation(coordination: Coordination):
        size = 64
        joins = (coordination.join(join(rank, size)) for rank in range(size))
        answers = await asyncio.gather(*joins)
        assert {answer.generation for answer in answers} == {1}
        (job,) = (await coordination.status(StatusRequest())).jobs
        assert (job.state, len(job.members)) == ("running", size)

    converse(conversation)
