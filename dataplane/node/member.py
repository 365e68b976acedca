"""One rank of one job, as this node serves it."""

from __future__ import annotations

from dataclasses import dataclass, field

from dataplane.config import JobSpec
from dataplane.errors import DataplaneError
from dataplane.node.walk import SlabSizes
from dataplane.node.work import Delivery, StreamState
from dataplane.rpc import messages


@dataclass(slots=True, eq=False)
class Member:
    """One rank of one job, as this node serves it. `error` ends it: its requests get it. `pixels`
    names what makes them here; "" without images.

    `next_epoch` is what its only stream will be followed by, if all goes on as it does: it is made
    while the last slabs of this epoch are consumed.
    """

    request: messages.OpenJob
    spec: JobSpec
    delivery: Delivery
    sizes: SlabSizes
    generation: int
    pixels: str = ""
    streams: dict[int, StreamState] = field(default_factory=dict)
    next_epoch: StreamState | None = None
    epoch: int = 0
    cursor: int = 0
    stall_s: float = 0.0
    bound: str = ""
    rate: float = 0.0
    seen: tuple[float, int, int] = (0.0, 0, 0)
    error: DataplaneError | None = None
    closed: bool = False
    described: tuple[messages.DescribedColumn, ...] | None = None

    @property
    def job_id(self) -> str:
        """Its job."""
        return self.request.job_id

    @property
    def member_id(self) -> str:
        """Its own name."""
        return self.request.member_id
