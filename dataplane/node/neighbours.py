"""The neighbours of a node: the port at which they reach it, the lender process that sends them
blocks, the nodes of each job as the coordinator reports them, and their use by the engine.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from msgspec import Struct

from dataplane.arena.memfd import Arena
from dataplane.base.trace import Trace
from dataplane.model.config import PeerTls
from dataplane.model.errors import ConfigError
from dataplane.model.records import Region
from dataplane.neighbours.wire import GIVEN_WHOLE, KEY_BYTES
from dataplane.node.dataset import Dataset
from dataplane.plan.cluster import Owners, Weighed
from dataplane.rpc import lending
from dataplane.rpc.address import (
    NO_NEIGHBOURS,
    TcpAddress,
    UnixAddress,
    is_loopback,
    listening,
    parse,
    resolve,
)
from dataplane.rpc.fetches import Neighbour, Peer
from dataplane.rpc.membership import JobNodes, KnownNodes, NeighbourNode
from dataplane.rpc.tasks import BLOCK_ARENA, AttachArena, DetachArena
from dataplane.worker.forking import fork_server
from dataplane.worker.process import HUNG_S, WorkerProcess, kill_all

# -- lender process -------------------------------------------------------------------------------
#
# A node's lender: the process that sends neighbours blocks of the node's block arena, and slabs
# that the node has made for them.
#
# Invariants:
# 1. After each `give`, its `after` is called exactly once, when the lender reports that it no
#    longer reads the regions, or has ended. After `close`, no `after` is called.
# 2. The open requests of a lender that has ended are forgotten: its connections ended with it, so
#    nobody waits for the answers.
# 3. A lender that ends is replaced, after longer and longer pauses while no lender is of use.
# 4. Nothing on the event loop waits for a lender.
# 5. A lender that reads no messages, because it is stopped or stuck, is killed, and 3 applies.
# 6. A new lender gets all arenas that are lent.

_PAUSE_S, _PAUSE_S_MAX = 0.1, 10.0
_NO_LIMIT = 0
_PROBE = lending.ToLender(DetachArena((1 << 64) - 1))
"""Checks whether the lender reads messages; has no effect, since no arena has this number."""

OnAsked = Callable[[lending.Asked], None]
After = Callable[[], object]


class Lending:
    """The lender of a node. Neighbours reach it at `listener`, which then belongs to this object.
    The process is started with the first key. Use this only from the event loop.

    `log` is the log's level and format. With `tls`, all connections use TLS.
    """

    def __init__(
        self,
        listener: socket.socket,
        node_id: str,
        arena: Arena,
        trace: Trace,
        log: tuple[str, str] = ("info", "text"),
        tls: PeerTls | None = None,
    ) -> None:
        self._listener = listener
        self._node_id = node_id
        self._arena = arena
        self._on_asked: OnAsked = lambda request: self.refuse(request.number)
        self._trace = trace
        self._log, self._tls = log, tls
        self._loop = asyncio.get_running_loop()
        self._process: WorkerProcess | None = None
        self._ending: WorkerProcess | None = None
        self._keys: dict[str, lending.LendingKeys] = {}
        self._arenas: dict[int, int] = {}
        self._asked: set[int] = set()
        self._given: dict[int, tuple[After, bool]] = {}
        self._last_number = 0
        self._lent_bytes = 0
        self._pause_s = _PAUSE_S
        self._restart: asyncio.TimerHandle | None = None
        self._is_started = self._closed = False

    def serve(self, on_asked: OnAsked) -> None:
        """Begin to serve neighbours: `on_asked` is called with each request for a block or a slab,
        which `give` or `refuse` must answer, now or later.
        """
        self._on_asked = on_asked

    @property
    def pid(self) -> int:
        """The process id of the lender; 0 while there is none. Waits until it is known."""
        return self._process.pid if self._process is not None else 0

    @property
    def lent_bytes(self) -> int:
        """How many bytes of data neighbours have received so far."""
        return self._lent_bytes

    def keys(
        self, job_id: str, generation: int, key: bytes, only_under: tuple[str, ...] = ()
    ) -> None:
        """Set the 32-byte key of a job, with which neighbours get data under the urls `only_under`,
        or any data if it is (). The key is b"" once the job has left this node. Connections of
        older generations are closed.
        """
        if self._closed:
            return
        assert len(key) in {0, KEY_BYTES}
        keys = lending.LendingKeys(job_id, generation, key, only_under)
        if key:
            self._keys[job_id] = keys
        else:
            self._keys.pop(job_id, None)
        if self._is_started:
            self._send(keys)
        elif key:
            fork_server.acquire()
            self._is_started = True
            self._spawn()

    def lend_arena(self, arena_id: int, fd: int) -> None:
        """Allow regions of this sealed arena to be given. `fd` stays the caller's."""
        self.return_arena(arena_id)
        if not self._closed:
            self._arenas[arena_id] = os.dup(fd)
            self._send(AttachArena(arena_id), (fd,))

    def return_arena(self, arena_id: int) -> None:
        """Stop giving regions of this arena; does nothing if the arena is not lent."""
        fd = self._arenas.pop(arena_id, None)
        if fd is not None:
            os.close(fd)
            self._send(DetachArena(arena_id))

    def give(
        self,
        number: int,
        region: Region,
        arena_id: int = BLOCK_ARENA,
        note: bytes = b"",
        more: tuple[Region, ...] = (),
        ends: tuple[int, ...] = (GIVEN_WHOLE,),
        *,
        after: After = lambda: None,
        is_data: bool = True,
    ) -> None:
        """Answer a request with this region and those of `more`. A slab has a `note`, of at most
        wire.NOTE_BYTES_MAX, and no `ends`; otherwise `ends` say how each block ended, and the
        regions are those of the blocks that were given. `after` is called later, when the regions
        are no longer read, even if the request is not open any more. If `is_data`, the bytes count
        as lent.
        """
        if number in self._asked:
            self._asked.remove(number)
            self._given[number] = after, is_data
            self._send(lending.Give(number, region, arena_id, note, more, ends))
        else:
            self._loop.call_soon(self._over, after)

    def refuse(self, number: int) -> None:
        """Refuse a request: the neighbour reads the store, or has its slab made elsewhere."""
        if number in self._asked:
            self._asked.remove(number)
            self._send(lending.Refuse(number))

    def tick(self) -> None:
        """Replace the lender if it hangs; call it about twice a second."""
        process, now = self._process, time.monotonic()
        if process is not None and process.is_hung(now, _PROBE, self._trace):
            self._end()

    def close(self) -> None:
        """Kill the process and wait a few seconds for its end. May be called twice."""
        if self._closed:
            return
        self._closed = True
        if self._restart is not None:
            self._restart.cancel()
        left = [process for process in (self._process, self._ending) if process is not None]
        kill_all(left, self._trace)
        self._listener.close()
        while self._arenas:
            os.close(self._arenas.popitem()[1])
        if self._is_started:
            fork_server.release()

    def _spawn(self) -> None:
        self._restart = None
        try:
            process = self._process = WorkerProcess.start(None, _NO_LIMIT, "lender", hung_s=HUNG_S)
        except OSError as error:  # out of descriptors
            self._trace.failed("no lender", why=error.strerror)
            self._spawn_later()
            return
        process.listen(lending.FromLender, self._hear, self._end)
        keys = tuple(self._keys.values())
        start = lending.StartLending(
            self._node_id, self._last_number + 1, *self._log, keys, self._tls
        )
        self._send(start, (self._arena.fd, self._listener.fileno()))
        self._trace.started("lender started")
        for arena_id, fd in self._arenas.items():
            self._send(AttachArena(arena_id), (fd,))

    def _send(self, body: lending.ToLenderBody, descriptors: tuple[int, ...] = ()) -> None:
        if self._process is not None:
            self._process.send(lending.ToLender(body), descriptors)

    def _hear(self, said: lending.FromLender) -> None:
        self._pause_s, body = _PAUSE_S, said.body
        if isinstance(body, lending.Given):
            if body.number in self._given:
                after, is_data = self._given.pop(body.number)
                self._lent_bytes += body.sent_bytes if is_data else 0
                after()
        elif body.number > self._last_number:
            self._last_number = body.number + body.request.count - 1
            self._asked.add(body.number)
            self._on_asked(body)

    def _end(self) -> None:
        """End the lender, and ignore its messages. Its regions are free once it is gone."""
        if self._process is None or self._closed:
            return
        process, self._process = self._process, None
        self._ending = process
        self._asked.clear()
        process.end(lambda status: self._on_end(process, status))

    def _on_end(self, process: WorkerProcess, status: int) -> None:
        self._ending = None
        if self._closed:
            return
        self._trace.failed("lender ended", status=status, said=process.last_words)
        given, self._given = self._given, {}
        self._spawn_later()
        for after, _ in given.values():
            self._over(after)

    def _spawn_later(self) -> None:
        self._restart = self._loop.call_later(self._pause_s, self._spawn)
        self._pause_s = min(2 * self._pause_s, _PAUSE_S_MAX)

    def _over(self, after: After) -> None:
        if not self._closed:
            after()


