"""Shards whose types differ are one dataset where batches are equal, and refused where not."""

from __future__ import annotations

import datetime as dt
import itertools
import uuid
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shards import (
    MemoryShard,
    arrow_bytes,
    example_bytes,
    json_lines,
    parquet_bytes,
    read_rows,
    tar_bytes,
    tfrecord_bytes,
)

from dataplane.commands.datasets import read_block
from dataplane.formats import registry
from dataplane.formats.joint_types import is_readable_as, joint_type, same_type
from dataplane.formats.tar import Tar
from dataplane.formats.unsupported import Difference, differing, refuse_differing
from dataplane.index.indexing import index_dataset
from dataplane.index.shared_schema import SharedSchema
from dataplane.model.errors import SchemaMismatch
from dataplane.model.records import ColumnOptions, NullPolicy
from dataplane.plan.columns import UNKNOWN
from dataplane.plan.manifest import Manifest
from dataplane.plan.views import identity_of
from dataplane.transforms.canonical import canonical
from dataplane.transforms.columns import plan_columns

NOON = dt.datetime(2024, 5, 1, 12, tzinfo=dt.UTC)
TEXTS = [
    pa.string(),
    pa.large_string(),
    pa.string_view(),
    pa.dictionary(pa.int8(), pa.string()),
    pa.dictionary(pa.int32(), pa.large_string()),
    pa.null(),
]
BYTES = [pa.binary(), pa.large_binary(), pa.binary_view(), pa.binary(2), pa.null()]
LISTS = [pa.list_, pa.large_list]
# Types of which batches are equal, a value, and which of them Parquet does not keep apart.
FAMILIES: dict[str, tuple[list[pa.DataType], Any]] = {
    "texts": (TEXTS, "text"),
    "bytes": (BYTES, b"ab"),
    "lists": ([make(pa.int32()) for make in LISTS], [1, 2]),
    "lists of texts": (
        [make(kind) for make in LISTS for kind in (pa.string(), pa.large_string())],
        ["a", None, "b"],
    ),
    "times": ([pa.timestamp("us", zone) for zone in ("UTC", "+00:00", "Europe/Berlin")], NOON),
    "decimals": ([pa.decimal128(9, 2), pa.decimal128(11, 2)], Decimal("1.25")),
    "structs": (
        [
            pa.struct([("a", pa.string()), ("b", pa.list_(pa.int64()))]),
            pa.struct([("b", pa.large_list(pa.int64())), ("a", pa.large_string())]),
            pa.struct([("a", pa.null()), ("b", pa.list_(pa.int64()))]),
        ],
        {"a": "x", "b": [1]},
    ),
    "maps": (
        [pa.map_(pa.string(), kind) for kind in (pa.string(), pa.large_string())],
        [("k", "v")],
    ),
    "uuids": ([pa.uuid(), pa.binary(16)], b"0123456789abcdef"),
}
ONLY_ARROW: dict[str, tuple[list[pa.DataType], Any]] = {
    "list views": ([pa.list_(pa.int8()), pa.list_view(pa.int8())], [1, 2]),
    "run ends": ([pa.string(), pa.run_end_encoded(pa.int32(), pa.string())], "text"),
    "dictionaries of numbers": ([pa.int16(), pa.dictionary(pa.int8(), pa.int16())], 7),
}
WRITERS: dict[str, Callable[[pa.Table], bytes]] = {"parquet": parquet_bytes, "arrow": arrow_bytes}


