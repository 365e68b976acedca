"""Tar: names as every tool writes them, samples as the webdataset library groups them."""

from __future__ import annotations

import io
import tarfile

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from shards import MemoryShard, decoded, read_rows, tar_bytes, zipped

from dataplane.errors import CorruptShard, SchemaMismatch
from dataplane.formats.tar import Tar

TAR = Tar()
FORMS = (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)
WORD = st.text(st.characters(codec="utf-8", exclude_characters="/.\0", exclude_categories=["Cs"]), min_size=1, max_size=8)  # fmt: skip


@hypothesis_settings(max_examples=60)
@given(
    keys=st.lists(WORD, min_size=1, max_size=8, unique=True),
    folder=st.sampled_from(["", "a/", "./", "a.b/c/", "long/" * 40]),
    bodies=st.lists(st.binary(max_size=1100), min_size=8, max_size=8),
    form=st.sampled_from(FORMS[1:]),
    compressed=st.booleans(),
)
def test_samples_come_back(
    keys: list[str], folder: str, bodies: list[bytes], form: int, compressed: bool
) -> None:
    keys = [key for key in keys if not (key.startswith("__") and key.endswith("__"))]
    rows = [
        {"__key__": f"{folder}{key}", "bin": body, "seg.PNG": body[::-1]}
        for key, body in zip(keys, bodies, strict=False)
    ]
    content = tar_bytes(
        [(f"{row['__key__']}.{field}", row[field]) for row in rows for field in ("bin", "seg.PNG")],
        form,
    )
    expected = [{name.lower(): value for name, value in row.items()} for row in rows]
    assert read_rows(TAR, zipped(content) if compressed else content) == expected


def test_a_ustar_prefix_is_part_of_the_name() -> None:
    name = "folder/" * 15 + "sample.txt"
    content = tar_bytes([(name, b"x")], tarfile.USTAR_FORMAT)
    assert content[345:352] == b"folder/"
    assert read_rows(TAR, content) == [{"__key__": name[:-4], "txt": "x"}]


def test_a_pax_size_and_a_base_256_size_are_right() -> None:
    member = tarfile.TarInfo("a.bin")
    member.size, member.pax_headers = 3, {"size": "3"}
    body = b"abc" + bytes(509)
    pax = member.tobuf(tarfile.PAX_FORMAT) + body + bytes(1024)
    assert read_rows(TAR, pax) == [{"__key__": "a", "bin": b"abc"}]
    header = bytearray(tarfile.TarInfo("b.bin").tobuf(tarfile.GNU_FORMAT))
    header[124:136] = b"\x80" + (3).to_bytes(11, "big")
    assert read_rows(TAR, resummed(header) + body + bytes(1024)) == [
        {"__key__": "b", "bin": b"abc"}
    ]


def resummed(header: bytearray) -> bytes:
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


@pytest.mark.parametrize("size", [2**62, 2**40, -1])
def test_a_hostile_size_is_refused(size: int) -> None:
    header = bytearray(tarfile.TarInfo("b.bin").tobuf(tarfile.GNU_FORMAT))
    header[124:136] = b"\x80" + size.to_bytes(11, "big") if size > 0 else b"\xff" * 12
    for content in (resummed(header) + bytes(2048), zipped(resummed(header) + bytes(2048))):
        with pytest.raises(CorruptShard, match=r"truncated|size"):
            TAR.index(MemoryShard(content))


def test_what_is_no_field_of_a_sample_is_skipped() -> None:
    content = tar_bytes(
        [
            ("__meta__.json", b"{}"),
            ("a.txt", b"one"),
            ("README", b"no dot"),
            (".hidden.txt", b"no"),
            ("a.cls", b"1"),
            ("folder/._a.txt", b"no"),
        ]
    )
    assert read_rows(TAR, content) == [{"__key__": "a", "txt": "one", "cls": 1}]


def test_numbers_that_are_no_numbers_are_text_from_the_start_or_an_error_later() -> None:
    words = tar_bytes([("a.cls", b"dog"), ("b.cls", b"1")])
    assert [row["cls"] for row in read_rows(TAR, words)] == ["dog", "1"]
    many = [(f"{i:04d}.bin", bytes(1 << 20)) for i in range(6)]
    mixed = tar_bytes([("0.cls", b" 7\n"), *many, ("x.cls", b"dog")])
    with pytest.raises(SchemaMismatch, match=r"b'dog' in member 'x.cls'"):
        read_rows(TAR, mixed)


def test_text_that_is_not_utf8_names_its_member() -> None:
    content = tar_bytes([("a.txt", b"fine"), ("b.txt", b"\xff\xfe")])
    with pytest.raises(CorruptShard, match=r"member 'b.txt' is not UTF-8"):
        read_rows(TAR, content)


def test_one_field_twice_is_refused() -> None:
    with pytest.raises(CorruptShard, match="the field 'txt' twice"):
        TAR.index(MemoryShard(tar_bytes([("a.txt", b"1"), ("a.TXT", b"2")])))


@pytest.mark.parametrize("kind", [tarfile.LNKTYPE, tarfile.SYMTYPE])
def test_links_are_refused_with_what_to_do(kind: bytes) -> None:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as archive:
        link = tarfile.TarInfo("b.txt")
        link.type, link.linkname = kind, "a.txt"
        archive.addfile(link)
    with pytest.raises(CorruptShard, match=r"link.*--dereference"):
        TAR.index(MemoryShard(sink.getvalue()))


def test_an_archive_without_an_end_is_truncated_and_two_in_one_are_refused() -> None:
    content = tar_bytes([("a.txt", b"1")])
    with pytest.raises(CorruptShard, match="truncated"):
        TAR.index(MemoryShard(content[:1024]))
    with pytest.raises(CorruptShard, match="concatenated archives"):
        TAR.index(MemoryShard(content + content))


def test_blocks_are_runs_of_samples_of_about_four_mebibytes() -> None:
    content = tar_bytes(
        [(f"{i}.{field}", bytes(500_000)) for i in range(10) for field in ("jpg", "png")]
    )
    shard = MemoryShard(content)
    index = TAR.index(shard)
    assert [block.rows for block in index.blocks] == [4, 4, 2]
    assert sum(batch.num_rows for batch in decoded(TAR, content)) == 10


def test_bodies_of_large_members_are_not_read_by_indexing() -> None:
    shard = MemoryShard(tar_bytes([(f"{i}.bin", bytes(3_000_000)) for i in range(10)]))
    TAR.index(shard)
    assert shard.bytes_read < shard.size_bytes / 2
