"""Megatron's indexed datasets: a row is a sequence of tokens, as the pair of .bin and .idx has it.

A .idx has a header, the length of each sequence (int32), the place of each in the .bin (int64), and
which sequences are documents; a .bin has only tokens. `preprocess_data.py` writes a sequence for
each document unless it splits sentences, so rows are documents, and can be packed.

Pairs are cut into joined shards of at most 65,536 sequences (model/joined.py): the header and the
lengths from the .idx, and the tokens from the .bin. So a block needs only the lengths of its own
shard, however many sequences the pair has. The header and the lengths are the preamble; a block is
a run of sequences of about 4 MiB.

Source:  megatron/core/datasets/indexed_dataset.py in github.com/NVIDIA/Megatron-LM
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dataplane.formats.arrays import list_column
from dataplane.formats.base import Block, RawBlock, ShardIndex, ShardReader
from dataplane.formats.conform import batch_of, check_rows, check_shard
from dataplane.formats.faults import corrupt, describe, foreign_faults, require_bytes
from dataplane.formats.npy import as_rows
from dataplane.formats.source import BLOCK_BYTES
from dataplane.model.errors import ConfigError, CorruptShard
from dataplane.model.joined import Joined, head_bytes
from dataplane.model.records import Region
from dataplane.plan.columns import NEVER

NAME: Final = "megatron"
COLUMN: Final = "tokens"
MAGIC: Final = b"MMIDIDX\0\0"
HEADER_BYTES: Final = 34
SHARD_DOCUMENTS: Final = 1 << 16
_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
_START_BYTES = 512


def documents_in(url: str, header: bytes, size: int) -> int:
    """Return the number of sequences of a .idx of this size.   Raises:  CorruptShard."""
    _dtype(url, header)
    count, documents = (int.from_bytes(header[at : at + 8], "little") for at in (18, 26))
    end = pointer_at(count, count) + 8 * documents
    if size not in {end, end + count}:  # multimodal datasets have a mode for each sequence
        raise corrupt(
            url,
            HEADER_BYTES,
            f"the index of {count} sequences is truncated or damaged",
            expected=f"{end} bytes",
            found=f"{size} bytes",
        )
    return count


def pointer_at(count: int, sequence: int) -> int:
    """Return where a .idx of `count` sequences has the place of this one."""
    return HEADER_BYTES + 4 * count + 8 * sequence


def contradiction(url: str, tokens_url: str) -> CorruptShard:
    """Return the error for places in a .idx that its .bin does not have."""
    what = f"the lengths and places of its sequences do not fit {tokens_url}: one is truncated"
    return corrupt(url, HEADER_BYTES, what)


def _dtype(url: str, header: bytes) -> np.dtype:
    if len(header) < HEADER_BYTES or not header.startswith(MAGIC):
        raise corrupt(url, 0, "not Megatron's index", expected=str(MAGIC), found=describe(header))
    version, code = int.from_bytes(header[9:17], "little"), header[17]
    if version != 1 or code not in _DTYPES:
        what = f"an index of version {version} with values of type {code}, which is not read"
        raise corrupt(url, len(MAGIC), what)
    return np.dtype(_DTYPES[code])


class Megatron:
    """The pairs of .bin and .idx."""

    suffixes = (".bin",)
    needs = "a .idx beside each .bin"

    name = NAME

    def __init__(self, parameters: str) -> None:
        if parameters:
            raise ConfigError(f"the format {NAME} has no parameters", field="format")

    def index(self, shard: ShardReader) -> ShardIndex:
        """Implement `Format.index`: read the lengths of the shard's sequences."""
        url, size = shard.url, shard.size_bytes
        require_bytes(url, size, "Megatron")
        start = memoryview(shard.read(0, min(_START_BYTES, size)))
        head = head_bytes(start)
        if not 0 < head <= size:
            raise _no_pair(url, start)
        joined = _joined(url, memoryview(shard.read(0, head)))
        end = head + HEADER_BYTES + joined.members[1].size_bytes
        if size != end + joined.members[2].size_bytes:
            raise _no_pair(url, start)
        dtype, lengths = _table(url, memoryview(shard.read(0, end)))
        if int(lengths.sum(dtype=np.int64)) * dtype.itemsize != size - end:
            raise contradiction(url, joined.members[2].url)
        cuts = _cuts(lengths, dtype)
        ends = np.append(0, np.cumsum(lengths, dtype=np.int64))[cuts] * dtype.itemsize
        blocks = tuple(
            Block(rows, Region(end + at, stop - at), stop - at + 4 * rows + 64)
            for rows, at, stop in zip(
                np.diff(cuts).tolist(), ends[:-1].tolist(), ends[1:].tolist(), strict=True
            )
        )
        schema = pa.schema([(COLUMN, pa.list_(pa.from_numpy_dtype(dtype)))])
        return ShardIndex(schema, blocks, Region(0, end), False, [NEVER, NEVER])

    def decode(self, block: RawBlock, schema: pa.Schema, columns: Sequence[str]) -> pa.RecordBatch:
        """Implement `Format.decode`."""
        url = block.url
        dtype, lengths = _table(url, block.preamble)
        kind = pa.from_numpy_dtype(dtype)
        check_shard(pa.schema([(COLUMN, pa.list_(kind))]), schema, columns, url)
        cuts = _cuts(lengths, dtype)[block.index : block.index + 2]
        counts = lengths[cuts[0] : cuts[-1]].astype(np.int64)
        check_rows(url, block.place.offset, block.rows, len(counts))
        if int(counts.sum()) * dtype.itemsize != len(block.body):
            raise corrupt(url, block.place.offset, "the tokens do not fit the lengths of sequences")
        arrays = {}
        if COLUMN in columns:
            tokens = as_rows(np.frombuffer(block.body, dtype), kind)
            arrays[COLUMN] = list_column(counts, np.ones(len(counts), np.bool_), tokens)
        return batch_of(arrays, schema, columns, block)


