"""Default lanes, window and ramp of a dataset. docs/order.md specifies these rules,
docs/decisions/lanes-and-windows.md gives the reasons, and benchmarks/plans.py simulates them.

They depend only on the manifest, never on the number of ranks or hosts, so that a job may be
resumed on any number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from dataplane.model.config import JobSpec
from dataplane.plan.order import RAMP_MAX, counted

MIB, GIB = 1 << 20, 1 << 30

# The memory that the open windows of all lanes may take, summed over all hosts: a seventh of the
# decoded dataset, within these limits. With blocks of 64 MiB, 36 GiB suffice for 512 lanes.
OPEN_SHARE = 7
OPEN_BYTES_MIN = 256 * MIB
OPEN_BYTES_MAX = 36 * GIB
# The longest window. Computing its permutation takes a third of a second.
WINDOW_SAMPLES_MAX = 1 << 22
# The most samples in the open windows of all lanes. Their permutations take 64 MiB.
OPEN_SAMPLES_MAX = 1 << 24
PERMUTATION_BYTES = 4

# Each usual number of GPUs (a power of two, or three times a power of two) divides at least one of
# these numbers.
LANES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1536, 3072)
# The usual minimum size of a lane, so that hosts share few blocks. A large dataset is read by many
# hosts, so it gets many lanes.
LANE_BYTES = GIB
# The fewest blocks of a lane. A block on the border of two lanes is read for both lanes, so at most
# one block in seven is read twice.
LANE_BLOCKS_MIN = 7
# A window covers at least a block divided by this number. Shorter windows would save little memory,
# since each lane has at least one block open.
WINDOW_SHARE_MIN = 16
# If fewer blocks than this can be open in all windows together, more lanes shuffle better than
# longer windows.
SCARCE_BLOCKS = 256
LANES_IF_SCARCE = 128

# The total size of the first windows of epoch 0. They have at least RAMP_BLOCKS_MIN blocks in total
# and an eighth of a block per lane, since smaller windows would not be read sooner.
RAMP_BYTES = 32 * MIB
RAMP_BLOCKS_MIN = 4
RAMP_SHARE_MIN = 8


class BlockSizes(Struct, frozen=True):
    """A dataset's mean sizes, rounded up to integers, so that every host computes the same values.

    `usual_rows` is the number of rows of the block that contains a sample, averaged over samples.
    If blocks differ in size, it is more than `block_rows`. No default depends on it.
    """

    samples: int
    blocks: int
    block_rows: int
    block_bytes: int
    sample_bytes: int
    usual_rows: int

    @classmethod
    def of(cls, block_rows: NDArray[np.integer], block_decoded: NDArray[np.integer]) -> BlockSizes:
        """Shapes:  block_rows: integer[K], samples.   block_decoded: integer[K], bytes.
        Raises:  ConfigError: no samples.
        """
        samples, blocks = counted(block_rows), len(block_rows)
        decoded = int(block_decoded.sum(dtype=np.int64))
        usual = math.ceil(float(np.square(block_rows, dtype=np.float64).sum()) / samples)
        return cls(
            samples,
            blocks,
            -(-samples // blocks),
            -(-decoded // blocks),
            -(-decoded // samples),
            min(usual, samples),
        )

    @property
    def dataset_bytes(self) -> int:
        """The approximate decoded size of the dataset."""
        return self.samples * self.sample_bytes

    def open_window_bytes(self, window: int) -> int:
        """Return the memory that one open window takes, the sum of

        - its samples, and their permutation: W * (sample + PERMUTATION_BYTES);
        - the rest of the blocks in which it begins and ends: half a block each on average.
        """
        return window * (self.sample_bytes + PERMUTATION_BYTES) + self.block_bytes


class Shuffle(Struct, frozen=True):
    """The parameters of a shuffle; see docs/order.md. `ramp` counts halvings of the first
    windows.
    """

    lanes: int
    window: int
    ramp: int


def shuffle_of(sizes: BlockSizes, lanes: int | None = None, window: int | None = None) -> Shuffle:
    """Return lanes, window and ramp for a dataset: the given values, and defaults for the rest."""
    lanes = lanes or _lanes(sizes)
    window = window or _window(sizes, lanes)
    return Shuffle(lanes, window, _ramp(sizes, lanes, window))


def with_shuffle(spec: JobSpec, sizes: BlockSizes) -> JobSpec:
    """Return a job's spec with the shuffle of a dataset of these sizes: the lanes and window that
    the spec has, and defaults for the rest.
    """
    shuffle = Shuffle(1, 1, 0)
    if spec.shuffle:
        shuffle = shuffle_of(sizes, spec.lanes, spec.window)
    return replace(spec, lanes=shuffle.lanes, window=shuffle.window, ramp=shuffle.ramp)


def open_bytes_max(sizes: BlockSizes) -> int:
    """Return the memory that all open windows may take by default, over all hosts."""
    return max(OPEN_BYTES_MIN, min(sizes.dataset_bytes // OPEN_SHARE, OPEN_BYTES_MAX))


def mixed_lanes(sizes: Sequence[BlockSizes]) -> int:
    """Return the lanes of a mixture of several datasets: as many as one dataset with all of their
    blocks would have.
    """
    return _lanes(_together(sizes))


def source_window(sizes: BlockSizes, lanes: int, every: Sequence[BlockSizes]) -> int:
    """Return the window of one dataset of a mixture with this many lanes. The dataset's share of
    the memory for open windows, and of their samples, is proportional to its bytes. The window is
    at least half a block.
    """
    whole = _together(every)
    if lanes == 1 and _is_one_window(whole):
        return sizes.samples
    part, total = sizes.dataset_bytes, max(sum(each.dataset_bytes for each in every), 1)
    left = open_bytes_max(whole) * part // total // lanes - sizes.block_bytes
    fitting = min(
        left // (sizes.sample_bytes + PERMUTATION_BYTES),
        WINDOW_SAMPLES_MAX,
        OPEN_SAMPLES_MAX * part // total // lanes,
        -(-sizes.samples // lanes),
    )
    return max(fitting, _shortest(sizes), 1)


def _together(every: Sequence[BlockSizes]) -> BlockSizes:
    samples, blocks = (sum(getattr(one, name) for one in every) for name in ("samples", "blocks"))
    decoded = sum(one.blocks * one.block_bytes for one in every)
    rows = -(-samples // blocks)
    return BlockSizes(samples, blocks, rows, -(-decoded // blocks), -(-decoded // samples), rows)


def _is_one_window(sizes: BlockSizes) -> bool:
    whole_bytes = sizes.samples * (sizes.sample_bytes + PERMUTATION_BYTES)
    return sizes.samples <= WINDOW_SAMPLES_MAX and whole_bytes <= OPEN_BYTES_MIN


def _lanes(sizes: BlockSizes) -> int:
    if _is_one_window(sizes):
        return 1
    wanted = sizes.dataset_bytes // LANE_BYTES
    is_scarce = open_bytes_max(sizes) < SCARCE_BLOCKS * sizes.block_bytes
    if is_scarce and _fits(sizes, LANES_IF_SCARCE):
        wanted = max(wanted, LANES_IF_SCARCE)
    return next((each for each in reversed(LANES) if each <= wanted and _fits(sizes, each)), 1)


def _fits(sizes: BlockSizes, lanes: int) -> bool:
    return LANE_BLOCKS_MIN * lanes <= sizes.blocks and _longest(sizes, lanes) >= _shortest(sizes)


def _shortest(sizes: BlockSizes) -> int:
    return -(-sizes.block_rows // WINDOW_SHARE_MIN)


def _longest(sizes: BlockSizes, lanes: int) -> int:
    """Return the longest window within all limits; below 1 if there is none."""
    left = open_bytes_max(sizes) // lanes - sizes.block_bytes
    return min(
        left // (sizes.sample_bytes + PERMUTATION_BYTES),
        WINDOW_SAMPLES_MAX,
        OPEN_SAMPLES_MAX // lanes,
        -(-sizes.samples // lanes),
    )


def _window(sizes: BlockSizes, lanes: int) -> int:
    if lanes == 1 and _is_one_window(sizes):
        return sizes.samples
    longest, shortest = _longest(sizes, lanes), _shortest(sizes)
    if longest >= shortest:
        return longest
    if lanes > 1:
        return shortest
    # The blocks are too large for the limit: use only the memory that is needed in any case.
    fitting = open_bytes_max(sizes) // (sizes.sample_bytes + PERMUTATION_BYTES)
    return max(min(sizes.block_rows, fitting, WINDOW_SAMPLES_MAX), 1)


def _ramp(sizes: BlockSizes, lanes: int, window: int) -> int:
    """Return how often windows must be halved until the first windows of all lanes take RAMP_BYTES
    in total, or until they are as short as is useful.
    """
    least = max(
        -(-RAMP_BLOCKS_MIN * sizes.block_rows // lanes), -(-sizes.block_rows // RAMP_SHARE_MIN)
    )
    ramp, length = 0, min(window, -(-sizes.samples // lanes))
    while lanes * length * sizes.sample_bytes > RAMP_BYTES and length >= 2 * least:
        length = -(-length // 2)
        ramp += 1
    return min(ramp, RAMP_MAX)
