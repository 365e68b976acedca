"""Warn users of a job's problems before it runs.

A shuffle may mix poorly, make hosts read much more than their share, or need more memory for open
windows than hosts have; packs may waste tokens on padding. Each warning names the setting that
helps.

1. All numbers are estimates from mean sizes, so computing them is fast for any dataset.
2. A job that follows the advice gets no further warning.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from msgspec import Struct
from msgspec.structs import replace

from dataplane.base.units import raise_to
from dataplane.model.records import LongPolicy, PackPolicy, PackSpec
from dataplane.plan.cluster import Cluster
from dataplane.plan.defaults import (
    GIB,
    LANE_BLOCKS_MIN,
    LANES,
    PERMUTATION_BYTES,
    BlockSizes,
    Shuffle,
)
from dataplane.plan.order import WINDOW_MAX
from dataplane.plan.packs import Packing
from dataplane.plan.shuffled import QUALITY_MIN, ShuffledJob, block_bytes
from dataplane.plan.windows import WINDOW_CACHE_BYTES

ROOM = 1.1
"""The factor by which suggested memory exceeds the estimate, so that the job really fits."""
# Suggest lanes and windows of slightly more than the minimum quality, since shares of sources are
# rounded.
_QUALITY_WANTED = QUALITY_MIN + 0.05
# A batch whose samples come from this many blocks mixes well.
_BLOCKS_WANTED = 64
_LANES_A_RANK = (1, 2, 4, 8)
# The share of tokens that packs may waste without a warning. Packs of web pages waste less if a
# block has `_PACKS_A_BLOCK` packs.
_WASTE_MAX, _PACKS_A_BLOCK, _TOKENS_MIN = 0.03, 128, 1 << 20
# Padded batches always waste more, since their widths are rounded up.
_PADDED_WASTE_MAX = 0.1
_SMALLER_BLOCKS = "write smaller blocks (row groups or record batches)"


def advice(job: ShuffledJob) -> str:
    """Return the advice about a shuffled job over a dataset or a mixture, and about this host's
    memory, as one message; "" if there is no problem.
    """
    qualities = job.qualities()
    problems = [said for said in (_mixing(job, qualities), _locality(job), _memory(job)) if said]
    return f"{', and '.join(problems)}: {_help(job, qualities)}" if problems else ""


def memory(job: ShuffledJob) -> str:
    """Return only the advice about memory, or "" if open windows fit into this host's memory."""
    return f"{_memory(job)}: {_help(job, job.qualities())}" if not job.fits else ""


def packing(made: Packing, pack: PackSpec, block_count: int) -> str:
    """Return the advice about a job's packs, if they waste many tokens."""
    in_block, padding = f"{made.packs / block_count:.1f}", made.padding
    if made.tokens < _TOKENS_MIN:
        return ""
    if pack.policy is PackPolicy.PAD:
        return "" if padding <= _PADDED_WASTE_MAX else (
            f"{padding:.1%} of the tokens in padded batches are padding, because blocks have only "
            f"{in_block} padded batches on average. Store larger blocks: the documents of a batch "
            "come from one block, and a larger block has more documents of similar length. A "
            "smaller `multiple` also helps"
        )  # fmt: skip
    lost = 1 - made.packed_tokens / made.tokens
    cuts = pack.policy is PackPolicy.WRAP and pack.long is LongPolicy.FRAGMENT
    if padding > _WASTE_MAX:
        waste = f"{padding:.1%} of the tokens in packs are padding"
    elif cuts and lost > _WASTE_MAX:
        waste = f"{lost:.1%} of the tokens are dropped, because the end of each block fills no pack"
    else:
        return ""
    return (
        f"{waste}: blocks have {in_block} packs on average. Store larger blocks: packs are made of "
        f"the documents of one block, and {_PACKS_A_BLOCK} packs or more waste less than 1 %"
    )


