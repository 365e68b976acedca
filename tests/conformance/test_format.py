"""Every format indexes shards, decodes any single block, and never gives a wrong sample."""

from __future__ import annotations

import csv
import io
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from sample_files import litdata_bytes, mds_bytes, megatron_bytes, zstd
from shards import (
    MemoryShard,
    Row,
    arrow_bytes,
    decoded,
    example_bytes,
    json_lines,
    npy_bytes,
    parquet_bytes,
    raw_block,
    read_rows,
    rows_of,
    tar_bytes,
    tfrecord_bytes,
    zipped,
)

from dataplane.formats import registry
from dataplane.model.errors import ConfigError, CorruptShard, SchemaMismatch
from dataplane.model.joined import Joined, head_of
from dataplane.model.records import ObjectInfo

URL = "memory://test/shard"


def plain_rows(count: int) -> list[Row]:
    return [
        {
            "id": i,
            "text": f"sample {i}: ünïcode 日本 " + "x" * (i % 7),
            "tokens": list(range(i % 5)),
            "weight": None if i % 11 == 0 else i / 8,
        }
        for i in range(count)
    ]


SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("text", pa.string()),
        ("tokens", pa.list_(pa.int32())),
        ("weight", pa.float64()),
    ]
)


def table(rows: list[Row]) -> pa.Table:
    return pa.Table.from_pylist(rows, schema=SCHEMA)


def tf_rows(count: int) -> list[Row]:
    return [
        row | {"text": row["text"].encode(), "tokens": row["tokens"] if i % 3 else None}
        for i, row in enumerate(plain_rows(count))
    ]


def tf_write(rows: list[Row]) -> bytes:
    kinds = {
        "id": "int64_list",
        "text": "bytes_list",
        "tokens": "int64_list",
        "weight": "float_list",
    }
    return tfrecord_bytes(
        example_bytes(
            {
                name: (kinds[name], value if isinstance(value, list) else [value])
                for name, value in row.items()
                if value is not None
            }
        )
        for row in rows
    )


def file_rows(count: int) -> list[Row]:
    return [
        {
            "__key__": f"{'abc'[i % 3]}/{i:05d}.png",
            "label": "abc"[i % 3],
            "image": b"%d" % i * (i % 9),
        }
        for i in range(count)
    ]


def file_write(rows: list[Row]) -> bytes:
    root = URL[: URL.rfind("/") + 1]
    members = [
        ObjectInfo(f"{root}{row['__key__']}", len(row["image"]), f"{at:x}")
        for at, row in enumerate(rows)
    ]
    head = head_of(Joined(members, root).listed(URL).etag)
    return head + b"".join(row["image"] for row in rows)


def tar_rows(count: int) -> list[Row]:
    return [
        {
            "__key__": f"folder/{i:05d}",
            "cls": i - 3,
            "txt": f"sample {i}: ünïcode",
            "bin": None if i % 4 == 1 else bytes(range(i % 50)),
        }
        for i in range(count)
    ]


def tar_write(rows: list[Row]) -> bytes:
    members: list[tuple[str, bytes]] = []
    for row in rows:
        members.append((f"{row['__key__']}.cls", str(row["cls"]).encode()))
        members.append((f"{row['__key__']}.txt", row["txt"].encode()))
        if row["bin"] is not None:
            members.append((f"{row['__key__']}.bin", row["bin"]))
    return tar_bytes(members)


RECORD = np.dtype([("id", "<i8"), ("text", "U9"), ("box", ">f4", (2, 2)), ("blob", "S5")])


def record_rows(count: int) -> list[Row]:
    return [
        {"id": i, "text": f"日本{i}", "box": [[i / 2, 1.0], [0.0, -i]], "blob": b"x" * (i % 5)}
        for i in range(count)
    ]


def record_write(rows: list[Row]) -> bytes:
    return npy_bytes(np.array([tuple(row.values()) for row in rows], RECORD))


def document_rows(count: int) -> list[Row]:
    return [{"tokens": [*range(1, i % 9 + 1), 500]} for i in range(count)]


def document_write(rows: list[Row]) -> bytes:
    return np.concatenate([row["tokens"] for row in rows]).astype("<u2").tobytes()


def csv_rows(count: int) -> list[Row]:
    return [
        {"id": str(i), "text": f'{i}: a "word",\nünïcode', "empty": "" if i % 2 else None}
        for i in range(count)
    ]


