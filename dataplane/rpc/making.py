"""What a node asks of a maker, another node whose workers make slabs for it.

The note that comes with the answer is an encoded tasks.Result. Its body is an Assembled, which
describes the slab; with `batch_count` 0 and without a slab, if the asker has too little room for
the first batch. Or it is the error for which the slab cannot be made from its data.

Frozen values, used outside this package instead of protobuf classes. Names and fields equal those
of proto/dataplane/rpc/v1/making.proto, whose comments are the specification; a test compares the
two.
"""

from __future__ import annotations

from msgspec import Struct

from dataplane.rpc.messages import OpenJob
from dataplane.weights import MixHistory


class StepRange(Struct, frozen=True):
    """So many steps of a stream, from this one on."""

    first: int
    count: int


class MakeSlab(Struct, frozen=True):
    """Make the slab of these steps; those in `coming` will be asked for next. `slot_bytes` is the
    size of the slot that the slab goes to. `opening` is for a maker that does not know the job.
    `mix` is that of the stream; `software` makes batches on the node that asks.
    """

    digest: str
    epoch: int
    cursor: int
    dp_rank: int
    dp_size: int
    step_stride: int
    steps: StepRange
    slot_bytes: int
    software: str = ""
    coming: tuple[StepRange, ...] = ()
    opening: OpenJob | None = None
    mix: MixHistory | None = None
