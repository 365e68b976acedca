"""Only a node itself speaks as that node: whoever has its token, or another node's, does not."""

from __future__ import annotations

import asyncio
import time

import jwt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from membership import VERSION, progress
from msgspec import structs
from trusted import (
    N0,
    OWN,
    TOKEN,
    TRUSTED,
    beat,
    client_of,
    identity,
    join,
    leave,
    node,
    refusals,
    share,
)

from dataplane.coordinator.front import CoordinatorConfig
from dataplane.coordinator.server import CoordinatorServer
from dataplane.model.errors import AccessDenied, LeaseExpired
from dataplane.rpc.membership import StatusRequest
from dataplane.security.jwts import Jwts
from dataplane.security.node_identity import SECRET_BYTES, identity_of, is_of, own_identity
from dataplane.security.security import Security
from dataplane.security.tokens import TokenSource

HERE, ELSEWHERE = "10.0.0.1:7078", "10.6.6.6:7078"
THIEF = identity("thief")
CHECKED = Security(TRUSTED.tokens, jwts=Jwts(TRUSTED.tokens))


def token_for(job):
    claims = {"aud": "dataplane", "exp": time.time() + 600, "roles": ["node"], "job": job}
    return Security(TokenSource("a test", (jwt.encode(claims, TOKEN, "HS256"),)))


secrets = st.binary(min_size=SECRET_BYTES, max_size=SECRET_BYTES)


@given(secret=secrets, other=st.one_of(secrets, st.binary(max_size=64)), name=st.text(max_size=20))
def test_an_id_is_of_its_secret_and_of_no_other(secret, other, name):
    own = identity_of(name, secret)
    assert is_of(own.node_id, secret)
    assert is_of(own.node_id, other) == (other == secret)
    assert not is_of(own.node_id[:-1], secret)
    assert not is_of(f"{own.node_id}-", secret)
    assert not is_of(name, secret)


def test_every_start_of_a_node_has_another_id_whose_secret_is_in_no_text():
    one, other = own_identity(), own_identity()
    assert one.node_id != other.node_id
    assert one.secret.hex() not in f"{one!r}{one}"
    assert repr(one.secret) not in f"{one!r}{one}"


def conversation(converse, database=":memory:"):
    """With the owner of n0, which has rank 0 of the job j, and its address."""

    async def main():
        config = CoordinatorConfig(version=VERSION, lease_s=60.0, database=str(database))
        server = CoordinatorServer(config, "127.0.0.1:0", CHECKED)
        address = await server.start()
        try:
            async with client_of(address, TRUSTED) as owner:
                await owner.register_node(node(data_address=HERE))
                await owner.join(join(0, 1))
                await converse(address, owner, server)
        finally:
            await server.stop(0.0)

    asyncio.run(main())


async def seen(server):
    """What people, and other nodes, see of the job and its node."""
    found = await server.coordinator.status(StatusRequest())
    (job,) = found.jobs
    members = [
        (one.member_id, one.node_id, one.state, one.epoch, one.cursor) for one in job.members
    ]
    nodes = [(one.node_id, one.host, one.data_address, one.worker_count) for one in found.nodes]
    return job.generation, job.nodes, job.nodes_version, members, nodes


AS_ANOTHER = {
    "a goodbye in its name": lambda one: one.register_node(node(worker_count=0)),
    "its blocks from elsewhere": lambda one: one.register_node(node(data_address=ELSEWHERE)),
    "a heartbeat for its address": lambda one: one.heartbeat(beat(data_address=ELSEWHERE)),
    "a heartbeat for its key": lambda one: one.heartbeat(beat(progress(epoch=9))),
    "a rank in its name": lambda one: one.join(join(0, 1, member="another")),
    "a manifest in its name": lambda one: one.share_manifest(share(data_address=ELSEWHERE)),
    "its rank's end": lambda one: one.leave(leave(lost=True)),
}


