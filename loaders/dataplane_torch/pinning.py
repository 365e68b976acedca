"""Pin the memory that devices read, and release slabs when no device can still read them.

`x.to("cuda", non_blocking=True); del x` is normal code: the tensor is freed while its copy is still
running. So a slab without references is released only after the devices have finished. A thread
waits for the devices, for many slabs at once, so that no finalizer waits.

The thread waits for all work of all devices, since a user may copy in any stream. If users never
see the memory, as in a loader over urls that yields batches on a device, the thread waits only for
the copies.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import warnings
from collections.abc import Callable
from typing import Any, Protocol

import torch

from dataplane.client.mount import Bytes, Pinning
from dataplane_torch.torch_private.memory import has_cuda_context

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device's context
_RETRY_S = 0.05

Release = Callable[[], None]


class Device(Protocol):
    """The device calls that pinning needs."""

    def register(self, address: int, size_bytes: int) -> None:
        """Pin these pages.   Raises:  RuntimeError."""
        ...

    def unregister(self, address: int) -> None:
        """Unpin these pages.   Raises:  RuntimeError."""
        ...

    def is_used(self) -> bool:
        """Return whether this process has given a device any work."""
        ...

    def synchronize(self) -> None:
        """Wait for all work submitted so far that may read the memory.   Raises:  RuntimeError."""
        ...


def wait_for_all_work() -> None:
    """Wait until the devices have finished all submitted work. Skip devices without a context,
    since waiting for such a device would create a context.
    """
    for index in range(torch.cuda.device_count()):
        if has_cuda_context(index):
            torch.cuda.synchronize(index)


class Cuda:
    """The process's CUDA devices, through torch. `wait` waits for work that may read memory."""

    def __init__(self, wait: Callable[[], None] = wait_for_all_work) -> None:
        self._wait = wait

    def register(self, address: int, size_bytes: int) -> None:
        """Implement Device.register."""
        cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        status = int(cudart.cudaHostRegister(address, size_bytes, _PORTABLE))
        if status:
            # Launch a kernel here, since CUDA reports the error once more at the next launch.
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device="cuda")
            raise RuntimeError(f"cudaHostRegister: error {status}")

    def unregister(self, address: int) -> None:
        """Implement Device.unregister."""
        cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        status = int(cudart.cudaHostUnregister(address))
        if status:
            raise RuntimeError(f"cudaHostUnregister: error {status}")

    def is_used(self) -> bool:
        """Implement Device.is_used."""
        return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]

    def synchronize(self) -> None:
        """Implement Device.synchronize."""
        self._wait()


class DevicePinning:
    """An implementation of dataplane.client.mount.Pinning for a device."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._dead: queue.SimpleQueue[Release | None] = queue.SimpleQueue()

    def pin(self, memory: Bytes) -> Callable[[], None]:
        """Register a mapping, and start the thread that releases its slabs."""
        address, pid = memory.ctypes.data, os.getpid()
        registered = self._register(address, memory.nbytes)
        threading.Thread(
            target=_give_back_dead, args=(self._device, self._dead), name="dataplane-release",
            daemon=True,
        ).start()  # fmt: skip

        def unpin() -> None:
            if os.getpid() != pid:
                return
            self._dead.put(None)  # end one thread
            if registered:
                with contextlib.suppress(RuntimeError):  # at process exit CUDA shuts down first
                    self._device.unregister(address)

        return unpin

    def when_unread(self, release: Release) -> None:
        """Call `release` now if no device has ever had work, otherwise in the thread. Finalizers
        may call this.
        """
        if self._device.is_used():
            self._dead.put(release)
        else:
            release()

    def _register(self, address: int, size_bytes: int) -> bool:
        try:
            self._device.register(address, size_bytes)
        except RuntimeError as error:
            warnings.warn(
                f"cannot pin {size_bytes} bytes for the device ({error}): batches are copied by "
                "way of pageable memory; raise `ulimit -l`, or pass pin_memory=False",
                RuntimeWarning,
                stacklevel=2,
            )
            return False
        return True


def cuda_pinning(*, wanted: bool) -> Pinning | None:
    """Return pinning if it is wanted and there is a CUDA device, otherwise None."""
    return DevicePinning(Cuda()) if wanted and torch.cuda.is_available() else None


def _give_back_dead(device: Device, dead: queue.SimpleQueue[Release | None]) -> None:
    # Make each round a function call, so that a waiting thread holds no reference to pinned memory.
    while _gave_back(device, dead):
        pass


def _gave_back(device: Device, dead: queue.SimpleQueue[Release | None]) -> bool:
    """Wait for dead slabs, and release them. Return False if None in `dead` ends the thread."""
    releases: list[Release] = []
    ends = False
    while not ends and not (releases and dead.empty()):
        release = dead.get()
        if release is None:
            ends = True
        else:
            releases.append(release)
    if releases:
        _wait_for(device)
    for release in releases:
        release()
    return not ends


def _wait_for(device: Device) -> None:
    """Wait for the device's work; retry while a CUDA graph is captured, which forbids waiting."""
    while True:
        try:
            device.synchronize()
        except RuntimeError:
            threading.Event().wait(_RETRY_S)
        else:
            return
