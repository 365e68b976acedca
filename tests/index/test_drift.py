"""Shards of one folder, written by several tools, whose columns drifted: read as pyarrow reads them
with a unified schema, or refused with the way out.
"""

from __future__ import annotations

import datetime as dt
import itertools
import math
from collections.abc import Callable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from shards import arrow_bytes

from dataplane.commands.datasets import read_block
from dataplane.formats.unsupported import refuse_differing
from dataplane.index.indexing import index_dataset
from dataplane.model.errors import SchemaMismatch

TIME = dt.datetime.fromisoformat("2024-05-01T12:00:00.123456")
EXACT = 1 << 53
Write = Callable[[pa.Table, Path], None]


def _as_polars(kind: pa.DataType) -> pa.DataType:
    """Return the type that polars writes: views, and 64-bit offsets."""
    if pa.types.is_string(kind):
        return pa.large_string()
    return pa.large_list(kind.value_type) if pa.types.is_list(kind) else kind


def _polars_like(table: pa.Table, path: Path) -> None:
    kinds = [(field.name, _as_polars(field.type)) for field in table.schema]
    pq.write_table(table.cast(pa.schema(kinds)), path, version="1.0", use_dictionary=False)


def _polars(table: pa.Table, path: Path) -> None:
    pytest.importorskip("polars").from_arrow(table).write_parquet(path)


def _duckdb(table: pa.Table, path: Path) -> None:
    duckdb = pytest.importorskip("duckdb")
    duckdb.from_arrow(table).write_parquet(str(path))


def _pandas(table: pa.Table, path: Path) -> None:
    pytest.importorskip("pandas")
    table.to_pandas().to_parquet(path)


WRITERS: dict[str, Write] = {
    "arrow": pq.write_table,
    "arrow file": lambda table, path: path.write_bytes(arrow_bytes(table)) and None,
    "pandas-like": lambda table, path: pq.write_table(
        table, path, coerce_timestamps="us", allow_truncated_timestamps=True
    ),
    "polars-like": _polars_like,
    "duckdb-like": lambda table, path: pq.write_table(table, path, store_schema=False),
    "spark-like": lambda table, path: pq.write_table(table, path, flavor="spark", version="1.0"),
    "pandas": _pandas,
    "polars": _polars,
    "duckdb": _duckdb,
}
PARQUET = [name for name in WRITERS if name != "arrow file"]


def column(kind: pa.DataType, values: Sequence[Any]) -> pa.Array:
    if pa.types.is_dictionary(kind):
        return column(kind.value_type, values).dictionary_encode().cast(kind)
    return pa.nulls(len(values)) if pa.types.is_null(kind) else pa.array(values, kind)


