"""Warn users of a job's problems before it runs. Of a shuffle: poor mixing, hosts that read much
more than their share, open windows that do not fit into memory. Of packs: padding and waste. Each
warning names the setting that helps.

All numbers are estimates from mean sizes, so this is fast for any dataset.
"""

from __future__ import annotations

from collections.abc import Sequence

from dataplane.model import LongPolicy, PackPolicy, PackSpec
from dataplane.plan.cluster import Cluster
from dataplane.plan.defaults import LANE_BLOCKS_MIN, BlockSizes, Shuffle
from dataplane.plan.packs import Packing
from dataplane.plan.remedies import ROOM, Remedy, remedies
from dataplane.plan.shuffled import ShuffledJob
from dataplane.units import raise_to

# Packs may waste such a part of their tokens; of web pages, so many packs of a block waste less.
_WASTE_MAX, _PACKS_A_BLOCK, _TOKENS_MIN = 0.03, 128, 1 << 20
# Padded batches waste more, since widths are rounded up.
_PADDED_WASTE_MAX = 0.1
_SMALLER_BLOCKS = "write smaller blocks (row groups or record batches)"
# Where windows are longer than so many blocks, smaller blocks need little less memory.
_LONG_WINDOW_BLOCKS = 3


def advice(job: ShuffledJob) -> str:
    """Return the advice about a shuffled job over a dataset or a mixture, and about this host's
    memory: one message, or "" in ordinary cases.
    """
    qualities = job.qualities()
    found = [said for said in (_mixing(job, qualities), _locality(job), _memory(job)) if said]
    return f"{', and '.join(found)}: {_help(job, qualities)}" if found else ""


def memory(job: ShuffledJob) -> str:
    """Return the advice if open windows do not fit into this host's memory, and about
    nothing else.
    """
    return f"{_memory(job)}: {_help(job, job.qualities())}" if not job.fits else ""


def packing(found: Packing, pack: PackSpec, block_count: int) -> str:
    """Return the advice about a job's packs, if they waste many tokens."""
    if found.tokens < _TOKENS_MIN:
        return ""
    in_blocks = f"blocks have {found.packs / block_count:.1f} packs on average"
    cure = (
        f"Store larger blocks: packs are made of the documents of one block, and {_PACKS_A_BLOCK}"
        " packs or more waste less than 1 %"
    )
    padding = found.padding
    if pack.policy is PackPolicy.PAD:
        return _padded_batches(found, in_blocks) if padding > _PADDED_WASTE_MAX else ""
    if padding > _WASTE_MAX:
        return f"{padding:.1%} of the tokens in packs are padding: {in_blocks}. {cure}"
    lost = 1 - found.packed_tokens / found.tokens
    cuts = pack.policy is PackPolicy.WRAP and pack.long is LongPolicy.FRAGMENT
    if cuts and lost > _WASTE_MAX:
        ends = "what is left at the end of each block"
        return f"{lost:.1%} of the tokens are in no pack, {ends}: {in_blocks}. {cure}"
    return ""


def _padded_batches(found: Packing, in_blocks: str) -> str:
    batches = in_blocks.replace("packs", "padded batches")
    return (
        f"{found.padding:.1%} of the tokens in padded batches are padding: {batches}. Store larger"
        " blocks: a batch has documents of one block, and in a larger one more of them are of"
        " about the same length. A smaller `multiple` helps, too"
    )


def blocks_per_batch(sizes: BlockSizes, shuffle: Shuffle, global_batch: int) -> float:
    """Return how many blocks the samples of a batch come from, on average over an epoch."""
    lanes = min(shuffle.lanes, global_batch)
    # A batch may reach over several windows.
    window = max(shuffle.window, global_batch / lanes) / sizes.block_rows
    # A window that begins anywhere has unequal parts of blocks; as many equal ones would mix alike.
    even = window**2 / (window - 1 / 3) if window >= 1 else 1 / (1 - window / 3)
    even = max(min(even, sizes.blocks / shuffle.lanes), 1.0)
    return min(lanes * _distinct(even, global_batch / lanes), sizes.blocks)


def _distinct(groups: float, draws: float) -> float:
    return groups * (1 - (1 - 1 / groups) ** draws) if groups > 1 else 1.0


