"""Servers and clients in one test process, and what they show each other."""

from __future__ import annotations

import functools
import hashlib
from contextlib import asynccontextmanager

import membership
from membership import VERSION

from dataplane.coordinator.front import CoordinatorConfig
from dataplane.coordinator.server import CoordinatorServer
from dataplane.rpc.calls import CoordinatorClient
from dataplane.rpc.sharing import ShareManifestRequest
from dataplane.security.node_identity import identity_of
from dataplane.security.security import Security
from dataplane.security.tokens import TokenSource

TOKEN = "a-token-that-only-tests-know-0123456789"
TRUSTED = Security(TokenSource("the tests", (TOKEN,)))
STRANGER = Security()
CONFIG = CoordinatorConfig(version=VERSION, lease_s=60.0)
LOCAL = "127.0.0.1:0"


def identity(name):
    """The same for the same name."""
    return identity_of(name, hashlib.sha256(name.encode()).digest())


OWN = identity("n0")
N0 = OWN.node_id
# Requests of that node.
node = functools.partial(membership.node, node_id=N0)
join = functools.partial(membership.join, node_id=N0)
beat = functools.partial(membership.beat, node_id=N0)
leave = functools.partial(membership.leave, node_id=N0)


def share(**others):
    """Return a request of the node to open a dataset of the job j."""
    fields = {"urls": ("s3://b/x/",), "data_address": "10.0.0.1:7078", **others}
    return ShareManifestRequest(
        fields.pop("node_id", N0), fields.pop("job_id", "j"), "i1", bytes(16), **fields
    )


@asynccontextmanager
async def serving(address=LOCAL, security=TRUSTED):
    server = CoordinatorServer(CONFIG, address, security)
    try:
        yield await server.start()
    finally:
        await server.stop(0.0)


@asynccontextmanager
async def client_of(address, security, identity=OWN):
    client = CoordinatorClient(address, security, patience_s=0.0, identity=identity)
    try:
        yield client
    finally:
        await client.close()


def refusals(caplog):
    found = [one.getMessage() for one in caplog.records if "call refused" in one.getMessage()]
    caplog.clear()
    return found