def blocks_per_batch(sizes: BlockSizes, shuffle: Shuffle, global_batch: int) -> float:
    """Return how many blocks the samples of a batch come from, on average over an epoch."""
    lanes = min(shuffle.lanes, global_batch)
    # If a batch has more samples of a lane than a window has, they come from several windows.
    window = max(shuffle.window, global_batch / lanes) / sizes.block_rows
    # Since a window has only parts of blocks at both ends, compute the number of whole blocks that
    # would mix as well.
    even = window**2 / (window - 1 / 3) if window >= 1 else 1 / (1 - window / 3)
    even = max(min(even, sizes.blocks / shuffle.lanes), 1.0)
    draws = global_batch / lanes
    distinct = even * (1 - (1 - 1 / even) ** draws) if even > 1 else 1.0
    return min(lanes * distinct, sizes.blocks)


def _mixing(job: ShuffledJob, qualities: Sequence[float]) -> str:
    """Return a sentence about the source whose batches come from the fewest blocks, or ""."""
    poor = job.poor(qualities)
    if not poor:
        return ""
    worst = max(poor, key=lambda source: (source.draws, source.stored_bytes))
    blocks = blocks_per_batch(worst.sizes, Shuffle(job.lanes, worst.window, 0), worst.draws)
    of = f"of source {worst.name!r} in a batch" if worst.name else "of a batch"
    more = len(poor) - 1
    also = f"; {more} more source{'s are' if more > 1 else ' is'} like that" if more else ""
    return (
        f"the samples {of} come from about {blocks:.0f} of {worst.sizes.blocks:,} blocks (shuffle "
        f"quality {qualities[job.sources.index(worst)]:.2f}, and 1 is perfect{also})"
    )


def _locality(job: ShuffledJob) -> str:
    """Return a sentence if hosts read much more than their share, or ""."""
    if not job.reads_much:
        return ""
    hosts, times = job.cluster.host_count, job.reads_times_share
    size = _size(times * job.share_bytes)
    return f"each of {hosts} hosts reads about {size} in an epoch, {times:.1f} times its share"


def _memory(job: ShuffledJob) -> str:
    """Return a sentence if a host's open windows do not fit into its block arena, or ""."""
    if job.fits:
        return ""
    return (
        f"the shuffle keeps about {_size(job.kept_bytes)} of blocks open on a host, and its block "
        f"arena has {_size(job.arena_bytes)}, so blocks are read several times in an epoch"
    )


def _help(job: ShuffledJob, qualities: Sequence[float]) -> str:
    """Return the change of settings that solves all problems of a job together."""
    is_poor, also = bool(job.poor(qualities)), ""
    fitting, larger = _remedies(job, min(qualities))
    if job.reads_much and fitting is None and larger is None:
        blocks = _blocks_for_all_ranks(job)
        if not is_poor and job.fits:
            return blocks
        also = f"; to read less, {blocks}"
        fitting, larger = _remedies(job, min(qualities), reads_may_be_many=True)
    if not is_poor and (also or not job.reads_much):
        other = ". No other lanes and window both fit and mix well"
        if fitting is not None:
            other = f"; or {fitting.said}, for a shuffle quality of {fitting.quality:.2f}"
        return f"{_enough_memory(job)}{other}{also}"
    if fitting is not None:
        need = _size(fitting.job.window_bytes)
        return f"{fitting.said}, for which each host needs {need} for open windows{also}"
    if larger is not None:
        return f"{larger.said}, and {_enough_memory(larger.job)}{also}"
    return _SMALLER_BLOCKS


def _enough_memory(job: ShuffledJob) -> str:
    """Return all ways to make a job fit into memory without changing its lanes and windows."""
    ways = [raise_to("block_arena_bytes", round(job.kept_bytes * ROOM))]
    cluster = job.cluster
    twice = Cluster(2 * cluster.host_count * cluster.ranks_per_host, cluster.ranks_per_host)
    if twice.lanes_per_host(job.lanes) < job.lanes_per_host:
        ways.append("use more hosts")
    return ", or ".join([*ways, _SMALLER_BLOCKS])


def _blocks_for_all_ranks(job: ShuffledJob) -> str:
    lanes = job.lanes_of_ranks
    if LANE_BLOCKS_MIN * lanes <= job.block_count:
        return _SMALLER_BLOCKS
    return f"write smaller blocks; with {LANE_BLOCKS_MIN * lanes:,} or more, lanes={lanes} helps"


