"""Writers of the shards of MosaicML and LitData, from the descriptions of their layouts. Each was
compared with the shards that the library itself writes.

Source:  streaming/base/format/mds and litdata/streaming/writer.py
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from shards import Row

_SCALARS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_FLOATS = ("float16", "float32", "float64")
_CODES = {
    **{name: int(name[4:]) for name in _SCALARS[4:]},
    **{name: int(name[3:]) + 1 for name in _SCALARS[:4]},
    **{name: int(name[5:]) + 2 for name in _FLOATS},
}


def _array(value: np.ndarray, options: Sequence[str]) -> bytes:
    head = b"" if options else bytes([_CODES[value.dtype.name]])
    if len(options) < 2:
        width = next(n for n in range(4) if max(value.shape) < 1 << (8 << n))
        sizes = np.array(value.shape, f"<u{1 << width}").tobytes()
        head += bytes([value.ndim << 2 | width]) + sizes
    return head + bytes(value.tobytes())


def mds_value(encoding: str, value: Any) -> bytes:
    """One value, as MDS encodes it; images are given as their bytes."""
    family, *options = encoding.split(":")
    if family == "ndarray":
        return _array(value, options)
    if encoding.startswith("list["):
        sizes = np.array([len(part) for part in value], "<u4").tobytes()
        return struct.pack("<II", 0, len(value)) + sizes + b"".join(value)
    if encoding == "jpeg_array":
        sizes = np.array([len(part) for part in value], "<u4").tobytes()
        return struct.pack("<I", len(value)) + sizes + b"".join(value)
    if encoding == "json":
        return json.dumps(value).encode()
    if encoding.startswith("str"):
        return str(value).encode()
    if encoding in (*_SCALARS, *_FLOATS, "int"):
        return bytes(np.dtype("int64" if encoding == "int" else encoding).type(value).tobytes())
    return bytes(value)


def mds_size(encoding: str) -> int | None:
    """The size of a column's values, if it is fixed."""
    family, *options = encoding.split(":")
    if encoding in (*_SCALARS, *_FLOATS, "int"):
        return np.dtype("int64" if encoding == "int" else encoding).itemsize
    if family == "ndarray" and len(options) == 2:
        return int(np.prod([*map(int, options[1].split(","))])) * np.dtype(options[0]).itemsize
    return None


def mds_bytes(columns: Mapping[str, str], rows: Sequence[Row]) -> bytes:
    """A shard with these columns (name -> encoding)."""
    names = sorted(columns)
    sizes = [mds_size(columns[name]) for name in names]
    config = {
        "column_encodings": [columns[name] for name in names],
        "column_names": names,
        "column_sizes": sizes,
        "compression": None,
        "format": "mds",
        "hashes": [],
        "size_limit": 1 << 26,
        "version": 2,
    }
    samples = []
    for row in rows:
        values = [mds_value(columns[name], row[name]) for name in names]
        stated = [len(value) for value, size in zip(values, sizes, strict=True) if size is None]
        samples.append(np.array(stated, "<u4").tobytes() + b"".join(values))
    return _samples(json.dumps(config, sort_keys=True).encode(), samples)


def _samples(head: bytes, samples: Sequence[bytes]) -> bytes:
    ends = np.cumsum([0, *map(len, samples)]) + 4 * (len(samples) + 2) + len(head)
    offsets = ends.astype("<u4").tobytes()
    return struct.pack("<I", len(samples)) + offsets + head + b"".join(samples)


def zstd(content: bytes) -> bytes:
    return bytes(pa.Codec("zstd").compress(content, asbytes=True))
