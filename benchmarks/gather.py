"""How close to memory speed is gathering a slab? The kernel and two bounds, on one core.

    python benchmarks/gather.py [--json]

Rows are drawn at random from many blocks, as in a shuffled window. One bound is np.take of as many
random rows of the same mean size from a single array; the other is memcpy of as many consecutive
bytes. Tables are gathered from packed blocks too, and packing is measured. Exit status 1: the
kernel missed its bar, a share of np.take's speed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
import pyarrow as pa

from dataplane.model import ColumnOptions, ListPolicy
from dataplane.rpc.messages import Batch
from dataplane.transforms.canonical import canonical
from dataplane.transforms.columns import ColumnPlan, plan_columns
from dataplane.worker.columns import BlockColumns, RowIndex, RowLayout, open_block
from dataplane.worker.gather import Gather
from dataplane.worker.row_layout import open_stored, plan_row_layout, store, stored_bytes

ROUNDS = 7
SLAB_BYTES = 4 << 20
SLABS = 24


@dataclass(frozen=True, slots=True)
class GatherCase:
    """A kind of dataset. `bar` is the share of np.take's speed that the kernel must reach."""

    name: str
    block_rows: int
    batch_rows: int
    bar: float
    make: Callable[[np.random.Generator, int], dict[str, pa.Array]]


def _tokens(random: np.random.Generator, rows: int) -> dict[str, pa.Array]:
    values = random.integers(0, 50_000, rows * 2048, dtype=np.int32)
    return {"tokens": pa.FixedSizeListArray.from_arrays(pa.array(values), 2048)}


def _table(random: np.random.Generator, rows: int) -> dict[str, pa.Array]:
    return {f"f{i}": pa.array(random.random(rows, np.float32)) for i in range(40)}


def _lists(random: np.random.Generator, rows: int) -> dict[str, pa.Array]:
    lengths = np.exp(random.normal(5.0, 0.8, rows)).astype(np.int64).clip(1, 2048)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    values = random.integers(0, 50_000, offsets[-1], dtype=np.int32)
    return {"tokens": pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(values))}


def _texts(random: np.random.Generator, rows: int) -> dict[str, pa.Array]:
    words = ["a" * int(length) for length in random.integers(0, 60, rows)]
    return {"text": pa.array(words, pa.large_string())}


CASES = (
    GatherCase("rows of 8 KiB, 128 blocks of 512 rows", 512, 32, 0.7, _tokens),
    GatherCase("40 columns of 4 bytes, 128 blocks of 16384 rows", 16384, 8192, 0.8, _table),
    GatherCase("lists of about 200 int32, 128 blocks of 2048 rows", 2048, 64, 0.5, _lists),
    GatherCase("texts of about 30 bytes, 128 blocks of 16384 rows", 16384, 256, 0.2, _texts),
)
BLOCKS = 128


@dataclass(frozen=True, slots=True)
class GatherSpeed:
    """One line of the table, in GB/s of slab; the rates of packing are 0 if nothing is packed."""

    name: str
    bar: float
    kernel_gb_s: float
    packed_gb_s: float
    pack_gb_s: float
    take_gb_s: float
    memcpy_gb_s: float

    @property
    def share(self) -> float:
        return self.kernel_gb_s / self.take_gb_s


