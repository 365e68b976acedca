"""Shards that are nearly right: seeded changes of a few bytes, of lengths, and of the end."""

from __future__ import annotations

import base64
import json
import random
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
from shards import (
    arrow_bytes,
    example_bytes,
    json_lines,
    parquet_bytes,
    tar_bytes,
    tfrecord_bytes,
    zipped,
)

_ROWS = 60
_LENGTHS = (0, 1, 2, 7, 0x7F, 0x80, 0xFFFF, 0x10000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)


def table() -> pa.Table:
    """Columns of most kinds, with nulls."""
    rows = range(_ROWS)
    texts = [None if i % 7 == 3 else f"text {i} äö" for i in rows]
    return pa.table(
        {
            "id": pa.array(rows, pa.int64()),
            "small": pa.array([None if i % 5 == 0 else i for i in rows], pa.int8()),
            "x": pa.array([i / 7 for i in rows], pa.float32()),
            "flag": pa.array([i % 3 == 0 for i in rows]),
            "text": pa.array(texts),
            "kind": pa.array([f"k{i % 4}" for i in rows]).dictionary_encode(),
            "tokens": pa.array([list(range(i % 6)) for i in rows], pa.list_(pa.int32())),
            "box": pa.array([[i, i, i] for i in rows], pa.list_(pa.int16(), 3)),
            "t": pa.array([i * 10**15 for i in rows], pa.timestamp("ns", "UTC")),
            "s": pa.array([None if i % 9 == 1 else {"a": i, "b": [str(i)]} for i in rows]),
            "m": pa.array(
                [[(str(i), i)] * (i % 3) for i in rows], pa.map_(pa.string(), pa.int64())
            ),
        }
    )


def _json_rows() -> list[dict[str, Any]]:
    return [
        {"id": i, "x": i / 7, "text": f"text {i} äö", "l": [i, i + 1], "s": {"a": i}, "n": None}
        for i in range(_ROWS)
    ]


def _record_rows() -> list[dict[str, Any]]:
    return [{"id": i, "text": f"text {i}", "l": [i, -i]} for i in range(_ROWS)]


def _records() -> bytes:
    return tfrecord_bytes(
        example_bytes(
            {
                "id": ("int64_list", [row["id"]]),
                "text": ("bytes_list", [row["text"].encode()]),
                "l": ("int64_list", row["l"]),
            }
        )
        for row in _record_rows()
    )


def _archive() -> bytes:
    return tar_bytes(
        (f"dir/{i:04d}.{end}", body)
        for i in range(_ROWS)
        for end, body in (
            ("jpg", bytes([i]) * (i * 9)),
            ("cls", str(i).encode()),
            ("txt", b"text %d" % i),
            ("json", json.dumps({"n": i}).encode()),
        )
    )


WHOLE: Mapping[str, Mapping[str, Callable[[], bytes]]] = {
    "parquet": {
        "plain": lambda: parquet_bytes(
            table(), row_group_size=25, compression="none", use_dictionary=False
        ),
        "snappy": lambda: parquet_bytes(table(), row_group_size=25, compression="snappy"),
        "zstd-v2": lambda: parquet_bytes(
            table(), compression="zstd", data_page_version="2.0", write_page_index=True
        ),
        "checked": lambda: parquet_bytes(table(), write_page_checksum=True),
    },
    "arrow-file": {
        "plain": lambda: arrow_bytes(table(), rows=25, file=True),
        "lz4": lambda: arrow_bytes(table(), rows=25, file=True, codec="lz4"),
        "zstd": lambda: arrow_bytes(table(), rows=25, file=True, codec="zstd"),
    },
    "arrow-stream": {
        "plain": lambda: arrow_bytes(table(), rows=25),
        "zstd": lambda: arrow_bytes(table(), rows=25, codec="zstd"),
        "legacy": lambda: arrow_bytes(table(), rows=25, use_legacy_format=True),
    },
    "jsonl": {
        "plain": lambda: json_lines(_json_rows()),
        "gz": lambda: zipped(json_lines(_json_rows())),
    },
    "tfrecord": {"plain": _records, "gz": lambda: zipped(_records())},
    "tar": {"plain": _archive, "gz": lambda: zipped(_archive())},
}
FORMATS = {name: name.partition("-")[0] for name in WHOLE}


def write_whole(folder: Path, kind: str) -> dict[str, Path]:
    """The shards that mutants of a kind are made of, by name."""
    found = {}
    for name, make in WHOLE[kind].items():
        found[name] = folder / f"{kind}-{name}.whole"
        found[name].write_bytes(make())
        if kind == "tfrecord":
            found[name].with_suffix(".written").write_text(json.dumps(_record_rows()))
    return found


def mutants(whole: bytes, kind: str, name: str, count: int, seed: int) -> Iterator[bytes]:
    """This many changed copies; the same arguments give the same copies."""
    for number in range(count):
        yield mutant(whole, random.Random(f"{kind}/{name}/{seed}/{number}"))


def mutant(whole: bytes, draw: random.Random) -> bytes:
    """One copy with one to three changes."""
    content = bytearray(whole)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        draw.choice(_CHANGES)(content, draw)
    return bytes(content)


def _place(content: bytearray, draw: random.Random) -> int:
    """A random place, more often in headers and footers."""
    size = len(content)
    first, last = draw.choice(
        ((0, size), (0, size), (0, 600), (size - 3000, size), (size - 64, size))
    )
    return draw.randrange(max(first, 0), max(1, min(last, size)))


def _flip(content: bytearray, draw: random.Random) -> None:
    if content:
        content[_place(content, draw)] ^= 1 << draw.randrange(8)


def _set(content: bytearray, draw: random.Random) -> None:
    if content:
        content[_place(content, draw)] = draw.choice((0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256)))


def _set_length(content: bytearray, draw: random.Random) -> None:
    at, (code, size) = _place(content, draw), draw.choice((("<I", 4), ("<Q", 8), (">I", 4)))
    content[at : at + size] = struct.pack(code, draw.choice(_LENGTHS))


def _set_number(content: bytearray, draw: random.Random) -> None:
    """Replace a digit in text with another."""
    at = _place(content, draw)
    digits = [i for i in range(at, min(at + 200, len(content))) if 0x30 <= content[i] <= 0x39]
    if digits:
        content[draw.choice(digits)] = draw.choice(b"0123456789-.eE ")


def _cut(content: bytearray, draw: random.Random) -> None:
    del content[_place(content, draw) :]


def _leave_out(content: bytearray, draw: random.Random) -> None:
    at = _place(content, draw)
    del content[at : at + draw.choice((1, 2, 4, 8, 100))]


def _insert(content: bytearray, draw: random.Random) -> None:
    at = _place(content, draw)
    content[at:at] = draw.randbytes(draw.choice((1, 2, 4, 8)))


def _move(content: bytearray, draw: random.Random) -> None:
    """Copy bytes from one place to another."""
    size = draw.choice((4, 16, 64))
    start, at = _place(content, draw), _place(content, draw)
    content[at : at + size] = content[start : start + size]


_CHANGES = (_flip, _flip, _set, _set_length, _set_length, _set_number, _cut, _leave_out, _insert,
            _move)  # fmt: skip


def shown(content: bytes) -> str:
    """For a test that keeps it."""
    return base64.b85encode(content).decode()
