"""Who is told where a manifest is, over gRPC with real tokens."""

from __future__ import annotations

import asyncio
import contextlib
import time

import jwt
import pytest
from msgspec import structs
from trusted import CONFIG, LOCAL, TOKEN, TRUSTED, client_of, identity, share

from dataplane.coordinator.server import CoordinatorServer
from dataplane.model.errors import AccessDenied
from dataplane.rpc.sharing import ManifestState, ManifestTurn
from dataplane.security.jwts import Jwts
from dataplane.security.security import Security
from dataplane.security.tokens import TokenSource

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
