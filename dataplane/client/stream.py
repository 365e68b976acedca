"""A stream of slabs, and the batches in them.

The next slab is requested when the trainer begins to use the present slab, so that the answer is
usually in the socket when it is needed. The caller names the step that it needs. If this is not the
next step (after an interrupt, or the death of a node), the stream is opened again at the needed
step.

A trainer requests slabs, and the node does not push them: pushing would need credits, and a slab
that was already sent cannot be taken back for a stream that needs the memory more.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from dataplane.arena.slab_layout import aligned, pieces
from dataplane.client.mount import Bytes, Mount
from dataplane.client.session import Session
from dataplane.client.wire import NoAnswer
from dataplane.model.config import VERSION
from dataplane.model.errors import ClosedError, DataplaneError, DataStallError, PeerLost
from dataplane.model.records import ColumnSpec, MixHistory
from dataplane.rpc.codec import decode
from dataplane.rpc.messages import (
    Batch,
    Column,
    EndOfStream,
    FromNodeBody,
    Layout,
    NextSlab,
    OpenStream,
    Slab,
    StageTimes,
    StreamOpened,
    WeightsAsked,
)

AHEAD_STREAMS_MAX = 2


class Batches(Struct, frozen=True):
    """Consecutive batches of a stream, and their memory. Slab and Column give offsets within it.

    Shapes:  memory: uint8[bytes], writable. The batches live as long as this memory or a view of
    it.
    """

    memory: Bytes
    batches: tuple[Batch, ...]
    columns: tuple[Column, ...]


class SlabStream:
    """The batches of steps first_step, first_step + step_stride, … of a rank's slice at `cursor`.

    Used by one thread at a time; several streams may share a session.
    """

    def __init__(
        self,
        session: Session,
        epoch: int,
        cursor: int,
        first_step: int = 0,
        step_stride: int = 1,
        *,
        mix: MixHistory | None = None,
        ahead: bool = True,
        replays: bool = False,
    ) -> None:
        """Prepare the stream. With `replays`, the first slab is handed out again and again, and the
        node makes no other slab.
        """
        self._session, self._ahead = session, ahead and not replays
        self._replays = replays
        self._first: tuple[Slab, list[Batches]] | None = None
        self.mix = mix
        self._epoch, self._cursor, self._stride = epoch, cursor, step_stride
        self._next_step = first_step
        self._mount: Mount | None = None
        self._stream_id: int | None = None
        self._step_count = 0
        self._pending: int | None = None
        self._is_closed = False
        self._handed_over: float | None = None
        self._tally = session.tally()
        self._consumed = cursor
        # Trace only if the trainer has imported OpenTelemetry, so that nothing is imported here.
        api = sys.modules.get("opentelemetry.trace")
        self._tracer = None if api is None else api.get_tracer("dataplane", VERSION)
        self.stall_s = 0.0
        """The time waited for slabs so far, in seconds."""

    def batches_from(self, step: int) -> list[Batches]:
        """Return the next slab, whose first batch is that of `step`; [] at the end of the epoch.

        Held memory is bounded: beyond the bound, batches are copied to ordinary memory one by one.

        Raises:  DataStallError: no slab has come within the deadline.  DataplaneError: the node's
        error.
        """
        started = time.monotonic()
        if self._handed_over is not None:
            self._tally.consumed(started - self._handed_over)
            self._handed_over = None
        if self._first is not None:
            return self._again(step, *self._first)
        try:
            slab, mount = self._slab(step)
        finally:
            waited_s = time.monotonic() - started
            self.stall_s += waited_s
        if slab is None:
            self._session.waited((0, 0, 0, 0, 0, round(waited_s * 1e6)))
            return []
        is_first = self._session.slab_arrived(started, slab.times)
        if self._tracer is not None:
            place = self._session.request.topology
            trace_slab(
                self._tracer, slab, waited_s,
                job=mount.job_id, rank=place.rank, epoch=self._epoch,
            )  # fmt: skip
        layout = decode(Layout, slab.layout)
        batches = Batches(mount.take(slab), slab.batches, layout.columns)
        is_kept = (
            len(batches.memory)
            and not slab.copy_out
            and mount.held_bytes <= mount.job.held_bytes_max
        )
        found = [batches] if is_kept else copied(batches, mount.job.columns)
        waits = self._tally.handed_over(slab, waited_s, was_copied=not is_kept)
        if not is_first:
            self._session.waited(waits)
        if self._replays:
            self._leave()
            self._first = replace(slab, times=StageTimes(workers=slab.times.workers)), found
        self._handed_over = time.monotonic()
        return found

    def _again(self, step: int, slab: Slab, first: list[Batches]) -> list[Batches]:
        """Return the first slab, as if its batches were those of `step` and the next ones."""
        handed = slab.batches[: len(range(step, self._step_count, self._stride))]
        if not handed:
            return []
        self._tally.handed_over(replace(slab, batches=handed), 0.0, was_copied=False)
        self._tally.replayed += len(handed)
        self._handed_over = time.monotonic()
        steps = itertools.count(step, self._stride)
        return [
            replace(
                batches,
                batches=tuple(batch._replace(step=next(steps)) for batch in batches.batches),
            )
            for batches in first
        ]

    @property
    def consumed(self) -> int:
        """The number of samples that all ranks have consumed; sent with the next message."""
        return self._consumed

    @consumed.setter
    def consumed(self, cursor: int) -> None:
        self._consumed = cursor
        if self._mount is not None:
            self._mount.progress = self._epoch, cursor

    def change(self, mix: MixHistory) -> None:
        """Use these weights of a mixture from the next slab on. Never waits."""
        self._leave()
        self.mix = mix

    @property
    def is_at_hand(self) -> bool:
        """Return whether the next slab has arrived, so that `batches_from` does not wait."""
        if self._first is not None:
            return True
        mount, pending = self._mount, self._pending
        if self._is_closed or mount is None or pending is None or mount.wire.is_lost:
            return False
        return isinstance(mount.wire.arrived(pending), Slab)

    def close(self) -> None:
        """Close the stream. Never waits; may be called twice."""
        if self._is_closed:
            return
        self._is_closed = self._tally.is_closed = True
        self._leave()

    def __del__(self) -> None:
        # If the constructor failed, there is nothing to close.
        with contextlib.suppress(AttributeError):
            self.close()

    def _slab(self, step: int) -> tuple[Slab | None, Mount]:
        """Return the slab, from the current node or, after a loss, from its successor."""
        if self._is_closed:
            raise ClosedError("this stream was closed")
        mount = self._session.mount()
        stall_s = self._session.stall_timeout_s(mount.job)
        deadline = time.monotonic() + stall_s  # does not include opening the job, by `mount` above
        stall = partial(self._stall, step, stall_s)
        losses, last_error = 0, ""
        while True:
            try:
                return self._step_of(mount, step, deadline), mount
            except PeerLost as error:
                losses, last_error = losses + 1, str(error)
                deadline = max(deadline, mount.wire.worked_at + stall_s)
                self._session.lost(mount)
                self._leave()
            except NoAnswer:
                raise stall(last_error) from None
            mount = self._next_mount(losses, deadline, last_error, stall)
            deadline += mount.opening_s

    def _next_mount(
        self, losses: int, deadline: float, last_error: str, stall: Callable[[str], DataStallError]
    ) -> Mount:
        """Return another connection, after a pause that gets longer with each loss."""
        if losses > 1:
            pause_s = random.uniform(0, min(5.0, 0.1 * 2 ** (losses - 1)))  # noqa: S311
            threading.Event().wait(min(pause_s, max(0.0, deadline - time.monotonic())))
        if time.monotonic() >= deadline:
            raise stall(last_error)
        try:
            return self._session.mount(deadline)
        except PeerLost as error:
            if "status" in error.nouns:  # the node exited by itself, and the error says why
                raise
            raise stall(str(error)) from None

    def _step_of(self, mount: Mount, step: int, deadline: float) -> Slab | None:
        """Return the slab that begins with `step`, opening a stream there if needed."""
        while True:
            if mount is not self._mount or self._stream_id is None or step != self._next_step:
                self._leave()
                self._open(mount, step, deadline)
            mount.flush()
            if self._pending is None:
                self._pending = self._ask(mount, deadline)
            body = self._answer(mount, self._pending, deadline)
            self._pending = None
            if self._stream_id is not None:
                mount.asked_ahead.discard(self._stream_id)
            if not isinstance(body, WeightsAsked):
                break
            self._session.learn(body.entries)
            self._leave()
        if isinstance(body, DataplaneError):
            self._leave()
            raise body
        if isinstance(body, EndOfStream) and step >= self._step_count:
            return None
        if not isinstance(body, Slab) or not self._continues(body, step):
            # An interrupt has lost the answer. Send the request again on a new connection: the node
            # frees the lost slab when the old connection closes.
            self._session.lost(mount)
            raise PeerLost(f"expected step {step} and found {body!r:.200}", peer=mount.node_id)
        self._next_step = step + len(body.batches) * self._stride
        # A slab that waits in the socket takes memory that other streams of this rank may need.
        may_ask_ahead = self._ahead and len(mount.asked_ahead) < AHEAD_STREAMS_MAX
        if self._next_step < self._step_count and may_ask_ahead:
            mount.asked_ahead.add(self._stream_id)
            self._pending = self._ask(mount, deadline)
        return body

    def _answer(self, mount: Mount, request_id: int, deadline: float) -> FromNodeBody:
        notice = self._session.first_slab_notice()
        try:
            return mount.wait(request_id, deadline, notice)[0]
        finally:
            if notice is not None:
                notice.over()

    def _open(self, mount: Mount, step: int, deadline: float) -> None:
        request = OpenStream(
            mount.job_id, self._epoch, self._cursor, step, self._stride, self.mix,
            self._session.known_entry,
        )  # fmt: skip
        opened, _ = mount.call(request, deadline)
        if not isinstance(opened, StreamOpened):
            raise PeerLost(f"the node answered OpenStream with {opened!r:.200}", peer=mount.node_id)
        self._mount, self._stream_id = mount, opened.stream_id
        self._step_count, self._next_step = opened.step_count, step
        mount.progress = self._epoch, self._consumed
        self._session.begins(self._epoch, self._cursor)

    def _ask(self, mount: Mount, deadline: float) -> int:
        bound = self._session.bound(time.monotonic())
        stream_id, waited = self._stream_id or 0, self._session.take_waited()
        request = NextSlab(stream_id, self.consumed, self.stall_s, bound, waited)
        return mount.wire.ask(request, deadline)

    def _continues(self, slab: Slab, step: int) -> bool:
        expected = range(step, step + len(slab.batches) * self._stride, self._stride)
        return bool(slab.batches) and all(
            batch.step == step for batch, step in zip(slab.batches, expected, strict=True)
        )

    def _leave(self) -> None:
        mount, stream_id, pending = self._mount, self._stream_id, self._pending
        self._mount = self._stream_id = self._pending = None
        if mount is None or stream_id is None:
            return
        mount.asked_ahead.discard(stream_id)
        if pending is not None:
            mount.wire.forget(pending)
        if not mount.wire.is_lost:
            mount.leave_stream(stream_id, self._consumed, self._session.take_waited())

    def _stall(self, step: int, stall_s: float, last_error: str) -> DataStallError:
        mount = self._mount
        node = mount.node_id if mount is not None else ""
        return DataStallError(
            f"no batch within {stall_s:g} s: waited for step {step} of epoch {self._epoch} "
            f"(from cursor {self._cursor}) from node {node or 'that could not be reached'}"
            + (f"; the connection before was lost: {last_error}" if last_error else ""),
            stage="node",
            node=node,
            last_error=last_error,
            step=step,
            epoch=self._epoch,
            pid=os.getpid(),
        )


def copied(batches: Batches, specs: tuple[ColumnSpec, ...]) -> list[Batches]:
    """Copy each batch to ordinary memory of its own, so that a kept batch does not keep others."""
    return [_copied_one(batches, specs, i) for i in range(len(batches.batches))]


def _copied_one(batches: Batches, specs: tuple[ColumnSpec, ...], i: int) -> Batches:
    moves: list[tuple[int, int, int]] = []
    end, columns = 0, []
    for spec, column in zip(specs, batches.columns, strict=True):
        places = []
        for offset, size in pieces(spec, column, i, batches.batches[i].rows):
            places.append(end)
            moves.append((end, offset, size))
            end += aligned(size)
        lengths = (places[1],) if len(places) > 1 else ()
        columns.append(Column((places[0],), lengths, column.width[i : i + 1]))
    memory = np.empty(end, np.uint8)
    for to, offset, size in moves:
        memory[to : to + size] = batches.memory[offset : offset + size]
    return Batches(memory, batches.batches[i : i + 1], tuple(columns))


# -- spans -----------------------------------------------------------------------------------------
#
# The life of a slab as spans of OpenTelemetry, made from the slab's stage times.

_STAGES = ("fetch", "decode", "room", "queue", "assemble", "ready")


def trace_slab(tracer: Any, slab: Slab, waited_s: float, **about: str | int) -> None:
    """Record a slab that has just arrived: a span for the slab, and within it a span for each of
    its stages, which followed one another, and a span for the trainer's wait.
    """
    now, times = time.time_ns(), slab.times
    stages = [(name, getattr(times, name) * 1000) for name in _STAGES]
    start = now - sum(took for _, took in stages)
    facts = about | {
        "step": slab.batches[0].step,
        "batches": len(slab.batches),
        "samples": sum(batch.valid for batch in slab.batches),
        "read_bytes": times.read_bytes,
    }
    named = {f"dataplane.{name}": value for name, value in facts.items()}
    whole = tracer.start_span("dataplane.slab", start_time=start, attributes=named)
    if not whole.is_recording():
        return
    inside = sys.modules["opentelemetry.trace"].set_span_in_context(whole)
    parts, at = [], start
    for name, took in stages:
        parts.append((name, at, at + took))
        at += took
    for name, begin, end in [*parts, ("wait", now - round(waited_s * 1e9), now)]:
        if end > begin:
            tracer.start_span(f"dataplane.{name}", inside, start_time=begin).end(end)
    whole.end(now)
