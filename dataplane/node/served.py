"""A stream that a node serves to a trainer."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from dataplane.model.errors import ConfigError
from dataplane.rpc.messages import FromNodeBody, Slab
from dataplane.scheduler.walk import Walk

Send = Callable[[int, FromNodeBody], None]


class ServedStream(Struct, eq=False):
    """A stream. `send` answers a request of its consumer, which was sent its steps before
    `steps_sent`. `on_begun` is called once, after its next slab was sent. `on_planned` is called
    once, when its last step is planned; `is_planned` says that this happened, `has_failed` that
    planning failed. `maps` names the functions that workers call over its blocks.
    """

    stream_id: int
    walk: Walk
    send: Send
    steps_sent: int = 0
    on_begun: Callable[[], None] | None = None
    on_planned: Callable[[], None] | None = None
    is_planned: bool = False
    has_failed: bool = False
    is_closed: bool = False
    maps: str = ""

    def answer(self, request_id: int, body: FromNodeBody) -> None:
        """Answer a request of its consumer."""
        self.send(request_id, body)
        if not isinstance(body, Slab):
            return
        self.steps_sent = body.batches[-1].step + 1
        if self.on_begun is not None:
            call, self.on_begun = self.on_begun, None
            call()

    def check_consumed(self, cursor: int) -> None:
        """Check the cursor that all ranks have consumed according to the consumer.

        Raises:  ConfigError: it is beyond what the consumer was sent.
        """
        walk, begin = self.walk, self.walk.stream
        steps = max(begin.first_step, self.steps_sent)
        end = walk.steps.after(steps)
        if cursor > end:
            raise ConfigError(
                f"this trainer says that {cursor} samples of epoch {begin.epoch} are consumed, and"
                f" was sent batches up to sample {end}: a trainer counts what it was given",
                field="cursor",
            )

    def tell_planned(self) -> None:
        """Call `on_planned` once, if its last step is planned."""
        call = self.on_planned
        if self.is_planned and call is not None:
            self.on_planned = None
            if not self.has_failed:
                call()
