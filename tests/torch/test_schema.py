"""`loader.schema` says what batches hold, before there is one, and docs/formats.md shows it."""

from __future__ import annotations

import itertools
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from arrow_layouts import cases
from dataplane_torch import (
    BatchColumn,
    DataLoader,
    Ragged,
    ShardedIterableDataset,
    Stack,
)
from dataplane_torch.schema import Schema
from foreign_values import difference, leaf_types, leaves, needs_fill
from shards import WRITERS, arrow_bytes, json_lines, parquet_bytes

from dataplane.cli import run
from dataplane.index.counting import counted
from dataplane.index.indexing import index_dataset
from dataplane.model.errors import ConfigError, SchemaMismatch
from dataplane.model.records import View
from dataplane.store.connect import connect

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


def by_folders(table: Path, suffix: str) -> dict[tuple[str, int], list[int]]:
    """Write shards into folders of two keys; returns the ids below each."""
    ids = {}
    for at, (lang, month) in enumerate(itertools.product(("de", "en"), (1, 10))):
        folder = table / f"lang={lang}" / f"month={month:02}"
        folder.mkdir(parents=True)
        ids[lang, month] = list(range(at * 40, at * 40 + 40))
        made = pa.table({"x": ids[lang, month]})
        content = arrow_bytes(made) if suffix == "arrow" else parquet_bytes(made, row_group_size=10)
        (folder / f"a.{suffix}").write_bytes(content)
    return ids


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_keys_of_folders_are_columns_also_of_conditions(tmp_path: Path, suffix: str) -> None:
    ids = by_folders(tmp_path / "t", suffix)
    triples = [(lang, month, x) for (lang, month), some in ids.items() for x in some]

    def read(**given: Any) -> list[tuple[str, int, int]]:
        with DataLoader(tmp_path / "t", batch_size=16, **given) as loader:
            rows = [
                zip(b["lang"], b["month"].tolist(), b["x"].tolist(), strict=True) for b in loader
            ]
        return [row for some in rows for row in some]

    assert read() == triples
    assert sorted(read(shuffle=True, columns=["month", "x", "lang"])) == triples
    english = [row for row in triples if row[0] == "en" and row[1] == 10]
    assert read(where="lang == 'en' and month = 10") == english
    assert sorted(read(where="lang == 'en' and month > 1", shuffle=True)) == english
    assert read(where="month = 1 or x >= 155") == [
        row for row in triples if row[1] == 1 or row[2] >= 155
    ]
    with DataLoader(tmp_path / "t", batch_size=40, columns=["month"]) as loader:
        assert [batch["month"].tolist() for batch in loader] == [[1] * 40, [10] * 40] * 2
    for typo in ({"where": "mont == 1"}, {"columns": ["mont"]}):
        with pytest.raises(ConfigError, match="'month'") as caught:
            DataLoader(tmp_path / "t", **typo).schema  # noqa: B018
        assert "was named in full" not in str(caught.value)
    (tmp_path / "other").mkdir()
    pq.write_table(pa.table({"x": [1]}), tmp_path / "other" / "lang=x.parquet")
    with pytest.raises(ConfigError, match=r"month.*The folder month=01 was named in full"):
        DataLoader(tmp_path / "t/lang=de/month=01", columns=["month"]).schema  # noqa: B018


@pytest.mark.parametrize("first", [0, 1])
def test_columns_of_folders_do_not_depend_on_other_open_jobs(tmp_path: Path, first: int) -> None:
    part = tmp_path / "lang=en"
    part.mkdir()
    (part / "a.parquet").write_bytes(parquet_bytes(pa.table({"x": range(40)})))
    places = [(tmp_path, {"x", "lang"}), (part, {"x"})]
    (one, columns), (other, others) = places[first], places[1 - first]
    with DataLoader(one, batch_size=8) as before, DataLoader(other, batch_size=8) as beside:
        assert next(iter(before)).keys() == columns
        assert next(iter(beside)).keys() == others
        state = beside.state_dict()
    with DataLoader(other, batch_size=8) as resumed:
        resumed.load_state_dict(state)
        assert next(iter(resumed)).keys() == others


def test_shards_that_a_condition_on_folders_decides_are_not_read(tmp_path: Path) -> None:
    by_folders(tmp_path / "t", "parquet")
    manifest = index_dataset(tmp_path / "t")

    def count(where: str) -> list[int]:
        def no_read(*_: object) -> Any:
            raise AssertionError("a shard is read")

        return counted(manifest, View(where=where), connect, no_read).tolist()

    assert count("lang == 'en' and month < 5") == [0] * 8 + [10] * 4 + [0] * 4
    assert count("month = 10 or lang == 'en'") == [0] * 4 + [10] * 12
    with pytest.raises(AssertionError, match="a shard is read"):
        count("lang == 'en' and x > 3")


# Names that are integers in a tar file, too.
ROWS = [{"cls": i, "id": None if i % 4 == 3 else i, "inx": i or None} for i in range(40)]