class Slabs:
    """The blocks of a case, and the rows of some slabs."""

    def __init__(self, case: GatherCase) -> None:
        random = np.random.default_rng(0)
        first = pa.record_batch(case.make(random, case.block_rows))
        self.plan: ColumnPlan = plan_columns(first.schema, ColumnOptions(lists=ListPolicy.RAGGED))
        self.packing = plan_row_layout(self.plan.specs)
        self.blocks: list[BlockColumns] = []
        self._packed: list[BlockColumns] = []
        for _ in range(BLOCKS):
            batch = canonical(pa.record_batch(case.make(random, case.block_rows)), self.plan, "")
            self.blocks.append(open_block(batch, self.plan.specs))
            if self.packing is not None:
                region = memoryview(bytearray(stored_bytes(batch, self.packing)))
                store(batch, self.plan.specs, self.packing, region)
                self._packed.append(open_stored(region, self.plan.specs, self.packing))
        count = max(int(SLAB_BYTES * 0.9 / first.nbytes * case.block_rows / case.batch_rows), 1)
        self.batches = [Batch(i, case.batch_rows, case.batch_rows) for i in range(count)]
        rows = count * case.batch_rows
        self.indexes: list[RowIndex] = [
            np.stack(
                [random.integers(0, BLOCKS, rows), random.integers(0, case.block_rows, rows)], 1
            ).astype(np.int32)
            for _ in range(SLABS)
        ]
        self.slab = np.zeros(2 * SLAB_BYTES, np.uint8)
        self.bytes_used = self.gather(self.indexes[0])
        # For np.take: each column as one array, in 4-byte words, with rows of the mean length.
        words = max(first.nbytes // case.block_rows // len(self.plan.specs) // 4, 1)
        self._columns = [
            np.ones((BLOCKS * case.block_rows, words), np.int32) for _ in self.plan.specs
        ]
        self._picks = [random.integers(0, BLOCKS * case.block_rows, rows) for _ in range(SLABS)]
        self._taken = np.zeros((rows, words), np.int32)
        self._cold = np.ones(SLABS * SLAB_BYTES, np.uint8)
        self.bytes_taken = self._taken.nbytes * len(self._columns)
        self._region = memoryview(bytearray(stored_bytes(self.blocks[0].batch, self.packing)))

    def gather(self, index: RowIndex, *, packed: bool = False) -> int:
        """Make one slab; return its size in bytes."""
        blocks = self._packed if packed else self.blocks
        gather = Gather(self.plan.specs, blocks, index, self.batches)
        done = gather.into(self.slab.data)
        assert done.batch_count == len(self.batches)
        return done.bytes_used

    def pack(self, number: int, packing: RowLayout) -> None:
        """Pack one block."""
        store(self.blocks[number].batch, self.plan.specs, packing, self._region)

    def take(self, number: int) -> None:
        """A bound: numpy with one call per column."""
        for column in self._columns:
            np.take(column, self._picks[number], axis=0, out=self._taken, mode="clip")

    def copy(self, number: int) -> None:
        """A bound: memcpy, from another place each time."""
        start = number * SLAB_BYTES
        run = self._cold[start : start + self.bytes_used]
        self.slab[: len(run)] = run


def measure(case: GatherCase) -> GatherSpeed:
    """Measure in turns, so that other load slows all of them; the best round of each counts."""
    slabs = Slabs(case)
    packing, nothing = slabs.packing, lambda _: None
    calls: tuple[Callable[[int], object], ...] = (
        lambda i: slabs.gather(slabs.indexes[i]),
        (lambda i: slabs.gather(slabs.indexes[i], packed=True)) if packing else nothing,
        (lambda i: slabs.pack(i, packing)) if packing else nothing,
        slabs.take,
        slabs.copy,
    )
    best = [float("inf")] * len(calls)
    for _ in range(ROUNDS):
        for which, call in enumerate(calls):
            began = time.thread_time()
            for number in range(SLABS):
                call(number)
            best[which] = min(best[which], time.thread_time() - began)
    used, block = slabs.bytes_used, slabs.blocks[0].batch.nbytes
    sizes = (used, used * bool(packing), block * bool(packing), slabs.bytes_taken, used)
    speeds = [size * SLABS / seconds / 1e9 for size, seconds in zip(sizes, best, strict=True)]
    return GatherSpeed(case.name, case.bar, *speeds)


def main() -> int:
    """Run the command. Exit status 1: a bar was missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    given = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    missed = False
    for case in CASES:
        found = measure(case)
        missed = missed or found.share < found.bar
        if given.json:
            print(json.dumps(asdict(found)))
        else:
            print(
                f"{found.name}: kernel {found.kernel_gb_s:.2f} GB/s, "
                f"packed {found.packed_gb_s:.2f} (packing {found.pack_gb_s:.2f}), "
                f"np.take {found.take_gb_s:.2f}, memcpy {found.memcpy_gb_s:.2f}; "
                f"kernel / np.take {found.share:.2f} (at least {found.bar})",
                flush=True,
            )
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
