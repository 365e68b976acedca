"""The targets of one read: parts of a shard, and where their bytes go."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from dataplane.arena.memfd import Arena
from dataplane.rpc import fetches


def views(order: fetches.ReadRange, arena: Arena, stack: contextlib.ExitStack) -> list[memoryview]:
    """Where the bytes of each target go."""
    regions = [target.into for target in order.targets]
    return [stack.enter_context(arena.view(each.offset, each.length)) for each in regions]


def spaced(
    targets: Sequence[fetches.ReadTarget], into: Sequence[memoryview]
) -> Iterator[memoryview]:
    """Where the bytes of a read go, one part after the other; those between targets go nowhere."""
    at = targets[0].offset
    for target, each in zip(targets, into, strict=True):
        if target.offset > at:
            yield memoryview(bytearray(target.offset - at))
        yield each
        at = target.offset + len(each)
