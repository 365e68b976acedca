"""Memory limits of processes that parse untrusted bytes."""

from __future__ import annotations

from typing import Self

from msgspec import Struct

from dataplane.model.config import NodeConfig

_MIB = 1 << 20
# Allow this many times a block's decoded size: decoding holds the columns as the library made them,
# their canonical form, and one column more.
_DECODING_TIMES = 3


class WorkerBytes(Struct, frozen=True):
    """The private memory that a worker may take: `base`, plus the need of a dataset's largest
    block, up to `most` in total.
    """

    base: int
    most: int

    @classmethod
    def of(cls, config: NodeConfig) -> Self:
        """Return the limits of a node's configuration."""
        return cls(config.worker_memory_bytes, config.worker_memory_bytes_max)

    def for_blocks_of(self, decoded_bytes: int) -> int:
        """Return enough memory to decode a block of this size."""
        wanted = -(-(self.base + _DECODING_TIMES * decoded_bytes) // _MIB) * _MIB
        return max(self.base, min(wanted, self.most))