def _joined(url: str, head: memoryview) -> Joined:
    """Return the three parts that this head lists.   Raises:  CorruptShard."""
    with foreign_faults(url, 0, "the list of parts is damaged"):
        joined = Joined.of_head(url, head)
    if [len(joined.members), joined.members[0].size_bytes] != [3, HEADER_BYTES]:
        raise _no_pair(url, head)
    return joined


def _no_pair(url: str, start: memoryview) -> CorruptShard:
    head = describe(bytes(start[:_START_BYTES]))
    return corrupt(url, 0, "this is no pair of .bin and .idx", expected="its parts", found=head)


def _table(url: str, preamble: memoryview) -> tuple[np.dtype, NDArray[np.int32]]:
    """Return the dtype of tokens, and the lengths of sequences.   Raises:  CorruptShard."""
    head = head_bytes(preamble)
    end = head + HEADER_BYTES
    dtype = _dtype(url, bytes(preamble[head:end]))
    lengths = np.frombuffer(preamble, "<i4", (len(preamble) - end) // 4, end)
    if len(lengths) and int(lengths.min()) < 0:
        raise corrupt(url, end + 4 * int(lengths.argmin()), "a sequence has a negative length")
    return dtype, lengths


def _cuts(lengths: NDArray[np.int32], dtype: np.dtype) -> NDArray[np.int64]:
    """Return the first sequence of each block, and their number."""
    ends = np.cumsum(lengths, dtype=np.int64) * dtype.itemsize
    cuts = [0]
    while cuts[-1] < len(ends):
        start = int(ends[cuts[-1] - 1]) if cuts[-1] else 0
        stop = int(np.searchsorted(ends, start + BLOCK_BYTES, "right"))
        cuts.append(max(stop, cuts[-1] + 1))
    return np.array(cuts, np.int64)
