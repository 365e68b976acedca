"""Sequence packing: what packs waste, and how fast they are planned and made, with bars.

    python benchmarks/packing.py [--json]

Exit status 1: a bar was missed. Documents have log-normal lengths with a mean of 616 tokens, as web
pages have. "Made" is the work of one worker: a block of documents becomes batches.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from plan_scale import manifest_of

from dataplane.arena.slab_layout import row_bytes
from dataplane.model import PACK_OUTPUTS, ColumnSpec, Kind, PackPolicy, PackSpec
from dataplane.plan.order import Order
from dataplane.plan.packed_blocks import with_counts
from dataplane.plan.packs import costs, pack_count, packing_of, packs_of
from dataplane.rpc.messages import Batch
from dataplane.worker.columns import open_block
from dataplane.worker.gather import Gather
from dataplane.worker.pack_blocks import PackBlock, PackForm
from dataplane.worker.packing import PackGather

_MEAN, _SIGMA, _GROUP = 616, 1.2, 128
_DOCUMENTS = 10_000
_SPEED_MIN, _WASTE_MAX, _INDEX_MAX = 5.0, 1.0, 50.0
_SPEED_OF_ROWS_MIN = 0.8
"""Of packs that have nothing but tokens: what else is asked for is written, too."""


@dataclass(frozen=True, slots=True)
class PackFigure:
    """One line of the table. `least` and `most` are bars, if set."""

    name: str
    value: float
    unit: str
    least: float | None = None
    most: float | None = None

    @property
    def missed(self) -> bool:
        below = self.least is not None and self.value < self.least
        return below or (self.most is not None and self.value > self.most)


def web_lengths(tokens: int, seed: int) -> NDArray[np.int64]:
    """Lengths of documents with so many tokens or a few more."""
    rng = np.random.default_rng(seed)
    drawn = rng.lognormal(np.log(_MEAN) - _SIGMA**2 / 2, _SIGMA, 3 * tokens // _MEAN + 100)
    lengths = np.ceil(drawn).astype(np.int64)
    return lengths[: int(np.searchsorted(np.cumsum(lengths), tokens)) + 1]


def best_s(call: Callable[[], object], times: int = 7) -> float:
    found = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        found.append(time.perf_counter() - began)
    return min(found)


def planned(length: int) -> list[PackFigure]:
    spec = PackSpec("tokens", length)
    wastes = []
    for seed in range(20):
        told = packing_of(web_lengths(_GROUP * length, seed), spec)
        wastes.append(100 * told.padding)
    many = web_lengths(_DOCUMENTS * _MEAN, 7)[:_DOCUMENTS]
    made, count = best_s(lambda: packs_of(many, spec, 5)), best_s(lambda: pack_count(many, spec))
    wrap = PackSpec("tokens", length, PackPolicy.WRAP)
    wrapped = best_s(lambda: packs_of(many, wrap, 5))
    per_s = len(many) / 1e6
    name = f"S = {length:,}"
    return [
        PackFigure(
            f"{name}: waste, mean of 20 groups", float(np.mean(wastes)), "%", None, _WASTE_MAX
        ),
        PackFigure(f"{name}: waste, worst of 20 groups", max(wastes), "%", None, _WASTE_MAX),
        PackFigure(f"{name}: packs planned", per_s / made, "M documents/s", _SPEED_MIN),
        PackFigure(f"{name}: packs counted", per_s / count, "M documents/s", _SPEED_MIN),
        PackFigure(f"{name}: wrapped packs planned", per_s / wrapped, "M documents/s"),
    ]


def padded(length: int) -> list[PackFigure]:
    """Padded batches of so many tokens, and batches of 16 rows as they come."""
    found = []
    for documents, most in ((1_000, None), (5_000, 2.0), (20_000, None)):
        drawn = web_lengths(2 * documents * _MEAN, 1)[:documents]
        for multiple in (1, 8):
            spec = PackSpec("tokens", length, PackPolicy.PAD, multiple=multiple)
            waste = 100 * packing_of(drawn, spec).padding
            name = f"{length:,} tokens: blocks of {documents:,}, multiple {multiple}"
            found.append(PackFigure(name, waste, "%", None, most))
        rows = drawn[: documents // 16 * 16].reshape(-1, 16)
    waste = 100 * (1 - rows.sum() / (16 * rows.max(axis=1).sum()))
    found.append(PackFigure("16 rows as they come, padded to the longest", waste, "%"))
    spec = PackSpec("tokens", length, PackPolicy.PAD)
    took = best_s(lambda: packs_of(drawn[:_DOCUMENTS], spec, 5))
    name = f"{length:,} tokens: padded batches planned"
    return [*found, PackFigure(name, _DOCUMENTS / took / 1e6, "M documents/s")]


def balance(policy: PackPolicy, lanes: int, window: int) -> list[PackFigure]:
    """How much more the most expensive pack of a step costs than the mean of 64 ranks, over an
    epoch of 256 blocks of about 256 packs.
    """
    found, ranks = [], 64
    for is_balanced in (False, True):
        spec = PackSpec("tokens", 8192, policy, balanced=is_balanced)
        lengths = [web_lengths(2 * _GROUP * 8192, seed) for seed in range(256)]
        of_blocks = [costs(packs_of(each, spec, 5), spec) for each in lengths]
        counts = np.array([len(each) for each in of_blocks])
        order = Order(counts, 7, True, lanes, window, 1, balanced=is_balanced)
        block, row = order.locate(np.arange(order.sample_count))
        cost = np.concatenate(of_blocks)[(np.cumsum(counts) - counts)[block] + row]
        steps = cost[: len(cost) // ranks * ranks].reshape(-1, ranks)
        value = float((steps.max(axis=1) / steps.mean(axis=1)).mean())
        told = "balanced" if is_balanced else "as they come"
        name = f"{policy.value}, {lanes} lanes, windows of {window:,}: {told}"
        found.append(PackFigure(name, value, "max/mean"))
    return found


def made(length: int, rows: int) -> list[PackFigure]:
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
        each = sum(map(row_bytes, form.specs)) / length
        name = f"S = {length:,}: packs, {each:.1f} bytes a token"
        sizes[name] = bool(outputs)
        gathers[name] = partial(PackGather, form, [block], index, batch)
    took = dict.fromkeys(gathers, math.inf)
    for _ in range(40):  # in turns, so that other load slows all alike
        for name, gather in gathers.items():
            took[name] = min(took[name], best_s(lambda: gather().into(room), 1))  # noqa: B023
    tokens = rows * length / 1e6
    plain = took["rows"]
    found = [PackFigure(f"S = {length:,}: rows of equal length", tokens / plain, "M tokens/s")]
    for name, has_more in sizes.items():
        least = None if has_more else _SPEED_OF_ROWS_MIN
        found.append(PackFigure(name, tokens / took[name], "M tokens/s"))
        found.append(
            PackFigure(f"{name}, of equal rows' speed", plain / took[name], "times", least)
        )
    return found


def indexed() -> list[PackFigure]:
    """The size of a manifest that knows the packs of 10^10 documents, in blocks of 4,000."""
    rng, blocks = np.random.default_rng(0), 2_500_000
    tokens = rng.normal(4000 * _MEAN, 80_000, blocks).astype(np.int64)
    short = np.zeros(blocks, np.int64)
    packs = tokens // 4096 + 3
    counts = np.stack([tokens, packs, tokens, short, 4096 * packs], axis=1)
    manifest = manifest_of(np.full(blocks, 4000), 4 * _MEAN)
    size = len(with_counts(manifest, "packs", counts).to_bytes()) / 1e6
    return [PackFigure("manifest of 10^10 documents and their packs", size, "MB", None, _INDEX_MAX)]


def table(measures: list[PackFigure]) -> str:
    lines = []
    for each in measures:
        bar = each.least if each.most is None else each.most
        told = "" if bar is None else f"  bar {bar:g}: {'MISSED' if each.missed else 'ok'}"
        lines.append(f"{each.name:<58}{each.value:>12,.2f} {each.unit:<14}{told}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    measures = [each for length in (2048, 8192) for each in planned(length)]
    measures += padded(16_384)
    for lanes, window in ((1, 1 << 16), (64, 150), (64, 600), (128, 512), (96, 512)):
        measures += balance(PackPolicy.BEST_FIT, lanes, window)
    measures += balance(PackPolicy.PAD, 64, 600)
    measures += [each for length in (2048, 8192) for each in made(length, 2 * _GROUP)]
    measures += indexed()
    told = json.dumps([asdict(each) for each in measures]) if asked.json else table(measures)
    sys.stdout.write(f"{told}\n")
    return int(any(each.missed for each in measures))


if __name__ == "__main__":
    raise SystemExit(main())
