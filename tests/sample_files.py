"""Writers of the shards of MosaicML, LitData and Megatron, from the descriptions of their layouts. Each was
compared with the shards that the library itself writes.

Source:  streaming/base/format/mds, litdata/streaming/writer.py, megatron/core/datasets/indexed_dataset.py
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
    if encoding in {"jpeg_array", "jpegarray"}:
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


_NUMPY = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", *_FLOATS)
_TORCH = {"float32": 1, "float16": 9, "float64": 3, "int64": 18, "int32": 16, "bool": 19}


def litdata_value(kind: str, value: Any) -> bytes:
    """One value, as LitData encodes it."""
    family = kind.partition(":")[0]
    if family in {"int", "float", "bool"}:
        return bytes(
            np.dtype({"int": "<i8", "float": "<f8", "bool": "?"}[family]).type(value).tobytes()
        )
    if family in {"numpy", "tensor"}:
        code = _NUMPY.index(value.dtype.name) if family == "numpy" else _TORCH[value.dtype.name]
        order = "<u4" if family == "numpy" else ">u4"
        return np.array([code, value.ndim, *value.shape], order).tobytes() + value.tobytes()
    if family.startswith("no_header"):
        return bytes(value.tobytes())
    return str(value).encode() if family in {"str", "text"} else bytes(value)


def litdata_bytes(kinds: Mapping[str, str], rows: Sequence[Row], frame_rows: int = 0) -> bytes:
    """A chunk with these values (name -> kind); if these have no name, it is one of a TokensLoader.
    With `frame_rows`, that many samples are compressed together.
    """
    samples = []
    for row in rows:
        values = [litdata_value(kind, row[name]) for name, kind in kinds.items()]
        sizes = np.array([len(value) for value in values], "<u4").tobytes()
        samples.append(b"".join(values) if [*kinds] == [""] else sizes + b"".join(values))
    return _framed(samples, frame_rows) if frame_rows else _samples(b"", samples)


def _framed(samples: Sequence[bytes], frame_rows: int) -> bytes:
    count, starts = len(samples), range(0, len(samples), frame_rows)
    offsets = np.cumsum([0, *map(len, samples)]).astype("<u4").tobytes()
    runs = [b"".join(samples[at : at + frame_rows]) for at in starts]
    stored = [zstd(run) for run in runs]
    head = struct.pack("<8sHHIII", b"LDFZ01", 1, 0, count, frame_rows, len(runs)) + offsets
    at, table = len(head) + 24 * len(runs), b""
    for first, run, frame in zip(starts, runs, stored, strict=True):
        rows = min(frame_rows, count - first)
        table += struct.pack("<IIQII", first, rows, at, len(frame), len(run))
        at += len(frame)
    return head + table + b"".join(stored)


def litdata_index(kinds: Mapping[str, str], files: Sequence[str], **config: Any) -> bytes:
    """An index.json of samples that are dictionaries."""
    leaf: dict[str, Any] = {"type": None, "context": None, "children_spec": []}
    spec = {
        "type": "builtins.dict",
        "context": json.dumps([*kinds]),
        "children_spec": [leaf] * len(kinds),
    }
    known = {
        "data_format": [*kinds.values()],
        "data_spec": json.dumps([1, spec]),
        "item_loader": "PyTreeLoader",
    }
    listed = [{"filename": file} for file in files]
    return json.dumps({"chunks": listed, "config": known | config}).encode()


def megatron_bytes(documents: Sequence[np.ndarray]) -> tuple[bytes, bytes]:
    """The .bin and the .idx of these documents."""
    kinds = ("", "u1", "i1", "i2", "i4", "i8", "f8", "f4", "u2")
    dtype = documents[0].dtype if documents else np.dtype("u2")
    code = kinds.index(dtype.str[1:])
    lengths = np.array([len(document) for document in documents], "<i4")
    places = np.append(0, np.cumsum(lengths, dtype=np.int64))[:-1] * dtype.itemsize
    count = len(documents)
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, count, count + 1)
    table = head + lengths.tobytes() + places.tobytes() + np.arange(count + 1).tobytes()
    return b"".join(document.tobytes() for document in documents), table


def zstd(content: bytes) -> bytes:
    return bytes(pa.Codec("zstd").compress(content, asbytes=True))
