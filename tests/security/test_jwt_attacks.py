"""Tokens that are not right, over the wire: each call is refused with one line of the log, and the
job of those whose token is right goes on as if nobody had come.
"""

from __future__ import annotations

import asyncio
import base64
import json
import time

import jwt
import pytest
from membership import VERSION, progress
from trusted import (
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
from dataplane.model.errors import AccessDenied
from dataplane.rpc.membership import ChangeRequest, LedgerRequest, StatusRequest
from dataplane.rpc.services import coordinator_methods
from dataplane.security.jwts import Jwts
from dataplane.security.security import Security
from dataplane.security.tokens import TokenSource

CHECKED = Security(TRUSTED.tokens, jwts=Jwts(TRUSTED.tokens))
THIEF = identity("thief")
ALL_ROLES = ["node", "trainer", "admin"]


def claims(**changed):
    found = {"aud": "dataplane", "exp": time.time() + 3600, "roles": ALL_ROLES, **changed}
    return {name: value for name, value in found.items() if value is not None}


def made(secret=TOKEN, **changed):
    return jwt.encode(claims(**changed), secret, "HS256")


def unsigned(algorithm):
    """As a hostile client writes it: PyJWT makes none of these."""
    parts = (json.dumps(part).encode() for part in ({"alg": algorithm, "typ": "JWT"}, claims()))
    return ".".join(base64.urlsafe_b64encode(part).decode().rstrip("=") for part in parts) + "."


TOKENS = {
    "expired": (lambda: made(exp=time.time() - 60), "the token has expired"),
    "without an end": (lambda: made(exp=None), "lacks the claim"),
    "of another audience": (lambda: made(aud="another"), "is not for the audience 'dataplane'"),
    "of an audience in a list": (lambda: made(aud=["a", "b"]), "is not for the audience"),
    "alg=none": (lambda: unsigned("none"), "no key for tokens with the algorithm 'none'"),
    "alg=NONE": (lambda: unsigned("NONE"), "no key for tokens with the algorithm 'NONE'"),
    "alg=HS256, no signature": (lambda: unsigned("HS256"), "is signed with another key"),
    "another secret": (lambda: made("another-secret-" * 3), "is signed with another key"),
    "changed on its way": (lambda: changed(made(roles=["trainer"])), "is signed with another key"),
}


def changed(token):
    """With all roles, and the old signature."""
    head, _, signature = token.split(".")
    body = base64.urlsafe_b64encode(json.dumps(claims()).encode()).decode().rstrip("=")
    return f"{head}.{body}.{signature}"


CALLS = {
    "RegisterNode": lambda one: one.register_node(node(node_id=THIEF.node_id)),
    "Join": lambda one: one.join(join(0, 1, node_id=THIEF.node_id, incarnation="another")),
    "Heartbeat": lambda one: one.heartbeat(beat(progress(epoch=9), node_id=THIEF.node_id)),
    "Leave": lambda one: one.leave(leave(node_id=THIEF.node_id, lost=True)),
    "ShareManifest": lambda one: one.share_manifest(share(node_id=THIEF.node_id)),
    "Status": lambda one: one.status(StatusRequest()),
    "Ledger": lambda one: one.ledger(LedgerRequest("j")),
    "Change": lambda one: one.change(ChangeRequest("j", "a thief")),
}


async def seen(server):
    """What the coordinator knows of the job and its node."""
    found = await server.coordinator.status(StatusRequest())
    (job,) = found.jobs
    members = [(one.member_id, one.node_id, one.state, one.epoch) for one in job.members]
    return job.generation, members, [(one.node_id, one.host) for one in found.nodes]


@pytest.mark.parametrize("kind", TOKENS)
def test_a_token_that_is_not_right_is_refused_every_call_and_nothing_else_is_disturbed(
    kind, caplog
):
    make, why = TOKENS[kind]

    async def main():
        server = CoordinatorServer(CoordinatorConfig(VERSION, lease_s=60.0), "127.0.0.1:0", CHECKED)
        address, token = await server.start(), make()
        stolen = Security(TokenSource("a test", (token,)))
        try:
            async with client_of(address, TRUSTED) as owner:
                await owner.register_node(node())
                await owner.join(join(0, 1))
                before = await seen(server)
                async with client_of(address, stolen, THIEF) as thief:
                    for name, call in CALLS.items():
                        with pytest.raises(AccessDenied, match=why) as caught:
                            await call(thief)
                        assert caught.value.call == name
                        (line,) = refusals(caplog)
                        assert f"call={name} " in line
                        assert why in line
                        assert "peer=ipv4:127.0.0.1:" in line
                        assert token not in line + str(caught.value)
                        assert await seen(server) == before
                        (verdict,) = (await owner.heartbeat(beat(progress()))).verdicts
                        assert verdict.error is None
                assert not caplog.records
        finally:
            await server.stop(0.0)

    asyncio.run(main())


def test_these_calls_are_all_that_there_are():
    assert {method.name for method in coordinator_methods()} == {*CALLS}


def test_the_same_token_is_let_in_if_it_is_right():
    async def main():
        server = CoordinatorServer(CoordinatorConfig(VERSION), "127.0.0.1:0", CHECKED)
        address = await server.start()
        right = Security(TokenSource("a test", (made(aud=["dataplane", "another"]),)))
        try:
            async with client_of(address, right, THIEF) as client:
                await client.join(join(0, 1, node_id=THIEF.node_id))
                assert len((await client.status(StatusRequest())).jobs) == 1
        finally:
            await server.stop(0.0)

    asyncio.run(main())
