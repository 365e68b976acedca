"""Memory that a forked child of a trainer can still read is not written again."""

from __future__ import annotations

import threading

from forked import forking

from dataplane.client.stream import SlabStream


def test_slabs_that_a_forked_child_can_read_are_not_used_again(fake, session) -> None:
    node, mine = fake(), session()
    stream = SlabStream(mine, 0, 0)
    held = stream.batches_from(0)
    before = held[0].memory.tobytes()
    with forking(lambda: int(held[0].memory.tobytes() != before)) as child:
        held.clear()
        step = 1
        while slabs := stream.batches_from(step):  # returned memory is overwritten
            step += sum(len(each.batches) for each in slabs)
            del slabs
        assert mine.mount().held_bytes > 0
        assert child.ask() == 0
    stream.close()
    assert mine.mount().held_bytes == 0
    for _ in range(3000):
        if node.free_count == node.slots.layout.slot_count:
            break
        threading.Event().wait(0.01)
    assert node.free_count == node.slots.layout.slot_count
