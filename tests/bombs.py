"""Small shards that decode to hundreds of megabytes, each with a sound one of the same schema."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

MIB = 1 << 20
_ROWS = 600


def _repeated(value: str, count: int) -> pa.DictionaryArray:
    """One value repeated this many times; Arrow stores it once."""
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(count, np.int32)), pa.array([value]))


def long_dictionary_values(folder: Path) -> None:
    """Parquet: a text of 1 MiB is stored once and occurs 600 times, in no statistics."""
    for name, text in (("0-bomb", "x" * MIB), ("1-sound", "x")):
        table = pa.table({"t": _repeated(text, _ROWS)})
        path = folder / f"{name}.parquet"
        pq.write_table(table, path, compression="zstd", write_statistics=False, store_schema=False)


def long_runs(folder: Path) -> None:
    """Parquet: 60 million equal integers in one row group."""
    for name, count in (("0-bomb", 60_000_000), ("1-sound", 5)):
        indices = pa.array(np.zeros(count, np.int8))
        table = pa.table({"n": pa.DictionaryArray.from_arrays(indices, pa.array([7], pa.int64()))})
        path = folder / f"{name}.parquet"
        pq.write_table(table, path, row_group_size=1 << 30, store_schema=False)


def arrow_dictionary(folder: Path) -> None:
    """Arrow: a dictionary of one text of 1 MiB, compressed, and 600 rows of it."""
    for name, text in (("0-bomb", "x" * MIB), ("1-sound", "x")):
        batch = pa.record_batch({"t": _repeated(text, _ROWS)})
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        with pa.ipc.new_file(str(folder / f"{name}.arrow"), batch.schema, options=options) as out:
            out.write_batch(batch)


def long_line(folder: Path) -> None:
    """JSON lines, gzip: one line of 64 MiB."""
    for name, length in (("0-bomb", 64 * MIB), ("1-sound", 1)):
        content = b'{"t": "' + bytes(length).replace(b"\0", b"a") + b'"}\n'
        (folder / f"{name}.jsonl.gz").write_bytes(gzip.compress(content, 1))


def long_member(folder: Path) -> None:
    """tar, gzip: one member of 200 MiB."""
    for name, length in (("0-bomb", 200 * MIB), ("1-sound", 1)):
        with tarfile.open(folder / f"{name}.tar.gz", "w:gz", compresslevel=1) as archive:
            member = tarfile.TarInfo("a.bin")
            member.size = length
            archive.addfile(member, io.BytesIO(bytes(length)))


BOMBS: tuple[Callable[[Path], None], ...] = (
    long_dictionary_values,
    long_runs,
    arrow_dictionary,
    long_line,
    long_member,
)
