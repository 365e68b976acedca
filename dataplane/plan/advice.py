"""What a user should know of a job's shuffle before it runs: poor mixing, hosts that read much more
than their share, open windows that do not fit into memory. Each with the setting that helps.

All numbers are estimates from mean sizes, so this is fast for any dataset.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec.structs import replace

from dataplane.model import LongPolicy, PackPolicy, PackSpec
from dataplane.plan.cluster import Cluster
from dataplane.plan.defaults import (
    GIB,
    LANE_BLOCKS_MIN,
    LANES,
    OPEN_BYTES_MIN,
    BlockSizes,
    Shuffle,
    mixed_lanes,
    shuffle_of,
    source_window,
)
from dataplane.plan.packs import Packing
from dataplane.plan.shuffled import ShuffledSource, hosts_per_block, open_bytes
from dataplane.units import raise_to

# A batch of samples from so many blocks has three quarters of the entropy of a permutation's.
_BLOCKS_MIN = 32
# A host may read so much more than its share.
_READS_MAX, _EXCESS_BYTES_MAX = 1.5, 32 * GIB
_ROOM = 1.1
# Packs may waste such a part of their tokens; of web pages, so many packs of a block waste less.
_WASTE_MAX, _PACKS_A_BLOCK, _TOKENS_MIN = 0.03, 128, 1 << 20
# Padded batches waste more, since widths are rounded up.
_PADDED_WASTE_MAX = 0.1


def advice(
    sources: Sequence[ShuffledSource], lanes: int, cluster: Cluster, global_batch: int
) -> tuple[str, ...]:
    """What is to be said of a shuffled job as a whole, over a dataset or the sources of a mixture;
    nothing in ordinary cases.
    """
    found = (_mixing(sources, lanes, global_batch), _locality(sources, lanes, cluster))
    return tuple(each for each in found if each)


def packing(found: Packing, pack: PackSpec, block_count: int) -> str:
    """What is to be said of a job's packs, if they waste many tokens."""
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
    """How many blocks the samples of a batch come from, on average over an epoch."""
    lanes = min(shuffle.lanes, global_batch)
    # A batch may reach over several windows.
    window = max(shuffle.window, global_batch / lanes) / sizes.block_rows
    # A window that begins anywhere has unequal parts of blocks; as many equal ones would mix alike.
    even = window**2 / (window - 1 / 3) if window >= 1 else 1 / (1 - window / 3)
    even = max(min(even, sizes.blocks / shuffle.lanes), 1.0)
    return lanes * _distinct(even, global_batch / lanes)


def _distinct(groups: float, draws: float) -> float:
    return groups * (1 - (1 - 1 / groups) ** draws) if groups > 1 else 1.0


def _mixing(sources: Sequence[ShuffledSource], lanes: int, global_batch: int) -> str:
    poor = [one for one in sources if _mixes_poorly(one, lanes, global_batch)]
    if not poor:
        return ""
    worst = max(poor, key=lambda one: (one.draws, one.stored_bytes))
    sizes, draws = worst.sizes, worst.draws
    found = blocks_per_batch(sizes, Shuffle(lanes, worst.window, 0), draws)
    enough = _enough(worst, global_batch)
    window = math.ceil(2 * enough * sizes.block_rows / lanes)
    need = lanes * sum(one.sizes.open_window_bytes(window) for one in sources)
    if blocks_per_batch(sizes, _default(worst, sources), draws) >= enough:
        help_ = "leave out lanes and window"
    elif sizes.blocks >= 2 * enough:
        help_ = (
            f"write smaller blocks (row groups or record batches), or set window={window}, for "
            f"which all hosts together need {_size(need)} for blocks"
        )
    else:
        help_ = "write smaller blocks (row groups or record batches)"
    of = f"of source {worst.name!r} in a batch" if worst.name else "of a batch"
    more = len(poor) - 1
    also = f"; {more} more source{'s are' if more > 1 else ' is'} like that" if more else ""
    return (
        f"the samples {of} come from about {found:.0f} of {sizes.blocks:,} blocks (a full "
        f"shuffle: {_distinct(sizes.blocks, draws):.0f}{also}), so neighbours in the dataset are "
        f"often in the same batch: {help_}"
    )


