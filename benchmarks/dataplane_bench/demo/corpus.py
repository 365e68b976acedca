"""Real text that every machine with Python has: the source of the standard library, as bytes."""

from __future__ import annotations

import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

ROW_TOKENS = 513
"""512 tokens of input and the token that follows them, which is also the next row's first."""

_STRIDE = ROW_TOKENS - 1
_NOT_THE_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})


@dataclass(frozen=True, slots=True, eq=False)
class Corpus:
    """The text cut into samples; a sample's id is its row.

    Shapes:  tokens: int32[samples, ROW_TOKENS], bytes 0..255.
    """

    tokens: NDArray[np.int32]
    file_count: int

    @property
    def sample_count(self) -> int:
        return len(self.tokens)

    def sums(self) -> NDArray[np.int64]:
        """Every sample's checksum.   Shapes:  result: int64[samples]."""
        return row_sums(self.tokens)


def row_sums(tokens: NDArray[np.int32]) -> NDArray[np.int64]:
    """A checksum of each row's bytes.   Shapes:  tokens: int32[n, k].   result: int64[n]."""
    return np.array([zlib.crc32(row.data) for row in np.ascontiguousarray(tokens)], np.int64)


def corpus(sample_count: int) -> Corpus:
    """The first samples of the standard library's *.py files, joined in sorted order.

    Raises:  ValueError: there is not enough text.
    """
    needed = sample_count * _STRIDE + 1
    parts: list[bytes] = []
    length = 0
    for source in _sources():
        parts.append(source.read_bytes())
        length += len(parts[-1])
        if length >= needed:
            break
    if length < needed:
        raise ValueError(f"the standard library has {length} bytes of source, not {needed}")
    text = np.frombuffer(b"".join(parts), np.uint8)
    rows = np.lib.stride_tricks.sliding_window_view(text, ROW_TOKENS)[::_STRIDE][:sample_count]
    return Corpus(rows.astype(np.int32), len(parts))


def parquet_shards(text: Corpus, shard_count: int, group_rows: int) -> dict[str, bytes]:
    """Name and content of each shard: columns `id` and `tokens`, several row groups each."""
    shards = {}
    pieces = np.array_split(np.arange(text.sample_count), shard_count)
    for index, ids in enumerate(pieces):
        values = pa.array(text.tokens[ids].reshape(-1), pa.int32())
        table = pa.table(
            {
                "id": pa.array(ids, pa.int64()),
                "tokens": pa.FixedSizeListArray.from_arrays(values, ROW_TOKENS),
            }
        )
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, row_group_size=group_rows, compression="zstd")
        shards[f"text-{index:05d}.parquet"] = sink.getvalue().to_pybytes()
    return shards


def _sources() -> Iterator[Path]:
    library = Path(sysconfig.get_path("stdlib"))
    for source in sorted(library.rglob("*.py")):
        if _NOT_THE_LIBRARY.isdisjoint(source.relative_to(library).parts):
            yield source
