"""Columns delivered as codes: the same in every shard, format and run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from dataplane_torch import DataLoader, ShardedIterableDataset
from fleet import own_nodes
from shards import (
    arrow_bytes,
    example_bytes,
    json_lines,
    parquet_bytes,
    tar_bytes,
    tfrecord_bytes,
)

from dataplane.model.errors import ConfigError, SpecMismatch

pytestmark = pytest.mark.usefixtures("shared_node")

COUNTRIES = ["de", "fr", None, "ä", "", "de", "at"]
VALUES = ("", "at", "de", "fr", "ä")
Rows = Sequence[dict[str, Any]]


def rows_from(start: int, count: int) -> list[dict[str, Any]]:
    return [{"txt": COUNTRIES[i % 7], "cls": i % 3 * 100} for i in range(start, start + count)]


def table(rows: Rows, *, dictionary: bool) -> pa.Table:
    found = pa.Table.from_pylist(list(rows))
    if dictionary:
        coded = found["txt"].combine_chunks().dictionary_encode()
        found = found.set_column(0, "txt", coded)
    return found


def as_tar(rows: Rows) -> bytes:
    return tar_bytes(
        (f"{i:04d}.{name}", str(value).encode())
        for i, row in enumerate(rows)
        for name, value in row.items()
        if value is not None
    )


def as_tfrecord(rows: Rows) -> bytes:
    return tfrecord_bytes(
        example_bytes(
            {"cls": ("int64_list", [row["cls"]])}
            | ({} if row["txt"] is None else {"txt": ("bytes_list", [row["txt"].encode()])})
        )
        for row in rows
    )


WRITERS: dict[str, Callable[[Rows], bytes]] = {
    "parquet": lambda rows: parquet_bytes(table(rows, dictionary=False), row_group_size=5),
    "arrow": lambda rows: arrow_bytes(table(rows, dictionary=True), rows=100),
    "jsonl": json_lines,
    "tfrecord": as_tfrecord,
    "tar": as_tar,
}


def codes_of(rows: Rows, null: int = -1) -> list[int]:
    return [null if row["txt"] is None else VALUES.index(row["txt"]) for row in rows]


@pytest.mark.parametrize("suffix", WRITERS)
def test_codes_are_the_same_in_every_shard_and_run(tmp_path: Path, suffix: str) -> None:
    # Of a dictionary the second shard has other values, and in another order.
    parts = [rows_from(0, 9), rows_from(3, 9)]
    for number, rows in enumerate(parts):
        (tmp_path / f"{number}.{suffix}").write_bytes(WRITERS[suffix](rows))
    every = [*parts[0], *parts[1]]
    options = {"codes": ["txt", "cls"], "columns": ["txt", "cls"]}
    with DataLoader(str(tmp_path / f"*.{suffix}"), 4, **options) as loader:
        text = suffix != "tfrecord"
        assert loader.categories("txt") == (VALUES if text else tuple(v.encode() for v in VALUES))
        assert loader.categories("cls") == (0, 100, 200)
        assert loader.schema["txt"].described == "int64 [B], codes of 5 values"
        found = list(loader)
    assert torch.cat([batch["txt"] for batch in found]).tolist() == codes_of(every)
    assert torch.cat([batch["cls"] for batch in found]).tolist() == [r["cls"] // 100 for r in every]


def test_nulls_of_codes_are_minus_one_unless_a_value_is_named(tmp_path: Path) -> None:
    rows = rows_from(0, 14)
    (tmp_path / "rows.parquet").write_bytes(WRITERS["parquet"](rows))
    url = str(tmp_path / "rows.parquet")
    with DataLoader(url, 14, codes=["txt"], nulls="mask", fill_null={"txt": 7}) as loader:
        (batch,) = loader
    assert batch["txt"].tolist() == codes_of(rows, 7)
    assert batch["txt.is_null"].tolist() == [row["txt"] is None for row in rows]
    with DataLoader(url, 14, codes=["txt"], shuffle=True, stack={"x": ["txt", "cls"]}) as loader:
        (batch,) = loader
    assert sorted(batch["x"].tolist()) == sorted(
        [code, row["cls"]] for code, row in zip(codes_of(rows), rows, strict=True)
    )
    dataset = ShardedIterableDataset(url, 14, codes=["cls"])
    assert dataset.categories("cls") == (0, 100, 200)
    dataset.close()


@pytest.mark.usefixtures("own_node")
def test_the_values_are_read_once_and_remembered(tmp_path: Path) -> None:
    (tmp_path / "rows.arrow").write_bytes(WRITERS["arrow"](rows_from(0, 50)))
    for _ in range(2):
        with DataLoader(str(tmp_path / "rows.arrow"), 7, codes=["txt"]) as loader:
            assert loader.categories("txt") == VALUES
            remembered = list((tmp_path / "cache" / "categories").iterdir())
            assert len(remembered) == 1
            assert torch.cat([b["txt"] for b in loader]).tolist() == codes_of(rows_from(0, 50))
            state = loader.state_dict()
        remembered[0].write_bytes(remembered[0].read_bytes()[:-9])  # damaged: read again
    with (
        DataLoader(str(tmp_path / "rows.arrow"), 7) as loader,
        pytest.raises(SpecMismatch, match=r"codes: .*txt.* in the state"),
    ):
        loader.load_state_dict(state)


@pytest.mark.usefixtures("own_node")
def test_schema_and_categories_come_from_the_node_after_one_that_was_killed(tmp_path: Path) -> None:
    (tmp_path / "rows.arrow").write_bytes(WRITERS["arrow"](rows_from(0, 50)))
    others = set(own_nodes())
    with DataLoader(str(tmp_path / "rows.arrow"), 7, codes=["txt"]) as loader:
        assert len(loader) == 8
        (node,) = set(own_nodes()) - others
        node.kill()
        node.wait()
        assert loader.schema["txt"].category_count == len(VALUES)
        assert loader.categories("txt") == VALUES
        assert torch.cat([b["txt"] for b in loader]).tolist() == codes_of(rows_from(0, 50))


def test_many_values_come_in_several_answers(tmp_path: Path) -> None:
    texts = [f"value {i:06d} {'x' * 20}" for i in range(9000)]
    (tmp_path / "rows.parquet").write_bytes(parquet_bytes(pa.table({"t": texts[::-1]})))
    with DataLoader(str(tmp_path / "rows.parquet"), 100, codes=["t"]) as loader:
        assert loader.categories("t") == tuple(texts)
        assert next(iter(loader))["t"].tolist() == list(range(8999, 8899, -1))


def test_what_has_no_codes_is_told_by_name(tmp_path: Path) -> None:
    table = pa.table({"x": [1.5], "l": [[1]], "t": ["a"]})
    (tmp_path / "rows.parquet").write_bytes(parquet_bytes(table))
    cases = [
        ({"codes": ["x"]}, r"codes: column 'x' is of type double"),
        ({"codes": ["l"]}, r"codes: column 'l' is of type list"),
        ({"codes": ["gone"]}, r"codes names 'gone'.*batches have: l, t, x"),
        ({"codes": ["t"], "columns": ["x"]}, r"codes names 't', which columns=\[…\] leaves out"),
    ]
    for options, says in cases:
        with (
            DataLoader(str(tmp_path / "rows.parquet"), 1, **options) as loader,
            pytest.raises(ConfigError, match=says),
        ):
            len(loader)
    with DataLoader(str(tmp_path / "rows.parquet"), 1, codes=["t"]) as loader:
        with pytest.raises(ConfigError, match=r"'x' does not come as codes; the columns that do:"):
            loader.categories("x")
        with pytest.raises(ConfigError, match=r"categories\(5\): pass the name of a column"):
            loader.categories(5)  # type: ignore[arg-type]
    for codes in ("t", [3]):
        with pytest.raises(ConfigError, match="pass a list of the columns"):
            DataLoader(str(tmp_path / "rows.parquet"), 1, codes=codes)
    with pytest.raises(ConfigError, match="only loaders over urls have categories"):
        DataLoader([1, 2]).categories("x")