def _enough(one: ShuffledSource, global_batch: int) -> float:
    """From how many blocks its samples in a batch should come: together, those of all sources come
    from enough.
    """
    return _BLOCKS_MIN * min(one.draws / global_batch, 1.0)


def _mixes_poorly(one: ShuffledSource, lanes: int, global_batch: int) -> bool:
    if one.sizes.dataset_bytes < OPEN_BYTES_MIN:
        return False
    found = blocks_per_batch(one.sizes, Shuffle(lanes, one.window, 0), one.draws)
    return found < min(_enough(one, global_batch), _distinct(one.sizes.blocks, one.draws) / 2)


def _default(
    one: ShuffledSource, sources: Sequence[ShuffledSource], lanes: int | None = None
) -> Shuffle:
    """What a source is shuffled with by default."""
    if len(sources) == 1:
        return shuffle_of(one.sizes, lanes)
    every = [each.sizes for each in sources]
    lanes = lanes or mixed_lanes(every)
    return Shuffle(lanes, source_window(one.sizes, lanes, every), 0)


def _locality(sources: Sequence[ShuffledSource], lanes: int, cluster: Cluster) -> str:
    """Whether hosts read much more than their share, and which lanes help."""
    hosts, ranks = cluster.host_count, cluster.dp_size
    times = hosts_per_block(sources, lanes, cluster)
    share = sum(one.stored_bytes for one in sources) / hosts
    if times <= _READS_MAX or (times - 1) * share <= _EXCESS_BYTES_MAX:
        return ""
    said = (
        f"each of {hosts} hosts reads about {_size(times * share)} in an epoch, {times:.1f} times "
        f"its share, since {lanes} lanes are shared by {ranks} ranks: "
    )
    better = ranks * max(round(lanes / ranks), 1)
    if LANE_BLOCKS_MIN * better > sum(one.sizes.blocks for one in sources):
        return said + (
            f"write smaller blocks; with {LANE_BLOCKS_MIN * better:,} or more, lanes={better} helps"
        )
    windows = [replace(one, window=_default(one, sources, better).window) for one in sources]
    need = open_bytes(windows, cluster.lanes_per_host(better))
    return said + f"set lanes={better}, for which each host needs {_size(need)} for open windows"


def memory(
    sources: Sequence[ShuffledSource], lanes: int, cluster: Cluster, arena_bytes: int
) -> str:
    """Whether the open windows of a host fit into its block arena, and what helps; "" if they
    fit.
    """
    on_host = cluster.lanes_per_host(lanes)
    need = sum(
        min(on_host * _block(one) * (1 + one.window / one.sizes.block_rows), one.kept_bytes)
        for one in sources
    )
    if need <= arena_bytes:
        return ""
    said = (
        f"the shuffle of this job keeps about {_size(need)} of blocks open on a host, and its "
        f"block arena has {_size(arena_bytes)}, so blocks are read several times in an epoch: "
        f"{raise_to('block_arena_bytes', round(need * _ROOM))}"
    )
    blocks = sum(_block(one) for one in sources)
    rows = sum(_block(one) / one.sizes.block_rows for one in sources)
    for fewer in sorted({each for each in LANES if each < lanes}, reverse=True):
        room = arena_bytes / _ROOM / cluster.lanes_per_host(fewer)
        window = int((room - blocks) / rows)
        if window >= max(one.sizes.block_rows for one in sources):
            return f"{said}, or mix fewer blocks: lanes={fewer}, window={window}"
    return said


def _block(one: ShuffledSource) -> float:
    """The memory that a block takes on average."""
    return one.kept_bytes / one.sizes.blocks


def _size(size: float) -> str:
    for unit in ("MiB", "GiB"):
        size /= 1024 if unit == "GiB" else 1 << 20
        if size < 1024:
            break
    return f"{size:,.1f} {unit}"
