"""Upper bounds on the rates of loaders, set by the machine and measured in the same run.

Each measurement takes about 0.3 s in its own process, and its best pass counts, since no loader may
beat a bound. One core gathers, copies or decodes. Rates that scale with cores are multiplied by
their number; the real limit is lower, since cores share memory bandwidth and clock frequency.

    python -m dataplane_bench.bounds      (reads its order from stdin, writes results to stdout)
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dataplane_bench import processes
from dataplane_bench.model import (
    BatchKind,
    BenchCase,
    ColumnType,
    DatasetPlace,
    StorageKind,
    Workload,
    from_plain,
    json_line,
)
from dataplane_bench.peers.tokenising import THREADS, tokenising
from dataplane_bench.trial.launch import TrialFailed

COMMAND = ("-m", "dataplane_bench.bounds")
TIMEOUT_S = 120.0
MEASURE_S = 0.3
"""How long each measurement repeats itself."""


def names(workload: Workload, store: StorageKind) -> tuple[str, ...]:
    """The measurements that cases of this workload need."""
    measurements = ["memcpy_gb_per_s", "page_cache_gb_per_s"]
    match workload.delivery:
        case BatchKind.PACKED:
            return (*measurements, "packs_gb_per_s")
        case BatchKind.TOKENISED:
            return (*measurements, "parquet_gb_per_s", "tokenised_texts_per_s")
    match workload.shape:
        case "tokens":
            measurements += ["gather_gb_per_s", "parquet_gb_per_s"]
        case "tabular":
            measurements += ["table_gather_gb_per_s", "parquet_gb_per_s"]
        case "images":
            measurements += ["jpeg_decode_per_s", "jpeg_decode_resize_per_s"]
        case _:
            measurements += ["parquet_gb_per_s"]
    if workload.of_kind(ColumnType.RAGGED):
        measurements.append("padded_lists_per_s")
    if workload.of_kind(ColumnType.STRING):
        measurements.append("string_rows_per_s")
    if store is StorageKind.S3:
        measurements.append("s3_gb_per_s")
    return tuple(measurements)


def measured_name(name: str, case: BenchCase) -> str:
    """The name of a measurement in a report: what S3 gives depends on the line to the server."""
    if name != "s3_gb_per_s":
        return name
    line = f"{case.delay_ms:g}_ms{'_tls' if case.over_tls else ''}"
    return f"s3_{line}{name.removeprefix('s3')}"


def measure(
    names: Sequence[str], workload: Workload, place: DatasetPlace | None, seconds: float = MEASURE_S
) -> dict[str, float]:
    """Each of these, by name, on the workload's source shards; `place` is where they are in S3.

    A separate process measures, so that no other memory or threads interfere.
    Raises:  TrialFailed: it failed, or took too long.
    """
    order = json_line({"names": names, "workload": workload, "place": place, "seconds": seconds})
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    trusted = place.trust() if place else {}
    try:
        done = subprocess.run(
            [*processes.dies_with_us(), sys.executable, *COMMAND],
            input=order,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=True,
            env={**kept, **trusted, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"},
        )
    except subprocess.TimeoutExpired as error:
        raise TrialFailed(f"the bounds were not measured within {TIMEOUT_S:g} s") from error
    except subprocess.CalledProcessError as error:
        raise TrialFailed(f"the bounds cannot be measured:\n{error.stderr.strip()}") from error
    rates: dict[str, float] = json.loads(done.stdout)
    return rates


def bound_of(
    workload: Workload, store: StorageKind, rates: Mapping[str, float]
) -> list[tuple[str, float]]:
    """Upper bounds on samples/s, each with the name of its bottleneck; the tightest first.

    Bounds on reading count the bytes of the source shards. A loader may exceed one if its own
    shards are smaller, or if it decodes only the part of an image that a crop needs.
    """
    cores = len(os.sched_getaffinity(0))
    fixed = sum(column.sample_bytes for column in workload.of_kind(ColumnType.FIXED))
    limits = [
        (
            f"JPEG decode and resize x {cores} cores",
            cores * rates.get("jpeg_decode_resize_per_s", inf),
        ),
        ("gather, one core", _samples_of(rates, "gather_gb_per_s", fixed)),
        ("gather of whole rows, one core", _samples_of(rates, "table_gather_gb_per_s", fixed)),
        ("gather and padding of lists, one core", rates.get("padded_lists_per_s", inf)),
        ("making strings, one core", rates.get("string_rows_per_s", inf)),
        ("gather of tokens, one core", _samples_of(rates, "packs_gb_per_s", 4 * workload.length)),
        (f"tokenizer x {cores} cores", rates.get("tokenised_texts_per_s", inf) * cores),
    ]
    if store is StorageKind.S3:
        shards = workload.shards
        stored = sum(path.stat().st_size for path in shards) / workload.sample_count
        limits.append(("S3 server's own ceiling", _samples_of(rates, "s3_gb_per_s", stored)))
    known = [(name, limit) for name, limit in limits if isfinite(limit)]
    return sorted(known, key=lambda bound: bound[1])


def _samples_of(rates: Mapping[str, float], name: str, sample_bytes: float) -> float:
    """Samples/s at a rate in GB/s."""
    if name not in rates or not sample_bytes:
        return inf
    return rates[name] * 1e9 / sample_bytes


_PASSES_MIN = 3
_COPY_BYTES = 64 << 20
_WARM_BYTES = 8 << 20
"""The size of a buffer that is written again and again, as a loader's batches are."""
_ROWS_BYTES = 256 << 20
"""The size of the rows to gather from: more than the caches of most processors."""
_SOURCE_BYTES = 64 << 20
_GET_BYTES, _GETS_AT_ONCE, _GETS = 8 << 20, 16, 32
_JPEGS = 24
_DRAWS = 16
_TEXTS = 256


