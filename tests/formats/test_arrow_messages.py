"""Arrow IPC metadata that contradicts itself: no sample is silently left out or changed."""

from __future__ import annotations

import io
import struct

import pyarrow as pa
import pytest
from shards import MemoryShard, arrow_bytes, decoded, read_rows, rows_of

from dataplane.errors import ConfigError, CorruptShard
from dataplane.formats import arrow_messages
from dataplane.formats.arrow_ipc import ArrowIpc
from dataplane.formats.arrow_messages import Window, file_footer, messages_of

ARROW = ArrowIpc()
TABLE = pa.table({"x": pa.array([1, 2, 3], pa.int32()), "s": ["a", "b", "c"]})


def changed(content: bytes, at: int, new: bytes) -> bytes:
    return content[:at] + new + content[at + len(new) :]


def test_old_streams_are_read_however_long_their_schema_is() -> None:
    wide = pa.table({f"column number {i}": [i, i + 1] for i in range(300)})
    content = arrow_bytes(wide, use_legacy_format=True)
    assert int.from_bytes(content[:4], "little") > 10_000
    assert read_rows(ARROW, content) == wide.to_pylist()


@pytest.mark.parametrize(
    "start", [b'{"a": 1}', b"PK\x03\x04\x00\x00", b"\x20\x00\x00\x00" + bytes(60)]
)
def test_what_only_looks_like_a_length_is_no_stream(start: bytes) -> None:
    with pytest.raises(CorruptShard, match="not an Arrow IPC file or stream"):
        ARROW.index(MemoryShard(start.ljust(200, b" ")))


def test_a_footer_with_another_schema_than_the_messages_is_refused() -> None:
    content = arrow_bytes(TABLE, file=True)
    other = arrow_bytes(TABLE.rename_columns(["y", "s"]), file=True)
    start = file_footer(MemoryShard(content)).start
    assert file_footer(MemoryShard(other)).start == start
    with pytest.raises(CorruptShard, match="different schemas"):
        ARROW.index(MemoryShard(content[:start] + other[start:]))


def test_a_footer_with_another_byte_order_than_the_messages_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    content = arrow_bytes(TABLE, file=True)
    monkeypatch.setattr(arrow_messages, "footer_is_big_endian", lambda _: True)
    with pytest.raises(CorruptShard, match="different schemas"):
        ARROW.index(MemoryShard(content))


def test_a_footer_that_points_to_something_other_than_a_batch_is_refused() -> None:
    content = arrow_bytes(TABLE, rows=2, file=True)
    footer = file_footer(MemoryShard(content))
    for at, length, _ in footer.batches:
        entry = content.index(struct.pack("<qi", at, length), footer.start)
        with pytest.raises(CorruptShard, match=f"names a record batch at byte {at + 8}"):
            ARROW.index(MemoryShard(changed(content, entry, struct.pack("<q", at + 8))))


def test_a_footer_that_names_some_batches_only_says_what_the_file_is() -> None:
    content = arrow_bytes(TABLE, rows=1, file=True)
    footer = file_footer(MemoryShard(content))
    first, second, last = [
        content.index(struct.pack("<qi", *batch[:2]), footer.start) for batch in footer.batches
    ]
    swapped = changed(content, first, content[last : last + 24])
    swapped = changed(swapped, last, content[second : second + 24])
    expected = pa.ipc.open_file(swapped).read_all().to_pylist()
    assert [row["x"] for row in expected] == [3, 2, 2]
    assert read_rows(ARROW, swapped) == expected


def test_no_message_is_skipped() -> None:
    """If one byte of a stream's metadata is changed, all rows are read, or none."""
    content = arrow_bytes(TABLE, rows=1)
    metadata = [
        at
        for message in messages_of(Window(MemoryShard(content)), 0, len(content), file=False)
        for at in range(message.offset, message.offset + message.metadata_length)
    ]
    for at in metadata:
        for byte in (0, 1, 2, 3, 4, 255):
            try:
                found = rows_of(decoded(ARROW, changed(content, at, bytes([byte]))))
            except (CorruptShard, ConfigError):
                continue
            assert len(found) == 3, (at, byte)


def test_dictionaries_of_lists_that_change_are_refused_by_name() -> None:
    sink = io.BytesIO()
    pieces = [
        pa.DictionaryArray.from_arrays(pa.array([0, 1]), pa.array([[version], [2]]))
        for version in (0, 1)
    ]
    with pa.ipc.new_stream(sink, pa.schema([("d", pieces[0].type), ("x", pa.int8())])) as writer:
        for piece in pieces:
            writer.write_batch(pa.record_batch([piece, pa.array([1, 2], pa.int8())], ["d", "x"]))
    with pytest.raises(ConfigError, match=r"test/shard: not supported: column 'd' is of type dict"):
        decoded(ARROW, sink.getvalue())
    assert rows_of(decoded(ARROW, sink.getvalue(), ["x"])) == [{"x": 1}, {"x": 2}] * 2