@pytest.mark.parametrize("suffix", WRITERS)
def test_columns_with_nulls_are_refused_together_before_the_first_batch(tmp_path, suffix):
    (tmp_path / f"0.{suffix}").write_bytes(WRITERS[suffix](ROWS[1:3]))
    (tmp_path / f"1.{suffix}").write_bytes(WRITERS[suffix](ROWS))
    order = {"batch_size": 6, "columns": ["cls", "id", "inx"]}
    with (
        DataLoader(str(tmp_path), **order) as loader,
        pytest.raises(ConfigError, match=rf"2 columns: .*1\.{suffix}\).*nulls: pass") as told,
    ):
        len(loader)
    assert 'fill_null={"id": 0, "inx": 0}' in str(told.value)
    with DataLoader(str(tmp_path), **order, fill_null={"id": 0, "inx": -7}) as loader:
        found = torch.cat([torch.stack([b["cls"], b["id"], b["inx"]], 1) for b in loader]).tolist()
    want = [[r["cls"], r["id"] or 0, -7 if r["inx"] is None else r["inx"]] for r in ROWS]
    assert found == [*want[1:3], *want]
    stack = {"x": ["inx", "id"]}
    with DataLoader(str(tmp_path), 6, columns=["cls"], stack=stack, nulls="mask") as loader:
        batches = list(loader)
    masks = torch.cat([batch["x.is_null"] for batch in batches])
    assert masks.dtype == torch.bool
    want = [[row["inx"] is None, row["id"] is None] for row in ROWS]
    assert masks.tolist() == [*want[1:3], *want]
    want = [[row["inx"] or 0, row["id"] or 0] for row in ROWS]
    assert torch.cat([batch["x"] for batch in batches]).tolist() == [*want[1:3], *want]
    assert not torch.cat([batch["cls.is_null"] for batch in batches]).any()


def test_nulls_that_the_index_did_not_see_are_told_together_by_the_first_block_with_one(tmp_path):
    """Of JSON lines only the first 4 MiB are parsed for an index."""
    rows = [{"x": i, "y": i, "text": "t" * 400} for i in range(15_000)]
    rows[14_000] |= {"x": None}
    rows[14_001] |= {"y": None}
    path = Path(tmp_path) / "long.jsonl"
    path.write_bytes(json_lines(rows))
    with DataLoader(str(path), batch_size=1000, columns=["x", "y"]) as loader:
        assert len(loader) == 15
        with pytest.raises(ConfigError, match=r'long.jsonl has nulls in 2 columns.*"x": 0, "y": 0'):
            list(loader)


def is_written_and_read(arrays: list[pa.Array]) -> bool:
    """Whether Arrow itself can write both as one stream, read it back and join the parts."""
    sink = pa.BufferOutputStream()
    try:
        with pa.ipc.new_stream(sink, pa.schema([("x", arrays[0].type)])) as writer:
            for array in arrays:
                writer.write_batch(pa.record_batch([array], ["x"]))
        pa.ipc.open_stream(sink.getvalue()).read_all().combine_chunks()
    except (pa.ArrowException, OSError):
        return False
    return True


def test_every_layout_comes_as_what_was_written(tmp_path: Path) -> None:
    found = {name: arrays for name, arrays in cases() if is_written_and_read(arrays)}
    assert len(found) > 300
    batches = [
        pa.record_batch([arrays[version] for arrays in found.values()], list(found))
        for version in (0, 1)
    ]
    with pa.ipc.new_stream(tmp_path / "all.arrows", batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    # As pyarrow reads them: it loses values of dictionaries in dictionaries when it writes them.
    expected = leaves(pa.ipc.open_stream(tmp_path / "all.arrows").read_all())
    fills = {name: 0 for name, kind in leaf_types(batches[0].schema) if needs_fill(kind)}
    with DataLoader(
        str(tmp_path / "all.arrows"), batch_size=4, lists="ragged", fill_null=fills
    ) as loader:
        assert difference(expected, list(loader)) == ""


def test_a_type_that_pyarrow_has_no_arrays_of_is_refused_by_name_and_can_be_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "old.arrows"
    path.write_bytes(with_month_interval())
    refusal = (
        r"old\.arrows: not supported: column 'm' is of type month_interval; .*columns=\[…\]: x"
    )
    with (
        DataLoader(str(path), batch_size=2) as loader,
        pytest.raises(ConfigError, match=refusal),
    ):
        next(iter(loader))
    with DataLoader(str(path), batch_size=2, columns=["x"]) as loader:
        assert [batch["x"].tolist() for batch in loader] == [[1, 2]]
    assert run(["inspect", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rows"] == [{"x": 1}, {"x": 2}]
    assert found["not_supported"] == {"m": "is of type month_interval"}
    assert run(["verify", str(path)]) == 1
    assert "not supported: column 'm'" in capsys.readouterr().out


def test_a_time_that_nanoseconds_cannot_hold_is_refused_also_by_a_condition(data_dir: Path) -> None:
    path = str(data_dir / "odd" / "int96-year-9999.parquet")
    refusal = r"row 1 of block 0: column 'end' has 9999-12-31T00:00:00, but INT96"
    for options in ({}, {"where": "end > '2020-01-01'"}, {"where": "end < '2000-01-01'"}):
        with (
            DataLoader(path, batch_size=2, **options) as loader,
            pytest.raises(SchemaMismatch, match=refusal),
        ):
            list(loader)
    with DataLoader(path, batch_size=2, columns=["id"]) as loader:
        assert [batch["id"].tolist() for batch in loader] == [[0, 1]]


def with_month_interval() -> bytes:
    """A stream whose column `m` says that it has months: the unit of an interval, in its schema."""
    kind = pa.month_day_nano_interval()
    batch = pa.record_batch([pa.array([(1, 2, 3), None], kind), pa.array([1, 2])], ["m", "x"])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    content = bytes(sink.getvalue())
    for at in (at for at, byte in enumerate(content[:400]) if byte == 2):
        changed = content[:at] + bytes(1) + content[at + 1 :]
        try:
            types = pa.ipc.open_stream(changed).schema.types
        except (pa.ArrowException, OSError):
            continue
        if [str(kind) for kind in types] == ["month_interval", "int64"]:
            return changed
    raise AssertionError("the unit of the interval was not found")
