"""A device that does its work as late, and in as bad an order, as a real one may.

Streams are queues of copies, reads and waits; a seed decides what runs when. A copy reads its
source, and a step its tensors, when it runs and not when it is submitted, and does not keep them
alive. Freed memory is reused at once, unless it was recorded as in use. So a forgotten wait, record
or reference leads to wrong bytes; `failures` says which.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from dataplane_torch.pinning import DevicePinning
from dataplane_torch.tensors import tensor_over

_STALE = 0xDB
_IDLE_S = 0.002


class Stream:
    """A queue of work: an operation says whether it was done, or must be asked again."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.queue: deque[Callable[[], bool]] = deque()
        self.given = self.done = 0

    def add(self, operation: Callable[[], bool]) -> None:
        self.queue.append(operation)
        self.given += 1

    def step(self) -> bool:
        """Run the first operation; False where it waits for another stream, or there is none."""
        if not self.queue or not self.queue[0]():
            return False
        self.queue.popleft()
        self.done += 1
        return True


class Block:
    """Memory of one stream. `busy_until` are the places in others at which it is free again."""

    def __init__(self, stream: Stream, size_bytes: int) -> None:
        self.stream = stream
        self.memory = np.full(size_bytes, _STALE, np.uint8)
        self.recorded: set[Stream] = set()
        self.busy_until: list[tuple[Stream, int]] = []

    @property
    def address(self) -> int:
        return self.memory.ctypes.data

    def forget(self) -> bool:
        self.memory[:] = _STALE
        return True


