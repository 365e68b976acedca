"""Processor time of decisions, rows and pixels: the scheduler, the gather kernel, JPEG crops.

    python benchmarks/worker.py scheduling | gather | pixels FOLDER [--json]

All of it runs in one process, on one core. Exit status 1: a bar was missed.
"""

from __future__ import annotations

import io
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pyarrow as pa
import simplejpeg  # type: ignore[import-untyped]
from dataplane_bench.scripts import Row, best_cpu_s, on_one_core, row, run
from msgspec import Struct
from numpy.typing import NDArray
from PIL import Image

from dataplane.arena.slots import plan_slots
from dataplane.model.config import JobSpec
from dataplane.model.records import ColumnOptions, ListPolicy, Stream
from dataplane.plan.order import Order
from dataplane.rpc import messages, tasks
from dataplane.rpc.codec import encode
from dataplane.rpc.messages import Batch
from dataplane.scheduler import events
from dataplane.scheduler.autoscaler import Autoscaler
from dataplane.scheduler.dataset import DatasetBlocks, DatasetLookup, Marks
from dataplane.scheduler.scheduler import Scheduler
from dataplane.scheduler.walk import SlabSizes, Walk
from dataplane.transforms import pixels as rendering
from dataplane.transforms.canonical import canonical
from dataplane.transforms.columns import ColumnPlan, plan_columns
from dataplane.transforms.pixels_library import maker
from dataplane.transforms.view import PixelView
from dataplane.worker.columns import BlockColumns, RowIndex, RowLayout, open_block
from dataplane.worker.gather import Gather
from dataplane.worker.row_layout import open_stored, plan_row_layout, store, stored_bytes

PAGE = 4096
ROUNDS = 3
RATIO_MAX = 1.2


class SchedulingCase(Struct, frozen=True):
    """The number of blocks in the arena and in the dataset, and the ranks that read it in lanes."""

    resident: int
    blocks: int
    ranks: int = 1
    batches_a_slab: int = 1
    rows_a_block: int = 16
    batch: int = 64

    @property
    def is_loading(self) -> bool:
        """Whether the dataset is larger than the arena, so that blocks evict each other."""
        return self.resident < self.blocks