# -- address for neighbours -----------------------------------------------------------------------
#
# The port at which other nodes request blocks from this one.

_trace = Trace("node")

_BACKLOG = 1024
# An address that no host has (RFC 5737), so that the kernel takes the default route to it.
_ELSEWHERE = TcpAddress("192.0.2.1", 9)


def open_data_port(
    wanted: str, coordinator: str, *, is_own: bool = False, is_safe: bool = True
) -> socket.socket | None:
    """Open the listening socket that the setting `data_listen` names; None if there is to be none.

    `is_own`: the coordinator is in this process. `is_safe`: connections are encrypted, or may be
    plain text. May wait for a name server.

    Raises:  ConfigError: the address is taken, or is not an address of this machine.
    """
    if wanted == NO_NEIGHBOURS:
        return None
    if wanted and not wanted.startswith(":"):
        parsed = parse(wanted)
        assert isinstance(parsed, TcpAddress), "the setting allows no other"
        return _listening(resolve(parsed))
    here = _address_here(coordinator)
    if here is None:
        return None
    if not wanted and is_loopback(here) and is_own:
        return None  # nobody on another host can join
    if not wanted and not is_loopback(here) and not is_safe:
        _trace.failed(
            "no data port: this node lends no blocks to other nodes and makes no slabs for them, "
            "since these would cross the network in plain text. --peer-tls, on all nodes, encrypts "
            "them; --data-listen :0 allows plain text, and --data-listen none leaves this line out"
        )
        return None
    return _listening(TcpAddress(here.host, int(wanted.removeprefix(":") or 0)))


