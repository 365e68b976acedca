"""Shards in memory: a reader that counts, decoding of whole shards, and writers of each format.

The writers are other people's code (pyarrow, tarfile, protobuf, json), so that a misunderstanding
of ours cannot agree with itself.
"""

from __future__ import annotations

import datetime as dt
import functools
import gzip
import io
import json
import struct
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import strategies as st

from dataplane.formats.base import Format, RawBlock, ShardIndex
from dataplane.model.records import Region

Row = dict[str, Any]


class MemoryShard:
    """A shard in memory that refuses the reads that a store would refuse, and counts reads."""

    def __init__(self, content: bytes, url: str = "memory://test/shard") -> None:
        self.content = content
        self.url = url
        self.size_bytes = len(content)
        self.reads: list[tuple[int, int]] = []

    def read(self, offset: int, length: int) -> bytes:
        assert offset >= 0
        assert length > 0
        assert offset + length <= self.size_bytes
        self.reads.append((offset, length))
        return self.content[offset : offset + length]

    def read_all(self, places: Sequence[Region]) -> list[bytes]:
        return [self.read(place.offset, place.length) for place in places]

    def stream(self) -> Iterator[bytes]:
        for at in range(0, self.size_bytes, 100_000):
            yield self.content[at : at + 100_000]

    @property
    def bytes_read(self) -> int:
        return sum(length for _, length in self.reads)


def raw_block(content: bytes, index: ShardIndex, block: int, url: str) -> RawBlock:
    """The block as a node would fetch it."""
    view, place, shared = memoryview(content), index.blocks[block].place, index.preamble
    return RawBlock(
        url=url,
        index=block,
        rows=index.blocks[block].rows,
        place=place,
        shard_bytes=len(content),
        preamble_place=shared,
        preamble=view[shared.offset : shared.offset + shared.length],
        body=view[place.offset : place.offset + place.length],
    )


def decoded(
    format_: Format,
    content: bytes,
    columns: Sequence[str] | None = None,
    *,
    schema: pa.Schema | None = None,
    url: str = "memory://test/shard",
) -> list[pa.RecordBatch]:
    """Every block of a shard."""
    index = format_.index(MemoryShard(content, url))
    expected = index.schema if schema is None else schema
    names = expected.names if columns is None else columns
    return [
        format_.decode(raw_block(content, index, block, url), expected, names)
        for block in range(len(index.blocks))
    ]


def rows_of(batches: Iterable[pa.RecordBatch]) -> list[Row]:
    return [row for batch in batches for row in batch.to_pylist()]


def read_rows(format_: Format, content: bytes, **options: Any) -> list[Row]:
    return rows_of(decoded(format_, content, **options))


# Rows of many types, each value null at times.
_TYPES = {
    "number": (pa.int16(), st.integers(-(2**15), 2**15 - 1)),
    "text": (pa.string(), st.text(max_size=5)),
    "blob": (pa.large_binary(), st.binary(max_size=5)),
    "day": (pa.date32(), st.dates(dt.date(1970, 1, 1), dt.date(2100, 1, 1))),
    "flag": (pa.bool_(), st.booleans()),
    "a.b": (pa.list_(pa.list_(pa.int64())), st.lists(st.lists(st.integers(0, 9), max_size=2), max_size=3)),
    "struct": (
        pa.struct([("x", pa.float64()), ("y", pa.list_(pa.string()))]),
        st.fixed_dictionaries(
            {"x": st.none() | st.floats(0, 1), "y": st.none() | st.lists(st.text(max_size=2), max_size=2)}
        ),
    ),
    "fixed": (pa.list_(pa.uint8(), 3), st.lists(st.integers(0, 255), min_size=3, max_size=3)),
}  # fmt: skip
NESTED = pa.schema([(name, kind) for name, (kind, _) in _TYPES.items()])
NESTED_ROWS = st.lists(
    st.fixed_dictionaries({name: st.none() | values for name, (_, values) in _TYPES.items()}),
    min_size=1,
    max_size=20,
)


# --- writers ---------------------------------------------------------------------------------


def parquet_bytes(table: pa.Table, **options: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, **options)
    return sink.getvalue()


def arrow_bytes(
    table: pa.Table,
    *,
    rows: int = 1000,
    file: bool = False,
    codec: str | None = None,
    **options: Any,
) -> bytes:
    sink = io.BytesIO()
    write = pa.ipc.new_file if file else pa.ipc.new_stream
    with write(
        sink, table.schema, options=pa.ipc.IpcWriteOptions(compression=codec, **options)
    ) as writer:
        writer.write_table(table, max_chunksize=rows)
    return sink.getvalue()