class FakeDevice:
    """One device, its streams and its allocator. `current` is the stream that callers compute in."""

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.lock = threading.RLock()
        self.copy_stream = Stream("copy stream")
        self.streams = [self.copy_stream, Stream("compute"), Stream("another")]
        self.current = self.streams[1]
        self.pinned: dict[int, int] = {}
        self.free: dict[tuple[Stream, int], list[Block]] = {}
        self.live: dict[int, Block] = {}
        self.failures: list[str] = []
        self.copies = self.pageable = 0
        self.refuses = 0

    def tick(self, most: int = 3) -> None:
        """Let some streams do a part of their work."""
        with self.lock:
            for _ in range(self.random.randint(0, most)):
                self.random.choice(self.streams).step()

    def finish(self) -> None:
        """Finish all submitted work."""
        with self.lock:
            while any(stream.step() for stream in self.streams):
                pass
            assert not any(stream.queue for stream in self.streams)

    def copied(self, source: torch.Tensor) -> torch.Tensor:
        """Begin to copy to memory of the current stream, like a tensor's to(non_blocking=True)."""
        with self.lock:
            self.tick()
            if self.refuses:
                self.refuses -= 1
                raise RuntimeError("out of memory")
            assert source.is_contiguous()
            size, address = source.numel() * source.element_size(), source.data_ptr()
            if not size:
                return torch.empty_like(source)
            block, self.copies = self._allocated(size), self.copies + 1
            staged = None
            if not self._is_pinned(address, size):
                self.pageable += 1
                staged = ctypes.string_at(address, size)

            def copy() -> bool:
                if staged is not None:
                    ctypes.memmove(block.address, staged, size)
                elif self._is_pinned(address, size):
                    ctypes.memmove(block.address, address, size)
                else:
                    self.failures.append("the source went away before it was copied")
                return True

            self.current.add(block.forget)
            self.current.add(copy)
            return self._tensor(block, source)

    def read(self, tensor: torch.Tensor, expected: bytes) -> None:
        """Submit a step that reads a tensor, and checks its bytes when it runs."""
        if not expected:
            return
        with self.lock:
            block = self.live[tensor.data_ptr()]

            def compute() -> bool:
                if block.memory[: len(expected)].tobytes() != expected:
                    self.failures.append(f"a step read {block.memory[:16]}")
                return True

            self.current.add(compute)
            self.tick()

    def record(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Like a tensor's record_stream()."""
        with self.lock:
            if tensor.numel():
                self.live[tensor.data_ptr()].recorded.add(stream)

    def marked(self, stream: Stream) -> Callable[[], bool]:
        """An event: whether what the stream was given so far is done."""
        place = stream.given
        return lambda: stream.done >= place

    def wait(self, streams: list[Stream]) -> None:
        """Wait, like a thread, for the work of the streams. Time advances by itself if no other
        thread advances it.
        """
        with self.lock:
            marks = [self.marked(stream) for stream in streams]
        pause = threading.Event()
        while True:
            with self.lock:
                if all(mark() for mark in marks):
                    return
                before = [stream.done for stream in self.streams]
            pause.wait(_IDLE_S)
            with self.lock:
                if before == [stream.done for stream in self.streams]:
                    for stream in self.streams:
                        stream.step()

    def _is_pinned(self, address: int, size: int) -> bool:
        spans = list(self.pinned.items())
        return any(start <= address and address + size <= start + span for start, span in spans)

    def _allocated(self, size: int) -> Block:
        blocks = self.free.setdefault((self.current, size), [])
        for block in reversed(blocks):
            if all(stream.done >= place for stream, place in block.busy_until):
                blocks.remove(block)
                block.recorded, block.busy_until = set(), []
                break
        else:
            block = Block(self.current, size)
        self.live[block.address] = block
        return block

    def _tensor(self, block: Block, like: torch.Tensor) -> torch.Tensor:
        memory = np.frombuffer(block.memory.data, np.uint8)  # it lives as long as the tensor
        weakref.finalize(memory, self._died, block).atexit = False
        return tensor_over(memory, like.dtype, tuple(like.shape))

    def _died(self, block: Block) -> None:
        with self.lock:
            del self.live[block.address]
            block.busy_until = [(stream, stream.given) for stream in block.recorded]
            self.free[block.stream, block.memory.nbytes].append(block)


class FakeCopyStream:
    """dataplane_torch.sending.CopyStream over a fake device."""

    def __init__(self, device: FakeDevice) -> None:
        self.fake, self.device = device, torch.device("cpu")

    @contextlib.contextmanager
    def copying(self) -> Iterator[Callable[[Any], Any]]:
        taker, self.fake.current = self.fake.current, self.fake.copy_stream
        try:
            yield self._copied
        finally:
            self.fake.current = taker

    def _copied(self, one: Any) -> Any:
        return self.fake.copied(one) if isinstance(one, torch.Tensor) else one.to(self)

    def mark(self) -> Callable[[], bool]:
        return self.fake.marked(self.fake.copy_stream)

    def wait_for(self, mark: Callable[[], bool]) -> Stream:
        with self.fake.lock:
            self.fake.current.add(mark)
            return self.fake.current

    def record(self, copied: Any, stream: Stream) -> None:
        if isinstance(copied, torch.Tensor):
            self.fake.record(copied, stream)
        else:
            copied.record_stream(stream)


class _Waits:
    """dataplane_torch.pinning.Device: memory that these streams may read."""

    def __init__(self, device: FakeDevice, streams: list[Stream]) -> None:
        self._device, self._streams = device, streams

    def register(self, address: int, size_bytes: int) -> None:
        self._device.pinned[address] = size_bytes

    def unregister(self, address: int) -> None:
        del self._device.pinned[address]

    def is_used(self) -> bool:
        return True

    def synchronize(self) -> None:
        self._device.wait(self._streams)


class FakeTarget:
    """dataplane_torch.device.Target: a fake device."""

    def __init__(self, device: FakeDevice, stream: type[FakeCopyStream] = FakeCopyStream) -> None:
        self.device, self._stream = device, stream

    def copy_stream(self) -> FakeCopyStream:
        return self._stream(self.device)

    def pinning(self, *, reads_all: bool) -> DevicePinning:
        streams = [self.device.copy_stream] if reads_all else self.device.streams
        return DevicePinning(_Waits(self.device, streams))


class LateDevice:
    """A device whose queue of work ends when the test says so."""

    def __init__(self, *, used: bool = True, refuses: bool = False) -> None:
        self.used, self.refuses = used, refuses
        self.registered: dict[int, int] = {}
        self.pinned_count = self.unpinned_count = self.failures = 0
        self.done = threading.Event()
        self.asked = threading.Semaphore(0)

    def register(self, address: int, size_bytes: int) -> None:
        if self.refuses:
            raise RuntimeError("out of locked memory")
        assert address not in self.registered
        self.registered[address] = size_bytes
        self.pinned_count += 1

    def unregister(self, address: int) -> None:
        del self.registered[address]
        self.unpinned_count += 1

    def is_used(self) -> bool:
        return self.used

    def synchronize(self) -> None:
        self.asked.release()
        if self.failures:
            self.failures -= 1
            raise RuntimeError("a graph is being captured")
        assert self.done.wait(60)

    def covers(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is entirely in registered memory."""
        first, length = tensor.data_ptr(), tensor.numel() * tensor.element_size()
        return any(
            start <= first and first + length <= start + size
            for start, size in self.registered.items()
        )
