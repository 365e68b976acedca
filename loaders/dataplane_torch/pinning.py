"""Memory that devices read: registered once, and given back when no device can read it any more.

`x.to("cuda", non_blocking=True); del x` is normal code: the tensor is dead while its copy is still
on its way. So a dead slab waits for the devices before it is released; a thread of its own does
that, for many slabs at once, so that no finalizer ever waits.

It waits for all work of all devices, since nobody knows in which stream a user copies. Of memory
that no user ever has, as that of a loader over urls whose batches come on a device, it waits for
the copies alone.
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
    """What is asked of CUDA."""

    def register(self, address: int, size_bytes: int) -> None:
        """Pin these pages. Raises RuntimeError."""
        ...

    def unregister(self, address: int) -> None:
        """Let go of them. Raises RuntimeError."""
        ...

    def is_used(self) -> bool:
        """Whether this process has given a device any work."""
        ...

    def synchronize(self) -> None:
        """Wait for all work given so far that may read the memory. Raises RuntimeError."""
        ...


def wait_for_all_work() -> None:
    """Until the devices have done what they were given. Only where there is a context: asking
    another device would make one.
    """
    for index in range(torch.cuda.device_count()):
        if has_cuda_context(index):
            torch.cuda.synchronize(index)


class Cuda:
    """The devices of this process, through torch. `wait` is for the work that may read memory."""

    def __init__(self, wait: Callable[[], None] = wait_for_all_work) -> None:
        self._wait = wait

    def register(self, address: int, size_bytes: int) -> None:
        """As in Device."""
        cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        status = int(cudart.cudaHostRegister(address, size_bytes, _PORTABLE))
        if status:
            # CUDA keeps the error for whoever launches the next kernel: that had better be us.
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device="cuda")
            raise RuntimeError(f"cudaHostRegister: error {status}")

    def unregister(self, address: int) -> None:
        """As in Device."""
        cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        status = int(cudart.cudaHostUnregister(address))
        if status:
            raise RuntimeError(f"cudaHostUnregister: error {status}")

    def is_used(self) -> bool:
        """As in Device."""
        return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]

    def synchronize(self) -> None:
        """As in Device."""
        self._wait()


class DevicePinning:
    """dataplane.client.mount.Pinning over a device."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._dead: queue.SimpleQueue[Release | None] = queue.SimpleQueue()

    def pin(self, memory: Bytes) -> Callable[[], None]:
        """Register a mapping, and start the thread that gives its slabs back."""
        address, pid = memory.ctypes.data, os.getpid()
        registered = self._register(address, memory.nbytes)
        threading.Thread(
            target=_give_back_dead, args=(self._device, self._dead), name="dataplane-release",
            daemon=True,
        ).start()  # fmt: skip

        def unpin() -> None:
            if os.getpid() != pid:
                return
            self._dead.put(None)  # one thread ends
            if registered:
                with contextlib.suppress(RuntimeError):  # at the end of the process CUDA ends first
                    self._device.unregister(address)

        return unpin

    def when_unread(self, release: Release) -> None:
        """Now where no device has work, else from the thread. Called by finalizers."""
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
    """Pinning where it is wanted and there is a device, else None."""
    return DevicePinning(Cuda()) if wanted and torch.cuda.is_available() else None


def _give_back_dead(device: Device, dead: queue.SimpleQueue[Release | None]) -> None:
    # A function a round: while it waits, this thread must keep nothing that keeps memory pinned.
    while _gave_back(device, dead):
        pass


def _gave_back(device: Device, dead: queue.SimpleQueue[Release | None]) -> bool:
    """Give back what is dead, once there is something; False when this was the last time."""
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
    """Until everything given to the device is done; a capture of a graph forbids asking."""
    while True:
        try:
            device.synchronize()
        except RuntimeError:
            threading.Event().wait(_RETRY_S)
        else:
            return
