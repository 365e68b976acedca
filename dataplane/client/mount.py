"""One connection's view of a job: the arena's mapping, the held slabs, and their return.

Invariants:
1. A slab is released once, when nothing can read it any more: its memory object is dead, the
   children forked during its life have ended, and `Pinning.when_unread` has called back.
2. The socket stays open as long as a slab is held, even after the loader was closed: for the node,
   a closed socket means that every slab is free. The job is left at once: other ranks may wait for
   that, to open it with other arguments.
3. Finalizers append to deques and send without waiting. Nothing here takes a lock.
4. In a forked child nothing is released or received: the parent owns everything. The child keeps
   only the memory of the slabs that were alive.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt

from dataplane.arena import forks
from dataplane.arena.memfd import Arena
from dataplane.client.wire import Wire
from dataplane.model.errors import PeerLost
from dataplane.rpc.messages import (
    CloseJob,
    CloseStream,
    FromNodeBody,
    JobOpened,
    Release,
    Slab,
    StreamOpened,
)

Bytes = npt.NDArray[np.uint8]

_RELEASE_COUNT_MAX = 4096
# How long an exiting process waits for a node that does not read.
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
    """For memory that only this process reads."""

    def pin(self, memory: Bytes) -> Callable[[], None]:  # noqa: ARG002 - as the protocol has it
        """Nothing to do."""
        return _nothing

    def when_unread(self, release: Callable[[], None]) -> None:
        """At once."""
        release()


class Mount:
    """One connection's share of a job, made by a session; only its slabs outlive it."""

    def __init__(
        self, wire: Wire, node_id: str, job_id: str, job: JobOpened, arena: Arena, pinning: Pinning
    ) -> None:
        self.wire, self.node_id, self.job_id, self.job = wire, node_id, job_id, job
        self._arena, self._pinning = arena, pinning
        self._pid = os.getpid()
        self.opening_s = 0.0
        """For how long nodes were at work until the job was open."""
        self.asked_ahead: set[int | None] = set()
        self._held: dict[int, int] = {}
        self._alive: dict[int, tuple[int, int]] = {}  # by number: where in the arena
        self._kept: forks.Kept[int] = forks.Kept()
        self._unread: dict[int, int] = {}  # dead slabs that a device may still read
        self._dead: deque[int] = deque()
        self._left: deque[CloseStream | CloseJob] = deque()
        self.progress = 0, 0
        """(epoch, cursor) of the stream that was walked last."""
        self._retired = False
        self._open = [True]
        # A slice, since an array over the arena's own view would keep it from being closed.
        self._unpin = pinning.pin(np.frombuffer(arena.view(0, arena.size_bytes), np.uint8))
        wire.stray, wire.waits = self._stray, self.flush
        _mounts.add(self)

    @property
    def held_bytes(self) -> int:
        """The bytes of the live slabs. Slabs that only a device may still read do not count: they
        return by themselves.
        """
        return sum(list(self._held.values())) - sum(list(self._unread.values()))

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
        # Only slots in use: mapping all of them would delay the first batch by a tenth of a second.
        self._arena.populate_once(region.offset, region.length)
        number = forks.born()
        weakref.finalize(memory, self._died, slab.slab_id, number).atexit = False
        self._alive[number] = region.offset, region.length
        self._held[slab.slab_id] = region.length
        return memory

    def leave_stream(self, stream_id: int, cursor: int = 0) -> None:
        """Tell the node, now or with the next message, that this stream is no longer read, and how
        many samples all ranks have consumed.
        """
        self._left.append(CloseStream(stream_id, cursor))
        self.flush()

    def flush(self) -> None:
        """Send pending messages: slabs that died, streams and jobs that were left. Never waits."""
        for slab_id in self._kept.let_go():
            self._unused(slab_id)
        while self._left:
            with contextlib.suppress(IndexError):
                left = self._left.popleft()
                if not self.wire.tell_nowait(left):
                    self._left.appendleft(left)
                    return
        while self._dead:
            slab_ids: list[int] = []
            with contextlib.suppress(IndexError):
                while len(slab_ids) < _RELEASE_COUNT_MAX:
                    slab_ids.append(self._dead.popleft())
            if slab_ids and not self.wire.tell_nowait(Release(self.job_id, tuple(slab_ids))):
                self._dead.extend(slab_ids)
                return

    def retire(self) -> None:
        """Leave the job: no more requests on this connection, which closes when the last of its
        slabs has died.
        """
        self._retired = True
        self.flush()
        if not self._held:
            self._finish()
        elif self.wire.peer_gone:
            self.wire.close()  # the node is gone, but devices may still read the memory
        else:
            self._left.append(CloseJob(self.job_id, *self.progress, holds_slabs=True))
            self.flush()

    def abandon(self) -> None:
        """Release the descriptors in a forked child, and all memory except that of live tensors,
        which the parent owns.
        """
        self._open.clear()
        self.wire.abandon()
        self._arena.keep_only(self._alive.values())

    def at_exit(self) -> None:
        """Leave the job. Close the connection, unless memory may still be read: then the kernel
        closes it.
        """
        if self._held:
            self.flush()
            leaving = CloseJob(self.job_id, *self.progress, holds_slabs=True)
            self.wire.tell_last(leaving, _LEAVE_S_MAX)
            self.wire.leave_open()
        else:
            self._finish()

    def _died(self, slab_id: int, number: int) -> None:
        if os.getpid() != self._pid:
            return
        self._alive.pop(number, None)
        children = forks.died(number)
        if children:
            self._kept.add(children, slab_id)
        else:
            self._unused(slab_id)

    def _unused(self, slab_id: int) -> None:
        self._unread[slab_id] = self._held.get(slab_id, 0)
        self._pinning.when_unread(partial(self._give_back, slab_id))

    def _give_back(self, slab_id: int) -> None:
        if os.getpid() != self._pid:
            return
        self._unread.pop(slab_id, None)  # first, so that it is never undercounted
        self._held.pop(slab_id, None)
        self._dead.append(slab_id)
        # If more requests follow, the next one carries it; a waiting request was already sent.
        if not self._held or self._retired or self.wire.is_waiting:
            self.flush()
        if self._retired and not self._held:
            self._finish()

    def _stray(self, answer: FromNodeBody) -> None:
        """Return the slab of an answer that came too late for its request."""
        if isinstance(answer, Slab):
            self._dead.append(answer.slab_id)
        elif isinstance(answer, StreamOpened):
            self._left.append(CloseStream(answer.stream_id))

    def _finish(self) -> None:
        try:
            self._open.pop()  # atomic: only one comes through
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
