"""A stream that a node serves to a trainer."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from dataplane.rpc.messages import FromNodeBody, Slab
from dataplane.scheduler.walk import Walk

Send = Callable[[int, FromNodeBody], None]


class ServedStream(Struct, eq=False):
    """`send` answers a request of its consumer. `on_begun` is called once, after its next slab was
    sent. `on_planned` is called once, when its last step is planned; `is_planned` says that this
    happened, `has_failed` that planning failed.
    """

    stream_id: int
    walk: Walk
    send: Send
    on_begun: Callable[[], None] | None = None
    on_planned: Callable[[], None] | None = None
    is_planned: bool = False
    has_failed: bool = False
    is_closed: bool = False

    def answer(self, request_id: int, body: FromNodeBody) -> None:
        """Answer a request of its consumer."""
        self.send(request_id, body)
        if self.on_begun is not None and isinstance(body, Slab):
            call, self.on_begun = self.on_begun, None
            call()

    def tell_planned(self) -> None:
        """Call `on_planned` once, if its last step is planned."""
        call = self.on_planned
        if self.is_planned and call is not None:
            self.on_planned = None
            if not self.has_failed:
                call()
