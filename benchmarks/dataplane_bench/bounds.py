"""Upper bounds on the rates of loaders, set by the machine and measured in the same run.

Each measurement takes about 0.3 s in its own process, and its best pass counts, since no loader may
beat a bound. One core gathers, copies or decodes. Rates that scale with cores are multiplied by
their number; the real limit is lower, since cores share memory bandwidth and clock frequency.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

from dataplane_bench import processes
from dataplane_bench.model import (
    BatchKind,
    BenchCase,
    ColumnType,
    DatasetPlace,
    StorageKind,
    Workload,
)
from dataplane_bench.trial import wire
from dataplane_bench.trial.launch import TrialFailed

COMMAND = ("-m", "dataplane_bench.measure")
TIMEOUT_S = 120.0
MEASURE_S = 0.3
"""How long each measurement repeats itself."""

MEMCPY = "memcpy_gb_per_s"
PAGE_CACHE = "page_cache_gb_per_s"
GATHER = "gather_gb_per_s"
TABLE_GATHER = "table_gather_gb_per_s"
PARQUET = "parquet_gb_per_s"
JPEG_DECODE = "jpeg_decode_per_s"
JPEG_CROP = "jpeg_decode_resize_per_s"
LISTS = "padded_lists_per_s"
STRINGS = "string_rows_per_s"
PACKS = "packs_gb_per_s"
TOKENS = "tokenised_texts_per_s"
S3 = "s3_gb_per_s"


def names(workload: Workload, store: StorageKind) -> tuple[str, ...]:
    """The measurements that cases of this workload need."""
    found = [MEMCPY, PAGE_CACHE]
    match workload.delivery:
        case BatchKind.PACKED:
            return (*found, PACKS)
        case BatchKind.TOKENISED:
            return (*found, PARQUET, TOKENS)
    match workload.shape:
        case "tokens":
            found += [GATHER, PARQUET]
        case "tabular":
            found += [TABLE_GATHER, PARQUET]
        case "images":
            found += [JPEG_DECODE, JPEG_CROP]
        case _:
            found += [PARQUET]
    if workload.of_kind(ColumnType.RAGGED):
        found.append(LISTS)
    if workload.of_kind(ColumnType.STRING):
        found.append(STRINGS)
    if store is StorageKind.S3:
        found.append(S3)
    return tuple(found)


def measured_name(name: str, case: BenchCase) -> str:
    """The name of a measurement in a report: what S3 gives depends on the line to the server."""
    if name != S3:
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
    order = wire.line({"names": names, "workload": workload, "place": place, "seconds": seconds})
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
    found: dict[str, float] = json.loads(done.stdout)
    return found


def bound_of(
    workload: Workload, store: StorageKind, found: Mapping[str, float]
) -> list[tuple[str, float]]:
    """Upper bounds on samples/s, each with the name of its bottleneck; the tightest first.

    Bounds on reading count the bytes of the source shards. A loader may exceed one if its own
    shards are smaller, or if it decodes only the part of an image that a crop needs.
    """
    cores = len(os.sched_getaffinity(0))
    fixed = sum(column.sample_bytes for column in workload.of_kind(ColumnType.FIXED))
    limits = [
        (f"JPEG decode and resize x {cores} cores", found.get(JPEG_CROP, math.inf) * cores),
        ("gather, one core", _samples(found, GATHER, fixed)),
        ("gather of whole rows, one core", _samples(found, TABLE_GATHER, fixed)),
        ("gather and padding of lists, one core", found.get(LISTS, math.inf)),
        ("making strings, one core", found.get(STRINGS, math.inf)),
        ("gather of tokens, one core", _samples(found, PACKS, 4 * workload.length)),
        (f"tokenizer x {cores} cores", found.get(TOKENS, math.inf) * cores),
    ]
    if store is StorageKind.S3:
        shards = workload.shards
        stored = sum(path.stat().st_size for path in shards) / workload.sample_count
        limits.append(("S3 server's own ceiling", _samples(found, S3, stored)))
    known = [(name, limit) for name, limit in limits if math.isfinite(limit)]
    return sorted(known, key=lambda one: one[1])


def _samples(found: Mapping[str, float], name: str, sample_bytes: float) -> float:
    """Samples/s at a rate in GB/s."""
    if name not in found or not sample_bytes:
        return math.inf
    return found[name] * 1e9 / sample_bytes