@pytest.mark.parametrize("call", AS_ANOTHER.values(), ids=AS_ANOTHER)
@pytest.mark.parametrize(
    ("security", "thief", "why"),
    [
        (lambda: TRUSTED, THIEF, "whose secret it does not show"),
        (lambda: token_for("j"), THIEF, "whose secret it does not show"),
        (lambda: token_for("another"), THIEF, "whose secret it does not show"),
        (lambda: TRUSTED, None, "shows no secret"),
        (
            lambda: TRUSTED,
            structs.replace(OWN, secret=OWN.secret[:-1]),
            "whose secret it does not show",
        ),
    ],
    ids=["shared token", "a token for the job", "a token for another job", "no secret", "a part"],
)
def test_nobody_speaks_as_another_node(call, security, thief, why, caplog):
    async def converse(address, owner, server):
        before = await seen(server)
        async with client_of(address, security(), thief) as stranger:
            with pytest.raises(AccessDenied, match=why):
                await call(stranger)
        (line,) = refusals(caplog)
        assert why in line
        assert await seen(server) == before
        (verdict,) = (await owner.heartbeat(beat(progress(), data_address=HERE))).verdicts
        assert verdict.error is None

    conversation(converse)


def claims(caplog):
    """The lines about members of other nodes."""
    found = [one.getMessage() for one in caplog.records if "member refused" in one.getMessage()]
    caplog.clear()
    return found


def test_a_node_renews_and_ends_only_members_of_its_own(caplog):
    """The thief says who it is, has a token for the job, and names a member of another node."""

    async def converse(address, owner, server):
        async with client_of(address, token_for("j"), THIEF) as thief:
            await thief.register_node(node(node_id=THIEF.node_id, data_address=ELSEWHERE))
            before = await seen(server)
            stealing = beat(progress(epoch=9), node_id=THIEF.node_id, data_address=ELSEWHERE)
            answer = await thief.heartbeat(stealing)
            (verdict,) = answer.verdicts
            assert isinstance(verdict.error, LeaseExpired)
            assert f"is on node {N0} now" in str(verdict.error)
            assert answer.jobs == (), "no key of a job of which it has no member"
            (line,) = claims(caplog)
            for lost in (True, False):
                await thief.leave(leave(lost=lost, node_id=THIEF.node_id))
                assert claims(caplog) == [line]
            assert f"node={THIEF.node_id} job=j member=m0-i1 " in line
            assert f"it has joined through the node {N0} last" in line
            assert await seen(server) == before
            # The owner's own calls leave none.
            await owner.heartbeat(beat(progress(), data_address=HERE))
            await owner.leave(leave(lost=True))
            await thief.leave(leave(node_id=THIEF.node_id))
            assert claims(caplog) == []

    conversation(converse)


def test_a_node_that_was_started_again_gets_its_trainers_places_back(tmp_path):
    """It has another id. Its trainers open their jobs again, as the members that they were."""
    again = identity("n0-started-again")

    async def converse(address, owner, server):
        async with client_of(address, TRUSTED, again) as client:
            here = {"node_id": again.node_id, "data_address": HERE}
            await client.register_node(node(**here))
            joined = await client.join(join(0, 1, node_id=again.node_id))
            assert [one.node_id for one in joined.nodes.nodes] == [again.node_id]
            (verdict,) = (await client.heartbeat(beat(progress(), **here))).verdicts
            assert verdict.error is None
            # What the former process left behind on the wire ends nothing.
            await owner.leave(leave(lost=True))
            (late,) = (await owner.heartbeat(beat(progress()))).verdicts
            assert isinstance(late.error, LeaseExpired)
            (verdict,) = (await client.heartbeat(beat(progress(), **here))).verdicts
            assert verdict.error is None

    conversation(converse)


def test_a_coordinator_that_was_started_again_knows_nodes_before_they_have_called(tmp_path, caplog):
    async def converse(address, owner, server):
        await server.stop(0.0)
        config = CoordinatorConfig(VERSION, str(tmp_path / "c.sqlite"), lease_s=60.0)
        second = CoordinatorServer(config, "127.0.0.1:0", CHECKED)
        address = await second.start()
        try:
            async with client_of(address, TRUSTED, THIEF) as thief:
                for call in AS_ANOTHER.values():
                    with pytest.raises(AccessDenied, match="whose secret it does not show"):
                        await call(thief)
            assert len(refusals(caplog)) == len(AS_ANOTHER)
            async with client_of(address, TRUSTED) as owner:
                (verdict,) = (await owner.heartbeat(beat(progress()))).verdicts
                assert verdict.error is None
        finally:
            await second.stop(0.0)

    conversation(converse, tmp_path / "c.sqlite")
