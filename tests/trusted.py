"""Servers and clients in one test process, and what they show each other."""

from __future__ import annotations

from contextlib import asynccontextmanager

from membership import VERSION

from dataplane.coordinator.front import CoordinatorConfig
from dataplane.coordinator.server import CoordinatorServer
from dataplane.rpc.calls import CoordinatorClient
from dataplane.security.security import Security
from dataplane.security.tokens import TokenSource

TOKEN = "a-token-that-only-tests-know-0123456789"
TRUSTED = Security(TokenSource("the tests", (TOKEN,)))
STRANGER = Security()
CONFIG = CoordinatorConfig(version=VERSION, lease_s=60.0)
LOCAL = "127.0.0.1:0"


@asynccontextmanager
async def serving(address=LOCAL, security=TRUSTED):
    server = CoordinatorServer(CONFIG, address, security)
    try:
        yield await server.start()
    finally:
        await server.stop(0.0)


@asynccontextmanager
async def client_of(address, security):
    client = CoordinatorClient(address, security, patience_s=0.0)
    try:
        yield client
    finally:
        await client.close()


def refusals(caplog):
    found = [one.getMessage() for one in caplog.records if "call refused" in one.getMessage()]
    caplog.clear()
    return found
