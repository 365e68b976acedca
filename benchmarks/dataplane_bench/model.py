"""The value types of the benchmark.

A *workload* is a set of samples and the batches that a trainer wants of it. A *case* is one way to
load it. A *scenario* is a question that some cases answer. A *system* is a loader under test:
Dataplane, a peer, or `noop`, which shows the limit of the harness itself. A *trial* is one run of
one system in one case, in its own processes. Trials of all systems take turns in *rounds*: A B C,
A B C.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

T = TypeVar("T")
CROP = 224
"""Height and width of an image in a batch, pixels."""


TOKENIZER, ABOUT = "tokenizer.json", "about.json"


class ColumnType(enum.StrEnum):
    """The type of a column in the source shards, and in a batch."""

    FIXED = "fixed"  # primitive or fixed-size list -> tensor [B, *shape]
    RAGGED = "ragged"  # list of numbers -> tensor [B, T] padded with 0, and "<name>.length"
    STRING = "string"  # utf8 -> list of B str
    IMAGE = "image"  # encoded JPEG -> uint8 [B, CROP, CROP, 3]: random resized crop, random flip


@dataclass(frozen=True, slots=True)
class WorkloadColumn:
    """A column of a workload. FIXED and RAGGED have a `dtype` (numpy's name), FIXED a `shape`."""

    name: str
    kind: ColumnType
    dtype: str = ""
    shape: tuple[int, ...] = ()

    @property
    def sample_bytes(self) -> int:
        """Bytes of one FIXED sample."""
        return np.dtype(self.dtype).itemsize * int(np.prod(self.shape, dtype=np.int64))


class BatchKind(enum.StrEnum):
    """The material of a batch."""

    STORED = "stored"  # samples as they are stored
    MIXED = "mixed"  # samples of several parts, in proportion to their weights
    PACKED = "packed"  # packs: rows of `length` tokens, each of some whole documents
    TOKENISED = "tokenised"  # a text's first `length` tokens, padded with 0, and how many they are


@dataclass(frozen=True, slots=True)
class WorkloadPart:
    """A source of a mixture. It has `sample_count` samples, and the share `weight` of a batch."""

    name: str
    weight: float
    sample_count: int


@dataclass(frozen=True, slots=True)
class Workload:
    """Samples that a trainer reads in shuffled batches of `batch_size`.

    The source is a folder of Parquet shards `shard-00000.parquet`, … with exactly these columns,
    without nulls; with `parts`, a folder of such shards for each of them. Every system but
    Dataplane converts it once into its own best format.
    `step_ms` is the length of the trainer's step for which stall shares are reported. `fingerprint`
    identifies the samples: equal rows have an equal fingerprint. `length` is that of the rows of
    tokens that are made of texts or documents, 0 where samples are delivered as they are stored.
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
    delivery: BatchKind = BatchKind.STORED
    length: int = 0
    parts: tuple[WorkloadPart, ...] = ()

    @property
    def shards(self) -> list[Path]:
        """The source's shards, in order."""
        folders = [self.source / part.name for part in self.parts] or [self.source]
        return [shard for folder in folders for shard in sorted(folder.glob("*.parquet"))]

    @property
    def batch_columns(self) -> tuple[WorkloadColumn, ...]:
        """The columns of a batch."""
        match self.delivery:
            case BatchKind.PACKED:
                return tuple(
                    WorkloadColumn(name, ColumnType.FIXED, "int32", (self.length,))
                    for name in ("tokens", "position_ids", "document_ids")
                )
            case BatchKind.TOKENISED:
                tokens = WorkloadColumn("tokens", ColumnType.FIXED, "int32", (self.length,))
                count = WorkloadColumn("token_count", ColumnType.FIXED, "int32")
                return (*self.of_kind(ColumnType.FIXED), tokens, count)
            case _:
                return self.columns

    def alone(self, part: WorkloadPart) -> Workload:
        """One part of a mixture as a workload of its own."""
        return dataclasses.replace(
            self,
            source=self.source / part.name,
            sample_count=part.sample_count,
            delivery=BatchKind.STORED,
            parts=(),
        )

    @property
    def tokenizer(self) -> Path:
        """The tokenizer of generated texts, a file of Hugging Face's `tokenizers`."""
        return self.source / TOKENIZER

    def of_kind(self, kind: ColumnType) -> tuple[WorkloadColumn, ...]:
        return tuple(column for column in self.columns if column.kind is kind)

    @property
    def shape(self) -> str:
        """The class by which adapters choose: "images" has an image column, "text" a string or
        ragged column, "tokens" a fixed-size row of 256 bytes or more, "tabular" only numbers.
        """
        if self.of_kind(ColumnType.IMAGE):
            return "images"
        if self.of_kind(ColumnType.RAGGED) or self.of_kind(ColumnType.STRING):
            return "text"
        wide = any(column.sample_bytes >= 256 for column in self.columns)
        return "tokens" if wide else "tabular"


class Mode(enum.StrEnum):
    """The subject of a trial."""

    STEADY = "steady"  # rates once everything is warm, over a window of time
    EPOCH = "epoch"  # an epoch, its first batch included, or its first seconds
    FIRST = "first"  # the first batch, then the end
    RESUME = "resume"  # the first batch after a restart from a state taken at `fraction`
    RESTART = "restart"  # the first batch of a loader that is opened again in the same process
    VERIFY = "verify"  # one whole epoch, every byte of it summed


class StorageKind(enum.StrEnum):
    """Where the shards are."""

    LOCAL = "local"  # a folder, in the page cache
    S3 = "s3"  # a real S3 server on this machine, behind a delay


@dataclass(frozen=True, slots=True)
class BenchCase:
    """One way to load a workload. Labels are unique in a scenario.

    `ranks` share one epoch, as in DDP. Each of `jobs` loads the whole epoch, in its own order; if
    the case is `shared`, all use the same order, so that a loader may make each batch once for all.
    `served` means that the system's daemon, if it has one, is already running. `cold` means that
    the system's own caches are empty. `step_ms`, if set, is how long the trainer computes after
    every batch.

    In the mode RESTART, a loader is opened again `pause_s` after all have closed theirs, by a rank
    less if there are several.

    In the mode EPOCH, `epoch` is measured, counted from 0, after all epochs before it were read.
    `cache_share`, if set, limits what a loader may keep of the samples from one epoch to the next,
    in memory and on disk, as a share of their bytes. Every request to S3 waits `delay_ms`, and is
    encrypted if `over_tls`.

    `files`, if set, names the peer whose files Dataplane reads as they are; no other peer takes
    part. If `in_order`, nothing is shuffled.
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
    pause_s: float = 0.0
    epoch: int = 0
    cache_share: float = 0.0
    delay_ms: float = 0.0
    over_tls: bool = False
    files: str = ""
    in_order: bool = False

    @property
    def process_count(self) -> int:
        return self.ranks * self.jobs

    def cache_bytes_max(self, stored_bytes: int) -> int:
        """How much a loader may keep of samples of `stored_bytes` in its own format; 0: all."""
        return int(stored_bytes * self.cache_share)


Settings = Mapping[str, Any]
"""One choice of a system's own settings, JSON values: {"num_workers": 2, "prefetch_factor": 4}."""


@dataclass(frozen=True, slots=True)
class DatasetPlace:
    """Where a system's prepared shards are. `url` is `folder` for LOCAL, else "s3://bucket/prefix".

    `endpoint` and the keys are those of the S3 server; the process has them in its environment too
    (AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION, S3_ENDPOINT_URL). Where
    the endpoint speaks TLS, `authority` is a file with the certificate that its own is signed with,
    which clients find in the environment too (AWS_CA_BUNDLE, CURL_CA_BUNDLE, SSL_CERT_FILE).
    """

    folder: Path
    url: str
    endpoint: str = ""
    access_key: str = ""
    secret_key: str = ""
    authority: str = ""

    @property
    def stored_bytes(self) -> int:
        """The bytes of all files."""
        return sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())

    def trust(self) -> dict[str, str]:
        """The variables with which clients trust the endpoint's certificate."""
        names = ("AWS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE") if self.authority else ()
        return dict.fromkeys(names, self.authority)


