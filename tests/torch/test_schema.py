"""`loader.schema` says what batches hold, before there is one, and docs/formats.md shows it."""

from __future__ import annotations

import warnings
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from dataplane_torch import (
    BatchColumn,
    DataLoader,
    Mixture,
    Ragged,
    ShardedIterableDataset,
    Source,
    Stack,
)
from dataplane_torch.schema import Schema

from dataplane.model.errors import ConfigError

pytestmark = pytest.mark.usefixtures("shared_node")

DOCS = Path(__file__).parents[2] / "docs" / "formats.md"
# What the table in the docs is made of: a column of each type, and one row.
TYPES: dict[str, tuple[pa.DataType, Any]] = {
    "flag": (pa.bool_(), True),
    "small": (pa.int8(), 1),
    "big": (pa.uint64(), 1),
    "half": (pa.float16(), 1.0),
    "x": (pa.float32(), 1.0),
    "day": (pa.date32(), 1),
    "day_ms": (pa.date64(), 86_400_000),
    "clock": (pa.time32("s"), 1),
    "clock_ns": (pa.time64("ns"), 1),
    "t": (pa.timestamp("us"), 1),
    "t_zone": (pa.timestamp("ns", "Europe/Berlin"), 1),
    "took": (pa.duration("ms"), 1),
    "text": (pa.string(), "a"),
    "text_view": (pa.string_view(), "a"),
    "blob": (pa.large_binary(), b"a"),
    "hash": (pa.binary(16), b"a" * 16),
    "uuid": (pa.uuid(), b"a" * 16),
    "kind": (pa.dictionary(pa.int8(), pa.string()), "a"),
    "run": (pa.run_end_encoded(pa.int32(), pa.int16()), 1),
    "tokens": (pa.list_(pa.int32()), [1]),
    "times": (pa.large_list(pa.timestamp("ms", "UTC")), [1]),
    "box": (pa.list_(pa.float32(), 4), [1.0] * 4),
    "matrix": (pa.list_(pa.list_(pa.float64(), 2), 3), [[1.0] * 2] * 3),
    "image": (pa.fixed_shape_tensor(pa.uint8(), [8, 8, 3]), [1] * 192),
    "point": (pa.struct([("x", pa.int64()), ("y", pa.int64())]), {"x": 1, "y": 2}),
    "words": (pa.list_(pa.string()), ["a"]),
    "lists": (pa.list_(pa.list_(pa.int8())), [[1]]),
    "structs": (pa.list_(pa.struct([("x", pa.int64())])), [{"x": 1}]),
    "pairs": (pa.map_(pa.string(), pa.int64()), [("a", 1)]),
    "price": (pa.decimal128(9, 2), Decimal("1.5")),
    "interval": (pa.month_day_nano_interval(), (1, 2, 3)),
    "nothing": (pa.null(), None),
}


def array_of(kind: pa.DataType, value: Any) -> pa.Array:
    if isinstance(kind, pa.FixedShapeTensorType):
        return pa.ExtensionArray.from_storage(kind, array_of(kind.storage_type, value))
    if pa.types.is_run_end_encoded(kind):
        return pa.RunEndEncodedArray.from_arrays([1], pa.array([value], kind.value_type))
    return pa.array([value], kind)


@pytest.fixture
def every_type(tmp_path: Path) -> str:
    arrays = [array_of(kind, value) for kind, value in TYPES.values()]
    batch = pa.record_batch(arrays, list(TYPES))
    with pa.ipc.new_file(tmp_path / "types.arrow", batch.schema) as writer:
        writer.write_batch(batch)
    return str(tmp_path / "types.arrow")


def documented() -> str:
    return DOCS.read_text().partition("```text schema\n")[2].partition("\n```")[0]


def expect_batch(schema: Schema, batch: dict[str, Any]) -> None:
    """The batch holds what the schema says."""
    assert [column.name for column in schema] == list(batch)
    for column in schema:
        found = batch[column.name]
        if column.comes_as == "tensor":
            assert found.dtype == column.dtype
            assert column.shape is not None
            assert len(found.shape) == len(column.shape), column
            for size, said in zip(found.shape, column.shape, strict=True):
                assert said in (None, size), column
            if column.length_max is not None:
                assert found.shape[1] <= column.length_max
        elif column.comes_as == "ragged":
            assert isinstance(found, Ragged)
            assert found.values.dtype == column.dtype
        else:
            assert isinstance(found, list)
            kind = {"str": str, "bytes": bytes}.get(column.comes_as, object)
            assert all(isinstance(value, kind) for value in found), column