def csv_write(rows: list[Row]) -> bytes:
    text = io.StringIO(newline="")
    text.write("id,text,empty\n")
    for row in rows:
        csv.writer(text, quoting=csv.QUOTE_ALL).writerow([row["id"], row["text"]])
        text.seek(text.tell() - 2)  # over the end of the line
        text.write(",\r\n" if row["empty"] is None else ',""\r\n')
    return text.getvalue().encode()


def mds_rows(count: int) -> list[Row]:
    return [
        {"box": [i, i + 1], "id": i, "list": [[i]] * (i % 3 + 1), "text": f"日本{i}"}
        for i in range(count)
    ]


def mds_write(rows: list[Row]) -> bytes:
    columns = {"box": "ndarray:int16:2", "id": "int", "list": "ndarray:uint32", "text": "str"}
    arrays = {"box": np.int16, "list": np.uint32}
    given = [
        row | {name: np.array(row[name], kind) for name, kind in arrays.items()} for row in rows
    ]
    return mds_bytes(columns, given)


LIT_KINDS = {"id": "int", "text": "str", "list": "no_header_tensor:18", "box": "numpy"}


def lit_rows(count: int) -> list[Row]:
    return [
        {"id": i, "text": f"日本{i}", "list": [*range(i % 4)], "box": [[i, i + 1]]}
        for i in range(count)
    ]


def lit_write(rows: list[Row], frame_rows: int = 0) -> bytes:
    arrays = {"list": np.int64, "box": np.int16}
    given = [
        row | {name: np.array(row[name], kind) for name, kind in arrays.items()} for row in rows
    ]
    return litdata_bytes(LIT_KINDS, given, frame_rows)


def pair_write(rows: list[Row]) -> bytes:
    """A pair as it is joined: a list of the parts, and these."""
    tokens, table = megatron_bytes([np.array(row["tokens"], "<u2") for row in rows])
    parts = [table[:34], table[34 : 34 + 4 * len(rows)], tokens]
    members = [ObjectInfo(f"{URL}/{at}", len(part), "v1") for at, part in enumerate(parts)]
    return head_of(Joined(members, starts=[0, 34, 0]).listed(URL).etag) + b"".join(parts)


@dataclass(frozen=True)
class Case:
    """A way to write a shard. `sealed`: any truncation is detectable; None: a truncated shard may
    have a row less or a shorter last row.

    `checked(size)`: the bytes of which any flipped bit is detectable, or harmless. `is_raw`: only
    some other kinds of files can be recognised.
    """

    format_name: str
    rows: Callable[[int], list[Row]]
    write: Callable[[list[Row]], bytes]
    sealed: bool | None = True
    is_raw: bool = False
    checked: Callable[[bytes], range] = field(default=lambda _: range(0))


def everything(content: bytes) -> range:
    return range(len(content))


def parquet_pages(content: bytes) -> range:
    # The footer has no checksum in Parquet.
    return range(4, len(content) - 8 - int.from_bytes(content[-8:-4], "little"))


def arrow(**options: object) -> Callable[[list[Row]], bytes]:
    return lambda rows: arrow_bytes(table(rows), **options)  # type: ignore[arg-type]