def array_of(kind: pa.DataType, values: Sequence[Any]) -> pa.Array:
    """Values of any type; a struct without some of its fields, and nulls of the null type."""
    if isinstance(kind, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(kind, pa.array(values, kind.storage_type))
    if pa.types.is_null(kind):
        return pa.nulls(len(values))
    if pa.types.is_run_end_encoded(kind):
        return pa.RunEndEncodedArray.from_arrays(
            range(1, len(values) + 1), array_of(kind.value_type, values), kind
        )
    if pa.types.is_dictionary(kind):
        plain = pa.array(values, kind.value_type).dictionary_encode()
        return pa.DictionaryArray.from_arrays(plain.indices.cast(kind.index_type), plain.dictionary)
    if pa.types.is_struct(kind):
        parts = [array_of(f.type, [None if v is None else v[f.name] for v in values]) for f in kind]
        return pa.StructArray.from_arrays(
            parts, fields=list(kind), mask=pa.array([v is None for v in values])
        )
    return pa.array(values, kind)


def stored_as(
    folder: Path, kinds: Sequence[pa.DataType], value: Any, write: str
) -> tuple[Manifest, list[pa.Table]]:
    """One shard of each type, which has the value, null, and the value again."""
    tables = []
    for at, kind in enumerate(kinds):
        table = pa.table({"id": [at] * 3, "x": array_of(kind, [value, None, value])})
        (folder / f"{at}.{write}").write_bytes(WRITERS[write](table))
        tables.append(table)
    return index_dataset(folder), tables


def read_back(manifest: Manifest, columns: Sequence[str] = ()) -> Iterator[pa.RecordBatch]:
    schema = schema_of(manifest)
    for block in range(manifest.block_count):
        yield read_block(manifest, block, schema, list(columns) or schema.names)


def schema_of(manifest: Manifest) -> pa.Schema:
    return pa.ipc.read_schema(pa.py_buffer(manifest.schema))


def values_of(tables: Sequence[pa.Table | pa.RecordBatch]) -> list[Any]:
    found = [value for table in tables for value in table.column("x").to_pylist()]
    return [value.bytes if isinstance(value, uuid.UUID) else value for value in found]


CASES = [
    *((name, family, writer) for writer in WRITERS for name, family in FAMILIES.items()),
    *((name, family, "arrow") for name, family in ONLY_ARROW.items()),
]


@pytest.mark.parametrize(
    ("family", "writer"),
    [pytest.param(family, writer, id=f"{name} {writer}") for name, family, writer in CASES],
)
def test_types_with_equal_batches_are_one_dataset(
    tmp_path: Path, family: tuple[list[pa.DataType], Any], writer: str
) -> None:
    kinds, value = family
    for count, order in enumerate((kinds, kinds[::-1])):
        folder = tmp_path / str(count)
        folder.mkdir()
        manifest, tables = stored_as(folder, order, value, writer)
        schema = schema_of(manifest)
        assert [differing(field) for field in schema] == [None, None]
        found = list(read_back(manifest))
        # A struct's fields may be in another order, and a shard may lack some values.
        assert values_of(found) == values_of(tables)
        options = ColumnOptions(nulls=NullPolicy.MASK)
        plan = plan_columns(schema, options)
        for batch, table in zip(found, tables, strict=True):
            own = plan_columns(table.schema, options)
            alone = canonical(table.combine_chunks().to_batches()[0], own, "u")
            whole = canonical(batch, plan, "u").to_pydict()
            if pa.types.is_null(table.schema.field("x").type):
                continue
            assert {name: _listed(column) for name, column in whole.items()} == {
                name: _listed(column) for name, column in alone.to_pydict().items()
            }


def _listed(column: list[Any]) -> list[Any]:
    return [sorted(v.items()) if isinstance(v, dict) else v for v in column]


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_shard_with_only_nulls_has_any_type(tmp_path: Path, place: int, writer: str) -> None:
    kinds = [pa.list_(pa.float32())] * 3
    kinds[place] = pa.null()
    manifest, tables = stored_as(tmp_path, kinds, [1.5], writer)
    assert schema_of(manifest).field("x").type == pa.list_(pa.float32())
    assert values_of(list(read_back(manifest))) == values_of(tables)
    nulls = manifest.nulls
    assert nulls is not None
    assert nulls.counts[1] in {5, UNKNOWN}


DIFFERENT = [
    (pa.int64(), pa.string()),
    (pa.uint64(), pa.int64()),
    (pa.decimal128(9, 2), pa.int64()),
    (pa.bool_(), pa.int8()),
    (pa.string(), pa.binary()),
    (pa.timestamp("us"), pa.timestamp("us", "UTC")),
    (pa.date32(), pa.timestamp("ms")),
    (pa.list_(pa.int8()), pa.list_(pa.int8(), 2)),
    (pa.list_(pa.int8(), 2), pa.list_(pa.int8(), 3)),
    (pa.list_(pa.int8()), pa.large_list(pa.bool_())),
    (pa.struct([("a", pa.int8())]), pa.struct([("a", pa.int8()), ("b", pa.int8())])),
    (pa.struct([("a", pa.int8())]), pa.struct([("a", pa.string())])),
    (pa.map_(pa.string(), pa.int8()), pa.map_(pa.string(), pa.string())),
    (pa.decimal128(9, 2), pa.float64()),
    (pa.fixed_shape_tensor(pa.int8(), [2, 2]), pa.list_(pa.int8(), 4)),
]


@pytest.mark.parametrize(("kind", "other"), DIFFERENT)
def test_types_with_different_batches_are_refused_if_they_are_read(
    tmp_path: Path, kind: pa.DataType, other: pa.DataType
) -> None:
    for at, each in enumerate((kind, kind, other)):
        empty = pa.nulls(
            1, each if not isinstance(each, pa.BaseExtensionType) else each.storage_type
        )
        column = (
            pa.ExtensionArray.from_storage(each, empty)
            if isinstance(each, pa.BaseExtensionType)
            else empty
        )
        table = pa.table({"id": [at], "x": column})
        (tmp_path / f"{at}.arrow").write_bytes(arrow_bytes(table))
    manifest = index_dataset(tmp_path)
    schema, url_of = schema_of(manifest), manifest.shards.urls.__getitem__
    assert differing(schema.field("x")) == Difference((0, 2), (str(kind), str(other)))
    with pytest.raises(SchemaMismatch) as caught:
        refuse_differing(schema, ["id", "x"], url_of)
    text = str(caught.value)
    for word in (url_of(0), url_of(2), "'x'", str(kind), str(other), "columns=[…]: id"):
        assert word in text
    refuse_differing(schema, ["id"], url_of)
    assert [batch.to_pylist() for batch in read_back(manifest, ["id"])] == [
        [{"id": at}] for at in range(3)
    ]


@pytest.mark.parametrize("writer", WRITERS)
def test_columns_that_some_shards_lack_are_refused_only_if_they_are_read(
    tmp_path: Path, writer: str
) -> None:
    rows = 100_000  # large enough for places of columns
    tables = [
        pa.table({"a": [1] * rows, "old": [1.5] * rows}),
        pa.table({"new": ["x"] * rows, "a": [2] * rows}),
        pa.table({"a": [3] * rows}),
    ]
    for at, table in enumerate(tables):
        (tmp_path / f"{at}.{writer}").write_bytes(WRITERS[writer](table))
    manifest = index_dataset(tmp_path)
    schema = schema_of(manifest)
    assert {field.name: differing(field) for field in schema} == {
        "a": None,
        "old": Difference((0, 1), ("double", "")),
        "new": Difference((0, 1), ("", "string")),
    }
    found = [batch.column("a") for batch in read_back(manifest, ["a"])]
    assert [value for column in found for value in column.unique().to_pylist()] == [1, 2, 3]
    with pytest.raises(SchemaMismatch, match=r"0\.\w+ has no such column, this shard has string"):
        refuse_differing(schema, ["new"], manifest.shards.urls.__getitem__)


def test_a_copy_of_a_dataset_with_different_shards_has_the_same_content(tmp_path: Path) -> None:
    found = []
    for place in ("here", "there"):
        folder = tmp_path / place
        folder.mkdir()
        manifest, _ = stored_as(folder, [pa.int8(), pa.int16()], 1, "parquet")
        found.append(manifest)
    assert found[0].schema == found[1].schema
    assert identity_of(found[0]).layout == identity_of(found[1]).layout


def test_shards_without_samples_have_no_say(tmp_path: Path) -> None:
    shards = [
        pa.table({"id": pa.array([], pa.float64())}),
        pa.table({"id": [1], "x": ["a"]}),
        pa.table({"x": pa.nulls(0), "z": pa.nulls(0)}),
    ]
    for at, table in enumerate(shards):
        (tmp_path / f"{at}.parquet").write_bytes(parquet_bytes(table))
    manifest = index_dataset(tmp_path)
    assert schema_of(manifest).equals(shards[1].schema)
    assert [batch.to_pylist() for batch in read_back(manifest)] == [[{"id": 1, "x": "a"}]]


@given(
    st.lists(
        st.dictionaries(
            st.sampled_from("abc"),
            st.sampled_from([*TEXTS, pa.int64(), pa.list_(pa.int8()), pa.large_list(pa.int8())]),
        ),
        min_size=1,
        max_size=5,
    ),
    st.randoms(),
)
def test_the_schema_depends_on_the_shards_alone(columns: list[dict], chance: Any) -> None:
    schemas = [pa.schema([("id", pa.int8()), *each.items()]) for each in columns]
    order = list(range(len(schemas)))
    found = []
    for _ in range(3):
        shared = SharedSchema(str)
        for shard in order:
            shared.note(shard, schemas[shard], has_rows=True)
        found.append(shared.merged())
        chance.shuffle(order)
    assert all(each.equals(found[0], check_metadata=True) for each in found)
    for field in found[0]:
        here = [s.field(field.name).type for s in schemas if field.name in s.names]
        if differing(field) is None:
            assert len(here) == len(schemas)
            assert all(is_readable_as(kind, field.type) for kind in here)
    if all(schema.equals(schemas[0]) for schema in schemas):
        assert found[0] is schemas[0]


def test_each_distinct_schema_is_merged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(
        "dataplane.index.shared_schema.joint_type",
        lambda kind, other: calls.append((kind, other)) or joint_type(kind, other),
    )
    shared = SharedSchema(str)
    kinds = itertools.cycle([pa.string(), pa.large_string(), pa.string_view()])
    for shard, kind in zip(range(3000), kinds, strict=False):
        shared.note(shard, pa.schema([("x", kind)]), has_rows=True)
    assert shared.merged().field("x").type == pa.large_string()
    assert len(calls) < 10


@pytest.mark.parametrize("families", [FAMILIES, ONLY_ARROW])
def test_joint_types_are_stable(families: dict[str, tuple[list[pa.DataType], Any]]) -> None:
    for kinds, _ in families.values():
        for kind, other in itertools.product(kinds, kinds):
            joint = joint_type(kind, other)
            assert joint is not None
            assert is_readable_as(kind, joint)
            assert is_readable_as(other, joint)
            if kind == other:
                assert same_type(kind, joint)


# --- types that no writer stored --------------------------------------------------------------


CHATS = [
    [{"messages": [{"role": "user", "content": "hi"}], "n": 1, "tags": [], "note": None}],
    [{"messages": [{"role": "tool", "name": "f", "call": {"x": 1}}], "n": 1.5, "tags": ["a"]}],
    [{"messages": [], "n": 2, "note": "x", "tags": None, "more": {"a": []}}],
    [{"more": {"a": [1], "b": True}, "n": 1 << 40}],
]


def filled(value: Any, kind: pa.DataType) -> Any:
    """A JSON value with None for each key that it lacks."""
    if value is None:
        return None
    if pa.types.is_struct(kind):
        return {field.name: filled(value.get(field.name), field.type) for field in kind}
    return [filled(each, kind.value_type) for each in value] if pa.types.is_list(kind) else value


@pytest.mark.parametrize("order", list(itertools.permutations(range(len(CHATS)))))
def test_json_lines_have_the_fields_of_all_shards(tmp_path: Path, order: tuple[int, ...]) -> None:
    rows = [CHATS[at] for at in order]
    for at, lines in enumerate(rows):
        (tmp_path / f"{at}.jsonl").write_bytes(json_lines(lines))
    manifest = index_dataset(tmp_path)
    schema = schema_of(manifest)
    assert schema.field("n").type == pa.float64()
    assert schema.field("tags").type == pa.list_(pa.string())
    found = [row for batch in read_back(manifest) for row in batch.to_pylist()]
    whole = pa.struct(list(schema))
    assert found == [filled(row, whole) for lines in rows for row in lines]


@pytest.mark.parametrize(
    ("first", "second", "kinds"),
    [
        (1, "x", ("int64", "string")),
        ([1], 1, ("list<item: int64>", "int64")),
        ([1], ["x"], ("list<item: int64>", "list<item: string>")),
        ({"a": 1}, {"a": "x"}, ("struct<a: int64>", "struct<a: string>")),
        (True, 1, ("bool", "int64")),
    ],
)
def test_json_fields_that_contradict_are_refused_only_if_they_are_read(
    tmp_path: Path, first: object, second: object, kinds: tuple[str, str]
) -> None:
    for at, value in enumerate((None, first, second)):
        (tmp_path / f"{at}.jsonl").write_bytes(json_lines([{"id": at, "x": value}]))
    manifest = index_dataset(tmp_path)
    schema = schema_of(manifest)
    assert differing(schema.field("x")) == Difference((1, 2), kinds)
    with pytest.raises(SchemaMismatch, match=r"2\.jsonl: column 'x': \S+1\.jsonl has"):
        refuse_differing(schema, ["x"], manifest.shards.urls.__getitem__)
    found = [row for batch in read_back(manifest, ["id"]) for row in batch.to_pylist()]
    assert found == [{"id": 0}, {"id": 1}, {"id": 2}]


def test_a_later_line_that_does_not_fit_is_named_if_shards_differ_too(tmp_path: Path) -> None:
    (tmp_path / "0.jsonl").write_bytes(json_lines([{"id": 1, "x": 1}]))
    (tmp_path / "1.jsonl").write_bytes(json_lines([{"id": 2, "x": "a"}]))
    schema = schema_of(index_dataset(tmp_path))
    content = json_lines([{"id": 2, "x": {}}, {"id": 2.5, "x": {}}])
    with pytest.raises(SchemaMismatch, match="line 2: does not fit the dataset's schema"):
        read_rows(registry.by_name("jsonl"), content, schema=schema, columns=["id"])


def test_a_feature_with_several_values_in_any_shard_is_a_list(tmp_path: Path) -> None:
    for at, values in enumerate(([1], [1, 2], [])):
        record = example_bytes({"x": ("int64_list", values), "id": ("int64_list", [at])})
        (tmp_path / f"{at}.tfrecord").write_bytes(tfrecord_bytes([record]))
    manifest = index_dataset(tmp_path)
    assert schema_of(manifest).field("x").type == pa.list_(pa.int64())
    assert values_of(list(read_back(manifest))) == [[1], [1, 2], []]


def test_a_feature_that_the_first_shard_lacks_is_a_column(tmp_path: Path) -> None:
    for at, more in enumerate(({}, {"b": ("bytes_list", [b"x"])}, {"a": ("int64_list", [7])})):
        record = example_bytes({"id": ("int64_list", [at]), **more})
        (tmp_path / f"{at}.tfrecord").write_bytes(tfrecord_bytes([record]))
    manifest = index_dataset(tmp_path)
    found = [row for batch in read_back(manifest) for row in batch.to_pylist()]
    assert found == [
        {"id": 0, "b": None, "a": None},
        {"id": 1, "b": b"x", "a": None},
        {"id": 2, "b": None, "a": 7},
    ]


def test_a_tar_dataset_has_the_fields_of_all_its_shards_and_one_column_of_images() -> None:
    def merged(*shards: Sequence[str]) -> list[str]:
        schemas = SharedSchema(str)
        for number, names in enumerate(shards):
            content = tar_bytes([(name, b"1") for name in names])
            schemas.note(number, Tar().index(MemoryShard(content)).schema, has_rows=True)
        return schemas.merged().names

    first = ("1.jpg", "1.cls")
    assert merged(first, ("2.jpeg", "2.cls", "2.txt"), ("3.jpg",)) == [
        "__key__",
        "jpg",
        "cls",
        "txt",
    ]
    assert merged(("1.jpg", "2.png"), ("3.png",), ("4.jpe",)) == ["__key__", "jpg"]
    assert merged(first, ("2.png", "2.cls")) == ["__key__", "jpg", "cls"]
    assert merged(("1.txt",), ("2.png", "2.txt")) == ["__key__", "txt", "png"]
