"""How the plan of an epoch scales, shuffles and packs, without a node: figures with bars.

    python benchmarks/plans.py scale | mixtures | shuffle | packing [--json]

Exit status 1: a bar was missed. Memory is the peak while the order is made, including the blocks'
row counts; a seek finds one position in a window not seen before.
"""

from __future__ import annotations

import math
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pyarrow as pa
from dataplane_bench.scripts import Row, best_s, row, run, timed
from msgspec import Struct
from numpy.typing import NDArray

from dataplane.arena.slab_layout import row_bytes
from dataplane.model.records import (
    PACK_OUTPUTS,
    ColumnSpec,
    Exhausted,
    Kind,
    PackPolicy,
    PackSpec,
    Region,
)
from dataplane.plan.counting import SHARES_SUM, CountingTree, quantised
from dataplane.plan.defaults import BlockSizes, shuffle_of
from dataplane.plan.manifest import Manifest
from dataplane.plan.mixed_order import MixedOrder, SourceOrder
from dataplane.plan.mixture import Mixed, plan_of
from dataplane.plan.order import Order
from dataplane.plan.packed_blocks import with_counts
from dataplane.plan.packs import costs, pack_count, packing_of, packs_of
from dataplane.plan.permute import key
from dataplane.plan.shards import Shard, ShardTable
from dataplane.rpc.messages import Batch
from dataplane.worker.columns import open_block
from dataplane.worker.gather import Gather
from dataplane.worker.pack_blocks import PackBlock, PackForm
from dataplane.worker.packing import PackGather

Int64 = NDArray[np.int64]

SEED, SEEKS = 7, 200
BLOCKS_PER_SHARD = 100
MIXED_SLAB, MIXED_ROUNDS = 96 * 1024, 10_000


