"""Divide the time until a loader's first batch by stage.

The client measures how long the node took to answer and to open the job. The node reports how much
of that it spent on the dataset's index and on planning. The rest comes from the stage times of the
first slab. Nothing is measured afterwards.
"""

from __future__ import annotations

from msgspec import Struct

from dataplane.client.waits import stages_waited_for
from dataplane.rpc.messages import JobOpened, StageTimes

_US_A_S = 1e6


class FirstBatch(Struct, frozen=True):
    """The stages of the first batch, one after the other, in seconds; all 0.0 until it arrived.

    `node_s`: until the node answered, which an embedded one does once it has started. `index_s`:
    its shards were listed and indexed, or their saved index was read. `plan_s`: columns, the place
    in the job, memory. `connect_s`: everything else until the job was open. Then the wait for the
    first slab, as in Statistics: `fetch_s`, `decode_s`, `room_s`, `queue_s`, `assemble_s`, and
    `hand_over_s`, which has the plan of its rows and the messages. `queue_s` is the wait for a
    worker: the start of its process, and all that it is told before the slab, are in it.
    """

    node_s: float = 0.0
    connect_s: float = 0.0
    index_s: float = 0.0
    plan_s: float = 0.0
    fetch_s: float = 0.0
    decode_s: float = 0.0
    room_s: float = 0.0
    queue_s: float = 0.0
    assemble_s: float = 0.0
    hand_over_s: float = 0.0

    @property
    def total_s(self) -> float:
        """The time from the first use of the loader to its first batch."""
        return sum(self.stages().values())

    def stages(self) -> dict[str, float]:
        """Seconds by stage, in their order: "node", "connect", …"""
        return {
            "node": self.node_s,
            "connect": self.connect_s,
            "index": self.index_s,
            "plan": self.plan_s,
            "fetch": self.fetch_s,
            "decode": self.decode_s,
            "room": self.room_s,
            "queue": self.queue_s,
            "assemble": self.assemble_s,
            "hand_over": self.hand_over_s,
        }


NOT_YET = FirstBatch()


class Opening(Struct, frozen=True):
    """The opening of a job; times in seconds, `done_at` in time.monotonic()."""

    node_s: float
    open_s: float
    done_at: float
    index_s: float
    plan_s: float

    @classmethod
    def of(cls, began: float, reached: float, done: float, job: JobOpened) -> Opening:
        """Make an opening from times `began`, `reached` and `done`, in time.monotonic()."""
        return cls(reached - began, done - reached, done, job.index_s, job.plan_s)

    def first_batch(self, asked: float, arrived: float, times: StageTimes) -> FirstBatch:
        """Return the stages of a slab that was requested and arrived at these times, in
        time.monotonic(). If the request opened the job, it waited for the slab only after that.
        """
        waited_s = max(arrived - max(asked, self.done_at), 0.0)
        parts = stages_waited_for(round(waited_s * _US_A_S), times)
        fetch, decode, room, queue, assemble, other = (part / _US_A_S for part in parts)
        connect_s = max(self.open_s - self.index_s - self.plan_s, 0.0)
        return FirstBatch(
            self.node_s, connect_s, self.index_s, self.plan_s,
            fetch, decode, room, queue, assemble, other,
        )  # fmt: skip