# Two columns whose values have one type, whichever of their writers.
READ = {
    "null": [(pa.null(), [None, None]), (pa.int64(), [5, None])],
    "texts": [(pa.string(), ["a", None]), (pa.large_string(), ["b", "c"])],
    "views": [(pa.string_view(), ["a", None]), (pa.string(), ["é" * 20])],
    "dictionary": [(pa.dictionary(pa.int8(), pa.string()), ["a", "b"]), (pa.string(), ["b", "é"])],
    "int32 and int64": [(pa.int32(), [1, -1]), (pa.int64(), [1 << 60, None])],
    "signed and unsigned": [(pa.uint8(), [255, 0]), (pa.int8(), [-128, 127])],
    "uint32 and int32": [(pa.uint32(), [(1 << 32) - 1]), (pa.int32(), [-(1 << 31)])],
    "float and integer": [(pa.float64(), [1.5, None]), (pa.int64(), [-EXACT, EXACT])],
    "float32 and int32": [(pa.float32(), [0.1, math.inf]), (pa.int32(), [(1 << 24) + 1, 7])],
    "float32 and double": [(pa.float32(), [0.1]), (pa.float64(), [0.1, 1e300])],
    "units": [(pa.timestamp("ms"), [TIME.replace(microsecond=1000)]), (pa.timestamp("us"), [TIME])],
    "scales": [
        (pa.decimal128(9, 2), [Decimal("1.25"), None]),
        (pa.decimal128(9, 4), [Decimal("99999.1234")]),
    ],
    "lists": [(pa.list_(pa.float32()), [[0.1], []]), (pa.list_(pa.float64()), [[0.1, 1e300], None])],
    "struct": [
        (pa.struct([("a", pa.int32()), ("b", pa.string())]), [{"a": 1, "b": "x"}]),
        (pa.struct([("b", pa.string()), ("a", pa.int64())]), [{"b": "y", "a": 1 << 40}]),
    ],
    "null in a struct": [
        (pa.struct([("a", pa.null()), ("b", pa.null())]), [{"a": None, "b": None}, None]),
        (pa.struct([("b", pa.list_(pa.int8())), ("a", pa.int64())]), [{"b": [1, None], "a": 7}]),
    ],
    "null in a list": [(pa.list_(pa.null()), [[], None]), (pa.list_(pa.int32()), [[1, 2], [None]])],
    "lists of structs": [
        (pa.list_(pa.struct([("a", pa.int32()), ("b", pa.null())])), [[{"a": 1, "b": None}], []]),
        (pa.list_(pa.struct([("b", pa.string()), ("a", pa.int64())])), [[{"b": "y", "a": EXACT}]]),
    ],
    "structs of structs": [
        (pa.struct([("p", pa.struct([("x", pa.int32()), ("y", pa.float32())]))]),
         [{"p": {"x": 1, "y": 0.5}}, {"p": None}]),
        (pa.struct([("p", pa.struct([("y", pa.float64()), ("x", pa.int64())]))]),
         [{"p": {"x": 1 << 40, "y": 1e300}}]),
    ],
    "lists of lists": [
        (pa.list_(pa.list_(pa.null())), [[[], None]]),
        (pa.list_(pa.list_(pa.int64())), [[[1 << 40], []]]),
    ],
}  # fmt: skip
# Two columns that are refused, when the dataset is opened or when a row is read.
REFUSED = {
    "kinds": [(pa.string(), ["1"]), (pa.int64(), [1])],
    "uint64 and int64": [(pa.uint64(), [1 << 63]), (pa.int64(), [-1])],
    "bool and integer": [(pa.bool_(), [True]), (pa.int64(), [1])],
    "decimal and float": [(pa.decimal128(9, 2), [Decimal("0.10")]), (pa.float64(), [0.1])],
    "zone and none": [(pa.timestamp("us", "UTC"), [TIME]), (pa.timestamp("us"), [TIME])],
    "date and time": [(pa.date32(), [TIME.date()]), (pa.timestamp("us"), [TIME])],
    "lacking field": [
        (pa.struct([("a", pa.int32()), ("b", pa.int8())]), [{"a": 1, "b": 1}]),
        (pa.struct([("a", pa.int32())]), [{"a": 1}]),
    ],
    "kinds within": [
        (pa.struct([("p", pa.list_(pa.struct([("x", pa.int32())])))]), [{"p": [{"x": 1}]}]),
        (pa.struct([("p", pa.list_(pa.struct([("x", pa.string())])))]), [{"p": [{"x": "1"}]}]),
    ],
    "lists of texts": [(pa.list_(pa.string()), [["1"]]), (pa.list_(pa.int8()), [[1]])],
}
TOO_LARGE = {
    "integer": [(pa.float64(), [1.5, 2.5, 3.5]), (pa.int64(), [1, EXACT, EXACT + 1])],
    "in a list": [
        (pa.list_(pa.int64()), [[1], [], [2, -EXACT - 1]]),
        (pa.list_(pa.float32()), [[]]),
    ],
    "time": [
        (pa.timestamp("us"), [TIME, None, dt.datetime.fromisoformat("9999-12-31")]),
        (pa.timestamp("ns"), [TIME]),
    ],
}


def write(folder: Path, shards: Sequence[tuple[pa.DataType, list]], writers: Sequence[str]) -> None:
    """Write a shard of each column, reordered from one to the next, beside one that is equal."""
    folder.mkdir()
    for at, ((kind, values), writer) in enumerate(zip(shards, writers, strict=False)):
        columns = {"id": pa.array(range(len(values)), pa.int64()), "x": column(kind, values)}
        names = list(columns)[:: 1 if at % 2 else -1]
        suffix = "arrow" if writer == "arrow file" else "parquet"
        table = pa.table({name: columns[name] for name in names})
        WRITERS[writer](table, folder / f"{at}.{suffix}")