def peak_mb(make: Callable[[], Order | MixedOrder]) -> float:
    """The peak of memory while an order is made and one slab is located."""
    tracemalloc.start()
    order = make()
    order.locate(np.arange(min(1024, order.sample_count)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / 1e6


def seek_ms(order: Order | MixedOrder) -> list[float]:
    """Milliseconds of each of `SEEKS` seeks."""
    places = [np.array([key(SEED, seek) % order.sample_count]) for seek in range(SEEKS)]
    return [timed(partial(order.locate, place))[1] * 1e3 for place in places]


def slab_ms(order: Order | MixedOrder, length: int) -> float:
    """The time to locate a slab of consecutive positions in open windows."""
    begin = order.sample_count // 2
    positions = np.arange(begin, min(begin + length, order.sample_count))
    order.locate(positions)
    return 1e3 * best_s(lambda: order.locate(positions), 5)


def manifest_of(block_rows: Int64, sample_bytes: int) -> Manifest:
    blocks = len(block_rows)
    block_shard = (np.arange(blocks) // BLOCKS_PER_SHARD).astype(np.int32)
    length = block_rows * sample_bytes
    shards = ShardTable.of(
        Shard(f"s3://bucket/data/{number:08d}.arrow", 1 << 30, f'"{number:032x}"', count,
              Region(0, 0), zero_copy=True)
        for number, count in enumerate(np.bincount(block_shard).tolist())
    )  # fmt: skip
    offset = np.arange(blocks) % BLOCKS_PER_SHARD * length
    return Manifest(
        ("s3://bucket/data/",), "arrow_ipc", b"", shards, block_shard, block_rows, offset, length,
        length,
    )  # fmt: skip


def scale(
    *,
    blocks: int = 2_500_000,
    rows: int = 4000,
    sample_bytes: int = 1024,
    plan_s_max: float = 1.0,
    plan_mb_max: float = 150.0,
    seek_ms_max: float = 10.0,
) -> Iterator[Row]:
    """Time and memory of the plan of 10^10 samples in 2.5 million blocks."""
    block_rows = np.full(blocks, rows)
    shuffle = shuffle_of(BlockSizes.of(block_rows, block_rows * sample_bytes))
    lanes, window = shuffle.lanes, shuffle.window
    order, plan_s = timed(lambda: Order(block_rows, SEED, True, lanes, window, 1))
    wide = Order(block_rows, SEED, True, 64, 65_536, 1)
    peak = peak_mb(lambda: Order(np.full(blocks, rows), SEED, True, lanes, window, 1))
    yield row("samples", order.sample_count)
    yield row("blocks", order.block_count)
    yield row("lanes by default", lanes)
    yield row("window by default", window, "samples")
    yield row("plan an epoch", plan_s, "s", most=plan_s_max)
    yield row("memory while planning, at most", peak, "MB", most=plan_mb_max)
    for name, planned in (("seek", order), ("seek in windows of 65,536", wide)):
        seeks = seek_ms(planned)
        yield row(f"{name}, median", float(np.median(seeks)), "ms")
        yield row(f"{name}, slowest", max(seeks), "ms", most=seek_ms_max)
    for length in (1024, 65_536):
        name = f"{length:,} positions in open windows of 64 lanes"
        yield row(name, slab_ms(wide, length), "ms")
    every = np.arange(order.block_count)
    for when in ("first time", "again"):
        _, span_s = timed(lambda: order.block_span(every))
        yield row(f"spans of all blocks, {when}", span_s, "s")
    manifest, made_s = timed(lambda: manifest_of(block_rows, sample_bytes))
    content, written_s = timed(manifest.to_bytes)
    _, read_s = timed(lambda: Manifest.from_bytes(content))
    yield row("manifest, made", made_s, "s")
    yield row("manifest, written", written_s, "s")
    yield row("manifest, read", read_s, "s")
    yield row("manifest, size of its file", len(content) / 1e6, "MB")


def mixed_order(sources: int, blocks: int, rows: int, lanes: int) -> MixedOrder:
    """Each source has blocks in proportion to its weight, a tenth more or less."""
    weights = (1 + np.arange(sources)) ** -1.2
    uneven = weights * np.linspace(0.9, 1.1, sources)
    counts = np.maximum(blocks * uneven / uneven.sum(), 1).astype(np.int64)
    mixed = Mixed(
        tuple((counts * rows).tolist()), quantised(weights.tolist()), (1,) * sources, lanes,
        Exhausted.RENORMALISE,
    )  # fmt: skip
    window = max(4096 // sources, 64)
    orders = [SourceOrder(np.full(count, rows), window) for count in counts.tolist()]
    return MixedOrder(plan_of(mixed, 0), orders, SEED, True, lanes)


def error_max(shares: tuple[int, ...]) -> float:
    """How far the counts of a lane are from exact, at most, at the first rounds' ends."""
    slots = np.arange(MIXED_ROUNDS) * 1024
    exact = slots[:, None] * np.array(shares) / SHARES_SUM
    return float(np.abs(CountingTree(shares).counts(slots) - exact).max())


def mixtures(
    *,
    sources: int = 100,
    blocks: int = 2_500_000,
    rows: int = 4000,
    lanes: int = 96,
    plan_s_max: float = 1.0,
    plan_mb_max: float = 150.0,
    seek_ms_max: float = 10.0,
) -> Iterator[Row]:
    """The same of a mixture of 100 sources with Pareto weights."""
    make = partial(mixed_order, sources, blocks, rows, lanes)
    peak = peak_mb(make)
    order, plan_s = timed(make)
    seeks, finds = seek_ms(order), []
    for seek in range(SEEKS):
        position = key(SEED, seek) % order.sample_count
        block, at = (int(place[0]) for place in order.locate(np.array([position])))
        positions, find_s = timed(partial(order.positions_of, block, at))
        assert position in positions
        finds.append(find_s)
    yield row("samples", order.sample_count)
    yield row("segments of the epoch", len(order.plan.segments))
    yield row("plan an epoch", plan_s, "s", most=plan_s_max)
    yield row("memory while planning, at most", peak, "MB", most=plan_mb_max)
    yield row("seek, median", float(np.median(seeks)), "ms")
    yield row("seek, slowest", max(seeks), "ms", most=seek_ms_max)
    yield row("find the positions of a row, slowest", max(finds), "s", most=1.0)
    yield row(f"{MIXED_SLAB:,} positions in open windows", slab_ms(order, MIXED_SLAB), "ms")
    every = np.arange(int(order.block_count))
    yield row("spans of all blocks", timed(lambda: order.block_span(every))[1], "s")
    far = error_max(order.plan.segments[0].shares)
    yield row("counts of a lane, away from exact, at most", far, "samples", most=3.4)


GLOBAL_BATCH = 256
LABELS = 100
RANKS_PER_HOST = 8
HOSTS = (8, 64)
READS_MAX = 1.15
_DRAWS = 400
_FIRST_BATCHES = 10


class Shape(Struct, frozen=True):
    """A dataset of equal blocks, and the least entropy that a batch should have."""

    name: str
    blocks: int
    rows: int
    sample_bytes: int
    entropy_min: float = 0.95

    @property
    def samples(self) -> int:
        return self.blocks * self.rows

    @property
    def dataset_bytes(self) -> int:
        return self.samples * self.sample_bytes


SHAPES = (
    Shape("200 k x 12 B", 50, 4000, 12),
    Shape("50 k x 4 KiB, groups of 1,000", 50, 1000, 4096),
    Shape("100 k x 4 KiB, groups of 1,000", 100, 1000, 4096, 0.85),
    Shape("5 M x 4 KiB, groups of 500", 10_000, 500, 4096),
    Shape("5 M x 4 KiB, groups of 5,000", 1000, 5000, 4096),
    Shape("1.28 M x 110 KB, blocks of 4 MiB", 33_684, 38, 110_000),
    Shape("1.28 M x 110 KB, blocks of 16 MiB", 8421, 152, 110_000),
    Shape("1.28 M x 110 KB, blocks of 64 MiB", 2098, 610, 110_000),
    Shape("1.28 M x 110 KB, groups of 1,000", 1280, 1000, 110_000, 0.85),
    Shape("10^9 x 8 KiB, blocks of 8 MiB", 976_562, 1024, 8192),
    Shape("10^9 x 8 KiB, blocks of 64 MiB", 122_070, 8192, 8192),
    Shape("10^10 x 1 KiB, blocks of 4 MiB", 2_500_000, 4000, 1024),
)


class ShuffleFigures(Struct, frozen=True):
    """One row of the table. `first_bytes` are the blocks of the first batch of epoch 0, and
    `entropy_first` is that of its first ten batches.
    """

    name: str
    lanes: int
    window: int
    ramp: int
    entropy: float
    entropy_of_epoch_0: float
    entropy_first: float
    blocks: float
    first_bytes: int
    open_bytes: int
    reads: tuple[float, ...]
    missed: tuple[str, ...]


def entropy_of(labels: Int64) -> float:
    """In bits."""
    share = np.bincount(labels, minlength=LABELS) / len(labels)
    share = share[share > 0]
    return float(-(share * np.log2(share)).sum())


def full_entropy(samples: int) -> float:
    """The entropy of a batch of a permutation of all samples, on average."""
    random = np.random.default_rng(SEED)
    drawn = random.integers(0, samples, (_DRAWS, GLOBAL_BATCH))
    return float(np.mean([entropy_of(batch * LABELS // samples) for batch in drawn]))


def batch_of(order: Order, start: int) -> tuple[Int64, Int64]:
    """The blocks and the rows of a batch."""
    return order.locate(np.arange(start, start + GLOBAL_BATCH, dtype=np.int64))


def mixing_of(shape: Shape, order: Order, starts: Int64) -> tuple[float, float]:
    """The entropy of the labels of batches, in bits, and how many blocks each comes from, on
    average. Shapes:  starts: int64[n], the first position of each.
    """
    mixed = []
    for start in starts.tolist():
        block, at = batch_of(order, start)
        labels = (block * shape.rows + at) * LABELS // shape.samples
        mixed.append((entropy_of(labels), len(np.unique(block))))
    entropy, blocks = np.mean(mixed, axis=0).tolist()
    return entropy, blocks


def reads_of(order: Order, hosts: int) -> float:
    """How much a host reads, as a multiple of its share of the dataset, on average."""
    ranks = hosts * RANKS_PER_HOST
    meeting = math.gcd(order.lanes, ranks)
    # Lane l and rank r meet where they are equal modulo `meeting`.
    served = np.zeros((hosts, meeting), np.bool_)
    rank = np.arange(ranks)
    served[rank // RANKS_PER_HOST, rank % meeting] = True
    first, last = order.block_lanes(np.arange(order.block_count))
    spans, counts = np.unique(
        np.stack([first % meeting, np.minimum(last - first, meeting - 1)]),
        axis=1, return_counts=True,
    )  # fmt: skip
    read = [
        served[:, np.arange(start, start + more + 1) % meeting].any(axis=1).sum()
        for start, more in spans.T.tolist()
    ]
    return float(np.dot(read, counts) / order.block_count)


def figures(shape: Shape, batches: int) -> ShuffleFigures:
    rows = np.full(shape.blocks, shape.rows)
    sizes = BlockSizes.of(rows, rows * shape.sample_bytes)
    shuffle = shuffle_of(sizes)
    order, begin = (
        Order(rows, SEED, True, shuffle.lanes, shuffle.window, epoch, shuffle.ramp)
        for epoch in (1, 0)
    )
    random = np.random.default_rng(SEED)
    starts = random.integers(0, shape.samples - GLOBAL_BATCH, batches)
    full = full_entropy(shape.samples)
    entropy, blocks = mixing_of(shape, order, starts)
    entropy /= full
    # The ramp is at the start of epoch 0, so its batches are taken evenly over the epoch.
    evenly = ((np.arange(batches) + 0.5) / batches * (shape.samples - GLOBAL_BATCH)).astype(int)
    first = np.arange(_FIRST_BATCHES) * GLOBAL_BATCH
    epoch_0, at_first = (mixing_of(shape, begin, some)[0] / full for some in (evenly, first))
    reads = tuple(reads_of(order, hosts) for hosts in HOSTS)
    missed = [f"entropy {entropy:.3f} < {shape.entropy_min}"] * (entropy < shape.entropy_min)
    for share, hosts, large in zip(reads, HOSTS, (100e9, 2e12), strict=True):
        if shape.dataset_bytes > large and share > READS_MAX:
            missed.append(f"{hosts} hosts read {share:.2f} > {READS_MAX}")
    return ShuffleFigures(
        shape.name,
        shuffle.lanes,
        shuffle.window,
        shuffle.ramp,
        entropy,
        epoch_0,
        at_first,
        blocks,
        len(np.unique(batch_of(begin, 0)[0])) * shape.rows * shape.sample_bytes,
        shuffle.lanes * sizes.open_window_bytes(shuffle.window),
        reads,
        tuple(missed),
    )


def row_of(figures: ShuffleFigures) -> str:
    """A row of a table; tests/plan/shuffles.json has the cells."""
    cells = (
        figures.name,
        f"{figures.lanes:,}",
        f"{figures.window:,}",
        f"{figures.ramp}",
        f"{figures.entropy:.1%}",
        f"{figures.entropy_of_epoch_0:.1%}",
        f"{figures.entropy_first:.1%}",
        f"{figures.blocks:.0f}",
        f"{figures.open_bytes / (1 << 30):.2f}",
        f"{figures.first_bytes / (1 << 30):.2f}",
        *(f"{read:.2f}" for read in figures.reads),
    )
    return f"| {' | '.join(cells)} |"


def shuffle(*, batches: int = 40) -> Iterator[Row]:
    """How well the default lanes and window shuffle: tests/plan/shuffles.json has the results.

    Each dataset is sorted by label: 100 labels, equally frequent. `entropy` is that of the labels
    of a batch of 256, as a share of what a permutation of all samples has: after the first epoch,
    and in epoch 0, whose first windows are short, in all of it and in its first ten batches.
    `reads` is what one host reads of the dataset in an epoch, times the number of hosts: 1 if each
    block is read by one host. Batches are sampled, so the size of a dataset does not matter.
    """
    for shape in SHAPES:
        measured = figures(shape, batches)
        print(row_of(measured), *measured.missed, file=sys.stderr, flush=True)
        reads = zip((f"reads of {hosts}" for hosts in HOSTS), measured.reads, strict=True)
        yield Row(shape.name, {"entropy": measured.entropy, **dict(reads)}, shape.entropy_min)
        yield row(f"{shape.name}: bars missed", len(measured.missed), most=0)


MEAN_TOKENS, SIGMA, GROUP = 616, 1.2, 128
DOCUMENTS = 10_000
PER_S = "M documents/s"
SPEED_MIN, WASTE_MAX, INDEX_MAX = 5.0, 1.0, 50.0
SPEED_OF_ROWS_MIN = 0.8
"""Of packs that have nothing but tokens: what else is asked for is written, too."""


def web_lengths(tokens: int, seed: int) -> NDArray[np.int64]:
    """Lengths of documents with so many tokens or a few more."""
    rng = np.random.default_rng(seed)
    drawn = rng.lognormal(np.log(MEAN_TOKENS) - SIGMA**2 / 2, SIGMA, tokens // 200 + 100)
    lengths = np.ceil(drawn).astype(np.int64)
    return lengths[: int(np.searchsorted(np.cumsum(lengths), tokens)) + 1]


def planned(length: int) -> Iterator[Row]:
    spec = PackSpec("tokens", length)
    groups = [web_lengths(GROUP * length, seed) for seed in range(20)]
    wastes = [100 * packing_of(lengths, spec).padding for lengths in groups]
    many = web_lengths(DOCUMENTS * MEAN_TOKENS, 7)[:DOCUMENTS]
    made, count = best_s(lambda: packs_of(many, spec, 5)), best_s(lambda: pack_count(many, spec))
    wrap = PackSpec("tokens", length, PackPolicy.WRAP)
    wrapped = best_s(lambda: packs_of(many, wrap, 5))
    per_s = len(many) / 1e6
    name = f"S = {length:,}"
    yield row(f"{name}: waste, mean of 20 groups", float(np.mean(wastes)), "%", most=WASTE_MAX)
    yield row(f"{name}: waste, worst of 20 groups", max(wastes), "%", most=WASTE_MAX)
    yield row(f"{name}: packs planned", per_s / made, PER_S, least=SPEED_MIN)
    yield row(f"{name}: packs counted", per_s / count, PER_S, least=SPEED_MIN)
    yield row(f"{name}: wrapped packs planned", per_s / wrapped, PER_S)


def padded(length: int) -> Iterator[Row]:
    """Padded batches of so many tokens, and batches of 16 rows as they come."""
    for documents, most in ((1_000, None), (5_000, 2.0), (20_000, None)):
        drawn = web_lengths(2 * documents * MEAN_TOKENS, 1)[:documents]
        for multiple in (1, 8):
            spec = PackSpec("tokens", length, PackPolicy.PAD, multiple=multiple)
            name = f"{length:,} tokens: blocks of {documents:,}, multiple {multiple}"
            yield row(name, 100 * packing_of(drawn, spec).padding, "%", most=most)
    rows = drawn[: documents // 16 * 16].reshape(-1, 16)
    waste = 100 * (1 - rows.sum() / (16 * rows.max(axis=1).sum()))
    yield row("16 rows as they come, padded to the longest", float(waste), "%")
    spec = PackSpec("tokens", length, PackPolicy.PAD)
    took = best_s(lambda: packs_of(drawn[:DOCUMENTS], spec, 5))
    yield row(f"{length:,} tokens: padded batches planned", DOCUMENTS / took / 1e6, PER_S)


def balance(policy: PackPolicy, lanes: int, window: int) -> Iterator[Row]:
    """How much more the most expensive pack of a step costs than the mean of 64 ranks, over an
    epoch of 256 blocks of about 256 packs.
    """
    ranks = 64
    for is_balanced in (False, True):
        spec = PackSpec("tokens", 8192, policy, balanced=is_balanced)
        lengths = [web_lengths(2 * GROUP * 8192, seed) for seed in range(256)]
        of_blocks = [costs(packs_of(of_block, spec, 5), spec) for of_block in lengths]
        counts = np.array([len(of_block) for of_block in of_blocks])
        order = Order(counts, 7, True, lanes, window, 1, balanced=is_balanced)
        block, at = order.locate(np.arange(order.sample_count))
        cost = np.concatenate(of_blocks)[(np.cumsum(counts) - counts)[block] + at]
        steps = cost[: len(cost) // ranks * ranks].reshape(-1, ranks)
        value = float((steps.max(axis=1) / steps.mean(axis=1)).mean())
        how = "balanced" if is_balanced else "as they come"
        name = f"{policy.value}, {lanes} lanes, windows of {window:,}: {how}"
        yield row(name, value, "max/mean")


def made(length: int, rows: int) -> Iterator[Row]:
    """Tokens a second that one worker gathers into a slab of so many rows, from packs and from rows
    of this length.
    """
    lengths = web_lengths(2 * rows * length, 3)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    tokens = pa.array(np.arange(offsets[-1], dtype=np.int32))
    stored = (ColumnSpec("tokens", Kind.RAGGED, "int32"),)
    lists = pa.LargeListArray.from_arrays(pa.array(offsets), tokens)
    documents = open_block(pa.record_batch({"tokens": lists}), stored)
    fixed = (ColumnSpec("tokens", Kind.FIXED, "int32", (length,)),)
    whole = len(tokens) // length
    equal = pa.FixedSizeListArray.from_arrays(tokens.slice(0, whole * length), length)
    opened = open_block(pa.record_batch({"tokens": equal}), fixed)
    rng, batch = np.random.default_rng(1), [Batch(0, rows, rows)]
    index = np.stack([np.zeros(rows), rng.permutation(whole)[:rows]], axis=1).astype(np.int32)
    slab = bytearray(rows * (4 * length * 8) + (1 << 16))
    room = memoryview(slab)
    gathers: dict[str, Callable[[], Gather | PackGather]] = {
        "rows": lambda: Gather(fixed, [opened], index, batch)
    }
    sizes = {}
    for outputs in ((), ("document_ids",), PACK_OUTPUTS):
        form = PackForm.of(stored, PackSpec("tokens", length, outputs=outputs))
        block = PackBlock(documents, (packs_of(lengths, form.pack, 5),))
        token_bytes = sum(map(row_bytes, form.specs)) / length
        name = f"S = {length:,}: packs, {token_bytes:.1f} bytes a token"
        sizes[name] = bool(outputs)
        gathers[name] = partial(PackGather, form, [block], index, batch)
    took = dict.fromkeys(gathers, math.inf)
    for _ in range(40):  # in turns, so that other load slows all alike
        for name, gather in gathers.items():
            took[name] = min(took[name], best_s(lambda: gather().into(room), 1))  # noqa: B023
    tokens = rows * length / 1e6
    plain = took["rows"]
    yield row(f"S = {length:,}: rows of equal length", tokens / plain, "M tokens/s")
    for name, has_more in sizes.items():
        least = None if has_more else SPEED_OF_ROWS_MIN
        yield row(name, tokens / took[name], "M tokens/s")
        yield row(f"{name}, of equal rows' speed", plain / took[name], "times", least=least)


def indexed() -> Iterator[Row]:
    """The size of a manifest that knows the packs of 10^10 documents, in blocks of 4,000."""
    rng, blocks = np.random.default_rng(0), 2_500_000
    tokens = rng.normal(4000 * MEAN_TOKENS, 80_000, blocks).astype(np.int64)
    short = np.zeros(blocks, np.int64)
    packs = tokens // 4096 + 3
    counts = np.stack([tokens, packs, tokens, short, 4096 * packs], axis=1)
    manifest = manifest_of(np.full(blocks, 4000), 4 * MEAN_TOKENS)
    size = len(with_counts(manifest, "packs", counts).to_bytes()) / 1e6
    yield row("manifest of 10^10 documents and their packs", size, "MB", most=INDEX_MAX)


def packing() -> Iterator[Row]:
    """How much sequence packs waste, and how fast they are planned and made.

    Documents have log-normal lengths with a mean of 616 tokens, as web pages have. "Made" is the
    work of one worker: a block of documents becomes batches.
    """
    for length in (2048, 8192):
        yield from planned(length)
    yield from padded(16_384)
    for lanes, window in ((1, 1 << 16), (64, 150), (64, 600), (128, 512), (96, 512)):
        yield from balance(PackPolicy.BEST_FIT, lanes, window)
    yield from balance(PackPolicy.PAD, 64, 600)
    for length in (2048, 8192):
        yield from made(length, 2 * GROUP)
    yield from indexed()


if __name__ == "__main__":
    sys.exit(run(__doc__, scale, mixtures, shuffle, packing))
