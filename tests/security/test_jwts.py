"""JSON Web Tokens: which are refused, and what the others allow."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import time

import jwt
import membership
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from membership import SPEC, VERSION, progress
from msgspec import structs
from trusted import (
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
from dataplane.model.config import Stage
from dataplane.model.errors import AccessDenied, ConfigError
from dataplane.model.records import DatasetIdentity
from dataplane.rpc.calls import CoordinatorClient
from dataplane.rpc.membership import (
    ChangeRequest,
    HeartbeatRequest,
    KnownNodes,
    LedgerRequest,
    StatusRequest,
    StepsSkipped,
)
from dataplane.rpc.services import coordinator_methods
from dataplane.security.jwts import Jwts
from dataplane.security.security import Security
from dataplane.security.tokens import Role, TokenSource, WrongTokenError

SECRET = "the-shared-token-of-these-tests-0123456789"
SHARED = TokenSource("the tests", (SECRET,))
ADDRESS = "10.0.0.1:7078"
PEM = (serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


STAGE = Stage("d", 0, 1, 2, DatasetIdentity("c", "l"), unread=True, before=(("", ("s3://c/old",)),))
CHANGED = structs.replace(SPEC, stages=(STAGE,))
"""A job whose first epoch leaves out what was read of other shards."""


def claims(**changed):
    found = {"aud": "dataplane", "exp": time.time() + 3600, "roles": ["node"], **changed}
    return {name: value for name, value in found.items() if value is not None}


def made(secret=SECRET, algorithm="HS256", **changed):
    return jwt.encode(claims(**changed), secret, algorithm)


def unsigned(header):
    """A token with this header and no signature."""
    parts = (json.dumps(part).encode() for part in (header, claims()))
    return ".".join(base64.urlsafe_b64encode(part).decode().rstrip("=") for part in parts) + "."


def refused(token, jwts=None):
    with pytest.raises(WrongTokenError) as caught:
        (jwts or Jwts(SHARED)).caller(token)
    assert token not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("token", "words"),
    [
        (lambda: made(exp=time.time() - 60), "has expired"),
        (lambda: made(exp=None), "lacks the claim"),
        (lambda: made(exp=time.time() + 25 * 3600), "more than 24 hours"),
        (lambda: made(aud="another-service"), "not for the audience 'dataplane'"),
        (lambda: made(aud=None), "lacks the claim"),
        (lambda: made(nbf=time.time() + 600), "not valid yet"),
        (lambda: made("another-secret-0123456789-0123456789"), "signed with another key"),
        (lambda: made(algorithm="HS512", secret=SECRET * 2), "algorithm 'HS512'"),
        (lambda: unsigned({"alg": "none"}), "algorithm 'none'"),
        (lambda: unsigned({"alg": "None", "typ": "JWT"}), "algorithm 'None'"),
        (lambda: unsigned({"alg": "HS256"}), "signed with another key"),
        (lambda: unsigned({"alg": "RS256"}), "algorithm 'RS256'"),
        (lambda: unsigned({}), "algorithm 'None'"),
        (lambda: "eyJ.eyJ.x", "damaged"),
        (lambda: made(roles=["root"]), "`roles`"),
        (lambda: made(roles="node"), "`roles`"),
        (lambda: made(roles=[]), "`roles`"),
        (lambda: made(roles=None), "`roles`"),
        (lambda: made(job=3), "`job`"),
        (lambda: made(datasets="s3://a"), "`datasets`"),
        (lambda: made(datasets=["/data"]), "`datasets`"),
    ],
)
def test_a_token_that_is_not_right_is_refused(token, words):
    assert words in refused(token())


def test_a_public_key_is_no_secret_and_allows_only_its_own_algorithm(tmp_path):
    keys = {"RS256": rsa.generate_private_key(65537, 2048), "ES256": ec.generate_private_key(ec.SECP256R1())}  # fmt: skip
    for algorithm, key in keys.items():
        public = key.public_key().public_bytes(*PEM)
        path = tmp_path / algorithm
        path.write_bytes(public)
        jwts = Jwts(SHARED, str(path))
        assert jwts.caller(made(key, algorithm)).roles == {Role.NODE}
        assert jwts.caller(made()).roles == {Role.NODE}
        other = {"RS256": "ES256", "ES256": "RS256"}[algorithm]
        assert f"algorithm {other!r}" in refused(made(keys[other], other), jwts)
        # The attack on libraries that take the algorithm from the token: PyJWT makes no such one.
        head = unsigned({"alg": "HS256"}).rsplit(".", 1)[0]
        signature = jwt.algorithms.HMACAlgorithm(jwt.algorithms.HMACAlgorithm.SHA256).sign(
            head.encode(), public
        )
        forged = f"{head}.{base64.urlsafe_b64encode(signature).decode().rstrip('=')}"
        assert "signed with another key" in refused(forged, jwts)


@pytest.mark.parametrize(
    "content",
    [
        b"nothing",
        ec.generate_private_key(ec.SECP384R1()).public_key().public_bytes(*PEM),
        rsa.generate_private_key(65537, 1024).public_key().public_bytes(*PEM),
    ],
    ids=["no key", "another curve", "a short key"],
)
def test_a_key_that_cannot_be_used_is_fatal(tmp_path, content):
    (tmp_path / "key").write_bytes(content)
    with pytest.raises(ConfigError, match=r"public key in PEM|must be an RSA key"):
        Jwts(SHARED, str(tmp_path / "key"))


def test_a_short_shared_token_signs_nothing():
    assert "no key" in refused(made("x" * 31 + "y"), Jwts(TokenSource("a test", ("x" * 20,))))


def test_a_token_that_was_right_once_ends_all_the_same_and_with_its_key():
    now, source = [time.time()], TokenSource("a test", (SECRET,))
    jwts = Jwts(source, clock=lambda: now[0])
    token = made(exp=now[0] + 600)
    jwts.caller(token)
    now[0] += 700
    assert "has expired" in refused(token, jwts)
    now[0] -= 700
    jwts.caller(token)
    source._tokens = ("another-shared-token-0123456789-0123456",)
    source.current = lambda: (source._tokens, 1)
    assert "signed with another key" in refused(token, jwts)


def conversation(token, converse):
    conversations({"": token}, lambda clients: converse(clients[""]))


def conversations(tokens, converse, **identities):
    """With a client for each of these tokens, by name, which is the node n0 unless it has another
    identity.
    """

    async def main():
        security = Security(SHARED, jwts=Jwts(SHARED))
        server = CoordinatorServer(CoordinatorConfig(version=VERSION), "127.0.0.1:0", security)
        address = await server.start()
        sources = {name: TokenSource("a test", (token,)) for name, token in tokens.items()}
        clients = {
            name: CoordinatorClient(
                address, Security(source), patience_s=0.0, identity=identities.get(name, OWN)
            )
            for name, source in sources.items()
        }
        try:
            await converse(clients)
        finally:
            for client in clients.values():
                await client.close()
            await server.stop(0.0)

    asyncio.run(main())


async def denied(call, words):
    with pytest.raises(AccessDenied, match=words):
        await call


def test_each_role_makes_its_own_calls_and_no_others():
    async def as_node(client):
        await client.register_node(node())
        await client.join(join(0))
        await client.heartbeat(beat(progress()))
        await client.leave(leave())
        await denied(client.status(StatusRequest()), "for node, which may not make this call")

    async def as_reader(client):
        assert (await client.status(StatusRequest())).version == VERSION
        for call in (
            client.join(join(0)),
            client.register_node(node()),
            client.heartbeat(beat()),
            client.leave(leave()),
        ):
            await denied(call, "which may not make this call")

    conversation(made(), as_node)
    conversation(made(roles=["trainer"]), as_reader)
    conversation(made(roles=["admin"]), as_reader)


def test_a_token_for_one_job_reaches_no_other(caplog):
    async def converse(client):
        await client.join(join(0))
        await client.heartbeat(beat(progress()))
        assert (await client.status(StatusRequest("j"))).jobs[0].job_id == "j"
        await denied(client.status(StatusRequest()), "for the job 'j', and the call names none")
        await denied(
            client.status(StatusRequest("k")), "for the job 'j', and the call asks for 'k'"
        )
        await denied(client.join(join(0, job="k")), "asks for 'k'")
        other = beat(progress(), progress(job="k"))
        await denied(client.heartbeat(other), "asks for 'k'")
        await denied(client.leave(leave(job="k")), "asks for 'k'")
        await client.leave(leave())

    conversation(made(roles=["node", "admin"], job="j"), converse)
    assert sum("call refused" in one.message for one in caplog.records) == 5
    caplog.clear()


def test_a_token_for_some_datasets_joins_no_job_over_others():
    async def converse(client):
        for url in ("s3://a/train/x.parquet", "s3://a/train/*", "s3://a/train/{0..9}/y"):
            await client.join(join(0, urls=(url,)))
        for urls in (
            (),
            ("s3://a/train-2/x",),
            ("s3://a/*",),
            ("s3://a/train/../x",),
            ("s3://a/train/{x,..}/y",),
            ("s3://a/train/%2E%2e/x",),
            ("s3://a/train/x", "file:///etc/passwd"),
            ("s3://a/train/x",) * 100,
        ):
            await denied(client.join(join(0, urls=urls)), "its token does not allow|100 urls")
            await denied(client.share_manifest(share(urls=urls)), "its token does not|100 urls")

    conversation(made(datasets=["s3://a/train"]), converse)


def test_only_a_node_gets_a_key_and_only_of_the_job_that_its_token_is_for():
    """Over gRPC: with tokens for each role, for one job, and for some datasets."""
    registered = node(data_address=ADDRESS)

    async def as_node(client):
        await client.register_node(registered)
        assert len((await client.join(join(0))).nodes.key) == 32
        (nodes,) = (await client.heartbeat(beat(progress(), data_address="10.0.0.1:7078"))).jobs
        assert len(nodes.key) == 32
        # Whoever knows a job's name, and has no member of it, gets nothing.
        assert (await client.heartbeat(beat(progress("m9"), known=(1,)))).jobs == ()

    async def as_reader(client):
        for call in (client.join(join(0)), client.heartbeat(beat(progress()))):
            await denied(call, "which may not make this call")
        await client.status(StatusRequest())

    async def for_a_job(client):
        await client.register_node(registered)
        assert len((await client.join(join(0))).nodes.key) == 32
        await denied(client.join(join(0, job="k")), "asks for 'k'")
        await denied(client.share_manifest(share(job_id="k")), "asks for 'k'")
        known = structs.replace(beat(progress(), known=(1,)).known[0], job_id="k")
        asking = structs.replace(beat(progress()), known=(known,))
        await denied(client.heartbeat(asking), "asks for 'k'")

    async def for_datasets(client):
        await client.register_node(structs.replace(registered, only_under=("s3://everything",)))
        told = (await client.join(join(0, urls=("s3://b/x/*.parquet",)))).nodes
        assert (len(told.key), told.only_under) == (32, ("s3://b/x/",))
        (again,) = (await client.heartbeat(beat(progress(), data_address=ADDRESS))).jobs
        assert again == told
        await denied(client.join(join(0, spec=CHANGED, urls=("s3://b/x",))), "not allow s3://c/old")

    async def for_no_dataset(client):
        await client.register_node(registered)
        answer = await client.heartbeat(HeartbeatRequest(registered))
        assert answer.jobs == ()

    conversation(made(), as_node)
    conversation(SECRET, as_node)
    conversation(made(roles=["trainer"]), as_reader)
    conversation(made(roles=["admin", "trainer"]), as_reader)
    conversation(made(job="j"), for_a_job)
    conversation(made(datasets=["s3://b"]), for_datasets)
    conversation(made(datasets=[]), for_no_dataset)


def test_nodes_that_may_read_a_jobs_dataset_get_one_key_and_others_get_none():
    """Over gRPC: `some` and `more` have tokens for urls above the job's, `all` for everything, and
    `liar` for others: it says that the job reads these.
    """
    names = ("all", "some", "more", "liar")
    identities = {name: identity(name) for name in names}
    ids = {name: one.node_id for name, one in identities.items()}
    url, other = "s3://b/train/*.parquet", "s3://other/x.parquet"

    async def told(client, name, rank, url, incarnation="i1"):
        """By the join, and by the first heartbeat."""
        named = {"node_id": ids[name], "data_address": f"10.0.0.{rank}:7078"}
        await client.register_node(node(**named))
        call = join(rank, 4, incarnation=incarnation, node_id=ids[name], urls=(url,))
        joined = await client.join(call)
        report = progress(f"m{rank}-{incarnation}", joined.generation)
        jobs = (await client.heartbeat(beat(report, **named))).jobs
        assert joined.nodes == (jobs[0] if jobs else None)
        return joined.nodes

    async def converse(clients):
        before = await told(clients["all"], "all", 0, url)
        assert before.only_under == ()
        assert await told(clients["liar"], "liar", 3, other) is None
        assert await told(clients["all"], "all", 0, url) == before, "others hear nothing of it"
        some = await told(clients["some"], "some", 1, url)
        more = await told(clients["more"], "more", 2, url)
        assert some.only_under == more.only_under == ("s3://b/train/",)
        assert some.key == more.key != before.key
        assert sorted(one.node_id for one in more.nodes) == sorted(
            [ids["all"], ids["some"], ids["more"]]
        )
        # It begins a generation itself: then nobody lends what others really read.
        lied = await told(clients["liar"], "liar", 3, other, "i2")
        assert lied.only_under == (other,)
        honest = await told(clients["all"], "all", 0, url, "i2")
        assert (honest.key, honest.only_under) == (lied.key, (other,))
        assert await told(clients["some"], "some", 1, url, "i2") is None

    tokens = {
        "all": SECRET,
        "some": made(datasets=["s3://b/train", "s3://c"]),
        "more": made(datasets=["s3://b"]),
        "liar": made(datasets=["s3://other"]),
    }
    conversations(tokens, converse, **identities)


def test_a_maker_gets_keys_of_the_jobs_that_its_token_allows_and_of_no_others():
    """Over gRPC: jobs j and k are short of workers, and makers have tokens of three kinds."""
    names = ("all", "one", "some")
    identities = {name: identity(f"c-{name}") for name in names}
    ids = {name: one.node_id for name, one in identities.items()}
    registered = {
        name: membership.node(identities[name].node_id, data_address=f"10.0.0.{number}:7078")
        for number, name in enumerate(names)
    }
    # Not what it says counts, but its token.
    registered["one"] = structs.replace(registered["one"], only_job="j")

    async def named_by(job, client):
        await client.join(join(0, 1, job=job))
        beaten = await client.heartbeat(beat(progress(job=job), worker_count=0))
        return [one.node_id for one in beaten.jobs[0].nodes if one.worker_count]

    async def converse(clients):
        for name in names:
            await clients[name].register_node(registered[name])
        trainers = clients["trainers"]
        await trainers.register_node(node(data_address="10.0.1.1:7078", worker_count=0))
        # Nobody asks those that get no key, nor for a job whose key they do not get.
        assert await named_by("j", trainers) == [ids["all"]]
        assert await named_by("k", trainers) == [ids["all"], ids["one"]]
        told = {
            name: (await clients[name].heartbeat(HeartbeatRequest(registered[name]))).jobs
            for name in names
        }
        assert {name: [one.job_id for one in jobs] for name, jobs in told.items()} == {
            "all": ["j", "k"],
            "one": ["k"],
            "some": [],
        }
        assert [len(one.key) for one in told["all"]] == [32, 32]
        # Of another job it hears neither by its name nor in the name of another maker.
        asking = HeartbeatRequest(registered["one"], known=(KnownNodes("j", 1),))
        await denied(clients["one"].heartbeat(asking), "asks for 'j'")
        in_its_name = HeartbeatRequest(registered["all"])
        await denied(clients["one"].heartbeat(in_its_name), "whose secret it does not show")
        await denied(clients["reader"].heartbeat(asking), "may not make this call")

    tokens = {
        "all": made(),
        "one": made(job="k"),
        "some": made(datasets=["s3://b"]),
        "reader": made(roles=["trainer"]),
        "trainers": SECRET,
    }
    conversations(tokens, converse, **identities)


def test_the_ledger_and_the_log_say_whose_token_made_a_change(caplog):
    caplog.set_level(logging.INFO, "dataplane.security")
    wanted = ChangeRequest("j", "root@elsewhere", skip=StepsSkipped(5, 6))
    by = []

    async def converse(clients):
        await clients["node"].join(join(0))
        for number, name in enumerate(("named", "nameless", "shared")):
            skip = StepsSkipped(5 + number, 6 + number)
            by.append((await clients[name].change(structs.replace(wanted, skip=skip))).entry.by)
        await denied(clients["node"].change(wanted), "which may not make this call")

    tokens = {
        "node": made(roles=["node"]),
        "named": made(roles=["admin"], sub="alice@example.com"),
        "nameless": made(roles=["admin"]),
        "shared": SHARED.first(),
    }
    conversations(tokens, converse)
    assert by == ["alice@example.com", "a JWT without sub", "root@elsewhere (by the shared token)"]
    lines = [one.getMessage() for one in caplog.records if "job changed" in one.getMessage()]
    assert [line.partition(" entry=")[0] for line in lines] == [
        "job changed job=j by=alice@example.com kind=skip",
        'job changed job=j by="a JWT without sub" kind=skip',
        'job changed job=j by="root@elsewhere (by the shared token)" kind=skip',
    ]


@pytest.mark.parametrize("sub", [7, "x" * 300, "a\x1b[2J", "\u202e", ["a"]])
def test_a_subject_is_a_name(sub):
    async def converse(client):
        await denied(client.status(StatusRequest()), "its claim `sub`|the token is not valid")

    conversation(made(roles=["admin"], sub=sub), converse)


CHECKED = Security(TRUSTED.tokens, jwts=Jwts(TRUSTED.tokens))
THIEF = identity("thief")
ALL_ROLES = ["node", "trainer", "admin"]


def attack_claims(**changed):
    found = {"aud": "dataplane", "exp": time.time() + 3600, "roles": ALL_ROLES, **changed}
    return {name: value for name, value in found.items() if value is not None}


def attacked(secret=TOKEN, **changed):
    return jwt.encode(attack_claims(**changed), secret, "HS256")


def unsigned_attack(algorithm):
    """Write a token as a hostile client does: PyJWT makes none of these."""
    parts = (
        json.dumps(part).encode() for part in ({"alg": algorithm, "typ": "JWT"}, attack_claims())
    )
    return ".".join(base64.urlsafe_b64encode(part).decode().rstrip("=") for part in parts) + "."


TOKENS = {
    "expired": (lambda: attacked(exp=time.time() - 60), "the token has expired"),
    "without an end": (lambda: attacked(exp=None), "lacks the claim"),
    "of another audience": (
        lambda: attacked(aud="another"),
        "is not for the audience 'dataplane'",
    ),
    "of an audience in a list": (
        lambda: attacked(aud=["a", "b"]),
        "is not for the audience",
    ),
    "alg=none": (
        lambda: unsigned_attack("none"),
        "no key for tokens with the algorithm 'none'",
    ),
    "alg=NONE": (
        lambda: unsigned_attack("NONE"),
        "no key for tokens with the algorithm 'NONE'",
    ),
    "alg=HS256, no signature": (
        lambda: unsigned_attack("HS256"),
        "is signed with another key",
    ),
    "another secret": (
        lambda: attacked("another-secret-" * 3),
        "is signed with another key",
    ),
    "changed on its way": (
        lambda: changed(attacked(roles=["trainer"])),
        "is signed with another key",
    ),
}


def changed(token):
    """With all roles, and the old signature."""
    head, _, signature = token.split(".")
    body = base64.urlsafe_b64encode(json.dumps(attack_claims()).encode()).decode().rstrip("=")
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
    """Return the coordinator's status of the job and its node."""
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
        right = Security(TokenSource("a test", (attacked(aud=["dataplane", "another"]),)))
        try:
            async with client_of(address, right, THIEF) as client:
                await client.join(join(0, 1, node_id=THIEF.node_id))
                assert len((await client.status(StatusRequest())).jobs) == 1
        finally:
            await server.stop(0.0)

    asyncio.run(main())
