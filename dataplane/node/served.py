"""A stream that a node serves to a trainer."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from dataplane.rpc.messages import FromNodeBody
from dataplane.scheduler.walk import Walk

Send = Callable[[int, FromNodeBody], None]


class ServedStream(Struct, eq=False):
    """`send` answers a request of its consumer. `on_planned` is called once, when its last step is
    planned; `is_planned` says that this happened, `has_failed` that planning failed.
    """

    stream_id: int
    walk: Walk
    send: Send
    on_planned: Callable[[], None] | None = None
    is_planned: bool = False
    has_failed: bool = False
    is_closed: bool = False
