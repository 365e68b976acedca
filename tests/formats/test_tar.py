"""Tar: names as every tool writes them, samples as the webdataset library groups them."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shards import MemoryShard, decoded, read_rows, tar_bytes, zipped

from dataplane.formats.tar import FieldSurvey, Sample, Tar
from dataplane.formats.tarheader import TarMember
from dataplane.model.errors import CorruptShard, SchemaMismatch

TAR = Tar()
FORMS = (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)
WORD = st.text(st.characters(codec="utf-8", exclude_characters="/.\0", exclude_categories=["Cs"]), min_size=1, max_size=8)  # fmt: skip


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


def _bodies(*names: str) -> list[tuple[str, bytes]]:
    return [(name, name.encode()) for name in names]


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("apart", [1, 6])
def test_halves_of_samples_are_refused_with_what_to_do(apart: int, *, compressed: bool) -> None:
    large = [(f"x{i}.bin", bytes(1 << 20)) for i in range(apart)]  # 6: in another block
    content = tar_bytes([*_bodies("a.jpg", "b.jpg"), *large, *_bodies("a.txt", "b.txt")])
    at = 2 * 1024 + apart * (512 + (1 << 20))
    said = (
        rf"byte {at}: .*sample 'a' do not follow.*'a.jpg' is at byte 0 .*tar --sort=name.*sort -V"
    )
    with pytest.raises(CorruptShard, match=said):
        TAR.index(MemoryShard(zipped(content) if compressed else content))


def test_members_by_kind_as_tar_writes_them_are_refused(data_dir: Path) -> None:
    content = (data_dir / "odd" / "members-by-kind.tar").read_bytes()
    with pytest.raises(CorruptShard, match=r"'0000.jpg' is at byte 0 and '0000.txt' at byte 4608"):
        TAR.index(MemoryShard(content))


def test_a_key_that_comes_again_whole_is_another_sample() -> None:
    content = tar_bytes(_bodies("a.jpg", "a.json", "b.jpg", "a.jpg", "folder/a.txt", "a.jpg"))
    rows = read_rows(TAR, content, columns=["__key__", "jpg"])
    assert [row["__key__"] for row in rows] == ["a", "b", "a", "folder/a", "a"]


def test_keys_are_remembered_in_few_bytes_and_compared_without_a_pass_for_each() -> None:
    survey = FieldSurvey("")
    member = TarMember("", 0, 0, 0, 0)
    for number in range(50_000):
        survey.note(Sample(f"{number:09}", {"jpg": member, "cls": member}, 0, 0))
    taken = sum(len(numbers) * numbers.itemsize for numbers in (survey._keys, survey._set_of))
    assert taken == 12 * 50_000
    assert survey.scattered() == frozenset()
    survey.note(Sample("000000007", {"jpg": member}, 0, 0))
    assert survey.scattered() == frozenset()
    survey.note(Sample("000000009", {"txt": member}, 0, 0))
    assert survey.scattered() == {hash("000000009")}


@pytest.mark.parametrize(
    ("names", "columns"),
    [
        (["1.jpg", "2.jpeg", "3.png", "4.webp"], {"jpg": ["1", "2", "3", "4"]}),
        (["1.png", "2.JPG"], {"png": ["1", "2"]}),
        # A mask beside its picture stays a column of its own.
        (["1.jpg", "1.png", "2.jpeg", "2.png"], {"jpg": ["1", "2"], "png": ["1", "2"]}),
        (["1.jpg", "1.jpeg", "2.png"], {"jpg": ["1"], "jpeg": ["1"], "png": ["2"]}),
        (["1.a.jpg", "1.b.png", "2.a.png"], {"a.jpg": ["1", "2"], "b.png": ["1"]}),
        (["1.txt", "2.json", "3.jpg"], {"txt": ["1"], "json": ["2"], "jpg": ["3"]}),
    ],
)
@pytest.mark.parametrize("apart", [0, 6])
def test_images_of_several_extensions_are_one_column_if_no_sample_has_two(
    names: list[str], columns: dict[str, list[str]], apart: int
) -> None:
    first, *rest = _bodies(*names)
    large = [(f"x{i}.bin", bytes(1 << 20)) for i in range(apart)]
    # The rest of the first sample follows it.
    key = first[0][0]
    own = [member for member in rest if member[0][0] == key]
    content = tar_bytes([first, *own, *large, *(member for member in rest if member not in own)])
    index = TAR.index(MemoryShard(content))
    assert sorted(index.schema.names) == sorted(["__key__", *columns, *(["bin"] * bool(apart))])
    rows = read_rows(TAR, content)
    keys_of = {name: [row["__key__"] for row in rows if row[name] is not None] for name in columns}
    assert keys_of == columns
    for name in columns:
        said = [row[name] for row in rows if row[name] is not None]
        assert all(
            body in {body for _, body in [first, *rest]} or isinstance(body, str) for body in said
        )
    counts = dict(zip(index.schema.names, index.nulls, strict=True))
    assert {name: len(rows) - counts[name] for name in columns} == {
        name: len(keys) for name, keys in columns.items()
    }


def _schema(*names: str) -> pa.Schema:
    return TAR.index(MemoryShard(tar_bytes(_bodies(*names)))).schema


def test_images_of_other_shards_are_read_as_the_first_shard_says() -> None:
    def rows(schema: pa.Schema, *names: str, columns: list[str] | None = None) -> list[dict]:
        content = tar_bytes(_bodies(*names))
        return read_rows(TAR, content, schema=schema, columns=columns)

    pictures, mixed = _schema("1.jpg"), _schema("1.jpg", "2.png")
    assert rows(pictures, "3.jpeg") == [{"__key__": "3", "jpg": b"3.jpeg"}]
    assert rows(mixed, "3.png", "4.JPEG") == [
        {"__key__": "3", "jpg": b"3.png"},
        {"__key__": "4", "jpg": b"4.JPEG"},
    ]
    assert rows(pictures, "3.png", "4.webp") == [
        {"__key__": "3", "jpg": b"3.png"},
        {"__key__": "4", "jpg": b"4.webp"},
    ]
    with pytest.raises(SchemaMismatch, match=r"'3\.webp'; list a shard first that has it"):
        rows(pictures, "3.webp", "3.png")
    assert rows(pictures, "3.png", columns=["__key__"]) == [{"__key__": "3"}]


def test_fields_that_the_first_shard_lacks_are_an_error_unless_columns_are_chosen() -> None:
    schema = _schema("1.jpg", "1.cls")
    for late in ("2.txt", "2.png"):
        content = tar_bytes(_bodies("2.jpg", "2.cls", late))
        with pytest.raises(SchemaMismatch, match=rf"{late}'; list a shard first .*columns="):
            read_rows(TAR, tar_bytes([("2.jpg", b""), ("2.cls", b"1"), (late, b"")]), schema=schema)
        assert read_rows(TAR, content, schema=schema, columns=["jpg"]) == [{"jpg": b"2.jpg"}]


def test_dots_in_keys_do_not_make_columns_without_end() -> None:
    content = tar_bytes([(f"photo.{number}.jpg", b"") for number in range(1100)])
    with pytest.raises(CorruptShard, match=r"member 'photo.1024.jpg'.*write keys without dots"):
        TAR.index(MemoryShard(content))
