"""The device on which batches are yielded (`device=`), and its stream for copies."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from msgspec import Struct

from dataplane.base.units import whole
from dataplane.client.mount import Pinning
from dataplane.model.errors import ConfigError
from dataplane_torch.pinning import Cuda, DevicePinning
from dataplane_torch.sending import Copy, CopyStream, moved

Given = str | torch.device | int | None


class Target(Protocol):
    """The destination of a loader's batches."""

    def copy_stream(self) -> CopyStream:
        """Return the copy stream for a pass that begins now."""
        ...

    def pinning(self, *, reads_all: bool) -> Pinning:
        """Return how memory is pinned for copies. `reads_all`: only copies to the device read the
        memory, and users never do.
        """
        ...


class CudaTarget(Struct, frozen=True):
    """A CUDA device; without an index, the device that is current when a pass begins."""

    index: int | None

    def copy_stream(self) -> CopyStream:
        """Implement Target.copy_stream."""
        return CudaCopyStream(torch.cuda.current_device() if self.index is None else self.index)

    def pinning(self, *, reads_all: bool) -> Pinning:
        """Implement Target.pinning."""
        return DevicePinning(Cuda(_wait_for_copies) if reads_all else Cuda())


class CudaCopyStream:
    """dataplane_torch.sending.CopyStream over CUDA. A process has one such stream per device, so
    that all loaders share one pool of the caching allocator.
    """

    def __init__(self, index: int) -> None:
        self.device = torch.device("cuda", index)
        self._stream = _stream_of(index)

    @contextlib.contextmanager
    def copying(self) -> Iterator[Copy]:
        """Implement CopyStream.copying."""
        # Leave inference mode for the copy: the batch may be used after inference mode has ended.
        with torch.inference_mode(mode=False), torch.cuda.stream(self._stream):
            yield functools.partial(moved, device=self.device)

    def mark(self) -> Any:
        """Implement CopyStream.mark."""
        return self._stream.record_event()

    def wait_for(self, mark: Any) -> Any:
        """Implement CopyStream.wait_for."""
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(mark)
        return stream

    def record(self, copied: Any, stream: Any) -> None:
        """Implement CopyStream.record."""
        copied.record_stream(stream)


def find_target(given: Given) -> Target | None:
    """Return the device that `device` names; None if batches stay in host memory.

    Raises:  ConfigError: `given` does not name a device, or the device does not exist.
    """
    device = _parsed(given)
    if device is None or device.type == "cpu":
        return None
    if device.type != "cuda":
        how = f"move each batch in your loop, as in batch['x'].to({str(device)!r})"
        raise _refusal(given, f"batches come to CUDA devices only. Leave device= out, and {how}")
    if not torch.cuda.is_available():
        is_built = torch.version.cuda is not None or torch.version.hip is not None
        why = (
            "torch sees no CUDA device: look at nvidia-smi and CUDA_VISIBLE_DEVICES"
            if is_built
            else f"this torch ({torch.__version__}) is built without CUDA: install one that has it"
        )
        raise _refusal(given, f'{why}, or leave device= out (device="cpu" means the same)')
    count = torch.cuda.device_count()
    if device.index is not None and device.index >= count:
        raise _refusal(given, f"the CUDA devices here are 0 to {count - 1}")
    return CudaTarget(device.index)


def _parsed(given: object) -> torch.device | None:
    if given is None or isinstance(given, torch.device):
        return given
    number = whole(given)
    if number is not None and number >= 0:
        return torch.device("cuda", number)
    if isinstance(given, str):
        with contextlib.suppress(RuntimeError):
            return torch.device(given)
    raise _refusal(given, 'pass "cuda", "cuda:1", a torch.device, or the number of a CUDA device')


def _refusal(given: object, why: str) -> ConfigError:
    return ConfigError(f"device={given!r:.80}: {why}", field="device")


_streams: dict[int, torch.cuda.Stream] = {}


def _stream_of(index: int) -> torch.cuda.Stream:
    stream = _streams.get(index)
    if stream is None:
        made: Any = torch.cuda.Stream
        stream = _streams.setdefault(index, made(index))
    return stream


def _wait_for_copies() -> None:
    event: Any = torch.cuda.Event
    for stream in list(_streams.values()):
        # Use a blocking event, so that this thread sleeps instead of using a CPU while it waits.
        end = event(blocking=True)
        end.record(stream)
        end.synchronize()
