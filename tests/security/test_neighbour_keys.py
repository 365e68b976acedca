"""The keys of neighbours: who gets one, and where they are not."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jwt
import membership
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from membership import VERSION, progress
from msgspec import structs
from trusted import (
    CONFIG,
    LOCAL,
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

from dataplane.coordinator.front import Coordinator, CoordinatorConfig
from dataplane.coordinator.server import CoordinatorServer
from dataplane.model.errors import AccessDenied, ConfigError, LeaseExpired
from dataplane.rpc.calls import CoordinatorClient
from dataplane.rpc.codec import encode
from dataplane.rpc.membership import JobNodes, StatusRequest
from dataplane.rpc.sharing import ManifestState, ManifestTurn
from dataplane.security.jwts import Jwts
from dataplane.security.node_identity import (
    SECRET_BYTES,
    NeighbourKeys,
    identity_of,
    is_of,
    keys_in,
    own_identity,
    own_keys,
)
from dataplane.security.security import Security
from dataplane.security.tokens import TokenSource, find

ADDRESS = "10.0.0.1:7078"
MAKER = identity("maker")


def test_a_key_is_of_one_secret_one_job_and_one_generation():
    one, other = own_keys(), own_keys()
    made = [
        keys.key(job, generation)
        for keys in (one, other)
        for job in ("j", "k", "j\0")
        for generation in (1, 2, 256)
    ]
    assert len({*made, one.salt, other.salt}) == len(made) + 2
    assert all(len(key) == 32 for key in made)
    assert NeighbourKeys(one._secret).key("j", 1) == one.key("j", 1)


def test_the_secret_is_private_and_made_once(tmp_path):
    path = tmp_path / "state" / "neighbours.key"
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: keys_in(path).key("j", 1), range(8)))
    assert len(set(found)) == 1
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(path.parent.iterdir()) == [path]
    assert keys_in(path).key("j", 1) == found[0]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda path: path.chmod(0o640), r"mode 0640: only its owner.*chmod 600"),
        (lambda path: path.write_text("abc\n"), "is not a secret of 64 hex digits: remove it"),
        (lambda path: path.write_text("x" * 65), "is not a secret of 64 hex digits: remove it"),
        (lambda path: path.write_bytes(b"\xff" * 65), "is not a secret of 64 hex digits"),
        (lambda path: path.write_text(path.read_text() * 2), "more than 65 bytes"),
        (lambda path: (path.unlink(), path.mkdir()), "only its owner|cannot be read"),
    ],
    ids=["readable", "short", "no digits", "no text", "long", "a folder"],
)
def test_a_secret_that_cannot_be_used_is_fatal_and_not_shown(tmp_path, spoil, words):
    path = tmp_path / "neighbours.key"
    keys_in(path)
    secret = path.read_text().strip()
    spoil(path)

    async def start():
        config = CoordinatorConfig(VERSION, str(tmp_path / "c.sqlite"), key_file=str(path))
        await Coordinator(config).start()

    with pytest.raises(ConfigError, match=words) as caught:
        asyncio.run(start())
    assert secret not in str(caught.value)


def test_a_state_directory_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "state").write_text("a file")
    with pytest.raises(ConfigError, match=r"(?m)secret .* cannot be created.*--state-dir$"):
        keys_in(tmp_path / "state" / "neighbours.key")


def shapes(secret: bytes) -> list[bytes]:
    """How these bytes would look in a text or a file."""
    texts = [secret.hex(), secret.hex().upper(), base64.b64encode(secret).decode(), repr(secret)]
    return [secret, *(text.strip("='b").encode() for text in texts)]


async def as_maker(client, coordinator):
    """Return what a maker hears of a job that is short of workers."""
    await client.register_node(node(node_id=MAKER.node_id, data_address=ADDRESS))
    await coordinator.register_node(membership.node("n1", worker_count=0))
    await coordinator.join(membership.join(0, job="short", node_id="n1"))
    told = await client.heartbeat(beat(node_id=MAKER.node_id, data_address=ADDRESS))
    assert [one.job_id for one in told.jobs] == ["short"]
    await coordinator.leave(membership.leave(job="short", node_id="n1"))
    return told


def test_no_secret_or_key_is_in_a_log_a_repr_the_ledger_a_status_or_an_error(
    tmp_path, caplog, capfd
):
    files = Path(tmp_path, "state")
    told: list[object] = []

    async def main():
        config = CoordinatorConfig(
            VERSION, str(files / "c.sqlite"), key_file=str(files / "neighbours.key")
        )
        for _ in range(2):  # also after a restart
            server = CoordinatorServer(config, "127.0.0.1:0", TRUSTED)
            address = await server.start()
            client = CoordinatorClient(address, TRUSTED, patience_s=0.0, identity=OWN)
            await client.register_node(node(data_address=ADDRESS))
            joined = await client.join(join(0))
            beaten = await client.heartbeat(beat(progress(), data_address=ADDRESS))
            assert joined.nodes == beaten.jobs[0]
            told.extend((joined, beaten, server.coordinator, TRUSTED))
            maker = CoordinatorClient(address, TRUSTED, patience_s=0.0, identity=MAKER)
            told.append(await as_maker(maker, server.coordinator))
            await maker.close()
            found = await client.status(StatusRequest())
            assert found.jobs[0].nodes_version == joined.nodes.version
            assert [one.is_short for one in found.nodes] == [False, False, True]
            told.append(msgspec.json.encode(found))
            with pytest.raises(ConfigError) as caught:
                await client.join(join(1, member="m0-i1"))
            told.append(caught.value)
            await client.leave(leave("m1-i1"))
            await client.close()
            await server.stop(0.0)

    with caplog.at_level(logging.DEBUG), caplog.at_level(logging.DEBUG, "dataplane"):
        asyncio.run(main())
    keys = keys_in(files / "neighbours.key")
    key = keys.key("j", 1)
    assert isinstance(told[0].nodes, JobNodes)
    assert key == told[0].nodes.key
    assert key == told[7].nodes.key
    assert key in encode(told[0]), "this test would find it"
    makers_key = keys.key("short", 1)
    assert makers_key == told[4].jobs[0].key
    told += [keys, repr(keys), OWN, MAKER, caplog.text, *capfd.readouterr()]
    texts = [one if isinstance(one, bytes) else f"{one!r} {one}".encode() for one in told]
    others = [path for path in files.iterdir() if path.name != "neighbours.key"]
    assert "c.sqlite" in {path.name for path in others}
    texts += [path.read_bytes() for path in others]
    secrets = (key, makers_key, keys._secret, OWN.secret, MAKER.secret)
    for one in (shape for secret in secrets for shape in shapes(secret)):
        assert not any(one in text for text in texts)
    caplog.clear()


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
    """Return the status of the job and its node, as people and other nodes see it."""
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


ONE, OTHER = "one-token-0123456789", "other-token-0123456789"


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


CLOCK = Clock()


def source(tmp_path, environ=None, token_file="", makes=True, clock=CLOCK):
    return find(environ or {}, str(token_file), str(tmp_path / "state"), makes=makes, clock=clock)


def test_the_variable_comes_before_the_file_and_the_file_before_the_own_token(tmp_path):
    (tmp_path / "given").write_text(f"{ONE}\n")
    given = source(tmp_path, {"DATAPLANE_TOKEN": OTHER}, tmp_path / "given")
    assert given.first() == OTHER
    assert source(tmp_path, {}, tmp_path / "given").first() == ONE
    assert not (tmp_path / "state").exists()
    early = source(tmp_path, makes=False)
    assert early.first() == ""
    assert Security(early).metadata() == ()
    assert "This process has no token" in Security(early).advice()
    own = source(tmp_path).first()
    assert len(own) >= 32
    assert source(tmp_path, makes=False).first() == own
    # Nodes may start before the first coordinator, and find what it has created at once.
    assert early.first() == own
    (tmp_path / "state" / "token").unlink()
    assert early.first() == own


def test_the_own_token_is_private_and_made_once(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: source(tmp_path).first(), range(8)))
    assert len(set(found)) == 1
    path = tmp_path / "state" / "token"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert list(path.parent.iterdir()) == [path]
    path.chmod(0o640)
    with pytest.raises(ConfigError, match=r"mode 0640: only its owner.*chmod 600"):
        source(tmp_path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot be read"),
        ("", "has 0 tokens"),
        ("short\n", "cannot be a token"),
        (f"{ONE} {OTHER}\n", "cannot be a token"),
        (f"{ONE}ü\n", "cannot be a token"),
        (f"{ONE}\n" * 9, "has 9 tokens"),
        ("x" * 5000, "cannot be a token"),
    ],
)
def test_a_source_that_cannot_be_used_is_fatal_and_shows_nothing_of_it(tmp_path, text, words):
    source(tmp_path)  # there would be another one
    path = tmp_path / "given"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=words) as caught:
        source(tmp_path, {}, path)
    assert ONE not in str(caught.value)
    with pytest.raises(ConfigError, match=words if text else "tokens"):
        source(tmp_path, {"DATAPLANE_TOKEN": text or ""})


def test_a_state_directory_where_no_token_can_be_written_is_named(tmp_path):
    (tmp_path / "state").write_text("a file")
    with pytest.raises(ConfigError, match=r"cannot be created.*--state-dir"):
        source(tmp_path)


def test_a_changed_file_is_read_again_and_a_broken_one_changes_nothing(tmp_path, caplog):
    clock, path = Clock(), tmp_path / "given"
    path.write_text(ONE)
    found = source(tmp_path, {}, path, clock=clock)
    path.write_text(f"{OTHER}\n{ONE}\n")
    assert found.first() == ONE  # it looks once a second
    clock.now += 1
    assert found.first() == OTHER
    assert found.accepts(ONE)
    assert found.accepts(OTHER)
    path.unlink()
    clock.now += 1
    assert found.first() == OTHER
    assert "what was read last stays" in caplog.text
    path.write_text(f"{OTHER}\n")
    clock.now += 1
    assert not found.accepts(ONE)
    assert not found.accepts("")
    assert not found.accepts("ü")
    caplog.clear()


def test_no_text_of_it_contains_the_token(tmp_path):
    found = source(tmp_path, {"DATAPLANE_TOKEN": ONE})
    security = Security(found)
    for text in (repr(found), str(found), repr(security), str(security), security.advice()):
        assert ONE not in text
    assert "$DATAPLANE_TOKEN" in security.advice()
    assert "This process has no token" in Security().advice()


# -- Who is told where a manifest is, over gRPC with real tokens


NAMES = ("maker", "some", "liar")
IDS = {name: identity(name).node_id for name in NAMES}


def token(**limits):
    claims = {"aud": "dataplane", "exp": time.time() + 600, "roles": ["node"], **limits}
    return Security(TokenSource("a test", (jwt.encode(claims, TOKEN, "HS256"),)))


def test_a_manifest_is_told_of_to_nodes_that_may_read_its_urls_and_under_no_other_ones():
    """`liar` knows the hash of the dataset, which follows from its urls."""

    async def denied(call):
        with pytest.raises(AccessDenied, match="its token does not allow"):
            await call

    async def converse(maker, some, liar):
        making = share(node_id=IDS["maker"])
        assert (await maker.share_manifest(making)).turn is ManifestTurn.MAKE
        held = structs.replace(making, state=ManifestState.HELD, fingerprint="f")
        kept = await maker.share_manifest(held)
        assert (kept.turn, len(kept.key)) == (ManifestTurn.KEEP, 32)
        assert kept.key.hex() not in repr(kept)
        assert repr(kept.key) not in repr(kept)
        found = await some.share_manifest(share(node_id=IDS["some"]))
        assert (found.turn, found.key) == (ManifestTurn.FETCH, kept.key)
        for urls in (("s3://b/x/",), (), ("s3://b/x/", "s3://other/")):
            await denied(liar.share_manifest(share(node_id=IDS["liar"], urls=urls)))
        own = await liar.share_manifest(share(node_id=IDS["liar"], urls=("s3://other/",)))
        assert (own.turn, own.key) == (ManifestTurn.MAKE, b"")

    async def main():
        server = CoordinatorServer(
            CONFIG, LOCAL, Security(TRUSTED.tokens, jwts=Jwts(TRUSTED.tokens))
        )
        address = await server.start()
        tokens = (TRUSTED, token(datasets=["s3://b"]), token(datasets=["s3://other"]))
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(server.stop, 0.0)
            clients = [
                await stack.enter_async_context(client_of(address, each, identity(name)))
                for each, name in zip(tokens, NAMES, strict=True)
            ]
            await converse(*clients)

    asyncio.run(main())