@dataclass(frozen=True, slots=True)
class Subject:
    """A workload to measure with, the place of its shards in S3, and the time to measure for."""

    workload: Workload
    place: DatasetPlace | None
    seconds: float

    @property
    def shards(self) -> list[Path]:
        return self.workload.shards


def best_rate(work: Callable[[], object], amount: float, seconds: float) -> float:
    """`amount` divided by the seconds of the best pass. Passes repeat for `seconds`, after one
    warm-up.
    """
    work()
    clock = time.perf_counter
    end, best, passes = clock() + seconds, float("inf"), 0
    while passes < _PASSES_MIN or clock() < end:
        start = clock()
        work()
        best = min(best, clock() - start)
        passes += 1
    return amount / best


def memcpy_gb_per_s(subject: Subject) -> float:
    """GB/s of one core that copies between two buffers larger than the caches."""
    source, target = (np.ones(_COPY_BYTES, np.uint8) for _ in range(2))
    return best_rate(lambda: np.copyto(target, source), _COPY_BYTES, subject.seconds) / 1e9


def page_cache_gb_per_s(subject: Subject) -> float:
    """GB/s of one core reading a source shard into a warm buffer."""
    buffer = memoryview(bytearray(_WARM_BYTES))
    buffer[:] = bytes(_WARM_BYTES)
    fd = os.open(max(subject.shards, key=lambda path: path.stat().st_size), os.O_RDONLY)
    try:
        size = min(os.fstat(fd).st_size, _SOURCE_BYTES)

        def read() -> None:
            at = 0
            while at < size:
                at += os.preadv(fd, [buffer[: size - at]], at)

        return best_rate(read, size, subject.seconds) / 1e9
    finally:
        os.close(fd)


def gather_gb_per_s(subject: Subject) -> float:
    """GB/s of one core taking random rows of the widest column into a warm buffer."""
    column = max(subject.workload.of_kind(ColumnType.FIXED), key=lambda fixed: fixed.sample_bytes)
    rows = _numbers(_start(subject, [column.name])[column.name]).astype(column.dtype, copy=False)
    return _row_gather(rows.reshape(-1, max(int(np.prod(column.shape)), 1)), subject.seconds) / 1e9


