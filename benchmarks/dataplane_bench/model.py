"""The nouns of a benchmark; they decide nothing.

A *workload* is a set of samples and what a trainer wants of it. A *case* is one way to load it. A
*scenario* is a question: some cases and a bound. A *system* is a loader under test: Dataplane, a
peer, or `noop`, which shows what the harness itself could do. A *trial* is one run of one system
in one case, in processes of its own. Trials of all systems take turns in *rounds*: A B C, A B C.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

CROP = 224
"""Height and width of an image in a batch, pixels."""


class ColumnType(enum.StrEnum):
    """What a column is in the source shards, and in a batch."""

    FIXED = "fixed"  # primitive or fixed-size list -> tensor [B, *shape]
    RAGGED = "ragged"  # list of numbers -> tensor [B, T] padded with 0, and "<name>.length"
    STRING = "string"  # utf8 -> list of B str
    IMAGE = "image"  # encoded JPEG -> uint8 [B, CROP, CROP, 3]: random resized crop, random flip


@dataclass(frozen=True, slots=True)
class WorkloadColumn:
    """A column of a workload. `dtype` is numpy's name, of FIXED and RAGGED; `shape` is FIXED's."""

    name: str
    kind: ColumnType
    dtype: str = ""
    shape: tuple[int, ...] = ()

    @property
    def sample_bytes(self) -> int:
        """Bytes of one FIXED sample."""
        return np.dtype(self.dtype).itemsize * int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True, slots=True)
class Workload:
    """Samples, and what a trainer wants of them: shuffled batches of `batch_size`.

    The source is a folder of Parquet shards `shard-00000.parquet`, … with exactly these columns,
    without nulls. Every system but Dataplane converts it once into its own best format.
    `step_ms` is the trainer's step for which a loader's stall share is told. `fingerprint` names
    the samples: the same for the same rows.
    """

    name: str
    columns: tuple[WorkloadColumn, ...]
    batch_size: int
    sample_count: int
    source: Path
    fingerprint: str
    step_ms: float
    urls: tuple[str, ...] = ()
    """The user's own shards, of which `source` is a copy; empty for generated samples."""

    @property
    def shards(self) -> list[Path]:
        """The source's shards, in order."""
        return sorted(self.source.glob("*.parquet"))

    def of_kind(self, kind: ColumnType) -> tuple[WorkloadColumn, ...]:
        return tuple(column for column in self.columns if column.kind is kind)

    @property
    def shape(self) -> str:
        """What adapters tell apart: "images" has an image, "text" a string or a ragged column,
        "tokens" a fixed-size row of 256 bytes or more, and "tabular" only single numbers.
        """
        if self.of_kind(ColumnType.IMAGE):
            return "images"
        if self.of_kind(ColumnType.RAGGED) or self.of_kind(ColumnType.STRING):
            return "text"
        wide = any(column.sample_bytes >= 256 for column in self.columns)
        return "tokens" if wide else "tabular"


class Mode(enum.StrEnum):
    """What a trial does."""

    STEADY = "steady"  # rates once everything is warm, over a window of time
    EPOCH = "epoch"  # an epoch from an empty cache, its first batch included, or its first seconds
    FIRST = "first"  # the first batch, then the end
    RESUME = "resume"  # the first batch after a restart from a state taken at `fraction`
    VERIFY = "verify"  # one whole epoch, every byte of it summed


class StorageKind(enum.StrEnum):
    """Where the shards are."""

    LOCAL = "local"  # a folder, in the page cache
    S3 = "s3"  # a real S3 server on this machine, behind a delay


@dataclass(frozen=True, slots=True)
class BenchCase:
    """One way to load a workload. Labels are unique in a scenario.

    `ranks` share one epoch, as DDP does; `jobs` each load the whole of it: in an order of its own,
    or, where the case is `shared`, in one order, so that a loader may make each batch once for all
    of them. `served` asks for a daemon that was there before, where a system has one. `cold` asks
    for empty caches of the system itself. `step_ms`, where given, is how long the trainer computes
    after every batch.
    """

    label: str
    workload: str
    mode: Mode = Mode.STEADY
    store: StorageKind = StorageKind.LOCAL
    ranks: int = 1
    jobs: int = 1
    served: bool = False
    shared: bool = False
    cold: bool = False
    step_ms: float = 0.0
    fraction: float = 0.0

    @property
    def process_count(self) -> int:
        return self.ranks * self.jobs


Settings = Mapping[str, Any]
"""One choice of a system's own settings, JSON values: {"num_workers": 2, "prefetch_factor": 4}."""


@dataclass(frozen=True, slots=True)
class DatasetPlace:
    """Where a system's prepared shards lie. `url` is `folder` for LOCAL, else "s3://bucket/prefix".

    `endpoint` and the keys are those of the S3 server; the process has them in its environment too
    (AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION, S3_ENDPOINT_URL).
    """

    folder: Path
    url: str
    endpoint: str = ""
    access_key: str = ""
    secret_key: str = ""


@dataclass(frozen=True, slots=True)
class TrialTask:
    """All that one process of a trial is told.

    `cache` is a folder of the trial's own, empty at its first process; all its processes share it.
    `run` is a token that all processes of one job have in common, and no other trial has.
    `group` is one that all jobs of a shared case have in common, "" elsewhere.
    `service` is what the system's daemon said of itself, "" where there is none.
    `rank` and `size` are the data-parallel ones of the job.
    """

    system: str
    case: BenchCase
    workload: Workload
    place: DatasetPlace
    settings: Settings
    cache: Path
    run: str
    rank: int = 0
    size: int = 1
    seed: int = 1
    service: str = ""
    group: str = ""
