"""JSON Web Tokens: which are refused, and what the others allow."""

from __future__ import annotations

import asyncio
import base64
import json
import time

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from membership import VERSION, beat, join, leave, node, progress

from dataplane.coordinator.front import CoordinatorConfig
from dataplane.coordinator.server import CoordinatorServer
from dataplane.errors import AccessDenied, ConfigError
from dataplane.rpc.calls import CoordinatorClient
from dataplane.rpc.membership import StatusRequest
from dataplane.security.calls import Role, WrongTokenError
from dataplane.security.jwts import Jwts
from dataplane.security.security import Security
from dataplane.security.tokens import TokenSource

SECRET = "the-shared-token-of-these-tests-0123456789"
SHARED = TokenSource("the tests", (SECRET,))
PEM = (serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


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
    async def main():
        security = Security(SHARED, jwts=Jwts(SHARED))
        server = CoordinatorServer(CoordinatorConfig(version=VERSION), "127.0.0.1:0", security)
        address = await server.start()
        client = CoordinatorClient(
            address, Security(TokenSource("a test", (token,))), patience_s=0.0
        )
        try:
            await converse(client)
        finally:
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

    conversation(made(datasets=["s3://a/train"]), converse)