CASES = {
    "parquet": Case(
        "parquet",
        plain_rows,
        lambda rows: parquet_bytes(
            table(rows), row_group_size=40, write_page_checksum=True, compression="zstd"
        ),
        checked=parquet_pages,
    ),
    "parquet-plain": Case(
        "parquet",
        plain_rows,
        lambda rows: parquet_bytes(
            table(rows), row_group_size=64, compression="none", data_page_version="2.0"
        ),
    ),
    "arrow-stream": Case("arrow", plain_rows, arrow(rows=40)),
    "arrow-file": Case("arrow", plain_rows, arrow(rows=40, file=True)),
    "arrow-zstd": Case("arrow", plain_rows, arrow(rows=40, codec="zstd")),
    "arrow-file-lz4": Case("arrow", plain_rows, arrow(rows=1, file=True, codec="lz4")),
    "tfrecord": Case("tfrecord", tf_rows, tf_write, sealed=False, checked=everything),
    "tfrecord-gzip": Case(
        "tfrecord", tf_rows, lambda rows: zipped(tf_write(rows)), checked=everything
    ),
    "files": Case("files", file_rows, file_write),
    "tar": Case("tar", tar_rows, tar_write),
    "tar-gzip": Case("tar", tar_rows, lambda rows: zipped(tar_write(rows)), checked=everything),
    "jsonl": Case("jsonl", plain_rows, json_lines, sealed=False),
    "jsonl-gzip": Case(
        "jsonl", plain_rows, lambda rows: zipped(json_lines(rows)), checked=everything
    ),
    "jsonl-zstd": Case("jsonl", plain_rows, lambda rows: zstd(json_lines(rows))),
    "csv": Case("csv", csv_rows, csv_write, sealed=None),
    "csv-gzip": Case("csv", csv_rows, lambda rows: zipped(csv_write(rows)), checked=everything),
    "npy": Case(
        "npy",
        lambda count: [{"array": [[i, 1], [-i, 0]]} for i in range(count)],
        lambda rows: npy_bytes(np.array([row["array"] for row in rows], "<i4")),
    ),
    "npy-records": Case("npy", record_rows, record_write),
    "mds": Case("mds", mds_rows, mds_write),
    "mds-zstd": Case("mds", mds_rows, lambda rows: zstd(mds_write(rows))),
    "litdata": Case(f"litdata:{json.dumps(LIT_KINDS)}", lit_rows, lit_write),
    "litdata-frames": Case(
        f"litdata:{json.dumps(LIT_KINDS)}", lit_rows, lambda rows: lit_write(rows, frame_rows=30)
    ),
    "megatron": Case("megatron", document_rows, pair_write),
    "tokens-end": Case(
        "tokens:uint16,end=500", document_rows, document_write, sealed=None, is_raw=True
    ),
    "tokens-length": Case(
        "tokens:uint32,length=3",
        lambda count: [{"tokens": [i, 70000, 0]} for i in range(count)],
        lambda rows: np.array([row["tokens"] for row in rows], "<u4").tobytes(),
        sealed=False,
        is_raw=True,
    ),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture
def format_(case: Case) -> registry.Format:
    return registry.by_name(case.format_name)


def attempt(format_: registry.Format, content: bytes, schema: pa.Schema) -> list[Row] | None:
    """The samples of a training run over these bytes; None if it raises one of our own errors."""
    try:
        return rows_of(decoded(format_, content, schema=schema, url=URL))
    except CorruptShard as error:
        if URL not in str(error):
            raise
        return None


def test_every_sample_comes_back(case: Case, format_: registry.Format) -> None:
    rows = case.rows(300)
    assert read_rows(format_, case.write(rows)) == rows


@hypothesis_settings(max_examples=10)
@given(count=st.integers(1, 120), seed=st.integers(0, 2**32))
@pytest.mark.parametrize("name", CASES)
def test_blocks_are_independent_and_columns_are_chosen(name: str, count: int, seed: int) -> None:
    case, chance = CASES[name], random.Random(seed)
    format_ = registry.by_name(case.format_name)
    rows = case.rows(count)
    content = case.write(rows)
    index = format_.index(MemoryShard(content, URL))
    columns = chance.sample(index.schema.names, chance.randint(1, len(index.schema.names)))
    starts = [sum(b.rows for b in index.blocks[:i]) for i in range(len(index.blocks))]
    order = list(range(len(index.blocks)))
    chance.shuffle(order)
    for block in order:
        batch = format_.decode(raw_block(content, index, block, URL), index.schema, columns)
        assert batch.schema.names == columns
        assert [batch.schema.field(c).type for c in columns] == [
            index.schema.field(c).type for c in columns
        ]
        part = rows[starts[block] : starts[block] + batch.num_rows]
        assert batch.to_pylist() == [{c: row[c] for c in columns} for row in part]
    assert sum(block.rows for block in index.blocks) == count


def test_a_block_lies_within_its_shard(case: Case, format_: registry.Format) -> None:
    content = case.write(case.rows(200))
    index = format_.index(MemoryShard(content))
    for place in [index.preamble, *(block.place for block in index.blocks)]:
        assert 0 <= place.offset <= place.offset + place.length <= len(content)


def test_the_estimate_of_the_decoded_size_is_not_too_small(
    case: Case, format_: registry.Format
) -> None:
    content = case.write(case.rows(300))
    index = format_.index(MemoryShard(content))
    for block, batch in zip(index.blocks, decoded(format_, content), strict=True):
        assert batch.nbytes <= block.decoded_bytes + 4096


def test_no_columns_is_rows_without_values(case: Case, format_: registry.Format) -> None:
    content = case.write(case.rows(10))
    assert sum(batch.num_rows for batch in decoded(format_, content, [])) == 10


def test_an_unknown_column_is_named(case: Case, format_: registry.Format) -> None:
    with pytest.raises(ConfigError, match="no column 'nope'"):
        decoded(format_, case.write(case.rows(10)), ["nope"])


def test_an_empty_shard_is_refused(format_: registry.Format) -> None:
    with pytest.raises(CorruptShard, match=r"byte 0: the shard is empty.*0 bytes"):
        format_.index(MemoryShard(b"", URL))


@pytest.mark.parametrize(
    ("page", "words"),
    [
        (b"<!DOCTYPE html><html><body>Sign in</body></html>" * 20, "HTML page"),
        (b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>", "AccessDenied"),
        (b'["AccessDenied"]' * 40, "AccessDenied"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n" * 9, "git lfs pull"),
    ],
)
def test_a_mislabelled_shard_is_described(
    case: Case, format_: registry.Format, page: bytes, words: str
) -> None:
    if case.is_raw and words == "AccessDenied":
        pytest.skip("such bytes may be tokens")
    with pytest.raises(CorruptShard, match=words):
        decoded(format_, page, url=URL)


def test_no_truncation_yields_a_wrong_sample(case: Case, format_: registry.Format) -> None:
    rows = case.rows(100)
    content = case.write(rows)
    schema = format_.index(MemoryShard(content)).schema
    for end in range(1, len(content), max(1, len(content) // 60)):
        outcome = attempt(format_, content[:end], schema)
        if case.sealed is None:
            continue
        if case.sealed:
            # What pads an archive may be missing; samples may not.
            assert outcome is None or outcome == rows, end
        else:
            assert outcome is None or outcome == rows[: len(outcome)], end


def test_no_flipped_bit_crashes_or_passes_a_checksum(case: Case, format_: registry.Format) -> None:
    rows = case.rows(100)
    content = case.write(rows)
    schema = format_.index(MemoryShard(content)).schema
    checked = case.checked(content)
    chance = random.Random(5)
    for _ in range(40):
        damaged = bytearray(content)
        at = chance.randrange(len(content))
        damaged[at] ^= 1 << chance.randrange(8)
        outcome = attempt(format_, bytes(damaged), schema)
        if at in checked:
            assert outcome is None or outcome == rows, at


def test_no_overwritten_bytes_crash(case: Case, format_: registry.Format) -> None:
    content = case.write(case.rows(60))
    schema = format_.index(MemoryShard(content)).schema
    chance = random.Random(7)
    for _ in range(30):
        damaged = bytearray(content)
        at, length = chance.randrange(len(content)), chance.choice((1, 2, 4, 8, 64))
        value = chance.choice((0x00, 0x7F, 0x80, 0xFF))
        damaged[at : at + length] = bytes([value]) * len(damaged[at : at + length])
        attempt(format_, bytes(damaged), schema)


def test_a_block_that_is_not_the_manifests_is_refused(case: Case, format_: registry.Format) -> None:
    content = case.write(case.rows(50))
    index = format_.index(MemoryShard(content))
    block = raw_block(content, index, 0, URL)
    other = type(block)(
        url=URL,
        index=0,
        rows=block.rows + 1,
        place=block.place,
        shard_bytes=block.shard_bytes,
        preamble_place=block.preamble_place,
        preamble=block.preamble,
        body=block.body,
    )
    with pytest.raises(CorruptShard, match="number of samples"):
        format_.decode(other, index.schema, index.schema.names)


def test_a_column_of_another_type_is_refused(case: Case, format_: registry.Format) -> None:
    content = case.write(case.rows(20))
    index = format_.index(MemoryShard(content))
    name = {"tar": "cls", "files": "label"}.get(case.format_name, index.schema.names[0])
    at = index.schema.get_field_index(name)
    other = dict.fromkeys(("tar", "csv", "files"), pa.int64()) | {"tfrecord": pa.binary()}
    changed = index.schema.set(at, pa.field(name, other.get(case.format_name, pa.string())))
    if case.format_name == "tar":
        content = case.write([row | {"cls": "a dog"} for row in case.rows(20)])
        index = format_.index(MemoryShard(content))
    with pytest.raises(SchemaMismatch, match=name) as caught:
        format_.decode(raw_block(content, index, 0, URL), changed, [name])
    assert caught.value.shard == URL
