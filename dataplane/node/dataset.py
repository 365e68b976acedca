"""A dataset as one job reads it: manifest, columns, and what each block costs in memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dataplane.config import JobSpec
from dataplane.model import Kind, Region
from dataplane.plan.manifest import Manifest, Shard
from dataplane.rpc import tasks
from dataplane.store.urls import local_path
from dataplane.transforms.columns import ColumnPlan, plan_columns

# What an Arrow stream adds to its columns: a schema message, headers and padding.
_STREAM_BYTES = 4096
_STREAM_BYTES_A_COLUMN = 512


Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Marks:
    """What the block table keeps of each block, where it is asked of hundreds of them a slab.

    Shapes:  all: int64[blocks].   keys: that of the block while rows can be gathered from it, or 0.
    pins: how many need it to stay.   touched: when it was needed last.   raw: bytes as fetched, 0
    of what lies in a local file.   decoded: bytes once decoded, as far as is known, 0 of what needs
    no decoding.
    """

    keys: Ints
    pins: Ints
    touched: Ints
    raw: Ints
    decoded: Ints

    @classmethod
    def of(cls, raw: Ints, decoded: Ints) -> Self:
        """Of blocks that are not there yet."""
        keys, pins, touched = np.zeros((3, len(raw)), np.int64)
        return cls(keys, pins, touched, raw, decoded)


@dataclass(frozen=True, slots=True, eq=False)
class Dataset:
    """One manifest read in one way. Two jobs that read it alike share its blocks.

    `direct`: a zero-copy block is in canonical form as it lies, so that it needs no decoding.
    """

    dataset_id: int
    manifest: Manifest
    columns: ColumnPlan
    message: tasks.OpenDataset
    direct: bool
    marks: Marks

    def needs_fetch(self, block: int) -> bool:
        """Whether the block's bytes must come through the store into the arena."""
        return self.path(block) is None

    def needs_decode(self, block: int) -> bool:
        """Whether a worker must decode it before rows can be gathered from it."""
        return not (self.direct and self._shard(block).zero_copy)

    def path(self, block: int) -> str | None:
        """The local file that holds the block, if it is one."""
        return _path_of(self._shard(block).url)

    def raw_block(self, block: int, arena: Region | None) -> tasks.RawBlock:
        """The block's bytes as a worker finds them."""
        shard = self._shard(block)
        place = Region(
            int(self.manifest.block_offset[block]), int(self.manifest.block_length[block])
        )
        return tasks.RawBlock(
            url=shard.url,
            index=self.manifest.block_in_shard(block),
            rows=int(self.manifest.block_rows[block]),
            place=place,
            preamble_place=shard.preamble,
            shard_bytes=shard.size_bytes,
            etag=shard.etag,
            arena=arena,
            path=self.path(block) if arena is None else None,
        )

    def origin(self, block: int) -> tasks.Origin | None:
        """Which samples it has; of interest only where they may be images."""
        if not any(spec.kind is Kind.BYTES for spec in self.columns.specs):
            return None
        shard = int(self.manifest.block_shard[block])
        first = int(np.searchsorted(self.manifest.block_shard, shard))
        rows = int(self.manifest.block_rows[first:block].sum())
        return tasks.Origin(self.manifest.shards[shard].url, shard, rows)

    def url(self, block: int) -> str:
        """The shard of the block."""
        return self._shard(block).url

    def etag(self, block: int) -> str:
        """What pins the shard."""
        return self._shard(block).etag

    def row_bytes(self) -> int:
        """About how many bytes one sample takes in a slab; at least one."""
        mean = int(self.manifest.block_decoded.sum()) // max(self.manifest.sample_count, 1)
        fixed = sum(_row_bytes(f.type) for f in self.columns.schema)
        if all(spec.kind is Kind.FIXED for spec in self.columns.specs):
            return max(fixed, 1)
        return max(mean, fixed, 1)

    def _shard(self, block: int) -> Shard:
        return self.manifest.shards[int(self.manifest.block_shard[block])]


@lru_cache(maxsize=1 << 16)
def _path_of(url: str) -> str | None:
    # Asked for every block of every slab: reading the URL anew was a tenth of the node's time.
    found = local_path(url)
    return None if found is None else str(found)


def _row_bytes(kind: pa.DataType) -> int:
    if pa.types.is_fixed_size_list(kind):
        return int(kind.list_size) * _row_bytes(kind.value_type)
    return int(kind.bit_width) // 8 if pa.types.is_primitive(kind) else 0


def _marks(manifest: Manifest, columns: ColumnPlan, *, direct: bool) -> Marks:
    shards = manifest.shards
    # Of each shard: what is fetched with every block, -1 where nothing is; whether it is decoded.
    preamble = np.array([-1 if _path_of(s.url) else s.preamble.length for s in shards], np.int64)
    is_decoded = np.array([not (direct and s.zero_copy) for s in shards], np.bool_)
    fetched = preamble[manifest.block_shard]
    raw = np.where(fetched < 0, 0, fetched + manifest.block_length)
    more = _STREAM_BYTES + _STREAM_BYTES_A_COLUMN * len(columns.specs)
    decoded = np.where(is_decoded[manifest.block_shard], manifest.block_decoded + more, 0)
    return Marks.of(raw, decoded)


def dataset_of(dataset_id: int, manifest: Manifest, spec: JobSpec) -> Dataset:
    """How a job with this spec reads the manifest.

    Raises:  ConfigError: a column that is not there.
    """
    schema = pa.ipc.read_schema(pa.py_buffer(manifest.schema))
    columns = plan_columns(schema, spec.columns, spec.lists)
    message = tasks.OpenDataset(
        dataset_id,
        manifest.format,
        manifest.schema,
        columns=spec.columns,
        lists=spec.lists,
        fill_null=spec.fill_null,
    )
    direct = all(
        field.name in schema.names and schema.field(field.name).type == field.type
        for field in columns.schema
    )
    marks = _marks(manifest, columns, direct=direct)
    return Dataset(dataset_id, manifest, columns, message, direct, marks)
