"""One connection's view of a job: the arena's mapping, the held slabs, and their return.

Invariants:
1. A slab is in the table from `take` until it is released, once, when nothing can read it any more:

    LIVE     this process has views of it               | at its last view's death: the next two
    FORKED   a child forked during its life may read it | when all such children have ended: UNREAD
    UNREAD   a device may still read it                 | when `when_unread` calls back: released

2. The socket stays open as long as a slab is held, even after the loader was closed: for the node,
   a closed socket means that every slab is free. But a closed loader leaves its job at once, since
   other ranks may wait to open the job with other arguments.
3. Finalizers append to deques and send without waiting. Nothing here takes a lock.
4. In a forked child nothing is released or received: the parent owns everything. The child keeps
   only the memory of the slabs that were alive.
"""

from __future__ import annotations

import contextlib
import enum
import os
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from dataplane.arena import forks
from dataplane.arena.memfd import Arena
from dataplane.client.waiting import Notice
from dataplane.client.wire import Answer, Wire
from dataplane.model.errors import PeerLost
from dataplane.model.records import Region
from dataplane.rpc.messages import (
    CloseJob,
    CloseStream,
    JobOpened,
    Release,
    Slab,
    StreamOpened,
    ToNodeBody,
    Waited,
)

Bytes = npt.NDArray[np.uint8]

_RELEASE_COUNT_MAX = 4096
# How long an exiting process waits for room in the socket of a node that does not read.
_LEAVE_S_MAX = 1.0


class Pinning(Protocol):
    """Hooks for a device that reads the memory."""

    def pin(self, memory: Bytes) -> Callable[[], None]:
        """Pin memory, once per mapping; the returned function is called before the mapping is
        removed.
        """
        ...

    def when_unread(self, release: Callable[[], None]) -> None:
        """Call `release`, now or later, once no work on a device can read the slabs that are dead
        by now.
        """
        ...


class NoDevice:
    """Hooks for memory that no device reads."""

    def pin(self, memory: Bytes) -> Callable[[], None]:  # noqa: ARG002 - required by the protocol
        """Do nothing."""
        return _nothing

    def when_unread(self, release: Callable[[], None]) -> None:
        """Call `release` at once."""
        release()


class _Use(enum.Enum):
    """Who may still read a slab (invariant 1)."""

    LIVE = enum.auto()
    FORKED = enum.auto()
    UNREAD = enum.auto()


class _HeldSlab(Struct, eq=False):
    """A slab that this process holds, and its number among all objects that forks may copy."""

    slab_id: int
    region: Region
    number: int
    use: _Use = _Use.LIVE


