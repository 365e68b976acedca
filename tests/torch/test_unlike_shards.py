"""Loaders over shards whose schemas differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from dataplane_torch import DataLoader
from shards import arrow_bytes, as_polars, json_lines, parquet_bytes

from dataplane.model.errors import SchemaMismatch

pytestmark = pytest.mark.usefixtures("shared_node")

WRITERS = {"parquet": parquet_bytes, "arrow": arrow_bytes}


def write(folder: Path, writer: str, *tables: pa.Table) -> str:
    for at, table in enumerate(tables):
        (folder / f"{at}.{writer}").write_bytes(WRITERS[writer](table))
    return str(folder)


def read(url: str, **options: Any) -> dict[str, list[Any]]:
    """All samples of a dataset, by column."""
    found: dict[str, list[Any]] = {}
    with DataLoader(url, batch_size=2, **options) as loader:
        for batch in loader:
            for name, column in batch.items():
                values = column if isinstance(column, list) else column.tolist()
                found.setdefault(name, []).extend(values)
    return found


@pytest.mark.parametrize("writer", WRITERS)
def test_texts_and_nulls_of_any_type_are_read(tmp_path: Path, writer: str) -> None:
    kinds = [
        pa.string(), pa.large_string(), pa.string_view(), pa.null(),
        pa.dictionary(pa.int8(), pa.string()),
    ]  # fmt: skip
    texts = [["a", None, "b"] if kind != pa.null() else [None] * 3 for kind in kinds]
    tables = [
        pa.table({"id": range(3 * at, 3 * at + 3), "s": pa.array(texts[at], kind)})
        for at, kind in enumerate(kinds)
    ]
    url = write(tmp_path, writer, *tables)
    everything = {"id": list(range(15)), "s": [text for some in texts for text in some]}
    assert read(url) == everything
    assert sorted(read(url, shuffle=True, seed=3)["id"]) == everything["id"]
    of_view = read(url, where="s == 'b'")
    assert of_view == {"id": [2, 5, 8, 14], "s": ["b"] * 4}
    codes = read(url, codes=["s"])["s"]
    assert codes == [{"a": 0, "b": 1, None: -1}[text] for text in everything["s"]]


@pytest.mark.parametrize("writer", WRITERS)
def test_columns_that_nobody_asked_for_may_differ(tmp_path: Path, writer: str) -> None:
    url = write(
        tmp_path,
        writer,
        pa.table({"a": [1], "s": [1]}),
        pa.table({"a": [2], "s": ["x"]}),
        pa.table({"s": [3], "new": [0.5], "a": [3]}),
    )
    assert read(url, columns=["a"]) == {"a": [1, 2, 3]}
    for options in ({}, {"columns": ["a", "s"]}, {"columns": ["a"], "where": "s == 1"}):
        with pytest.raises(SchemaMismatch) as caught:
            read(url, **options)
        text = str(caught.value)
        for word in (f"0.{writer} has int64", f"1.{writer}: column 's'", "has string", "[…]: a"):
            assert word in text
    with pytest.raises(SchemaMismatch, match=r"'new': \S+0\.\w+ has no such column, this shard"):
        read(url, columns=["new"])


def test_chats_that_lack_fields_of_each_other_are_read(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [
        {"turns": [{"role": "user", "text": "hi"}], "n": 1, "tags": []},
        {"turns": [{"role": "tool", "id": 7}], "n": 0.5, "tags": ["x"], "last": "yes"},
    ]
    for at, line in enumerate(lines):
        (tmp_path / f"{at}.jsonl").write_bytes(json_lines([line]))
    assert read(str(tmp_path)) == {
        "turns": [
            [{"role": "user", "text": "hi", "id": None}],
            [{"role": "tool", "text": None, "id": 7}],
        ],
        "n": [1.0, 0.5],
        "tags": [[], ["x"]],
        "last": [None, "yes"],
    }


def test_files_of_polars_and_of_others_are_one_dataset(tmp_path: Path) -> None:
    views = pa.table({"s": pa.array(["a", "b"], pa.string_view()), "n": [1, 2]})
    plain = pa.table({"s": ["c"], "n": [3]})
    (tmp_path / "0.arrow").write_bytes(arrow_bytes(plain, file=True))
    (tmp_path / "1.arrow").write_bytes(as_polars(arrow_bytes(views, file=True)))
    assert read(str(tmp_path)) == {"s": ["c", "a", "b"], "n": [3, 1, 2]}
