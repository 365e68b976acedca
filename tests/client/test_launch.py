"""How a trainer starts its node."""

from __future__ import annotations

import subprocess
import sys

import pytest

TRAINER = """
import socket, sys
from dataplane.client.launch import start_node
from dataplane.rpc.messages import DatasetSource

node = "import socket, sys; assert socket.socket(fileno=int(sys.argv[2])).getsockname() == ''"
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
    started = start_node(listener, (sys.executable, "-c", node), DatasetSource(("a.parquet",)))
    sys.exit(started.process.wait())
"""


@pytest.mark.parametrize("closed", ["", "<&-", "<&- >&-", "<&- >&- 2>&-"])
def test_a_node_gets_its_listener_also_from_a_trainer_without_standard_streams(closed):
    command = ["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, TRAINER]
    assert subprocess.run(command, check=False, timeout=60).returncode == 0
