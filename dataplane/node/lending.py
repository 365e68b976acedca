"""A node's lender: the process that sends blocks of its block arena, and slabs that it has made for
them, to neighbours.

Invariants:
1. Each `give` is followed by exactly one `on_given`, once its regions are no longer read: when the
   lender says so, or when it has ended. `close` ends all of this.
2. What a lender that has ended was asked for is forgotten: nobody waits for the answer.
3. A lender that ends is started again, later and later if none is of use.
4. Nothing on the event loop waits for it.
5. A lender that reads none of its messages, being stopped or stuck, is ended, and 3 applies.
6. A lender that is started knows all arenas that are lent.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections import deque
from collections.abc import Callable

from dataplane.arena.memfd import Arena
from dataplane.base.trace import Trace
from dataplane.model.config import PeerTls
from dataplane.model.errors import DataplaneError, PeerLost
from dataplane.model.records import Region
from dataplane.neighbours.handshake import KEY_BYTES
from dataplane.rpc import lending, local
from dataplane.rpc.tasks import BLOCK_ARENA
from dataplane.worker.forking import fork_server
from dataplane.worker.process import HUNG_S, WorkerProcess, kill_all

_MESSAGES_A_TURN = 32
_PAUSE_S, _PAUSE_S_MAX = 0.1, 10.0
_NO_LIMIT = 0
_PROBE = lending.ReturnArena((1 << 64) - 1)
"""Has no effect: no arena has this number."""

OnAsked = Callable[[lending.Asked], None]
OnGiven = Callable[[int], None]


class Lending:
    """The lender of a node, which neighbours reach at this listening socket; it is then owned. The
    process is started with the first key. Call it only from the event loop.

    `log` is level and format. With `tls`, all connections are inside of TLS.
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
        self._on_asked: OnAsked = lambda asked: self.refuse(asked.number)
        self._on_given: OnGiven = lambda _: None
        self._trace = trace
        self._log, self._tls = log, tls
        self._loop = asyncio.get_running_loop()
        self._process: WorkerProcess | None = None
        self._ending: WorkerProcess | None = None
        self._keys: dict[str, lending.LendingKeys] = {}
        self._arenas: dict[int, int] = {}
        self._unsent: deque[lending.ToLenderBody] = deque()
        self._asked: set[int] = set()
        self._given: dict[int, bool] = {}
        self._last_number = 0
        self._lent_bytes = 0
        self._pause_s = _PAUSE_S
        self._restart: asyncio.TimerHandle | None = None
        self._is_started = self._closed = False

    def serve(self, on_asked: OnAsked, on_given: OnGiven) -> None:
        """Begin to serve neighbours: `on_asked` is called for a block or a slab that one requests,
        and answered by one of `give`, `only_decoded` and `refuse`, now or later; `on_given` when
        the region of a number that was given is no longer read.
        """
        self._on_asked, self._on_given = on_asked, on_given

    @property
    def pid(self) -> int:
        """The process id of the lender; 0 while there is none. Waits until it is known."""
        return self._process.pid if self._process is not None else 0

    @property
    def lent_bytes(self) -> int:
        """How much neighbours have received so far."""
        return self._lent_bytes

    def keys(
        self, job_id: str, generation: int, key: bytes, only_under: tuple[str, ...] = ()
    ) -> None:
        """Neighbours of this job have this key of 32 bytes, for which they get what is under these
        urls, () for everything; b"": the job has left this node. The connections of an older
        generation are closed.
        """
        if self._closed:
            return
        assert len(key) in {0, KEY_BYTES}
        told = lending.LendingKeys(job_id, generation, key, only_under)
        if key:
            self._keys[job_id] = told
        else:
            self._keys.pop(job_id, None)
        if self._is_started:
            self._send(told)
        elif key:
            fork_server.acquire()
            self._is_started = True
            self._spawn()

    def lend_arena(self, arena_id: int, fd: int) -> None:
        """From now on, regions of this sealed arena may be given. `fd` stays the caller's."""
        self.return_arena(arena_id)
        if not self._closed:
            self._arenas[arena_id] = os.dup(fd)
            self._send(lending.LendArena(arena_id))

    def return_arena(self, arena_id: int) -> None:
        """No more regions of this arena will be given; nothing if it is not lent."""
        fd = self._arenas.pop(arena_id, None)
        if fd is not None:
            os.close(fd)
            self._send(lending.ReturnArena(arena_id))

    def give(
        self,
        number: int,
        region: Region,
        arena_id: int = BLOCK_ARENA,
        note: bytes = b"",
        more: tuple[Region, ...] = (),
        ends: tuple[int, ...] = (),
        *,
        is_data: bool = True,
    ) -> None:
        """Send this region, and those of `more`, as long as was asked for. Of a slab or a run, they
        are at most so long, and may be empty; a slab has a note, of at most wire.NOTE_BYTES_MAX,
        and a run how each of its blocks ends. `on_given` is called later, also if nobody waits for
        it any more. What `is_data` counts as lent.
        """
        if number in self._asked:
            self._asked.remove(number)
            self._given[number] = is_data
            self._send(lending.Give(number, region, arena_id, note, more, ends))
        else:
            self._loop.call_soon(self._over, number)

    def only_decoded(self, number: int, length: int) -> None:
        """Say that there is only the decoded block, of this length."""
        if number in self._asked:
            self._asked.remove(number)
            self._send(lending.GiveDecodedOnly(number, length))

    def refuse(self, number: int, *, is_unknown: bool = False) -> None:
        """Send nothing: the neighbour reads the store, or has its slab made elsewhere. With
        `is_unknown`, it may ask again, and say how to open the job of the slab.
        """
        if number in self._asked:
            self._asked.remove(number)
            self._send(lending.Refuse(number, is_unknown))

    def look(self) -> None:
        """Replace the lender if it hangs; call it about twice a second."""
        process, now = self._process, time.monotonic()
        if process is not None and process.is_hung(now, lambda: self._send(_PROBE)):
            why = "it reads no messages: it is stopped, or stuck in a system call"
            self._trace.failed("lender hung", pid=process.pid, why=why)
            self._end()

    def close(self) -> None:
        """Kill the process and wait a few seconds for its end. May be called twice."""
        if self._closed:
            return
        self._closed = True
        if self._restart is not None:
            self._restart.cancel()
        self._stop_writing()
        left = [each for each in (self._process, self._ending) if each is not None]
        for stuck in kill_all(left):
            self._trace.failed("end of lender", pid=stuck.pid, why="stuck in kernel")
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
        process.on_readable(self._on_readable)
        keys = tuple(self._keys.values())
        start = lending.StartLending(
            self._node_id, self._last_number + 1, *self._log, keys, self._tls
        )
        descriptors = (self._arena.fd, self._listener.fileno())
        try:
            local.send(process.sock, lending.ToLender(start), descriptors)
        except PeerLost:
            self._end()
            return
        self._trace.started("lender started")
        for arena_id in self._arenas:
            self._send(lending.LendArena(arena_id))

    def _send(self, body: lending.ToLenderBody) -> None:
        if self._process is None:
            return
        self._unsent.append(body)
        if len(self._unsent) == 1:
            self._flush()

    def _flush(self) -> None:
        process = self._process
        if process is None:
            return
        try:
            while self._unsent:
                body = self._unsent[0]
                if not isinstance(body, lending.LendArena):
                    local.send(process.sock, lending.ToLender(body))
                elif body.arena_id in self._arenas:  # it was not returned meanwhile
                    fd = self._arenas[body.arena_id]
                    local.send(process.sock, lending.ToLender(body), (fd,))
                self._unsent.popleft()
        except BlockingIOError:
            self._loop.add_writer(process.sock.fileno(), self._flush)
        except PeerLost:
            self._end()
        else:
            self._stop_writing()

    def _stop_writing(self) -> None:
        if self._process is not None and self._process.sock.fileno() >= 0:
            self._loop.remove_writer(self._process.sock.fileno())

    def _on_readable(self) -> None:
        for _ in range(_MESSAGES_A_TURN):
            process = self._process
            if process is None or self._closed:
                return
            try:
                said, descriptors = local.receive(process.sock, lending.FromLender)
            except BlockingIOError:
                return
            except DataplaneError:  # it is gone, or sent an invalid message
                self._end()
                return
            for fd in descriptors:
                os.close(fd)
            self._hear(said.body)

    def _hear(self, body: lending.FromLenderBody) -> None:
        self._pause_s = _PAUSE_S
        if isinstance(body, lending.Given):
            is_data = self._given.pop(body.number, None)
            if is_data is not None:
                self._lent_bytes += body.sent_bytes if is_data else 0
                self._on_given(body.number)
        elif body.number > self._last_number:
            self._last_number = body.number + body.request.count - 1
            self._asked.add(body.number)
            self._on_asked(body)

    def _end(self) -> None:
        """Nobody hears the lender any more. Its regions are free once it is gone."""
        if self._process is None or self._closed:
            return
        self._stop_writing()
        process, self._process = self._process, None
        self._ending = process
        self._unsent.clear()
        self._asked.clear()
        process.end(lambda status: self._on_end(process, status))

    def _on_end(self, process: WorkerProcess, status: int) -> None:
        self._ending = None
        if self._closed:
            return
        self._trace.failed("lender ended", status=status, said=process.last_words)
        given, self._given = self._given, {}
        self._spawn_later()
        for number in given:
            self._over(number)

    def _spawn_later(self) -> None:
        self._restart = self._loop.call_later(self._pause_s, self._spawn)
        self._pause_s = min(2 * self._pause_s, _PAUSE_S_MAX)

    def _over(self, number: int) -> None:
        if not self._closed:
            self._on_given(number)