def _size(size: float) -> str:
    is_small = size < GIB
    return f"{size / (1 << 20 if is_small else GIB):,.1f} {'MiB' if is_small else 'GiB'}"


# Find the lanes and windows that solve a job's problems.


class _Remedy(Struct, frozen=True):
    """A changed job, the change in words, and the shuffle quality of the job's worst source."""

    job: ShuffledJob
    said: str
    quality: float = 0.0


def _remedies(
    job: ShuffledJob, worst: float, *, reads_may_be_many: bool = False
) -> tuple[_Remedy | None, _Remedy | None]:
    """Find lanes and a window without the problems of this job, whose worst source has the quality
    `worst`. Return the first remedy that fits into memory, or else, as the second result, the
    remedy that needs the least memory. With `reads_may_be_many`, hosts may read any amount. No
    remedy makes the shuffle worse, even of a dataset too small to need a good one.
    """
    larger, least = None, min(_QUALITY_WANTED, worst)
    wanted = _QUALITY_WANTED if worst < QUALITY_MIN else least
    for remedy in _tried(job):
        fits = remedy.job.kept_bytes * ROOM <= job.arena_bytes
        if not fits and larger is not None and remedy.job.kept_bytes >= larger.job.kept_bytes:
            continue
        if remedy.job.reads_much and not reads_may_be_many:
            continue
        qualities = remedy.job.qualities()
        if min(qualities) < least or remedy.job.poor(qualities, wanted):
            continue
        helping = replace(remedy, quality=min(qualities))
        if fits:
            return helping, None
        larger = helping
    return None, larger


def _tried(job: ShuffledJob) -> Iterator[_Remedy]:
    """Yield candidates: the default lanes and windows first, then numbers of lanes from the present
    one on, with up to three windows for each.
    """
    default = job.by_default()
    yield _Remedy(default, "leave out lanes and window")
    has_window = job.sources != job.by_default(job.lanes).sources
    for lanes in _lanes_tried(job, default.lanes):
        if lanes != default.lanes:
            without = " and leave out window" if has_window else ""
            yield _Remedy(job.by_default(lanes), f"set lanes={lanes}{without}")
        for window in _windows_tried(job, lanes):
            yield _Remedy(job.with_window(lanes, window), f"set lanes={lanes}, window={window}")


def _lanes_tried(job: ShuffledJob, default: int) -> list[int]:
    of_ranks = {job.lanes_of_ranks, *(count * job.cluster.dp_size for count in _LANES_A_RANK)}
    fitting = [
        lanes
        for lanes in {default, *LANES, *of_ranks}
        if lanes == 1 or LANE_BLOCKS_MIN * lanes <= job.block_count
    ]
    near = {job.lanes, *fitting}
    return sorted(near, key=lambda lanes: (abs(math.log2(lanes / job.lanes)), -lanes))


def _windows_tried(job: ShuffledJob, lanes: int) -> list[int]:
    """Return the windows to try: one that mixes well, and the longest that fits, if shorter."""
    default = job.by_default(lanes)
    longest = max(-(-source.sizes.samples // lanes) for source in job.sources)
    remembered = WINDOW_CACHE_BYTES // (PERMUTATION_BYTES * default.lanes_per_host)
    wanted = max(
        max(source.window, math.ceil(_BLOCKS_WANTED * source.sizes.usual_rows / lanes))
        for source in default.sources
    )
    wanted = min(wanted, longest, remembered, WINDOW_MAX)
    blocks = sum(map(block_bytes, job.sources))
    if not blocks or math.isinf(job.arena_bytes):
        return [wanted] * (wanted > 0)
    rows = sum(block_bytes(source) / source.sizes.block_rows for source in job.sources)
    fitting = int((job.arena_bytes / ROOM / default.lanes_per_host - blocks) / rows)
    fitting -= max(job.with_rounds(source, 0) for source in job.sources)
    return [window for window in (wanted, fitting) if 0 < window <= wanted]
