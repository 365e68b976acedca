"""What a user should know of a job's shuffle before it runs: poor mixing, hosts that read much more
than their share, open windows that do not fit into memory. Each with the setting that helps.

All numbers are estimates from mean sizes, so this is fast for any dataset.
"""

from __future__ import annotations

from dataplane.model import LongPolicy, PackPolicy, PackSpec
from dataplane.plan.cluster import Cluster
from dataplane.plan.defaults import (
    GIB,
    LANE_BLOCKS_MIN,
    LANES,
    OPEN_BYTES_MIN,
    BlockSizes,
    Shuffle,
    shuffle_of,
)
from dataplane.plan.packs import Packing
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
    sizes: BlockSizes, shuffle: Shuffle, cluster: Cluster, global_batch: int, stored_bytes: int
) -> tuple[str, ...]:
    """What is to be said of a shuffled job as a whole; nothing in ordinary cases. `stored_bytes` is
    the size of all blocks in storage.
    """
    found = (
        _mixing(sizes, shuffle, global_batch),
        locality(sizes, shuffle, cluster, stored_bytes),
    )
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


def _mixing(sizes: BlockSizes, shuffle: Shuffle, global_batch: int) -> str:
    if sizes.dataset_bytes < OPEN_BYTES_MIN:
        return ""
    found = blocks_per_batch(sizes, shuffle, global_batch)
    best = _distinct(sizes.blocks, global_batch)
    if found >= min(_BLOCKS_MIN, best / 2):
        return ""
    window = -(-2 * _BLOCKS_MIN * sizes.block_rows // shuffle.lanes)
    need = shuffle.lanes * sizes.open_window_bytes(window)
    default = shuffle_of(sizes)
    if blocks_per_batch(sizes, default, global_batch) >= _BLOCKS_MIN:
        help_ = "leave out lanes and window"
    elif sizes.blocks >= 2 * _BLOCKS_MIN:
        help_ = (
            f"write smaller blocks (row groups or record batches), or set window={window}, for "
            f"which all hosts together need {_size(need)} for blocks"
        )
    else:
        help_ = "write smaller blocks (row groups or record batches)"
    return (
        f"the samples of a batch come from about {found:.0f} of {sizes.blocks:,} blocks (a full "
        f"shuffle: {best:.0f}), so neighbours in the dataset are often in the same batch: {help_}"
    )


def locality(sizes: BlockSizes, shuffle: Shuffle, cluster: Cluster, stored_bytes: int) -> str:
    """Whether hosts read much more than their share, and which lanes help; "" if not."""
    hosts, ranks = cluster.host_count, cluster.dp_size
    times = cluster.hosts_per_block(shuffle.lanes, sizes.blocks)
    share = stored_bytes / hosts
    if times <= _READS_MAX or (times - 1) * share <= _EXCESS_BYTES_MAX:
        return ""
    said = (
        f"each of {hosts} hosts reads about {_size(times * share)} of the dataset in an epoch, "
        f"{times:.1f} times its share, since {shuffle.lanes} lanes are shared by {ranks} ranks: "
    )
    lanes = ranks * max(round(shuffle.lanes / ranks), 1)
    if LANE_BLOCKS_MIN * lanes > sizes.blocks:
        return said + (
            f"write smaller blocks; with {LANE_BLOCKS_MIN * lanes:,} or more, lanes={lanes} helps"
        )
    better = shuffle_of(sizes, lanes)
    need = cluster.lanes_per_host(lanes) * sizes.open_window_bytes(better.window)
    return said + f"set lanes={lanes}, for which each host needs {_size(need)} for open windows"


def memory(
    sizes: BlockSizes, shuffle: Shuffle, cluster: Cluster, kept_bytes: int, arena_bytes: int
) -> str:
    """Whether the open windows of a host fit into its block arena, where all blocks of the dataset
    take `kept_bytes`, and what helps; "" if they fit.
    """
    lanes = cluster.lanes_per_host(shuffle.lanes)
    block = kept_bytes / sizes.blocks
    need = min(lanes * block * (1 + shuffle.window / sizes.block_rows), kept_bytes)
    if need <= arena_bytes:
        return ""
    said = (
        f"the shuffle of this job keeps about {_size(need)} of blocks open on this host, and its "
        f"block arena has {_size(arena_bytes)}, so blocks are read several times in an epoch: "
        f"{raise_to('block_arena_bytes', round(need * _ROOM))}"
    )
    for fewer in sorted({each for each in LANES if each < shuffle.lanes}, reverse=True):
        lanes = cluster.lanes_per_host(fewer)
        window = int((arena_bytes / _ROOM / lanes / max(block, 1.0) - 1) * sizes.block_rows)
        if window >= sizes.block_rows:
            return f"{said}, or mix fewer blocks: lanes={fewer}, window={window}"
    return said


def _size(size: float) -> str:
    for unit in ("MiB", "GiB"):
        size /= 1024 if unit == "GiB" else 1 << 20
        if size < 1024:
            break
    return f"{size:,.1f} {unit}"