class DrivenNode:
    """A scheduler, and a node in which every effect completes at once."""

    def __init__(self, case: SchedulingCase) -> None:
        self._scheduler = Scheduler(case.resident * PAGE, 64, Autoscaler(2, 2, 2), 1e9)
        rows = np.full(case.blocks, case.rows_a_block, np.int64)
        raw, decoded = np.full(case.blocks, PAGE, np.int64), np.zeros(case.blocks, np.int64)
        marks = Marks.of(raw, decoded, np.ones(case.blocks, np.bool_))
        dataset = DatasetBlocks(1, "made up", marks, raw, rows, url=str)
        datasets = DatasetLookup(dataset)
        # Open windows take an eighth of the blocks in memory.
        window = max(case.resident // 8, 1) * case.rows_a_block
        self._rows, self._ranks = rows, range(case.ranks)
        self._batches, self._is_loading = case.batches_a_slab, case.is_loading
        step = case.batch * case.ranks
        self._spec = JobSpec("f", seed=1, shuffle=True, window=window, global_batch=step)
        self._orders: dict[int, Order] = {}
        self._epochs = dict.fromkeys(self._ranks, -1)
        self._pending: deque[events.Event] = deque()
        self._now = self.cpu_s = 0.0
        self.loaded = self.slabs = 0
        self._requests = 0
        for rank in self._ranks:
            delivery = events.DeliveryOpened(
                rank, plan_slots(1 << 20, 1 << 16), datasets, group=rank, is_declared=False
            )
            self._post(delivery)
            self._open_next_epoch(rank)

    def _open_next_epoch(self, rank: int) -> None:
        self._epochs[rank] += 1
        epoch, spec = self._epochs[rank], self._spec
        for number in (epoch, epoch + 1):
            if number not in self._orders:
                self._orders[number] = Order(self._rows, spec.seed, True, 1, spec.window, number)
        at = Stream(epoch, 0, rank, len(self._ranks), 0, 1)
        walk = Walk(spec, self._orders[epoch], at, SlabSizes(self._batches, self._batches, 1 << 16))
        self._post(events.StreamStarted(self._stream_of(rank), rank, walk, rank))
        self._post(events.NextOrderKnown(self._stream_of(rank), self._orders[epoch + 1]))

    def _stream_of(self, rank: int) -> int:
        return self._epochs[rank] * len(self._ranks) + rank

    def _post(self, event: events.Event) -> None:
        self._pending.append(event)

    def run(self, slab_count: int) -> None:
        """Run until each rank has received this many more slabs."""
        end = self.slabs + slab_count * len(self._ranks)
        while self.slabs < end:
            for rank in self._ranks:
                self._requests += 1
                self._post(events.Requested(self._stream_of(rank), self._requests))
            wanted = self.slabs + len(self._ranks)
            while self.slabs < wanted:
                self._step()

    def _step(self) -> None:
        event = self._pending.popleft() if self._pending else events.Settled()
        self._now += 1e-6
        for effect in self._costing(self._scheduler.decide, event, self._now):
            if not self._is_loading:
                self._costing(self._message_of, effect)
            match effect:
                case events.PlanSteps():
                    plan = partial(effect.walk.next_plans, effect.count)
                    plans = plan() if self._is_loading else self._costing(plan)
                    self._post(events.Planned(effect.stream_id, plans))
                case events.Fetch():
                    self.loaded += 1
                    self._post(events.BlockFetched(effect.key))
                case events.AssembleSlab():
                    count = len(effect.plan.batches)
                    result = tasks.Assembled(count, bytes_needed=0, bytes_used=1)
                    self._post(events.SlabAssembled(effect.number, result, self._now))
                case events.Send(body=messages.Slab(slab_id=slab_id)):
                    self.slabs += 1
                    self._post(events.Released(effect.stream_id % len(self._ranks), (slab_id,)))
                case events.Send(body=messages.EndOfStream()):
                    rank = effect.stream_id % len(self._ranks)
                    self._post(events.StreamClosed(effect.stream_id))
                    self._open_next_epoch(rank)
                    self._post(events.Requested(self._stream_of(rank), effect.request_id))

    def _costing(self, call: Callable[..., Any], *given: object) -> Any:
        """Make a call whose CPU time counts as the node's."""
        began = time.thread_time_ns()
        result = call(*given)
        self.cpu_s += (time.thread_time_ns() - began) / 1e9
        return result

    def _message_of(self, effect: events.Effect) -> bytes:
        """The message that the engine sends for an effect, to a trainer or to a worker."""
        if isinstance(effect, events.Send):
            return encode(messages.FromNode(effect.request_id, effect.body))
        if isinstance(effect, events.AssembleSlab):
            return encode(
                tasks.Task(
                    tasks.Assemble(
                        1, effect.keys, effect.row_index, effect.plan.batches, effect.delivery_id,
                        effect.slab, effect.render,
                    )
                )
            )  # fmt: skip
        return b""


def measured(case: SchedulingCase) -> tuple[float, float]:
    """CPU microseconds of the node for a block and for a slab: the minimum of several rounds, since
    other load can only add to it.
    """
    node = DrivenNode(case)
    # Enough slabs to read two windows: the blocks of a window are loaded together.
    rows = case.rows_a_block
    slabs = max(2 * case.resident // 8 * rows // case.batch // case.ranks, 100)
    slabs = max(slabs // case.batches_a_slab, 100)
    # Warm up until the arena is full and every new block evicts another.
    node.run(case.resident * rows // case.batch // case.ranks // case.batches_a_slab + 50)
    costs = []
    for _ in range(ROUNDS):
        cpu_s, loaded, made = node.cpu_s, node.loaded, node.slabs
        node.run(slabs)
        cpu_us = (node.cpu_s - cpu_s) * 1e6
        costs.append((cpu_us / max(node.loaded - loaded, 1), cpu_us / (node.slabs - made)))
    block_us, slab_us = (min(some) for some in zip(*costs, strict=True))
    return block_us, slab_us


GROUPS = {
    "blocks in memory": [SchedulingCase(some, 100_000) for some in (500, 3_700, 15_000)],
    "blocks in the dataset": [SchedulingCase(500, some) for some in (1_000, 100_000, 3_000_000)],
    **{
        f"slabs of {count}": [
            SchedulingCase(3_700, 3_700, ranks, count, rows_a_block=256) for ranks in (1, 8)
        ]
        for count in (1, 8)
    },
}


def scheduling(*, largest: int = 3_000_000) -> Iterator[Row]:
    """How the cost of the scheduler's decisions grows with the number of blocks.

    The scheduler runs without stores, workers or sockets: each effect completes at once. First
    every block must be fetched and the arena is full, so that each block evicts another: CPU time
    of decisions per loaded block, for 500 to 15,000 blocks in memory and 10^3 to 3 * 10^6 in the
    dataset. Then all blocks are in memory: CPU time per slab of one batch and of eight, for 1 and 8
    ranks with batches of 64 rows: decisions, plans, and the messages to trainer and worker. Bar: a
    cost at its largest size is at most 1.2 times that at its smallest.
    """
    for name, cases in GROUPS.items():
        costs = []
        for case in (case for case in cases if case.blocks <= largest):
            block_us, slab_us = measured(case)
            costs.append(block_us if case.is_loading else slab_us)
            what = "us a block" if case.is_loading else "us a slab"
            many = f"{case.resident:,} in memory, {case.blocks:,} in all, {case.ranks} ranks"
            yield row(f"{name}: {many}", costs[-1], what)
        if len(costs) > 1:
            ratio = costs[-1] / costs[0]
            yield row(f"{name}: largest of smallest", ratio, "times", most=RATIO_MAX)


SLAB_BYTES = 4 << 20
SLABS, BLOCKS = 24, 128
GATHER_ROUNDS = 7


class GatherCase(Struct, frozen=True):
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

    def pack(self, packing: RowLayout, number: int) -> None:
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


def gather(*, rounds: int = GATHER_ROUNDS) -> Iterator[Row]:
    """How close to memory speed gathering a slab is: GB/s of slab on one core, and two bounds.

    Rows are drawn at random from many blocks, as in a shuffled window. One bound is np.take of as
    many random rows of the same mean size from a single array; the other is memcpy of as many
    consecutive bytes. Tables are gathered from packed blocks too, and packing is measured. Bar: a
    share of np.take's speed.
    """
    on_one_core()
    for case in CASES:
        slabs = Slabs(case)
        used, layout = slabs.bytes_used, slabs.packing
        calls: dict[str, tuple[int, Callable[[int], object]]] = {
            "kernel": (used, lambda i: slabs.gather(slabs.indexes[i])),  # noqa: B023
            "np.take": (slabs.bytes_taken, slabs.take),
            "memcpy": (used, slabs.copy),
        }
        if layout is not None:
            calls["packed"] = (used, lambda i: slabs.gather(slabs.indexes[i], packed=True))  # noqa: B023
            calls["packing"] = (slabs.blocks[0].batch.nbytes, partial(slabs.pack, layout))
        whole = {name: partial(_for_all_slabs, call) for name, (_, call) in calls.items()}
        spent = best_cpu_s(whole, rounds)
        speeds = {
            f"GB/s {name}": size * SLABS / spent[name] / 1e9 for name, (size, _) in calls.items()
        }
        share = speeds["GB/s kernel"] / speeds["GB/s np.take"]
        yield Row(case.name, {"of np.take": share, **speeds}, case.bar)


def _for_all_slabs(call: Callable[[int], object]) -> None:
    for number in range(SLABS):
        call(number)


SIDE = 224
LONG_SIDE, PIXELS_USUAL = 500, 500 * 375
QUALITY = 95
SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
ATTEMPTS = 10
BARS = {"ours": 1.4, "ours, again": 1.9}
RESTART_INDEX_PARTS = 16
VIEW = PixelView(SIDE, SIDE, "HWC", "uint8", None, None)
HALF_VIEW = PixelView(SIDE // 2, SIDE // 2, "HWC", "uint8", None, None)
PIXEL_ROUNDS = 9

Crops = NDArray[np.float64]


class Photographs:
    """The photographs, and the ways to crop all of them."""

    def __init__(self, folder: Path) -> None:
        self.encoded = [_usual(path.read_bytes()) for path in sorted(folder.iterdir())]
        self._memory = [np.frombuffer(image, np.uint8) for image in self.encoded]
        self._places = _places(self._memory)
        self._kept = [
            np.zeros(len(image) // RESTART_INDEX_PARTS // 8 * 8, np.uint8) for image in self.encoded
        ]
        self._restart_indexes = _places(self._kept)
        self.sizes = rendering.sizes(self._places)
        self._centres = centred_boxes(self.sizes)
        self._flips = np.zeros(len(self.encoded), np.uint8)
        self._out = np.zeros((len(self.encoded), SIDE, SIDE, 3), np.uint8)

    def by_simplejpeg(self, boxes: Crops) -> None:
        """Whole images, resized by OpenCV, without antialiasing."""
        for number, image in enumerate(self.encoded):
            top, left, height, width = boxes[number].astype(int).tolist()
            whole = simplejpeg.decode_jpeg(image, fastdct=False, fastupsample=False)
            part = whole[top : top + height, left : left + width]
            cv2.resize(part, (SIDE, SIDE), dst=self._out[number], interpolation=cv2.INTER_LINEAR)

    def by_pillow(self, boxes: Crops) -> None:
        """Whole images, resized with antialiasing."""
        for number, image in enumerate(self.encoded):
            top, left, height, width = boxes[number].tolist()
            with Image.open(io.BytesIO(image)) as opened:
                part = opened.convert("RGB").resize(
                    (SIDE, SIDE), Image.Resampling.BILINEAR, (left, top, left + width, top + height)
                )
                self._out[number] = np.asarray(part)

    def by_us(self, boxes: Crops) -> None:
        self._render(VIEW, boxes, may_reduce=True)

    def by_us_again(self, boxes: Crops) -> None:
        self._render(VIEW, boxes, self._restart_indexes, may_reduce=True)

    def evaluation_by_pillow(self, _boxes: Crops) -> None:
        """The steps of torchvision."""
        self.by_pillow(self._centres)

    def evaluation(self, _boxes: Crops) -> None:
        self._render(VIEW, self._centres)

    def small_evaluation(self, _boxes: Crops) -> None:
        self._render(HALF_VIEW, self._centres)

    def fast_small_evaluation(self, _boxes: Crops) -> None:
        self._render(HALF_VIEW, self._centres, may_reduce=True)

    def _render(
        self, view: PixelView, boxes: Crops, indexes: Any = None, *, may_reduce: bool = False
    ) -> None:
        out = self._out.reshape(-1)[: len(self.encoded) * view.bytes]
        rendering.render(
            self._places, boxes, self._flips, view, out, restart_indexes=indexes,
            may_reduce=may_reduce,
        )  # fmt: skip


def centred_boxes(sizes: NDArray[np.int32]) -> Crops:
    """The middle of a resize to 256, or to 128.   Shapes:  result: float64[n, 4]."""
    whole = sizes.astype(np.float64)
    kept = whole.min(1, keepdims=True) * SIDE / 256
    return np.concatenate([(whole - kept) / 2, np.repeat(kept, 2, axis=1)], axis=1)


def _places(memory: Sequence[NDArray[np.uint8]]) -> rendering.Ints:
    return np.array([(some.ctypes.data, some.nbytes) for some in memory], np.int64)


def _usual(image: bytes) -> bytes:
    with Image.open(io.BytesIO(image)) as opened:
        if opened.width * opened.height <= PIXELS_USUAL:
            return image
        shrunk = opened.convert("RGB")
        shrunk.thumbnail((LONG_SIDE, LONG_SIDE))
        file = io.BytesIO()
        shrunk.save(file, "JPEG", quality=QUALITY)
        return file.getvalue()


def random_boxes(random: np.random.Generator, sizes: NDArray[np.int32]) -> Crops:
    """Boxes as RandomResizedCrop draws them.   Shapes:  result: float64[n, 4], whole numbers."""
    whole = sizes.astype(np.float64)
    parts = whole.copy()
    for _ in range(ATTEMPTS):
        area = random.uniform(SCALE[0], SCALE[1], len(whole)) * whole.prod(1)
        ratio = np.exp(random.uniform(np.log(RATIO[0]), np.log(RATIO[1]), len(whole)))
        drawn = np.stack([np.sqrt(area / ratio), np.sqrt(area * ratio)], 1).round()
        fits = ((drawn <= whole) & (drawn > 0)).all(1) & (parts == whole).all(1)
        parts[fits] = drawn[fits]
    corners = np.floor(random.uniform(0, 1, whole.shape) * (whole - parts + 1))
    return np.concatenate([corners, parts], 1)


def pixels(folder: Path, *, rounds: int = PIXEL_ROUNDS) -> Iterator[Row]:
    """How many JPEG crops per second one core makes, with which library.

    Photographs of the folder that are larger than ImageNet's usual 500 x 375 are first scaled to
    that size, at a quality of 95. All libraries make the same crops in turns. Bars are multiples of
    the rate of simplejpeg (libjpeg-turbo, whole images) with OpenCV's resize. "Ours, again" are
    crops of images that were cropped before, as in later epochs of a dataset that stays in memory.

    Training uses random resized crops to 224. Evaluation uses a resize and a center crop: to 256
    and 224, for which these photographs are too small to be decoded at a reduced size, and to 128
    and 112.
    """
    on_one_core()
    cv2.setNumThreads(1)
    photographs = Photographs(folder)
    makers: dict[str, Callable[[Crops], None]] = {
        "simplejpeg and OpenCV": photographs.by_simplejpeg,
        "Pillow": photographs.by_pillow,
        "ours": photographs.by_us,
        "ours, again": photographs.by_us_again,
        "evaluation to 224, Pillow": photographs.evaluation_by_pillow,
        "evaluation to 224": photographs.evaluation,
        "evaluation to 112": photographs.small_evaluation,
        "evaluation to 112, fast": photographs.fast_small_evaluation,
    }
    random = np.random.default_rng(0)
    boxes = [random_boxes(random, photographs.sizes) for _ in range(3)]
    calls = {name: partial(_for_all_boxes, make, boxes) for name, make in makers.items()}
    spent = best_cpu_s(calls, rounds)
    size = sum(map(len, photographs.encoded)) / len(photographs.encoded)
    height, width = photographs.sizes.mean(0)
    print(f"ours by {maker()}", file=sys.stderr)
    yield Row("photographs", {"": len(photographs.encoded), "pixels high": height,
                              "wide": width, "bytes": size})  # fmt: skip
    for name, cpu_s in spent.items():
        rate = len(photographs.encoded) * len(boxes) / cpu_s
        times = spent["simplejpeg and OpenCV"] / cpu_s
        yield Row(name, {"times simplejpeg's": times, "images/s a core": rate}, BARS.get(name))


def _for_all_boxes(make: Callable[[Crops], None], boxes: Sequence[Crops]) -> None:
    for crops in boxes:
        make(crops)


if __name__ == "__main__":
    sys.exit(run(__doc__, scheduling, gather, pixels))