def _mixing(job: ShuffledJob, qualities: Sequence[float]) -> str:
    poor = job.poor(qualities)
    if not poor:
        return ""
    worst = max(poor, key=lambda one: (one.draws, one.stored_bytes))
    found_quality = qualities[job.sources.index(worst)]
    sizes, draws = worst.sizes, worst.draws
    found = blocks_per_batch(sizes, Shuffle(job.lanes, worst.window, 0), draws)
    open_share = min(job.lanes * worst.window / sizes.samples, 1.0)
    of = f"of source {worst.name!r} in a batch" if worst.name else "of a batch"
    more = len(poor) - 1
    also = f"; {more} more source{'s are' if more > 1 else ' is'} like that" if more else ""
    return (
        f"the samples {of} come from about {found:.0f} of {sizes.blocks:,} blocks (a full "
        f"shuffle: {_distinct(sizes.blocks, draws):.0f}{also}), and from windows with "
        f"{open_share:.1%} of all samples, so neighbours in the dataset are often in the same "
        f"batch (shuffle quality {found_quality:.2f}, and 1 is perfect)"
    )


def _locality(job: ShuffledJob) -> str:
    """Return the problem if hosts read much more than their share."""
    if not job.reads_much:
        return ""
    times, cluster = job.reads_times_share, job.cluster
    return (
        f"each of {cluster.host_count} hosts reads about {_size(times * job.share_bytes)} in an "
        f"epoch, {times:.1f} times its share, since {job.lanes} lanes are shared by "
        f"{cluster.dp_size} ranks"
    )


def _memory(job: ShuffledJob) -> str:
    """Return the problem if a host's open windows do not fit into its block arena."""
    if job.fits:
        return ""
    return (
        f"the shuffle of this job keeps about {_size(job.kept_bytes)} of blocks open on a host, "
        f"and its block arena has {_size(job.arena_bytes)}, so blocks are read several times in "
        "an epoch"
    )


def _help(job: ShuffledJob, qualities: Sequence[float]) -> str:
    """Return the remedies for all problems of a job together."""
    is_poor, reads_much, worst = bool(job.poor(qualities)), job.reads_much, min(qualities)
    found, blocks = remedies(job, worst), ""
    if reads_much and found.fitting is None and found.larger is None:
        blocks = _blocks_for_all_ranks(job)
        if not is_poor and job.fits:
            return blocks
        found = remedies(job, worst, reads_may_be_many=True)
    also = f"; to read less, {blocks}" if blocks else ""
    if not is_poor and (blocks or not reads_much):
        return _more_memory(job, worst, found.fitting) + also
    if found.fitting is not None:
        need = _size(found.fitting.job.window_bytes)
        return f"{found.fitting.said}, for which each host needs {need} for open windows{also}"
    if found.larger is not None:
        more = _enough_memory(found.larger.job, blocks_help=True)
        return f"{found.larger.said}, and {more}{also}"
    return _SMALLER_BLOCKS


def _more_memory(job: ShuffledJob, quality: float, other: Remedy | None) -> str:
    """Return the remedies for a shuffle that mixes well but does not fit."""
    blocks_help = any(
        one.window < _LONG_WINDOW_BLOCKS * one.sizes.block_rows for one in job.sources
    )
    more = _enough_memory(job, blocks_help=blocks_help)
    if other is None:
        return f"{more}. No other lanes and window both fit and mix well"
    qualities = f"a shuffle quality of {other.quality:.2f} instead of {quality:.2f}"
    return f"{more}; or {other.said}, for {qualities}"


def _enough_memory(job: ShuffledJob, *, blocks_help: bool) -> str:
    """Return all ways to make a job fit without changing its lanes and windows."""
    ways = [raise_to("block_arena_bytes", round(job.kept_bytes * ROOM))]
    cluster = job.cluster
    twice = Cluster(2 * cluster.host_count * cluster.ranks_per_host, cluster.ranks_per_host)
    if twice.lanes_per_host(job.lanes) < job.lanes_per_host:
        ways.append("use more hosts")
    if blocks_help:
        ways.append(_SMALLER_BLOCKS)
    return ", or ".join(ways)


def _blocks_for_all_ranks(job: ShuffledJob) -> str:
    lanes = job.lanes_of_ranks
    least = LANE_BLOCKS_MIN * lanes
    if least <= job.block_count:
        return _SMALLER_BLOCKS
    return f"write smaller blocks; with {least:,} or more, lanes={lanes} helps"


def _size(size: float) -> str:
    for unit in ("MiB", "GiB"):
        size /= 1024 if unit == "GiB" else 1 << 20
        if size < 1024:
            break
    return f"{size:,.1f} {unit}"
