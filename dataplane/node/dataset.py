"""A dataset as one job reads it: manifest, columns, and what each block costs in memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

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

    def needs_fetch(self, block: int) -> bool:
        """Whether the block's bytes must come through the store into the arena."""
        return self.path(block) is None

    def needs_decode(self, block: int) -> bool:
        """Whether a worker must decode it before rows can be gathered from it."""
        return not (self.direct and self._shard(block).zero_copy)

    def path(self, block: int) -> str | None:
        """The local file that holds the block, if it is one."""
        return _path_of(self._shard(block).url)

    def raw_bytes(self, block: int) -> int:
        """What the block takes as fetched; 0 if it lies in a local file."""
        if not self.needs_fetch(block):
            return 0
        return self._shard(block).preamble.length + int(self.manifest.block_length[block])

    def decoded_bytes(self, block: int) -> int:
        """What the block takes once decoded, as far as the index knows; 0 if it is not decoded."""
        if not self.needs_decode(block):
            return 0
        columns = _STREAM_BYTES_A_COLUMN * len(self.columns.specs)
        return int(self.manifest.block_decoded[block]) + _STREAM_BYTES + columns

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
    return Dataset(dataset_id, manifest, columns, message, direct)