def data_address(listener: socket.socket | None) -> str:
    """Return the address at which others reach this socket; "" without one."""
    return "" if listener is None else _bound(listener).target


def reaches_other_hosts(address: str) -> bool:
    """Whether nodes on other hosts can connect to this `data_address`."""
    parsed = parse(address) if address else None
    return isinstance(parsed, TcpAddress) and not is_loopback(parsed)


def _bound(sock: socket.socket) -> TcpAddress:
    host, port = sock.getsockname()[:2]
    return TcpAddress(str(ipaddress.ip_address(host)), port)


def _address_here(coordinator: str) -> TcpAddress | None:
    """Return the address from which this machine reaches the coordinator, or other hosts in general
    if the coordinator's name is unknown. None if the machine has no such address, or if other hosts
    could not connect to it.
    """
    parsed = parse(coordinator)
    if isinstance(parsed, UnixAddress):
        return None
    try:
        there = resolve(parsed)
    except ConfigError:
        there = _ELSEWHERE  # the coordinator may start later than its nodes
    with socket.socket(there.family, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect((there.host, there.port or _ELSEWHERE.port))  # sends nothing
            here = _bound(asking)
        except OSError:
            return None
    return None if ipaddress.ip_address(here.host).is_link_local else here


def _listening(address: TcpAddress) -> socket.socket:
    try:
        return listening(address, _BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"cannot listen for neighbours at {address.target}: {error.strerror}. Give an "
            "address of this machine and a free port with --data-listen HOST:PORT, or none with "
            "--data-listen none",
            key="data_listen",
            found=address.target,
        ) from error


# -- nodes of each job -----------------------------------------------------------------------------


class JobTables:
    """The coordinator's last report on each job. `on_nodes` is called with each report that
    differs from the last one, and `on_nodes_gone` with the id of each job that is forgotten.
    """

    def __init__(
        self,
        on_nodes: Callable[[JobNodes], object],
        on_nodes_gone: Callable[[str], object],
    ) -> None:
        self._on_nodes, self._on_nodes_gone = on_nodes, on_nodes_gone
        self._by_job: dict[str, JobNodes] = {}

    def get(self, job_id: str) -> JobNodes | None:
        """Return the nodes of a job; None if they were not reported."""
        return self._by_job.get(job_id)

    def known(self) -> tuple[KnownNodes, ...]:
        """Return the tables that the coordinator need not send again."""
        return tuple(KnownNodes(nodes.job_id, nodes.version) for nodes in self._by_job.values())

    def joined(self, nodes: JobNodes | None) -> None:
        """Apply the answer to a join. Answers may overtake each other: the newer generation stays,
        and within one generation the next heartbeat reports differences again.
        """
        if nodes is not None and nodes.generation >= self._generation(nodes.job_id):
            self._learn(nodes)

    def told(self, nodes: JobNodes, known: Mapping[str, int]) -> None:
        """Apply the answer to a heartbeat that named these versions as known. The answer applies
        even if its generation is older, since the coordinator has then lost its state, unless a
        join has reported a newer generation since the heartbeat was sent.
        """
        held = self._by_job.get(nodes.job_id)
        is_the_same = held is None or held.version == known.get(nodes.job_id)
        if is_the_same or nodes.generation >= self._generation(nodes.job_id):
            self._learn(nodes)

    def left(self, job_id: str, known: Mapping[str, int]) -> None:
        """Handle a heartbeat's answer that this node no longer makes slabs of this job, unless a
        join has reported the job since the heartbeat, which named these versions, was sent.
        """
        held = self._by_job.get(job_id)
        if held is not None and held.version == known.get(job_id):
            self.forget(job_id)

    def forget(self, job_id: str) -> None:
        """Forget a job that has no members left on this node, and for which the node makes
        no slabs.
        """
        if self._by_job.pop(job_id, None) is not None:
            self._on_nodes_gone(job_id)

    def _generation(self, job_id: str) -> int:
        held = self._by_job.get(job_id)
        return -1 if held is None else held.generation

    def _learn(self, nodes: JobNodes) -> None:
        if nodes != self._by_job.get(nodes.job_id):
            self._by_job[nodes.job_id] = nodes
            self._on_nodes(nodes)


# -- neighbours of the engine ---------------------------------------------------------------------
#
# The neighbours of a node, as its engine knows them: which node owns a block, which nodes make
# slabs, and the lender that answers neighbours.


class _Known(Struct, frozen=True):
    """The nodes of a job, and the `lenders` among them; without two, `owners` is None."""

    nodes: JobNodes
    lenders: tuple[NeighbourNode, ...]
    owners: Owners | None

    @classmethod
    def of(cls, nodes: JobNodes) -> _Known:
        """Select the owners: a node without memory for blocks owns none."""
        lenders = tuple(node for node in nodes.nodes if node.arena_bytes)
        names = [node.disk_id or node.node_id for node in lenders]
        if len({*names}) < len(names):  # a folder was copied to another host: use node ids
            names = [node.node_id for node in lenders]
        weighed = [Weighed(n, node.arena_bytes) for n, node in zip(names, lenders, strict=True)]
        return cls(nodes, lenders, Owners(weighed) if len(lenders) > 1 else None)


class KnownNeighbours:
    """The neighbours of the node `own_id`, by job. The node lends blocks through `lending`, which
    is None if neighbours cannot reach the node.
    """

    def __init__(self, own_id: str = "", lending: Lending | None = None) -> None:
        self._own_id, self.lending = own_id, lending
        self._known: dict[str, _Known] = {}

    def learn(self, nodes: JobNodes) -> None:
        """Note the nodes of a job, which the coordinator has just named."""
        self._known[nodes.job_id] = _Known.of(nodes)

    def forget(self, job_id: str) -> None:
        """Forget the nodes of a job with which this node has nothing to do any more."""
        self._known.pop(job_id, None)

    def owner_of(self, dataset: Dataset, block: int, jobs: Iterable[str]) -> Neighbour | None:
        """Return the node from which to request a block of a dataset that these jobs read here;
        None if this node owns it, or knows no neighbours.
        """
        for job_id in jobs:
            known = self._known.get(job_id)
            if known is not None and known.owners is not None:
                return self._owner(known, known.owners, dataset, block)
        return None

    def makers(self, job_id: str) -> Sequence[Peer]:
        """Return the other nodes that make slabs of a job on request."""
        known = self._known.get(job_id)
        if known is None:
            return ()
        return [
            self._peer(known.nodes, node)
            for node in known.nodes.nodes
            if node.worker_count and node.node_id != self._own_id
        ]

    def _owner(
        self, known: _Known, owners: Owners, dataset: Dataset, block: int
    ) -> Neighbour | None:
        manifest = dataset.manifest
        shard, offset = manifest.block_shard.item(block), manifest.block_offset.item(block)
        owner = known.lenders[owners.of(dataset.digest, shard, offset)]
        if owner.node_id == self._own_id:
            return None
        return Neighbour(self._peer(known.nodes, owner), dataset.digest, block)

    def _peer(self, of: JobNodes, node: NeighbourNode) -> Peer:
        return Peer(node.address, of.job_id, of.generation, of.key, self._own_id, node.node_id)
