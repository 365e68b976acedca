"""TFRecord: our reading of tf.train.Example against protobuf's, and hostile records."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shards import (
    MemoryShard,
    decoded,
    example_bytes,
    example_class,
    masked_crc,
    read_rows,
    tfrecord_bytes,
    zipped,
)

from dataplane.formats.example import (
    BYTES,
    FLOATS,
    INTS,
    MalformedExample,
    features,
    with_others,
    written_names,
)
from dataplane.formats.known_names import WORD_BYTES, KnownNames
from dataplane.formats.tfrecord import TfRecord
from dataplane.model.errors import CorruptShard, SchemaMismatch

TF = TfRecord()
KINDS = {"bytes_list": BYTES, "float_list": FLOATS, "int64_list": INTS}
FEATURE = st.one_of(
    st.tuples(st.just("bytes_list"), st.lists(st.binary(max_size=200), max_size=3)),
    st.tuples(st.just("float_list"), st.lists(st.floats(width=32, allow_nan=False), max_size=40)),
    st.tuples(st.just("int64_list"), st.lists(st.integers(-(2**63), 2**63 - 1), max_size=40)),
)


@given(st.dictionaries(st.text(max_size=5), FEATURE, max_size=4))
def test_values_lie_where_protobuf_puts_them(example: dict) -> None:
    content = example_bytes(example)
    by_name = features(memoryview(content), 0, len(content))
    assert {name.decode() for name in by_name} == set(example)
    for name, (kind, values) in example.items():
        feature = by_name[name.encode()]
        assert feature.kind == KINDS[kind]
        if kind == "bytes_list":
            assert [content[a:b] for a, b in feature.spans] == values
        if kind == "float_list":
            joined = b"".join(content[a:b] for a, b in feature.spans)
            assert np.frombuffer(joined, "<f4").tolist() == values


@given(st.binary(max_size=60))
def test_any_bytes_are_what_protobuf_says_or_malformed(content: bytes) -> None:
    try:
        by_name = features(memoryview(content), 0, len(content))
    except MalformedExample:
        return
    try:
        message = example_class().FromString(content)
    except Exception:  # noqa: BLE001 - protobuf also refuses what we never look at
        return
    assert {name.decode() for name in by_name} == set(message.features.feature)


RECORD = st.fixed_dictionaries(
    {"i": st.tuples(st.just("int64_list"), st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4))},
    optional={
        "f": st.tuples(st.just("float_list"), st.lists(st.floats(0, 1, width=32), max_size=3)),
        "b": st.tuples(st.just("bytes_list"), st.lists(st.binary(max_size=9), max_size=3)),
    },
)


@given(st.lists(RECORD, min_size=1, max_size=20), st.booleans())
def test_records_come_back(records: list[dict], compressed: bool) -> None:
    content = tfrecord_bytes(example_bytes(record) for record in records)
    rows = read_rows(TF, zipped(content) if compressed else content)
    names = {name for record in records for name in record}
    for name in names:
        counts = {len(record[name][1]) for record in records if name in record}
        scalar = counts == {1}
        for record, row in zip(records, rows, strict=True):
            values = record[name][1] if name in record else None
            assert row[name] == (values[0] if scalar and values else values)


def unpacked(values: list[int]) -> bytes:
    """An unpacked int64_list, as some writers make it, and an unknown field."""
    body = b"".join(b"\x08" + bytes([value]) for value in values)
    feature = b"\x1a" + bytes([len(body)]) + body
    entry = b"\x0a\x01i\x12" + bytes([len(feature)]) + feature
    example = b"\x0a" + bytes([len(entry)]) + entry
    return b"\x0a" + bytes([len(example)]) + example + b"\x78\x05"


def test_unpacked_numbers_and_unknown_fields_are_read() -> None:
    content = tfrecord_bytes([unpacked([1, 2, 3]), example_bytes({"i": ("int64_list", [300])})])
    assert read_rows(TF, content) == [{"i": [1, 2, 3]}, {"i": [300]}]


def scalar(value: int, count: int = 1) -> bytes:
    return example_bytes({"label": ("int64_list", [value] * count)})


def test_two_values_in_a_scalar_column_name_the_record() -> None:
    content = tfrecord_bytes([*map(scalar, range(1500)), scalar(7, 2)])
    with pytest.raises(SchemaMismatch, match=r"has 2 values of 'label', which is a scalar") as e:
        decoded(TF, content, url="s3://b/x.tfrecord")
    assert e.value.field == "label"
    assert content[e.value.offset : e.value.offset + 8] == struct.pack("<Q", len(scalar(7, 2)))


def test_another_kind_names_the_record() -> None:
    other = example_bytes({"label": ("bytes_list", [b"dog"])})
    with pytest.raises(SchemaMismatch, match="as bytes_list, records before it as int64_list"):
        decoded(TF, tfrecord_bytes([*map(scalar, range(1500)), other]))
    with pytest.raises(SchemaMismatch, match="as bytes_list, records before it as int64_list"):
        TF.index(MemoryShard(tfrecord_bytes([scalar(1), other])))


def test_blocks_are_about_four_mebibytes() -> None:
    payload = example_bytes({"image": ("bytes_list", [bytes(1_000_000)])})
    content = tfrecord_bytes([payload] * 10)
    index = TF.index(MemoryShard(content))
    assert [block.rows for block in index.blocks] == [4, 4, 2]
    assert [len(row["image"]) for row in read_rows(TF, content)] == [1_000_000] * 10


@pytest.mark.parametrize("compressed", [True, False])
def test_a_first_record_larger_than_a_block_is_sampled(compressed: bool) -> None:
    payload = example_bytes({"image": ("bytes_list", [bytes(6_000_000)])})
    content = tfrecord_bytes([payload, payload])
    rows = read_rows(TF, zipped(content) if compressed else content)
    assert [len(row["image"]) for row in rows] == [6_000_000] * 2


def test_payloads_of_large_records_are_not_read_by_indexing() -> None:
    payload = example_bytes({"image": ("bytes_list", [bytes(3_000_000)])})
    shard = MemoryShard(tfrecord_bytes([payload] * 10))
    TF.index(shard)
    assert shard.bytes_read < shard.size_bytes / 2


def test_compression_is_detected_from_content_and_not_from_the_name() -> None:
    content = tfrecord_bytes(map(scalar, range(10)))
    rows = [{"label": i} for i in range(10)]
    assert read_rows(TF, zlib.compress(content)) == rows
    assert read_rows(TF, zipped(content), url="s3://b/x.tfrecord") == rows


def test_a_record_whose_length_looks_like_gzip_is_a_record() -> None:
    length = 0x00088B1F
    overhead = len(example_bytes({"x": ("bytes_list", [bytes(length - 40)])})) - (length - 40)
    payload = example_bytes({"x": ("bytes_list", [bytes(length - overhead)])})
    content = tfrecord_bytes([payload])
    assert content.startswith(b"\x1f\x8b\x08")
    assert len(read_rows(TF, content)[0]["x"]) == length - overhead


@pytest.mark.parametrize("length", [2**63, 2**40, 2**31])
def test_a_hostile_length_with_a_right_checksum_is_refused(length: int) -> None:
    header = struct.pack("<Q", length)
    content = header + struct.pack("<I", masked_crc(header)) + bytes(100)
    for shard in (content, zipped(content)):
        with pytest.raises(CorruptShard, match="record 0 is longer than 1 GiB"):
            TF.index(MemoryShard(shard))


def test_a_payload_that_is_no_example_is_refused() -> None:
    with pytest.raises(CorruptShard, match=r"not a tf\.train\.Example"):
        TF.index(MemoryShard(tfrecord_bytes([b"\xff\xff\xff"])))


def test_a_damaged_length_names_its_record() -> None:
    content = bytearray(
        tfrecord_bytes([example_bytes({"n": ("int64_list", [i])}) for i in range(5)])
    )
    content[3 * len(content) // 5] ^= 1
    with pytest.raises(CorruptShard, match="the length of record 3 is damaged"):
        TF.index(MemoryShard(bytes(content)))


# --- features that first occur late -----------------------------------------------------------

NAMES = st.binary(min_size=1, max_size=30).map(lambda name: b"\0" + name.replace(b"\0", b"x"))


@given(st.lists(NAMES, min_size=1, max_size=12, unique=True), st.lists(NAMES, max_size=12))
def test_names_are_known_exactly_if_they_were_given(
    known: list[bytes], others: list[bytes]
) -> None:
    places = [
        *known,
        *others,
        *(name[:-1] for name in known),
        *(b"\0z" + name[1:] for name in known),
    ]
    text, ends = bytearray(WORD_BYTES), []
    for name in places:
        text += name
        ends.append(len(text))
    codes = np.frombuffer(bytes(text) + bytes(2 * WORD_BYTES), np.uint8)
    numbers = KnownNames(known).match(codes, np.array(ends)).tolist()
    assert numbers == [known.index(name) if name in known else -1 for name in places]


@given(
    st.lists(st.dictionaries(st.sampled_from(["a", "b", "n" * 30, "é", ""]), FEATURE), max_size=9),
    st.sets(st.sampled_from(["a", "b", "n" * 30, "é", ""])),
)
def test_records_with_features_that_are_not_known_are_picked_out(
    records: list[dict], known: set[str]
) -> None:
    written = [memoryview(example_bytes(record) + b"crc!") for record in records]
    names = KnownNames(written_names(name.encode() for name in known))
    odd = [at for at, record in enumerate(records) if not record.keys() <= known]
    assert with_others(written, 4, names) == odd


@given(st.lists(st.binary(max_size=40), max_size=4))
def test_records_of_another_layout_are_picked_out_too(records: list[bytes]) -> None:
    content = [*records, unpacked([1, 2]), example_bytes({"i": ("int64_list", [1])})]
    odd = with_others([memoryview(record) for record in content], 0, KnownNames([b"\x01i"]))
    assert len(records) in odd
    assert len(records) + 1 not in odd
    for at in set(range(len(records))) - set(odd):
        assert features(memoryview(records[at]), 0, len(records[at])).keys() <= {b"i"}


@pytest.mark.parametrize("compressed", [True, False])
def test_features_that_first_occur_late_are_columns(compressed: bool) -> None:
    late = {
        "label": ("int64_list", [5]),
        "late": ("int64_list", [300]),
        "more": ("bytes_list", [b"a", b""]),
        "none": ("float_list", []),
    }
    records = [*map(scalar, range(1200)), example_bytes(late), unpacked([1, 2]), scalar(6)]
    content = tfrecord_bytes(records)
    content = zipped(content) if compressed else content
    index = TF.index(MemoryShard(content))
    assert index.schema.names == ["i", "label", "late", "more", "none"]
    assert dict(zip(index.schema.names, [1000, -1, 1000, 1000, 1000], strict=True)) == {
        name: index.nulls[at] for name, at in zip(index.schema.names, [0, 2, 3, 4, 6], strict=True)
    }
    rows = read_rows(TF, content)
    nothing = dict.fromkeys(("i", "late", "more", "none"))
    assert rows[0] == nothing | {"label": 0}
    assert rows[-3:] == [
        {"i": None, "label": 5, "late": 300, "more": [b"a", b""], "none": []},
        nothing | {"label": None, "i": [1, 2]},
        nothing | {"label": 6},
    ]


def test_a_late_feature_of_two_kinds_names_the_record() -> None:
    late = [example_bytes({"x": (kind, [1])}) for kind in ("int64_list", "float_list")]
    with pytest.raises(SchemaMismatch, match="has 'x' as float_list, records before it as int64"):
        TF.index(MemoryShard(tfrecord_bytes([*map(scalar, range(1100)), *late])))


def test_a_late_feature_whose_record_indexing_does_not_read_is_refused_unless_left_out() -> None:
    large = ("bytes_list", [bytes(5_000_000)])
    content = tfrecord_bytes(
        example_bytes({"image": large, **late}) for late in ({}, {"mask": ("int64_list", [1])})
    )
    with pytest.raises(
        SchemaMismatch, match=r"record 0 of its block, at byte \d+, has a.*'mask'"
    ) as e:
        decoded(TF, content)
    assert e.value.field == "mask"
    assert "columns=[…]: image" in str(e.value)
    schema = TF.index(MemoryShard(content)).schema.append(pa.field("id", pa.int64()))
    (_, row) = read_rows(TF, content, schema=schema, columns=["image"])
    assert len(row["image"]) == 5_000_000


def test_a_damaged_record_adds_no_feature() -> None:
    content = bytearray(tfrecord_bytes(map(scalar, range(1500))))
    at = content.rindex(b"label")
    content[at] ^= 1
    assert TF.index(MemoryShard(bytes(content))).schema.names == ["label"]
    with pytest.raises(CorruptShard, match="payload of the record at byte"):
        decoded(TF, bytes(content))
