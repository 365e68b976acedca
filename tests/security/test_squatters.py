"""Another user's process that takes the place of a coordinator on loopback gets no token."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest
from trusted import TOKEN, client_of, serving

from dataplane.model.errors import PeerLost
from dataplane.rpc.membership import StatusRequest
from dataplane.security.security import Security
from dataplane.security.tokens import TokenSource

OWN = Security(TokenSource("the state directory", (TOKEN,), is_own=True))
NOBODY = 65534
SQUATTER = """
import os, socket, sys
os.setuid(int(sys.argv[1]))
is_6 = ":" in sys.argv[2]
family = socket.AF_INET6 if is_6 else socket.AF_INET
with socket.create_server((sys.argv[2], 0), family=family, dualstack_ipv6=is_6) as server:
    print(server.getsockname()[1], flush=True)
    connection, _ = server.accept()
    print(connection.recv(100))
"""


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.77.0.1"])
def test_the_own_token_is_sent_to_processes_of_the_own_user(host):
    async def main():
        async with serving("0.0.0.0:0" if host == "127.77.0.1" else f"{host}:0",
                           Security(OWN.tokens, insecure=True)) as address:  # fmt: skip
            port = address.rpartition(":")[2]
            async with client_of(f"{host}:{port}", OWN) as client:
                await client.status(StatusRequest())

    asyncio.run(main())


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::"])
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start another user's process")
def test_it_is_not_sent_to_those_of_others(host, caplog):
    async def main(port):
        async with client_of(f"127.0.0.1:{port}", OWN) as client:
            with pytest.raises(PeerLost, match=rf"of user {NOBODY}.*not sent"):
                await client.status(StatusRequest())

    command = [sys.executable, "-c", SQUATTER, str(NOBODY), host]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as squatter:
        assert squatter.stdout is not None
        try:
            asyncio.run(main(squatter.stdout.readline().strip()))
        finally:
            squatter.kill()
        assert squatter.stdout.read() == "", "nobody has connected"
    caplog.clear()
