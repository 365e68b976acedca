"""Find lanes and a window that help a shuffle that mixes poorly, does not fit into memory, or makes
hosts read much more than their share.

1. A remedy has none of these problems, so that a job that follows it gets no advice.
2. The search tries a few numbers of lanes, and three windows for each, for any dataset.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from msgspec import Struct
from msgspec.structs import replace

from dataplane.plan.defaults import LANE_BLOCKS_MIN, LANES, PERMUTATION_BYTES
from dataplane.plan.order import WINDOW_MAX
from dataplane.plan.shuffled import QUALITY_MIN, ShuffledJob, block_bytes
from dataplane.plan.windows import WINDOW_CACHE_BYTES

# More than an estimate of memory needs, so that the job really fits.
ROOM = 1.1
# A remedy mixes a little better than it must, since shares of sources are rounded.
_QUALITY_WANTED = QUALITY_MIN + 0.05
# A batch from so many blocks mixes well.
_BLOCKS_WANTED = 64
_LANES_A_RANK = (1, 2, 4, 8)


class Remedy(Struct, frozen=True):
    """A changed job, what the user does for it, and the quality of its worst source."""

    job: ShuffledJob
    said: str
    quality: float = 0.0

    @property
    def memory_bytes(self) -> float:
        """The memory that each host needs for blocks."""
        return self.job.kept_bytes * ROOM


class Remedies(Struct, frozen=True):
    """A remedy that fits into the available memory; if none does, the one that needs the least.
    None: no lanes and window help.
    """

    fitting: Remedy | None = None
    larger: Remedy | None = None


def remedies(job: ShuffledJob, quality: float, *, reads_may_be_many: bool = False) -> Remedies:
    """Find remedies for a job whose worst source has this quality. `reads_may_be_many`: hosts may
    read any amount. A small dataset, which needs no good shuffle, does not get a poor one either.
    """
    larger, least = None, min(_QUALITY_WANTED, quality)
    wanted = _QUALITY_WANTED if quality < QUALITY_MIN else least
    for one in _tried(job):
        fits = one.memory_bytes <= job.arena_bytes
        if not fits and larger is not None and one.memory_bytes >= larger.memory_bytes:
            continue
        if one.job.reads_much and not reads_may_be_many:
            continue
        qualities = one.job.qualities()
        if min(qualities) < least or one.job.poor(qualities, wanted):
            continue
        found = replace(one, quality=min(qualities))
        if fits:
            return Remedies(fitting=found)
        larger = found
    return Remedies(larger=larger)


def _tried(job: ShuffledJob) -> Iterator[Remedy]:
    """Yield the candidates: the defaults first, then numbers of lanes from the present one on."""
    default = job.by_default()
    yield Remedy(default, "leave out lanes and window")
    has_window = job.sources != job.by_default(job.lanes).sources
    for lanes in _lanes_tried(job, default.lanes):
        if lanes != default.lanes:
            without = " and leave out window" if has_window else ""
            yield Remedy(job.by_default(lanes), f"set lanes={lanes}{without}")
        for window in _windows_tried(job, lanes):
            yield Remedy(job.with_window(lanes, window), f"set lanes={lanes}, window={window}")


def _lanes_tried(job: ShuffledJob, default: int) -> list[int]:
    ranks = job.cluster.dp_size
    of_ranks = {job.lanes_of_ranks, *(each * ranks for each in _LANES_A_RANK)}
    fitting = [
        each
        for each in {default, *LANES, *of_ranks}
        if each == 1 or LANE_BLOCKS_MIN * each <= job.block_count
    ]
    return sorted({job.lanes, *fitting}, key=lambda each: (abs(math.log2(each / job.lanes)), -each))


def _windows_tried(job: ShuffledJob, lanes: int) -> list[int]:
    """Return the windows to try: one that mixes well, and the longest one that fits, if it is
    shorter.
    """
    tried = job.by_default(lanes)
    longest = max(-(-one.sizes.samples // lanes) for one in job.sources)
    remembered = WINDOW_CACHE_BYTES // (PERMUTATION_BYTES * tried.lanes_per_host)
    wanted = max(
        max(one.window, math.ceil(_BLOCKS_WANTED * one.sizes.usual_rows / lanes))
        for one in tried.sources
    )
    wanted = min(wanted, longest, remembered, WINDOW_MAX)
    blocks = sum(block_bytes(one) for one in job.sources)
    if not blocks or math.isinf(job.arena_bytes):
        return [wanted] * (wanted > 0)
    rows = sum(block_bytes(one) / one.sizes.block_rows for one in job.sources)
    fitting = int((job.arena_bytes / ROOM / tried.lanes_per_host - blocks) / rows)
    fitting -= max(job.with_rounds(one, 0) for one in job.sources)
    return [each for each in (wanted, fitting) if 0 < each <= wanted]