def test_the_table_in_the_docs_is_the_schema_of_a_column_of_each_type(every_type: str) -> None:
    with DataLoader(every_type, batch_size=2) as loader:
        schema = loader.schema
        batch = next(iter(loader))
    assert str(schema) == documented()
    expect_batch(schema, batch)
    assert schema["t_zone"] == BatchColumn(
        "t_zone",
        "timestamp[ns, tz=Europe/Berlin]",
        "tensor",
        torch.int64,
        (None,),
        "ns",
        "Europe/Berlin",
    )
    with pytest.raises(KeyError):
        schema["gone"]


def test_options_show_in_the_schema(tmp_path: Path) -> None:
    rows = {
        "a": pa.array([1, None, 3], pa.int16()),
        "b": pa.array([1.0, 2.0, 3.0]),
        "l": pa.array([[1, 2, 3], [4], None]),
        "jpg": pa.array([b"", b"", b""]),
    }
    pq.write_table(pa.table(rows), tmp_path / "rows.parquet")
    options = {
        "lists": "ragged",
        "max_length": 2,
        "nulls": "mask",
        "stack": {"x": Stack(["a", "b"], dtype="float32")},
    }
    with DataLoader(str(tmp_path / "rows.parquet"), 3, **options) as loader:
        schema = loader.schema
        expect_batch(schema, next(iter(loader)))
    assert [str(column) for column in schema] == [
        "l: Ragged of int64, lists <= 2",
        "l.is_null: bool [B]",
        "jpg: list of bytes",
        "jpg.is_null: bool [B]",
        "x: float32 [B, 2]",
        "x.is_null: bool [B, 2]",
    ]
    assert schema["x"].stored_type == "int16, double"
    dataset = ShardedIterableDataset(str(tmp_path / "rows.parquet"), 3, max_length=2, fill_null=0)
    assert str(dataset.schema["l"]) == "l: int64 [B, T], T <= 2"
    dataset.close()


def test_a_schema_of_very_many_columns_comes_in_several_answers(tmp_path: Path) -> None:
    names = [f"a_column_with_quite_a_long_name_{i:05d}" for i in range(900)]
    pq.write_table(pa.table({name: [1] for name in names}), tmp_path / "wide.parquet")
    with DataLoader(str(tmp_path / "wide.parquet")) as loader:
        assert [column.name for column in loader.schema] == names


def test_a_dataset_of_torch_has_no_schema() -> None:
    with pytest.raises(ConfigError, match="only loaders over urls have a schema"):
        DataLoader([1, 2, 3]).schema  # noqa: B018


def test_keys_of_folders_are_no_columns_and_the_user_learns_it_once(tmp_path: Path) -> None:
    for year in (1, 2):
        folder = tmp_path / "table" / f"year={year}" / "month=1"
        folder.mkdir(parents=True)
        pq.write_table(pa.table({"x": [year]}), folder / "a.parquet")
    with DataLoader(tmp_path / "table", batch_size=1) as loader:
        with pytest.warns(UserWarning, match=r"folders year=… and month=…"):
            assert [column.name for column in loader.schema] == ["x"]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert [batch["x"].item() for batch in loader] == [1, 2]
    told = r"'month'.*The shards lie in folders month=…, whose names are not read as columns"
    for options in (
        {"columns": ["x", "month"]},
        {"where": "month == 1"},
        {"fill_null": {"month": 0}},
        {"stack": {"y": ["month", "x"]}},
    ):
        with pytest.raises(ConfigError, match=told):
            DataLoader(tmp_path / "table", batch_size=1, **options).schema  # noqa: B018


def test_a_mixture_says_in_which_source_keys_of_folders_are_no_columns(tmp_path: Path) -> None:
    for source, folder in (("a", "day=1"), ("b", "part")):
        (tmp_path / source / folder).mkdir(parents=True)
        pq.write_table(pa.table({"x": [1, 2]}), tmp_path / source / folder / "x.parquet")
    sources = {name: Source(tmp_path / name, weight=1.0) for name in "ab"}
    told = r"^source 'a': the shards lie in folders day=…"
    with DataLoader(Mixture(sources), 1) as loader, pytest.warns(UserWarning, match=told):
        assert [column.name for column in loader.schema] == ["x"]


def test_a_folder_of_several_splits_is_refused_with_what_to_pass(tmp_path: Path) -> None:
    for name in ("train-0", "train-1", "test-0"):
        pq.write_table(pa.table({"x": [1, 2]}), tmp_path / f"{name}.parquet")
    told = r"several splits.*train \(.*/train-\*\.parquet\)"
    with DataLoader(tmp_path, 1) as loader, pytest.raises(ConfigError, match=told):
        len(loader)
    with DataLoader(tmp_path / "train-*.parquet", batch_size=1) as loader:
        assert len(loader) == 4
