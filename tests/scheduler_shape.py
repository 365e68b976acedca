"""What a simulated job over some nodes is like."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shape:
    """A job over some nodes. Times are in seconds, and drawn up to twice as long. Without lanes it
    reads in order. The first node has an arena of `small_bytes`, if that is not 0.
    """

    nodes: int = 4
    ranks: int = 2
    lanes: int = 8
    window: int = 1024
    batch: int = 512
    blocks: int = 512
    shard_blocks: int = 32
    block_rows: int = 500
    row_bytes: int = 1024
    estimate: float = 1.27
    """Of the index, for decoded blocks."""
    arena_bytes: int = 16 << 20
    small_bytes: int = 0
    slab_bytes: int = 1 << 19
    slots_bytes: int = 8 << 20
    workers: int = 1
    epochs: int = 2
    seed: int = 1
    read_s: float = 0.02
    line_s: float = 0.001
    decode_s: float = 0.003
    assemble_s: float = 0.002
    step_s: float = 0.005
    knows: int = 1
    """0: the nodes do not know each other."""

    @property
    def size(self) -> int:
        return self.nodes * self.ranks

    def arena_of(self, node: int) -> int:
        return self.small_bytes if self.small_bytes and not node else self.arena_bytes

    def place(self, block: int) -> tuple[int, int]:
        """The shard that a block is in, and where it begins there."""
        shard, number = divmod(block, self.shard_blocks)
        return shard, number * (self.block_rows * self.row_bytes)