@dataclass(frozen=True, slots=True)
class TrialTask:
    """The order for one process of a trial.

    `cache` is a folder shared by the trial's processes, and empty when the first of them starts.
    `run` is a token shared by the processes of one job, and different in every trial.
    `group` is a token shared by all jobs of a shared case; "" in other cases.
    `service` is what the system's daemon printed to describe itself; "" without a daemon.
    `rank` and `size` are the data-parallel rank and size of the job.
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


@dataclass(frozen=True, slots=True)
class About:
    """Facts about a user's samples, kept beside the shards that were made of them. `leaves` maps
    each column to Dataplane's name for it; `notes` list what was left out.
    """

    columns: tuple[WorkloadColumn, ...]
    leaves: tuple[str, ...]
    sample_count: int
    notes: tuple[str, ...]

    def write(self, folder: Path) -> None:
        """Write it into the folder that holds `source` and `shards`."""
        (folder / ABOUT).write_text(json_line(self), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> About:
        return from_plain(cls, json.loads((folder / ABOUT).read_text(encoding="utf-8")))


def leaves(workload: Workload) -> dict[str, str]:
    """Each column, and what Dataplane calls it: a struct's field, or a name that no file can have,
    is called otherwise for all others ("image.bytes" is "image_bytes").
    """
    if not workload.urls:
        return {column.name: column.name for column in workload.columns}
    about = About.read(workload.source.parent)
    return dict(zip((column.name for column in about.columns), about.leaves, strict=True))


def json_line(value: object) -> str:
    """One line of JSON, with its end. Values of this module and paths are written as they are."""
    return json.dumps(value, default=_plain) + "\n"


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"not JSON: {value!r}")


def from_plain(kind: type[T], plain: object) -> T:
    """A value of this type from JSON that `json_line` wrote. Fields that it does not know, which a
    newer version may have added, are ignored.

    Raises:  msgspec.ValidationError: the JSON is of another type; says where.
    """
    return msgspec.convert(plain, kind, dec_hook=lambda path, text: path(text))