def as_polars(content: bytes) -> bytes:
    """An Arrow file as Polars writes it from version 2 on: its schema has no length before it."""
    assert content[:8] == b"ARROW1\0\0"
    end = 16 + int.from_bytes(content[12:16], "little")
    return content[:8] + content[16:end] + bytes(8) + content[end:]


def json_lines(rows: Iterable[Row]) -> bytes:
    return b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)


def tar_bytes(members: Iterable[tuple[str, bytes]], form: int = tarfile.USTAR_FORMAT) -> bytes:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w", format=form) as archive:
        for name, body in members:
            member = tarfile.TarInfo(name)
            member.size = len(body)
            archive.addfile(member, io.BytesIO(body))
    return sink.getvalue()


def npy_bytes(array: np.ndarray) -> bytes:
    sink = io.BytesIO()
    np.save(sink, array)
    return sink.getvalue()


def zipped(content: bytes) -> bytes:
    return gzip.compress(content, mtime=0)


def masked_crc(piece: bytes) -> int:
    crc = google_crc32c.value(piece)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def tfrecord_bytes(payloads: Iterable[bytes]) -> bytes:
    out = bytearray()
    for payload in payloads:
        length = struct.pack("<Q", len(payload))
        out += length + struct.pack("<I", masked_crc(length))
        out += payload + struct.pack("<I", masked_crc(payload))
    return bytes(out)


@functools.cache
def example_class() -> Any:
    """tf.train.Example, as feature.proto declares it."""
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="t", syntax="proto3")
    for name, kind in (
        ("BytesList", kinds.TYPE_BYTES),
        ("FloatList", kinds.TYPE_FLOAT),
        ("Int64List", kinds.TYPE_INT64),
    ):
        message = file.message_type.add(name=name)
        message.field.add(name="value", number=1, label=kinds.LABEL_REPEATED, type=kind)
    feature = file.message_type.add(name="Feature")
    feature.oneof_decl.add(name="kind")
    for number, name in enumerate(("BytesList", "FloatList", "Int64List"), 1):
        feature.field.add(
            name=name[:-4].lower() + "_list",
            number=number,
            label=kinds.LABEL_OPTIONAL,
            type=kinds.TYPE_MESSAGE,
            type_name=f".t.{name}",
            oneof_index=0,
        )
    features = file.message_type.add(name="Features")
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, label=kinds.LABEL_OPTIONAL, type=kinds.TYPE_STRING)
    entry.field.add(
        name="value",
        number=2,
        label=kinds.LABEL_OPTIONAL,
        type=kinds.TYPE_MESSAGE,
        type_name=".t.Feature",
    )
    features.field.add(
        name="feature",
        number=1,
        label=kinds.LABEL_REPEATED,
        type=kinds.TYPE_MESSAGE,
        type_name=".t.Features.FeatureEntry",
    )
    file.message_type.add(name="Example").field.add(
        name="features",
        number=1,
        label=kinds.LABEL_OPTIONAL,
        type=kinds.TYPE_MESSAGE,
        type_name=".t.Features",
    )
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("t.Example"))


def example_bytes(features: Mapping[str, tuple[str, Sequence[Any]]]) -> bytes:
    """An Example from {name: ("bytes_list" | "float_list" | "int64_list", values)}."""
    example = example_class()()
    for name, (kind, values) in features.items():
        stored = getattr(example.features.feature[name], kind)
        stored.SetInParent()
        stored.value.extend(values)
    content: bytes = example.SerializeToString(deterministic=True)
    return content


def _examples(rows: Sequence[Row]) -> bytes:
    kinds = {int: "int64_list", float: "float_list", bytes: "bytes_list"}

    def feature(value: Any) -> tuple[str, list[Any]]:
        value = value.encode() if isinstance(value, str) else value
        return kinds[type(value)], [value]

    return tfrecord_bytes(
        example_bytes({name: feature(value) for name, value in row.items() if value is not None})
        for row in rows
    )


def _members(rows: Sequence[Row]) -> bytes:
    return tar_bytes(
        (f"{at:06d}.{name}", str(value).encode())
        for at, row in enumerate(rows)
        for name, value in row.items()
        if value is not None
    )


WRITERS: dict[str, Callable[[Sequence[Row]], bytes]] = {
    "parquet": lambda rows: parquet_bytes(pa.Table.from_pylist(list(rows)), row_group_size=10),
    "arrow": lambda rows: arrow_bytes(pa.Table.from_pylist(list(rows)), rows=10),
    "jsonl": json_lines,
    "tfrecord": _examples,
    "tar": _members,
}
"""Shards of rows of numbers and texts, by the suffix of their names."""
