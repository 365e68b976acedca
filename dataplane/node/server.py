"""The node process: sockets, signals, clocks. It decides nothing; engine and jobs do.

A trainer is one connection. Everything it held is freed when the connection ends.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator
from functools import partial
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from dataplane.arena.memfd import Arena
from dataplane.base import background
from dataplane.base.trace import QUIET, Trace
from dataplane.base.watchdog import Watchdog
from dataplane.metrics.table import Reading
from dataplane.model.config import PROTOCOL_VERSION, VERSION, NodeConfig
from dataplane.model.errors import ConfigError, DataplaneError, PeerLost, VersionMismatch
from dataplane.node.door import Door, done_before, wait_stop
from dataplane.node.engine import Engine
from dataplane.node.fetch import Fetcher
from dataplane.node.heartbeat import Heartbeat, readings_of_node
from dataplane.node.jobs import Jobs
from dataplane.node.making import Neighbourhood
from dataplane.node.manifests import EarlyOpening, ManifestSources, NodeStores
from dataplane.node.member import ServedMember, describe
from dataplane.node.neighbours import KnownNeighbours, Lending, data_address, open_data_port
from dataplane.node.opener import DatasetOpener
from dataplane.node.pool import WorkerPool
from dataplane.node.shared_manifests import LentManifests, SharedManifests
from dataplane.node.stored import FolderTakenError, open_cache_folder
from dataplane.rpc import local, messages
from dataplane.rpc.base import Coordination
from dataplane.rpc.bounds import VALUES_MAX
from dataplane.rpc.codec import encode
from dataplane.scheduler.autoscaler import Autoscaler
from dataplane.scheduler.scheduler import Scheduler

__all__ = ["FolderTakenError", "open_cache_folder", "open_data_port"]

_TICK_S, _WORK_S, _FIRST_CONNECTION_S, _DRAIN_SAID_S = 0.5, 1.0, 30.0, 60.0
_LAST_PIDS, _OUTBOX_MAX, _MESSAGES_A_TURN, _REQUESTS_MAX = 64, 1024, 16, 4
_REFUSED_PAUSE_S, _TURN_S, _CAUGHT_UP_S = 0.05, 0.005, 1.0
_JOB_COST_S, _UNPAID_S_MAX = 0.1, 3.2
"""A process may open 32 jobs at once, and then ten a second: opening a job, and freeing its memory,
takes the event loop some milliseconds."""
_JOBS_MAX, _STREAMS_MAX, _SLABS_AWAITED_MAX = 16, 256, 1024
_SHORT_BYTES = 2048
"""Messages of at most this length are parsed on the event loop, longer ones in a thread."""
_PARSE_PAUSES, _PARSE_PAUSE_S_MAX = 4.0, 5.0
T = TypeVar("T")


class _Process:
    """Rations turns by process, so that a process gains nothing by opening more connections."""

    def __init__(self) -> None:
        self.connections: set[TrainerConnection] = set()
        self._parsing = asyncio.Lock()
        self._starting = asyncio.Lock()
        self._paid_at = 0.0

    async def turn(self, cost_s: float) -> None:
        """Wait until the next request may start. Requests start one by one, but none waits for the
        previous one to end, since members of a job wait for each other. A process that starts
        requests faster than their costs allow is slowed down, once its allowance is used up.
        """
        await self._starting.acquire()
        loop = asyncio.get_running_loop()
        self._paid_at = max(self._paid_at, loop.time()) + cost_s
        after_s = max(_TURN_S, self._paid_at - loop.time() - _UNPAID_S_MAX)
        loop.call_later(after_s, self._starting.release)
        loop.call_at(self._paid_at, self._remembered)

    async def caught_up(self, opening: TrainerConnection) -> None:
        """Wait until what the process had sent on other connections was read, a second at most: on
        one of them it may have left the job that it opens again on this one.
        """
        others, end = self.connections - {opening}, time.monotonic() + _CAUGHT_UP_S
        while others and time.monotonic() < end:
            others = {one for one in others & self.connections if local.has_packet(one.fileno())}
            await asyncio.sleep(_TURN_S if others else 0)

    async def parse(self, read: Callable[[], T]) -> T:
        """Return the message that `read` parses, in a thread. Afterwards, the next long message of
        this process, on any connection, waits in proportion to the time that this one took.
        """
        await self._parsing.acquire()
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            return await asyncio.to_thread(read)
        finally:
            pause_s = _PARSE_PAUSES * (loop.time() - began)
            loop.call_later(min(pause_s, _PARSE_PAUSE_S_MAX), self._parsed)

    def _parsed(self) -> None:
        self._parsing.release()

    def _remembered(self) -> None:
        """Do nothing: the pending timer keeps the object alive after its connections have ended."""


class TrainerConnection:
    """One trainer's connection. To leave others their turns, the node reads a few messages at a
    time, and none while many requests are in progress or a thread parses a long message.
    """

    def __init__(self, server: NodeServer, sock: socket.socket) -> None:
        self._server = server
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._outbox: deque[tuple[int, bytes, tuple[int, ...]]] = deque()
        self._members: dict[str, ServedMember] = {}
        self._streams: dict[int, ServedMember] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._awaited_slabs: dict[int, int] = {}
        """The stream of each slab that was requested, by the number of the request."""
        self._greeted = self._is_parsing = self._is_reading = self.closed = False
        self.pid = local.peer_credentials(sock)[0]
        self._process = server.process_of(self.pid)
        self._process.connections.add(self)
        self._pace()

    def send(
        self, request_id: int, body: messages.FromNodeBody, descriptors: tuple[int, ...] = ()
    ) -> None:
        """Answer a request; the answer waits in the outbox while the trainer does not read."""
        if isinstance(body, messages.Slab) and (member := self._streams.get(body.stream_id)):
            member.count_slab(body)
        elif isinstance(body, DataplaneError) and request_id in self._awaited_slabs:
            self._server.jobs.no_batch(self._streams.get(self._awaited_slabs[request_id]), body)
        self._post(request_id, encode(messages.FromNode(request_id, body)), descriptors)

    def _post(self, request_id: int, wire: bytes, descriptors: tuple[int, ...]) -> None:
        self._awaited_slabs.pop(request_id, None)
        if self.closed or not request_id:
            return
        self._outbox.append((request_id, wire, descriptors))
        self._flush()

    def close(self) -> None:
        """Free everything this trainer held. May be called twice."""
        if self.closed:
            return
        self.closed = True
        self._process.connections.discard(self)
        self._pace()
        self._loop.remove_writer(self._sock.fileno())
        for task in self._tasks:
            task.cancel()
        for member in self._members.values():
            self._server.jobs.close(member)
            # When the node stops, members keep their places and rejoin through another node.
            if not self._server.stopping:
                self._server.jobs.leave(member, lost=True)
        self._members.clear()
        self._server.forget(self)
        # Close in a thread: the kernel may have to free a gigabyte that was sent and never read.
        self._loop.run_in_executor(None, self._sock.close)

    def _flush(self) -> None:
        while self._outbox:
            request_id, wire, descriptors = self._outbox[0]
            try:
                local.send_encoded(self._sock, wire, descriptors)
            except BlockingIOError:
                if len(self._outbox) > _OUTBOX_MAX:
                    self.close()
                    return
                self._loop.add_writer(self._sock.fileno(), self._flush)
                return
            except PeerLost:
                self.hung_up()
                return
            except ConfigError as error:
                self._outbox[0] = (request_id, encode(messages.FromNode(request_id, error)), ())
                continue
            self._outbox.popleft()
        self._loop.remove_writer(self._sock.fileno())

    def _pace(self) -> None:
        """Start or stop reading, depending on how many requests are in progress."""
        wants = not (self.closed or self._is_parsing or len(self._tasks) >= _REQUESTS_MAX)
        if wants == self._is_reading or self._sock.fileno() < 0:
            return
        self._is_reading = wants
        if wants:
            self._loop.add_reader(self._sock.fileno(), self._on_readable)
        else:
            self._loop.remove_reader(self._sock.fileno())

    def _on_readable(self) -> None:
        for _ in range(max(1, _MESSAGES_A_TURN // len(self._process.connections))):
            if not self._is_reading:
                return
            try:
                packet = local.receive_packet(self._sock)
                if packet.is_longer(_SHORT_BYTES):
                    self._start(self._parse(packet))
                    self._is_parsing = True
                    self._pace()
                else:
                    self._take(*packet.read(messages.ToNode))
            except BlockingIOError:
                return
            except PeerLost:
                self.hung_up()
                return
            except DataplaneError as error:
                self._end_session(error)
                return

    async def _parse(self, packet: local.Packet) -> None:
        """Parse a long message, and read on."""
        try:
            read = partial(packet.read, messages.ToNode, VALUES_MAX)
            self._take(*await self._process.parse(read))
        except DataplaneError as error:
            self._end_session(error)
        except MemoryError as error:
            self._broke(0, error)
            self.close()
        finally:
            packet.close()
            self._is_parsing = False

    def _take(self, message: messages.ToNode, descriptors: tuple[int, ...]) -> None:
        for fd in descriptors:
            os.close(fd)
        self._answer(message.request_id, message.body)

    def _end_session(self, error: DataplaneError) -> None:
        self._server.trace.failed("session", error=error)
        self.close()

    def fileno(self) -> int:
        """Return the socket's descriptor."""
        return self._sock.fileno()

    def hung_up(self) -> None:
        """Process a lost trainer's last messages (its position, and that it leaves), then close."""
        self._outbox.clear()
        for message in local.last_messages(self._sock, messages.ToNode, _SHORT_BYTES):
            if isinstance(message.body, messages.CloseStream):
                self._close_stream(message.body)
            elif isinstance(message.body, messages.CloseJob):
                self._close_job(message.body)
        self.close()

    def _answer(self, request_id: int, body: messages.ToNodeBody) -> None:
        try:
            if isinstance(body, messages.NextSlab):
                self._next_slab(request_id, body)
            elif isinstance(body, messages.Release):
                self._release(body)
            elif isinstance(body, messages.Hello):
                self._hello(request_id, body)
            elif isinstance(body, messages.OpenJob):
                self._run(request_id, partial(self._open_job, request_id, body), _JOB_COST_S)
            elif isinstance(body, messages.OpenStream):
                self._run(request_id, partial(self._open_stream, request_id, body))
            elif isinstance(body, messages.Question):
                self._run(request_id, partial(self._describe, request_id, body))
            elif isinstance(body, messages.CloseStream):
                self._close_stream(body)
            else:
                self._close_job(body)
        except DataplaneError as error:
            self.send(request_id, error)
        except Exception as error:  # noqa: BLE001 - a bad request must not affect other trainers
            self._broke(request_id, error)

    def _broke(self, request_id: int, error: BaseException) -> None:
        self._server.trace.broke("request", by=error, error=repr(error))
        self.send(request_id, DataplaneError(f"the node failed: {error!r}"))

    def _run(
        self, request_id: int, start: Callable[[], Coroutine[Any, Any, None]], cost_s: float = 0.0
    ) -> None:
        if not self._greeted:
            raise ConfigError("say Hello first")

        async def guarded() -> None:
            try:
                await self._process.turn(cost_s)
                await start()
            except DataplaneError as error:
                self.send(request_id, error)
                await asyncio.sleep(_REFUSED_PAUSE_S)  # slows down a trainer that retries at once
            except asyncio.CancelledError:
                raise
            except BaseException as error:  # noqa: BLE001 - even after a panic, send an answer
                self._broke(request_id, error)

        self._start(guarded())

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        self._pace()

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._pace()

    def _hello(self, request_id: int, body: messages.Hello) -> None:
        if body.protocol != PROTOCOL_VERSION:
            raise VersionMismatch(
                f"this node runs Dataplane {VERSION} (protocol {PROTOCOL_VERSION}), the trainer "
                f"{body.version} (protocol {body.protocol}): install one version in both, and "
                "restart the node",
                expected=PROTOCOL_VERSION,
                found=body.protocol,
            )
        self._server.door.greeted(self)
        self._greeted = True
        node = self._server
        awaited = node.heartbeat.awaited
        self.send(request_id, messages.Welcome(VERSION, PROTOCOL_VERSION, node.node_id, awaited))

    async def _open_job(self, request_id: int, body: messages.OpenJob) -> None:
        if self._server.draining:
            raise PeerLost(f"node {self._server.node_id} is draining: try another", peer="node")
        await self._process.caught_up(self)
        await self._server.heartbeat.wait_registered(body.job_id)
        if len(self._members) >= _JOBS_MAX:
            raise ConfigError(f"this connection has opened {_JOBS_MAX} jobs, the most for one")
        old = self._members.pop(body.job_id, None)
        if old is not None:
            self._drop_streams(old)
            self._server.jobs.close(old)
        working = self._loop.create_task(self._send_work(request_id, body))
        try:
            member, opened = await self._server.jobs.open(body)
        finally:
            working.cancel()
        if self.closed or body.job_id in self._members:
            self._server.jobs.close(member)
            raise ConfigError(f"job {body.job_id!r} was opened twice at once", field="job_id")
        self._members[body.job_id] = member
        wire = await asyncio.to_thread(encode, messages.FromNode(request_id, opened))
        self._post(request_id, wire, (member.delivery.arena.fd,))

    async def _send_work(self, request_id: int, body: messages.OpenJob) -> None:
        """Report progress on opening the job to the trainer, whenever there is any."""
        last: tuple[str, int] | None = None
        while True:
            await asyncio.sleep(_WORK_S)
            progress = self._server.jobs.places.progress_on(body)
            if progress is not None and (progress.what, progress.done) != last:
                last = progress.what, progress.done
                self.send(request_id, progress)

    async def _open_stream(self, request_id: int, body: messages.OpenStream) -> None:
        member, ready = self._member(body.job_id), self._server.heartbeat.wait_gathered
        if len(self._streams) >= _STREAMS_MAX:
            raise ConfigError(f"this connection has {_STREAMS_MAX} open streams, the most for one")
        stream, opened = await self._server.jobs.streams.open(member, body, self.send, ready)
        if self.closed or member.closed:
            self._server.engine.close_stream(stream)
            return
        self._streams[opened.stream_id] = member
        self.send(request_id, opened)

    async def _describe(self, request_id: int, body: messages.Question) -> None:
        self.send(request_id, await describe(self._member(body.job_id), body))

    def _member(self, job_id: str) -> ServedMember:
        member = self._members.get(job_id)
        if member is None or member.closed:
            raise ConfigError(f"this connection has not opened job {job_id!r}")
        return member

    def _next_slab(self, request_id: int, body: messages.NextSlab) -> None:
        member = self._streams.get(body.stream_id)
        stream = member.streams.get(body.stream_id) if member is not None else None
        if member is None or stream is None:
            raise ConfigError(f"stream {body.stream_id} is not open on this connection")
        if member.error is not None:
            raise member.error
        stream.check_consumed(body.cursor)
        if not request_id or request_id in self._awaited_slabs:
            raise ConfigError(
                f"a slab was requested with the number {request_id}: it needs its own"
            )
        if len(self._awaited_slabs) >= _SLABS_AWAITED_MAX:
            raise ConfigError(f"this connection waits for {_SLABS_AWAITED_MAX} slabs, the most")
        self._awaited_slabs[request_id] = body.stream_id
        member.epoch = stream.walk.stream.epoch
        member.cursor, member.stall_s, member.bound = body.cursor, body.stall_s, body.bound
        member.count_wait(body.waited)
        self._server.engine.request(stream, request_id)

    def _release(self, body: messages.Release) -> None:
        member = self._members.get(body.job_id)
        if member is not None:
            self._server.engine.release(member.delivery, body.slab_ids)

    def _close_stream(self, body: messages.CloseStream) -> None:
        member = self._streams.pop(body.stream_id, None)
        self._forget_slabs({body.stream_id})
        stream = member.streams.pop(body.stream_id, None) if member is not None else None
        if member is not None and stream is not None:
            member.reached(stream.walk.stream.epoch, body.cursor)
            member.count_wait(body.waited)
            self._server.engine.close_stream(stream)

    def _close_job(self, body: messages.CloseJob) -> None:
        member = self._members.get(body.job_id)
        if member is None:
            return
        member.reached(body.epoch, body.cursor)
        self._drop_streams(member)
        jobs = self._server.jobs
        if body.holds_slabs:
            jobs.stop(member)
        else:
            del self._members[body.job_id]
            jobs.close(member)
        if not member.has_left:
            jobs.forget_manifest(body.job_id)
            jobs.leave(member, lost=False)

    def _drop_streams(self, member: ServedMember) -> None:
        """Forget the streams of a member that leaves this connection."""
        gone = {stream_id for stream_id, owner in self._streams.items() if owner is member}
        self._streams = {key: member for key, member in self._streams.items() if key not in gone}
        self._forget_slabs(gone)

    def _forget_slabs(self, streams: set[int]) -> None:
        awaited = self._awaited_slabs.items()
        self._awaited_slabs = {key: stream for key, stream in awaited if stream not in streams}


