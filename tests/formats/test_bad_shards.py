"""Damage that can be detected raises an error that names shard and place."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from shards import MemoryShard, decoded, parquet_bytes, raw_block, read_rows

from dataplane.formats import registry
from dataplane.model.errors import CorruptShard

DAMAGE = {
    "arrow-truncated.arrow": r"truncated, its footer is missing",
    "parquet-truncated.parquet": r"truncated, its footer is missing",
    "empty.parquet": r"the shard is empty.*0 bytes",
    "empty.tar": r"the shard is empty.*0 bytes",
    "empty.tfrecord": r"the shard is empty.*0 bytes",
    "error-page.parquet": r"not a Parquet file.*AccessDenied",
    "tar-header-damaged.tar": r"byte 0: the checksum of a tar header is wrong",
    "tar-truncated.tar": r"byte 170496: the tar archive is truncated",
    "tfrecord-bitflip-length.tfrecord": r"byte 0: .*its first length is damaged",
    "tfrecord-bitflip-payload.tfrecord": r"byte 4870: the payload .* is damaged \(checksum\)",
    "tfrecord-truncated.tfrecord": r"byte 91810: record 667 is truncated",
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named(data_dir: Path, name: str) -> None:
    url = f"s3://bucket/{name}"
    format_ = registry.format_of_url(url)
    assert format_ is not None
    with pytest.raises(CorruptShard, match=DAMAGE[name]) as caught:
        decoded(format_, (data_dir / "bad" / name).read_bytes(), url=url)
    assert str(caught.value).startswith(f"{url}: byte ")
    assert caught.value.shard == url
    assert isinstance(caught.value.offset, int)


def test_every_bad_shard_is_looked_at(data_dir: Path) -> None:
    shards = {p.name for p in (data_dir / "bad").iterdir() if p.suffix != ".jpg"}
    without_evidence = {"parquet-page-bitflip.parquet", "jsonl-broken-line.jsonl"}
    assert shards == set(DAMAGE) | without_evidence


# --- two files whose damage left no trace in them ---------------------------------------------
# A reader can see damage only against a checksum or a broken syntax. These two have neither, so
# nothing but a copy or a checksum from elsewhere tells them from sound ones. What is tested is that
# this is so, and that the same damage is seen where the file gives a reader the means.


def test_a_flipped_bit_in_an_unchecked_parquet_page_leaves_no_trace(data_dir: Path) -> None:
    damaged = data_dir / "bad" / "parquet-page-bitflip.parquet"
    sound = data_dir / "parquet" / "shakespeare-zstd.parquet"
    table = pq.read_table(damaged, page_checksum_verification=True)
    table.validate(full=True)
    assert not table.equals(pq.read_table(sound))
    assert table.schema.equals(pq.read_table(sound).schema)


def test_the_same_flipped_bit_is_seen_where_pages_have_checksums(data_dir: Path) -> None:
    table = pq.read_table(data_dir / "parquet" / "shakespeare-zstd.parquet")
    content = bytearray(
        parquet_bytes(table, row_group_size=997, compression="zstd", write_page_checksum=True)
    )
    parquet = registry.by_name("parquet")
    index = parquet.index(MemoryShard(bytes(content)))
    content[40_000] ^= 0x10
    damaged = [
        i
        for i, block in enumerate(index.blocks)
        if block.place.offset <= 40_000 < block.place.offset + block.place.length
    ]
    assert damaged == [0]
    block = raw_block(bytes(content), index, 0, "s3://bucket/shard.parquet")
    with pytest.raises(CorruptShard, match=r"byte 4: row group 0 cannot be decoded.*CRC"):
        parquet.decode(block, index.schema, index.schema.names)


def test_bytes_missing_inside_of_a_json_string_leave_no_trace(data_dir: Path) -> None:
    content = (data_dir / "bad" / "jsonl-broken-line.jsonl").read_bytes()
    rows = [json.loads(line) for line in content.splitlines()]
    assert read_rows(registry.by_name("jsonl"), content) == rows


@pytest.mark.parametrize("cut", [slice(-10, -2), slice(0, 3), slice(5, 9), slice(14, 18)])
def test_bytes_missing_from_the_syntax_of_a_line_are_named(data_dir: Path, cut: slice) -> None:
    lines = (data_dir / "jsonl" / "shakespeare.jsonl").read_bytes().splitlines(keepends=True)
    broken = bytearray(lines[23])
    del broken[cut]
    content = b"".join([*lines[:23], bytes(broken), *lines[24:]])
    offset = sum(map(len, lines[:23]))
    with pytest.raises(CorruptShard, match=rf"byte {offset}, line 24: ") as caught:
        read_rows(registry.by_name("jsonl"), content, url="s3://bucket/shard.jsonl")
    assert caught.value.offset == offset