def rows_of(folder: Path) -> list[Any]:
    """The column as Dataplane reads it."""
    manifest = index_dataset(folder)
    schema = pa.ipc.read_schema(pa.py_buffer(manifest.schema))
    refuse_differing(schema, ["id", "x"], manifest.shards.urls.__getitem__)
    blocks = range(manifest.block_count)
    batches = [read_block(manifest, block, schema, ["x", "id"]) for block in blocks]
    return [value for batch in batches for value in batch.column("x").to_pylist()]


@pytest.mark.parametrize("writer", PARQUET)
def test_columns_of_several_writers_are_one(tmp_path: Path, writer: str) -> None:
    other = PARQUET[PARQUET.index(writer) - 1 if writer in PARQUET[:5] else 0]
    for turn, name in itertools.product(range(2), READ):
        folder = tmp_path / f"{name}.{turn}"
        write(folder, READ[name][:: -1 if turn else 1], [writer, other])
        paths = sorted(folder.iterdir())
        stored = [pq.ParquetFile(path).read(["x"])["x"].to_pylist() for path in paths]
        read = repr_of(rows_of(folder))
        assert read == repr_of([value for rows in stored for value in rows]), name
        try:
            schemas = [pq.read_schema(path) for path in paths]
            unified = pa.unify_schemas(schemas, promote_options="permissive")
        except pa.ArrowException:  # dictionaries and views are not unified there
            continue
        theirs = ds.dataset(paths, schema=unified).to_table(["x"])["x"].to_pylist()
        assert read == repr_of(theirs), name


def repr_of(values: Sequence[Any]) -> list[Any]:
    """Values in a form in which a number equals itself as a float; structs by their names."""
    return [
        repr_of([*itertools.chain(*sorted(value.items()))]) if isinstance(value, dict)
        else repr_of(value) if isinstance(value, list)
        else float(value)
        if isinstance(value, int) and abs(value) <= EXACT
        else getattr(value, "to_pydatetime", lambda value=value: value)()
        for value in values
    ]  # fmt: skip


def test_arrow_files_are_one_likewise(tmp_path: Path) -> None:
    for name, shards in READ.items():
        write(tmp_path / name, shards, ["arrow file"] * 2)
        wanted = [value for _, values in shards for value in values]
        read = rows_of(tmp_path / name)
        if name not in {"float32 and int32", "float32 and double", "lists"}:
            assert repr_of(read) == repr_of(wanted), name
        else:
            assert len(read) == len(wanted)


@pytest.mark.parametrize("name", REFUSED)
def test_other_columns_are_refused_with_the_way_out(tmp_path: Path, name: str) -> None:
    for at, writers in enumerate(itertools.pairwise([*PARQUET[:4], "arrow"])):
        write(tmp_path / str(at), REFUSED[name], writers)
        with pytest.raises(SchemaMismatch) as caught:
            rows_of(tmp_path / str(at))
        for word in ("0.parquet", "1.parquet", "'x'", "rewrite one of them", "columns=[…]: id"):
            assert word in str(caught.value)


@pytest.mark.parametrize("name", TOO_LARGE)
def test_a_value_that_the_joint_type_cannot_hold_is_named(tmp_path: Path, name: str) -> None:
    write(tmp_path / "a", TOO_LARGE[name], ["arrow file"] * 2)
    with pytest.raises(SchemaMismatch, match=r"row 2 of block 0: column 'x' is .* columns=\[…\]"):
        rows_of(tmp_path / "a")


def test_a_column_renamed_by_case_is_pointed_out(tmp_path: Path) -> None:
    for name in ("Label", "label"):
        pq.write_table(pa.table({"id": [1], name: [2]}), tmp_path / f"{name}.parquet")
    manifest = index_dataset(tmp_path)
    schema = pa.ipc.read_schema(pa.py_buffer(manifest.schema))
    with pytest.raises(SchemaMismatch, match=r"Is 'label' the same column\? Then rename") as caught:
        refuse_differing(schema, ["id", "Label"], manifest.shards.urls.__getitem__)
    assert 'fill_null={"Label": …}' in str(caught.value)