class NodeServer:
    """A whole node. Use: `await run(stop)`."""

    def __init__(
        self,
        config: NodeConfig,
        listener: socket.socket,
        coordination: Coordination,
        node_id: str,
        pool: WorkerPool | None = None,
        data_listener: socket.socket | None = None,
        early: EarlyOpening | None = None,
    ) -> None:
        self.config, self.trace, self.node_id = config, Trace("node"), node_id
        self.draining = self.stopping = False
        self.door = Door(listener, self._admit, self.trace)
        self._processes: WeakValueDictionary[int, _Process] = WeakValueDictionary()
        self._sessions: set[TrainerConnection] = set()
        self._idle_since, self._had_session = time.monotonic(), False
        self.last_pids: deque[int] = deque(maxlen=_LAST_PIDS)
        self._arena = Arena.create("dataplane-blocks", config.block_arena_bytes)
        opened = NodeStores(config) if early is None else early.stores
        self.outages, self._stores = opened.outages, opened.stores
        pauses = self._stores.pauses
        self._fetcher = Fetcher.of(config, self._arena, self.trace, self.outages, pauses)
        self._pool = pool or WorkerPool.of(config, self.trace)
        least = config.worker_count
        autoscaler = Autoscaler(least, config.worker_count_most, least)
        size, disk = self._arena.size_bytes, self._fetcher.cache_bytes
        scheduler = Scheduler(size, config.fetch_count, autoscaler, config.stall_timeout_s, disk)
        reads = self._fetcher.statistics
        lending, address = None, data_address(data_listener)
        if data_listener is not None:
            log = config.log_level, config.log_format
            lending = Lending(data_listener, node_id, self._arena, self.trace, log, config.data_tls)
        known = KnownNeighbours(node_id, lending)
        self.engine = Engine(
            scheduler, self._arena, self._fetcher, self._pool, self.trace, node_id,
            neighbours=known, connect=self._stores.connect,
        )  # fmt: skip
        lent = None if lending is None else LentManifests(lending, self.engine.numbers)
        shared = SharedManifests(config, coordination, node_id, address, lent)
        begin = self._fetcher.beginning(self.engine.scan_disk)
        keep = self._fetcher.remember_preamble
        manifests = ManifestSources(config, self._stores, keep, begin, early)
        opener = DatasetOpener(config, self.engine, manifests.open, shared)
        self._neighbours = Neighbourhood(config, self.engine, opener, known, lending, lent, reads)
        tables = self._neighbours.tables
        self.jobs = Jobs(config, self.engine, coordination, node_id, opener, tables)
        self._watchdog = Watchdog(self.trace, warns=config.log_level != QUIET)
        self.heartbeat = Heartbeat(
            config, coordination, self.jobs, self.engine, self.node_id, self.trace, self.outages,
            self._watchdog, self._neighbours.reads, address, self._fetcher.disk_id,
        )  # fmt: skip

    def process_of(self, pid: int) -> _Process:
        """Return the process of a connection; a new one for pid 0, which the kernel reports for
        every process of another pid namespace.
        """
        return self._processes.setdefault(pid, _Process()) if pid else _Process()

    def readings(self) -> Iterator[Reading]:
        """Return the present values of this node's metrics."""
        counts = self._pool, self._fetcher.origin, self._stores, self.outages, self._watchdog
        return readings_of_node(self.jobs, self.engine, self._neighbours.reads(), *counts)

    async def run(self, stop: asyncio.Event, ready: Callable[[], None]) -> None:
        """Serve until `stop` is set and the last trainer is gone, or, embedded, until idle."""
        beating: asyncio.Task[None] | None = None
        says_again_at = 0.0
        try:
            self._pool.start()
            self._neighbours.start()
            self.door.open()
            # The door accepts trainers meanwhile; they can open jobs once the node is registered.
            if await done_before(stop, self.heartbeat.register(), self.door.tick):
                beating = background.start("heartbeat", self.heartbeat.run())
                self._watchdog.start()
                ready()
            while beating is not None and not self._is_done(stop):
                self.door.tick()
                self.engine.tick()
                self.heartbeat.tick(is_draining=self.draining)
                self._neighbours.tick()
                await wait_stop(stop, _TICK_S, is_draining=self.draining)
                if stop.is_set() and time.monotonic() >= says_again_at:
                    self.draining, says_again_at = True, time.monotonic() + _DRAIN_SAID_S
                    if pids := " ".join(sorted({str(session.pid) for session in self._sessions})):
                        self.trace.noted("draining until loaders are closed", processes=pids)
        finally:
            self.stopping = True
            self._watchdog.close()
            if beating is not None:
                beating.cancel()
                await self.heartbeat.leave()
            self.door.close()
            for session in list(self._sessions):
                session.close()
            await self.jobs.places.close()
            self._pool.close()
            self._fetcher.close()
            self._neighbours.close()
            self._stores.close()
            self.engine.close()
            self._arena.close()

    def forget(self, session: TrainerConnection) -> None:
        """Forget a session that has ended."""
        self.door.left(session)
        self._sessions.discard(session)
        self._idle_since = time.monotonic()

    def _is_done(self, stop: asyncio.Event) -> bool:
        if self._sessions:
            return False
        if stop.is_set():
            return True
        idle_s = time.monotonic() - self._idle_since
        patience_s = self.config.linger_s if self._had_session else _FIRST_CONNECTION_S
        return self.config.embedded and idle_s > patience_s

    def _admit(self, sock: socket.socket) -> TrainerConnection:
        self._had_session = True
        session = TrainerConnection(self, sock)
        self.last_pids.append(session.pid)
        self._sessions.add(session)
        return session


async def run_node(
    config: NodeConfig,
    listener: socket.socket,
    coordination: Coordination,
    node_id: str,
    stop: asyncio.Event,
    ready: Callable[[], None],
    pool: WorkerPool | None = None,
    data_listener: socket.socket | None = None,
    early: EarlyOpening | None = None,
    show: Callable[[Callable[[], Iterable[Reading]]], None] = lambda _: None,
) -> Collection[int]:
    """Run a node on these listening sockets, which the node then owns: for trainers, and for other
    nodes. `ready` is called once the node is registered with the coordinator and jobs can be
    opened.

    Returns the ids of the processes that connected last.

    `stop` drains: no new job is opened, and the node exits after its last trainer. `pool`, and
    `early`, which opens a dataset, may be passed already started, so that they make progress while
    this process still imports modules. `show` gets the function that reads the node's metrics.

    Raises:  VersionMismatch: the coordinator is of another version.
    BudgetTooSmall: the machine refuses the arenas.
    """
    server = NodeServer(config, listener, coordination, node_id, pool, data_listener, early)
    show(server.readings)
    await server.run(stop, ready)
    return server.last_pids
