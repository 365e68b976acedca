"""How full the places are in which a node keeps blocks.

A frozen value, used outside this package instead of a protobuf class. Names and fields equal those
of proto/dataplane/rpc/v1/coordinator.proto, whose comments are the specification.
"""

from __future__ import annotations

from msgspec import Struct


class HeldBlocks(Struct, frozen=True):
    """The memory allocated for a node's blocks, and the bytes of its `disk_blocks` files on disk,
    each with its limit. A limit of 0: the node has no disk for blocks.
    """

    memory_bytes: int = 0
    memory_limit_bytes: int = 0
    disk_bytes: int = 0
    disk_limit_bytes: int = 0
    disk_blocks: int = 0
