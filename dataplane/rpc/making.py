"""Requests of a node to a maker, another node whose workers make slabs for it.

The note that comes with the answer is an encoded tasks.Result. Its body is an Assembled, which
describes the slab; with `batch_count` 0 and without a slab, if the asker has too little room for
the first batch. Or it is the error for which the slab cannot be made from its data.
"""

from __future__ import annotations

from dataplane.model.records import MixHistory, Unsigned
from dataplane.rpc.codec import Message
from dataplane.rpc.messages import OpenJob


class StepRange(Message, frozen=True):
    """So many steps of a stream, from this one on."""

    first: Unsigned
    count: Unsigned


class MakeSlab(Message, frozen=True):
    """Make the slab of these steps; those in `coming` will be asked for next. `slot_bytes` is the
    size of the slot that the slab goes to. `opening` is for a maker that does not know the job.
    `mix` is that of the stream; `software` makes batches on the node that asks. The slab depends on
    nothing else, so it may be asked for any number of times, and of several makers.
    """

    digest: str  # of the spec
    epoch: Unsigned
    cursor: Unsigned  # where the stream begins; its steps count from there
    dp_rank: Unsigned
    dp_size: Unsigned
    step_stride: Unsigned
    steps: StepRange
    slot_bytes: Unsigned  # of the slot it goes to: the maker uses equal ones
    software: str = ""  # that decodes images, and hashes of the code of functions; "": none
    coming: tuple[StepRange, ...] = ()  # what the same maker will be asked for next
    opening: OpenJob | None = None  # sent to a maker that does not know the job
    mix: MixHistory | None = None  # as in OpenStream