class Mount:
    """One connection's share of a job, made by a session. Only its slabs outlive the connection.
    `opening_s` is how long nodes worked until the job was open.
    """

    def __init__(
        self,
        wire: Wire,
        node_id: str,
        job_id: str,
        job: JobOpened,
        arena: Arena,
        pinning: Pinning,
        opening_s: float = 0.0,
    ) -> None:
        self.wire, self.node_id, self.job_id, self.job = wire, node_id, job_id, job
        self._arena, self._pinning, self.opening_s = arena, pinning, opening_s
        self._pid = os.getpid()
        self.asked_ahead: set[int | None] = set()
        self._slabs: dict[int, _HeldSlab] = {}
        self._forked: forks.Kept[_HeldSlab] = forks.Kept()
        self._released: deque[int] = deque()
        self._left: deque[CloseStream | CloseJob] = deque()
        self.progress = 0, 0
        """(epoch, cursor) of the stream that was read last."""
        self._retired = False
        self._open = [True]
        # Pin a slice of the arena's view: an array over the view itself would keep the arena from
        # being closed.
        self._unpin = pinning.pin(np.frombuffer(arena.view(0, arena.size_bytes), np.uint8))
        _mounts.add(self)

    @property
    def held_bytes(self) -> int:
        """The bytes of slabs that processes may read. Slabs that only a device may still read do
        not count: they return by themselves.
        """
        slabs = list(self._slabs.values())
        return sum(slab.region.length for slab in slabs if slab.use is not _Use.UNREAD)

    def call(self, body: ToNodeBody, deadline: float) -> Answer:
        """Send a request, and return its answer; see `Wire.call`."""
        return self.wire.call(body, deadline, flush=self.flush)

    def wait(self, request_id: int, deadline: float, notice: Notice | None = None) -> Answer:
        """Return the answer to a request; see `Wire.wait`."""
        return self.wire.wait(request_id, deadline, notice, self.flush)

    def take(self, slab: Slab) -> Bytes:
        """Return the memory of a slab. The slab lives as long as this object or a view of it.

        Shapes:  result: uint8[region.length], writable.
        Raises:  PeerLost: the node names memory outside the arena.
        """
        region = slab.region
        try:
            memory: Bytes = np.frombuffer(self._arena.view(region.offset, region.length), np.uint8)
        except IndexError as error:
            raise PeerLost(f"the node gave a slab outside of its arena: {error}") from error
        # Populate only the bytes in use: workers allocate no others, so that populating the rest of
        # a slot would allocate and clear it, which would delay the first batch.
        self._arena.populate_once(region.offset, min(slab.bytes_used, region.length))
        held = _HeldSlab(slab.slab_id, region, forks.born())
        weakref.finalize(memory, self._died, held).atexit = False
        self._slabs[slab.slab_id] = held
        return memory

    def leave_stream(self, stream_id: int, cursor: int, waited: Waited | None) -> None:
        """Tell the node, now or with the next message, that this stream is no longer read, how many
        samples all ranks have consumed, and how long the trainer has waited.
        """
        self._left.append(CloseStream(stream_id, cursor, waited))
        self.flush()

    def flush(self) -> None:
        """Send pending messages: slabs that died, or came too late for their requests, and streams
        and jobs that were left. Never waits.
        """
        while self.wire.strays:
            with contextlib.suppress(IndexError):
                stray = self.wire.strays.popleft()
                if isinstance(stray, Slab):
                    self._released.append(stray.slab_id)
                elif isinstance(stray, StreamOpened):
                    self._left.append(CloseStream(stray.stream_id))
        for slab in self._forked.let_go():
            self._unused(slab)
        while self._left:
            with contextlib.suppress(IndexError):
                left = self._left.popleft()
                if not self.wire.tell_nowait(left):
                    self._left.appendleft(left)
                    return
        while self._released:
            slab_ids: list[int] = []
            with contextlib.suppress(IndexError):
                while len(slab_ids) < _RELEASE_COUNT_MAX:
                    slab_ids.append(self._released.popleft())
            if slab_ids and not self.wire.tell_nowait(Release(self.job_id, tuple(slab_ids))):
                self._released.extend(slab_ids)
                return

    def retire(self) -> None:
        """Leave the job: no more requests on this connection, which closes when the last of its
        slabs has died.
        """
        self._retired = True
        self.flush()
        if not self._slabs:
            self._finish()
        elif self.wire.peer_gone:
            self.wire.close()  # keep the memory, which processes or devices may still read
        else:
            self._left.append(CloseJob(self.job_id, *self.progress, holds_slabs=True))
            self.flush()

    def abandon(self) -> None:
        """Release the descriptors in a forked child, and all memory except that of live tensors,
        which the parent owns.
        """
        self._open.clear()
        self.wire.abandon()
        live = [slab.region for slab in self._slabs.values() if slab.use is _Use.LIVE]
        self._arena.keep_only([(region.offset, region.length) for region in live])

    def at_exit(self) -> None:
        """Leave the job. Close the connection, unless memory may still be read: then the kernel
        closes it.
        """
        if self._slabs:
            self.flush()
            leaving = CloseJob(self.job_id, *self.progress, holds_slabs=True)
            self.wire.tell_last(leaving, _LEAVE_S_MAX)
            self.wire.leave_open()
        else:
            self._finish()

    def _died(self, slab: _HeldSlab) -> None:
        if os.getpid() != self._pid:
            return
        children = forks.died(slab.number)
        if children:
            slab.use = _Use.FORKED  # set before `add`: another thread may then release the slab
            self._forked.add(children, slab)
        else:
            self._unused(slab)

    def _unused(self, slab: _HeldSlab) -> None:
        slab.use = _Use.UNREAD
        self._pinning.when_unread(partial(self._release, slab))

    def _release(self, slab: _HeldSlab) -> None:
        if os.getpid() != self._pid:
            return
        self._slabs.pop(slab.slab_id, None)
        self._released.append(slab.slab_id)
        # Flush only if no request will follow soon: the next request would flush. A thread that
        # waits for an answer has already sent its request.
        if not self._slabs or self._retired or self.wire.is_waiting:
            self.flush()
        if self._retired and not self._slabs:
            self._finish()

    def _finish(self) -> None:
        try:
            self._open.pop()  # atomic: only one thread passes
        except IndexError:
            return
        self.flush()
        self.wire.tell_nowait(CloseJob(self.job_id, *self.progress))
        self.wire.close()
        self._unpin()
        self._arena.close()
        forks.lasting_forks()


def _nothing() -> None:
    pass


_mounts: weakref.WeakSet[Mount] = weakref.WeakSet()


def _abandon_all() -> None:
    for mount in list(_mounts):
        mount.abandon()
    _mounts.clear()


def close_all() -> None:
    """Close all connections at the end of the process."""
    for mount in list(_mounts):
        mount.at_exit()


os.register_at_fork(after_in_child=_abandon_all)