def _row_gather(rows: NDArray[Any], seconds: float) -> float:
    """Bytes/s.   Shapes:  rows: [n, width]."""
    rows = np.tile(rows, (-(-_ROWS_BYTES // max(rows.nbytes, 1)), 1))
    count = max(_WARM_BYTES // (rows.itemsize * rows.shape[1]), 1)
    buffer = np.zeros((count, rows.shape[1]), rows.dtype)
    draws = _draws(len(rows), count)
    return best_rate(
        lambda: np.take(rows, next(draws), axis=0, out=buffer, mode="clip"), buffer.nbytes, seconds
    )


def table_gather_gb_per_s(subject: Subject) -> float:
    """GB/s of one core taking random rows of a table into a warm buffer. All columns of a row lie
    side by side, the best case: no layout of a loader reads fewer bytes.
    """
    width = sum(column.sample_bytes for column in subject.workload.of_kind(ColumnType.FIXED))
    return _row_gather(np.ones((1 << 16, width), np.uint8), subject.seconds) / 1e9


def parquet_gb_per_s(subject: Subject) -> float:
    """GB/s, as decoded, of one core decoding a row group of a source shard."""
    with pq.ParquetFile(subject.shards[0]) as file:
        decoded = file.read_row_group(0, use_threads=False).nbytes
        decode = functools.partial(file.read_row_group, 0, use_threads=False)
        return best_rate(decode, decoded, subject.seconds) / 1e9


def jpeg_decode_per_s(subject: Subject) -> float:
    """Images/s of one core, decoded whole."""
    import simplejpeg  # type: ignore[import-untyped]

    images = _images(subject)

    def batch() -> None:
        for image in images:
            simplejpeg.decode_jpeg(image, "RGB")

    return best_rate(batch, len(images), subject.seconds)


def jpeg_decode_resize_per_s(subject: Subject) -> float:
    """Images/s of one core, decoded whole, cropped at random, resized and flipped."""
    from dataplane_bench.peers.samples import random_resized_crop_flip

    images = _images(subject)

    def batch() -> None:
        # The same crops in each pass; otherwise the best pass is the one with the smallest crops.
        random = np.random.default_rng(0)
        for image in images:
            random_resized_crop_flip(image, random)

    return best_rate(batch, len(images), subject.seconds)


def padded_lists_per_s(subject: Subject) -> float:
    """Samples/s of one core writing random lists into zeroed batches.

    Lists have the mean length of real ones, and batches their mean width. So as many bytes move,
    but without one call for each list, a cost that is not the hardware's.
    """
    seconds = 0.0
    for column in subject.workload.of_kind(ColumnType.RAGGED):
        lists = _start(subject, [column.name])[column.name].combine_chunks()
        lengths = np.diff(np.asarray(lists.offsets))
        count = min(subject.workload.batch_size, len(lengths))
        draws = _draws(len(lengths), count)
        width = int(np.mean([lengths[next(draws)].max() for _ in range(_DRAWS)]))
        mean = max(int(lengths.mean()), 1)
        values = np.asarray(lists.flatten()).astype(column.dtype, copy=False)
        rows = np.resize(values, (max(len(values) // mean, 1), mean))
        buffer = np.zeros((count, max(width, 1)), column.dtype)
        zero = best_rate(functools.partial(buffer.fill, 0), count, subject.seconds)
        seconds += 1 / zero + rows.itemsize * mean / _row_gather(rows, subject.seconds)
    return 1 / seconds


def string_rows_per_s(subject: Subject) -> float:
    """Samples/s of one core that makes Python strings from UTF-8."""
    seconds = 0.0
    for column in subject.workload.of_kind(ColumnType.STRING):
        texts = _start(subject, [column.name])[column.name].slice(0, 10_000)
        encoded = texts.cast(pa.binary()).to_pylist()
        seconds += 1 / best_rate(
            functools.partial(_decoded, encoded), len(encoded), subject.seconds
        )
    return 1 / seconds


def packs_gb_per_s(subject: Subject) -> float:
    """GB/s of one core taking tokens by packs into a warm buffer, as if none had two documents."""
    column = subject.workload.of_kind(ColumnType.RAGGED)[0]
    tokens = _numbers(_start(subject, [column.name])[column.name]).astype(column.dtype, copy=False)
    length = subject.workload.length
    rows = np.resize(tokens, (max(len(tokens) // length, 1), length))
    return _row_gather(rows, subject.seconds) / 1e9


def tokenised_texts_per_s(subject: Subject) -> float:
    """Texts/s of one core that tokenises them."""
    os.environ[THREADS] = "false"
    tokenise = tokenising(subject.workload)
    texts = _start(subject, ["text"])["text"].slice(0, _TEXTS).to_pylist()
    return best_rate(lambda: tokenise(texts), len(texts), subject.seconds)


def s3_gb_per_s(subject: Subject) -> float:
    """GB/s of several concurrent ranged GETs, whose bytes are discarded."""
    import obstore
    from obstore.store import S3Store

    place = subject.place
    assert place is not None
    bucket, _, prefix = place.url.removeprefix("s3://").partition("/")
    store = S3Store(
        bucket,
        endpoint=place.endpoint,
        access_key_id=place.access_key,
        secret_access_key=place.secret_key,
        region="us-east-1",
        virtual_hosted_style_request=False,
        client_options={"allow_http": True},
    )
    ranges = [
        (f"{prefix}/{path.name}", at, min(_GET_BYTES, path.stat().st_size - at))
        for path in subject.shards
        for at in range(0, path.stat().st_size, _GET_BYTES)
    ]
    ranges = [ranges[index % len(ranges)] for index in range(_GETS)]

    def get(span: tuple[str, int, int]) -> int:
        key, start, length = span
        return len(obstore.get_range(store, key, start=start, length=length))

    with ThreadPoolExecutor(_GETS_AT_ONCE) as pool:
        total = sum(length for _, _, length in ranges)
        return best_rate(lambda: list(pool.map(get, ranges)), total, subject.seconds) / 1e9


MEASURES: dict[str, Callable[[Subject], float]] = {
    measure.__name__: measure
    for measure in (
        memcpy_gb_per_s, page_cache_gb_per_s, gather_gb_per_s, table_gather_gb_per_s,
        parquet_gb_per_s, jpeg_decode_per_s, jpeg_decode_resize_per_s, padded_lists_per_s,
        string_rows_per_s, packs_gb_per_s, tokenised_texts_per_s, s3_gb_per_s,
    )
}  # fmt: skip


def _start(subject: Subject, names: Sequence[str]) -> pa.Table:
    """The first samples, about _SOURCE_BYTES of them."""
    groups, size = [], 0
    for path in subject.shards:
        with pq.ParquetFile(path) as file:
            for group in range(file.num_row_groups):
                groups.append(file.read_row_group(group, columns=list(names)))
                size += groups[-1].nbytes
                if size >= _SOURCE_BYTES:
                    return pa.concat_tables(groups)
    return pa.concat_tables(groups)


def _images(subject: Subject) -> list[bytes]:
    name = subject.workload.of_kind(ColumnType.IMAGE)[0].name
    with pq.ParquetFile(subject.shards[0]) as file:
        rows = next(file.iter_batches(_JPEGS, columns=[name]))
    encoded: list[bytes] = rows[name].to_pylist()
    return encoded


def _numbers(column: pa.ChunkedArray) -> NDArray[Any]:
    """All numbers of a column, in one array."""
    values = column.combine_chunks()
    while not pa.types.is_primitive(values.type):
        values = values.flatten()
    return np.asarray(values)


def _decoded(encoded: Sequence[bytes]) -> list[str]:
    return [text.decode() for text in encoded]


def _draws(size: int, count: int) -> Iterator[NDArray[np.int64]]:
    """Random rows, drawn beforehand and reused, so that drawing is not measured."""
    random = np.random.default_rng(0)
    drawn = [random.integers(0, size, count) for _ in range(_DRAWS)]
    while True:
        yield from drawn


def main() -> None:
    """Read the order, measure, write the results."""
    order = json.loads(sys.stdin.readline())
    subject = from_plain(Subject, order)
    rates = {name: MEASURES[name](subject) for name in order["names"]}
    sys.stdout.write(json.dumps(rates) + "\n")


if __name__ == "__main__":
    main()
