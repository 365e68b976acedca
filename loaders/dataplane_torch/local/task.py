"""A batch that a worker was asked for, from its index to the batch that the loop gets."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from msgspec import Struct

from dataplane_torch.local import frames
from dataplane_torch.local.parcel import Arrived
from dataplane_torch.local.progress import SamplerState
from dataplane_torch.local.segments import MappedSegments
from dataplane_torch.sending import CopyStream, Sending


class BatchTask(Struct):
    """Who makes it, and where the sampler stood after its index. `make` is there from when the
    memory of its parcel is taken, for a device perhaps before it is due; `told` is what it raised.
    """

    worker_id: int
    index: Any
    sampler: SamplerState | None
    answer: frames.Made | frames.Ended | None = None
    make: Callable[[], Any] | None = None
    told: str | None = None

    def take(
        self,
        made: frames.Made,
        mapped: MappedSegments,
        copy_stream: CopyStream | None,
        pin: Callable[[Any], Any] | None,
    ) -> Callable[[], Any]:
        """Take the memory of its parcel. What is returned makes the batch, or the worker's error;
        where it raises, it may be called again.
        """
        if self.make is None:
            unpack = partial(_unpacked, Arrived(made.parcel, mapped), pin)
            self.make = unpack
            if copy_stream is not None and made.kind != "error":
                self.make = Sending(copy_stream, unpack)
        return self.make

    def is_told_again(self, error: Exception) -> bool:
        """Whether its batch raises the same error again. An exception from a signal handler does
        not repeat; an unpickling error does, and is reported once.
        """
        before, self.told = self.told, repr(error)
        return before == self.told


def _unpacked(arrived: Arrived, pin: Callable[[Any], Any] | None) -> Any:
    batch = arrived.unpack()
    return batch if pin is None else pin(batch)
