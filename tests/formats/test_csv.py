"""Text tables: quotes, empty fields, names, and what is refused."""

from __future__ import annotations

import csv
import io
import random
from pathlib import Path

import numpy as np
import pytest
from sample_files import zstd
from shards import MemoryShard, Row, decoded, read_rows, zipped

from dataplane.formats.csv import Csv
from dataplane.index.indexing import index_dataset
from dataplane.model.errors import ConfigError, CorruptShard, SchemaMismatch

CSV = Csv()


def rows(text: str, url: str = "a.csv") -> list[Row]:
    return read_rows(CSV, text.encode(), url=url)


def test_every_value_is_text_and_an_empty_field_is_null() -> None:
    assert rows('a,b\n1,""\n,x y\n') == [{"a": "1", "b": ""}, {"a": None, "b": "x y"}]


def test_tabs_separate_fields_of_tsv() -> None:
    assert rows("a\tb\n1\t2,3\n", "a.TSV") == [{"a": "1", "b": "2,3"}]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_quoted_fields_have_separators_newlines_and_quotes(end: str) -> None:
    text = end.join(["a,b", '"x,\n""y""\r\n",2', "", '"",""', "3,4"])
    assert rows(text) == [
        {"a": 'x,\n"y"\r\n', "b": "2"},
        {"a": "", "b": ""},
        {"a": "3", "b": "4"},
    ]


def test_names_may_be_quoted_or_absent_behind_a_mark_of_utf_8() -> None:
    text = '\ufeff"a\nb",,c\n1,2,3\n'
    assert rows(text) == [{"a\nb": "1", "Unnamed: 1": "2", "c": "3"}]


@pytest.mark.parametrize("pack", [bytes, zipped, zstd])
def test_random_tables_are_read_as_python_reads_them(pack: type[bytes]) -> None:
    draw = random.Random(1)
    words = ["x", '"', "\n", ",", "ü", " ", "\r\n", "'"]
    cells = [["".join(draw.choices(words, k=draw.randrange(9))) for _ in "abc"] for _ in range(999)]
    text = io.StringIO(newline="")
    csv.writer(text, quoting=csv.QUOTE_ALL).writerows([["a", "b", "c"], *cells])
    assert [[*row.values()] for row in read_rows(CSV, pack(text.getvalue().encode()))] == cells


def test_records_longer_than_a_block_are_whole() -> None:
    long = "x\n" * (5 << 20)
    content = f'a\n1\n"{long}"\n3\n'.encode()
    assert [block.rows for block in CSV.index(MemoryShard(content)).blocks] == [1, 2]
    assert [row["a"] for row in read_rows(CSV, content)] == ["1", long, "3"]


def test_known_nulls_are_counted() -> None:
    index = CSV.index(MemoryShard(b"a,b\n1,\n2,3\n"))
    assert list(index.nulls) == [0, 1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('a,b\n1,5" pipe\n', "byte 7: a quote inside of a field"),
        ('a,b\n1,"x" y\n', "a quote inside of a field"),
        ('a,b\n1,"x\n', "byte 6: a quote is not closed"),
        ("a,b\n1,2\n3\n", "Expected 2 columns, got 1"),
        ("a,b\n1,2,3\n", "Expected 2 columns, got 3"),
        ("a,b\r1,2\r", "lines end with carriage returns alone"),
        ("a,b\r1,x\n2,y\n", "lines end with carriage returns alone"),
        ("\ra,b\n1,2\n", "lines end with carriage returns alone"),
        ("\n\r", "lines end with carriage returns alone"),
        ("\n\r\n\n", "only empty lines"),
    ],
)
def test_damaged_records_are_refused(text: str, words: str) -> None:
    with pytest.raises(CorruptShard, match=words):
        rows(text)


def test_bytes_that_are_not_utf_8_are_refused() -> None:
    with pytest.raises(CorruptShard, match="invalid UTF8"):
        decoded(CSV, b"a,b\n\xff,2\n")


@pytest.mark.parametrize("code", [0x50, 0x5F])
def test_zstd_data_may_begin_with_a_frame_to_skip(code: int) -> None:
    skipped = bytes([code]) + b"\x2a\x4d\x18" + (4).to_bytes(4, "little") + b"abcd"
    content = skipped + zstd(b"a\n1\n") + skipped + zstd(b"2\n")
    assert read_rows(CSV, content) == [{"a": "1"}, {"a": "2"}]
    with pytest.raises(CorruptShard, match="truncated compressed data"):
        read_rows(CSV, content[:-1])


def test_a_table_beside_other_shards_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "metrics.csv").write_text("a\n1\n")
    np.save(tmp_path / "b.npy", np.arange(3))
    assert index_dataset(tmp_path).format == "npy"
    (tmp_path / "b.jpg").write_bytes(b"x")
    assert index_dataset(tmp_path).format == "files"
    (tmp_path / "train.jsonl").write_text('{"a": 1}\n')
    assert index_dataset(tmp_path).format == "jsonl"
    assert index_dataset(tmp_path / "eval").format == "csv"


def test_files_that_are_left_out_beside_others_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "b.jpg").write_bytes(b"x")
    (tmp_path / "labels.csv").write_text("file_name\nb.jpg\n")
    assert index_dataset(tmp_path).format == "files"
    assert "labels.csv" in caplog.text
    caplog.clear()
    (tmp_path / "train.jsonl").write_text('{"a": 1}\n')
    assert index_dataset(tmp_path).format == "jsonl"
    assert "such_as" in caplog.text


def test_a_table_of_the_images_beside_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "b.jpg").write_bytes(b"x")
    table = tmp_path / "metadata.jsonl"
    table.write_text('{"file_name": "b.jpg"}\n')
    with pytest.raises(ConfigError, match=r'is a table of the images beside it .*format="files"'):
        index_dataset(tmp_path)
    assert index_dataset(tmp_path, format_name="files").format == "files"
    both = index_dataset(table, format_name="files::file_name")
    assert (both.format, both.sample_count) == ("files", 1)
    assert index_dataset(table).format == "jsonl"


def test_empty_lines_before_the_names_are_skipped() -> None:
    for before in ("\n", "\r\n\n", "\ufeff\n", "\n" * 70_000):
        assert rows(f'{before}"a",b\n1,x\n\n2,y\n') == [{"a": "1", "b": "x"}, {"a": "2", "b": "y"}]
    assert rows('\n"a\rb",c\n1,2\n') == [{"a\rb": "1", "c": "2"}]


def test_a_name_that_occurs_twice_is_refused() -> None:
    with pytest.raises(SchemaMismatch, match="two columns are named 'a'; rename one"):
        rows("a,a\n1,2\n")
