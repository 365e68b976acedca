"""What a coordinator costs with many nodes: real gRPC, with TLS and a token.

python tests/many_nodes.py [--nodes 1000] [--makers 0] [--ranks 10] [--plain]

Simulated nodes of one process register, join their ranks and send heartbeats every two seconds; the
processor time and memory of the coordinator's process are printed. Both processes share the machine,
so latencies are those of the client, too. With makers, which are more nodes without ranks, the
others are short of workers.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from certificates import Authority

from dataplane.model.config import PROTOCOL_VERSION, VERSION, JobSpec
from dataplane.model.records import Topology
from dataplane.rpc.calls import CoordinatorClient
from dataplane.rpc.membership import (
    HeartbeatRequest,
    JoinRequest,
    KnownNodes,
    MemberProgress,
    RegisterNodeRequest,
)
from dataplane.security.node_identity import identity_of
from dataplane.security.security import Security
from dataplane.security.tls import Certificates
from dataplane.security.tokens import TokenSource

TOKEN = "the-token-of-a-load-test-0123456789-0123456789"
PERIOD_S = 2.0
SETTLE_S = 5.0
MEASURE_S = 20.0


class Nodes:
    """Simulated nodes. `took_s` are the times of their heartbeats, `told` of them told the nodes of
    the job, `seen` at most.
    """

    def __init__(
        self, address: str, security: Security, count: int, makers: int, ranks: int
    ) -> None:
        self.address, self.security, self.makers, self.ranks = address, security, makers, ranks
        self.with_ranks, self.count = count, count + makers
        self.joined = asyncio.Semaphore(0)
        self.stop = asyncio.Event()
        self.took_s: list[float] = []
        self.told = self.seen = 0

    async def run(self, number: int) -> None:
        identity = identity_of(f"n{number}", number.to_bytes(32))
        name = identity.node_id
        client = CoordinatorClient(self.address, self.security, 30, 120, identity)
        address = f"10.0.{number // 256}.{number % 256}:7078"
        ranks = self.ranks if number < self.with_ranks else 0
        is_short = bool(self.makers and ranks)
        node = RegisterNodeRequest(
            name, f"h{number}", number, VERSION, PROTOCOL_VERSION, address, 1 << 40, 8
        )
        known: tuple[KnownNodes, ...] = ()
        await client.register_node(node)
        members = tuple([await self._join(client, name, number * ranks + i) for i in range(ranks)])
        self.joined.release()
        due = time.monotonic() + PERIOD_S * number / self.count
        while not self.stop.is_set():
            await asyncio.sleep(max(0, due - time.monotonic()))
            due += PERIOD_S
            began = time.monotonic()
            request = HeartbeatRequest(node, members, known=known, is_short=is_short)
            answer = await client.heartbeat(request)
            self.took_s.append(time.monotonic() - began)
            for nodes in answer.jobs:
                known, self.told = (KnownNodes(nodes.job_id, nodes.version),), self.told + 1
                self.seen = max(self.seen, len(nodes.nodes))
            assert all(verdict.error is None for verdict in answer.verdicts)
        await client.close()

    async def _join(self, client: CoordinatorClient, name: str, rank: int) -> MemberProgress:
        size = self.with_ranks * self.ranks
        place = Topology(dp_rank=rank, dp_size=size, rank=rank, world_size=size)
        spec, member = JobSpec("f" * 32, global_batch=size), f"m{rank}"
        request = JoinRequest("job", "s3://b", spec, place, "i", member, name, 10**9)
        return MemberProgress("job", member, (await client.join(request)).generation)


def _tell(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


async def measure(nodes: Nodes, coordinator: psutil.Process) -> None:
    began = time.monotonic()
    tasks = [asyncio.create_task(nodes.run(number)) for number in range(nodes.count)]
    for _ in tasks:
        await nodes.joined.acquire()
    spent_s, span_s = sum(coordinator.cpu_times()[:2]), time.monotonic() - began
    _tell(f"all joined after {span_s:.1f} s, in which the coordinator took {spent_s:.1f} s of CPU")
    told = -1
    while told != nodes.told:  # until each knows all others, and late heartbeats are made up for
        told = nodes.told
        await asyncio.sleep(SETTLE_S)
    _tell(f"{nodes.told} heartbeats told the nodes of the job, {nodes.seen} at most")
    nodes.took_s.clear()
    cpu_s, began = sum(coordinator.cpu_times()[:2]), time.monotonic()
    await asyncio.sleep(MEASURE_S)
    assert not any(task.done() for task in tasks), "a node has failed"
    cpu_s, span_s = sum(coordinator.cpu_times()[:2]) - cpu_s, time.monotonic() - began
    took_s = sorted(nodes.took_s)
    _tell(
        f"{len(took_s) / span_s:.0f} heartbeats/s, of {nodes.ranks} ranks or of makers: {cpu_s / span_s:.2f} cores, "
        f"{coordinator.memory_info().rss / 1e6:.0f} MB; p50 {took_s[len(took_s) // 2] * 1e3:.1f} ms, "
        f"p99 {took_s[len(took_s) * 99 // 100] * 1e3:.1f} ms"
    )
    nodes.stop.set()
    await asyncio.gather(*tasks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--makers", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=10)
    parser.add_argument("--plain", action="store_true", help="without TLS")
    given = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with tempfile.TemporaryDirectory() as folder:
        environ = {**os.environ, "DATAPLANE_TOKEN": TOKEN, "DATAPLANE_STATE_DIR": folder}
        environ["DATAPLANE_LEASE_S"] = "300"  # all join before the first beats
        tls = None
        if not given.plain:
            files = Authority.made().write(Path(folder), "tls")
            tls = Certificates(files)
            for name in ("cert", "key", "ca"):
                environ[f"DATAPLANE_TLS_{name.upper()}"] = getattr(files, name)
        command = [sys.executable, "-m", "dataplane", "serve", "--coordinator"]
        with subprocess.Popen(
            [*command, "--listen", "127.0.0.1:0"], stdout=subprocess.PIPE, text=True, env=environ
        ) as process:
            assert process.stdout is not None
            try:
                address = process.stdout.readline().split()[-1]
                security = Security(TokenSource("this test", (TOKEN,)), tls=tls)
                nodes = Nodes(address, security, given.nodes, given.makers, given.ranks)
                asyncio.run(measure(nodes, psutil.Process(process.pid)))
            finally:
                process.kill()


if __name__ == "__main__":
    main()
