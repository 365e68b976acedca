"""Columns in another type than the stored one, over a node: what an embedding takes."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch
from dataplane_torch import DataLoader, Mixture, Pack, Ragged, ShardedIterableDataset, Source
from fleet import own_nodes
from shards import WRITERS, arrow_bytes, parquet_bytes

from dataplane.model.errors import ConfigError, SchemaMismatch, SpecMismatch

pytestmark = pytest.mark.usefixtures("shared_node")

LISTS = [[], [1], [2, 65_535, 4], [5, 6], None, [10, 11]]
FIXED = [[3 * row, 3 * row + 1, 65_535] for row in range(6)]
ROWS = pa.table(
    {
        "tokens": pa.array(LISTS, pa.list_(pa.uint16())),
        "vector": pa.array(FIXED, pa.list_(pa.uint16(), 3)),
        "id": pa.array(range(6), pa.uint32()),
        "text": [f"text {row}" for row in range(6)],
    }
)
INT64 = {"tokens": torch.int64, "vector": "int64"}


def doubled(columns: dict[str, pa.Array]) -> dict[str, pa.Array]:
    """A map."""
    return {"twice": pc.multiply(columns["id"], 2).cast(pa.uint16())}


@pytest.fixture(params=["parquet", "arrow"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    written = tmp_path / f"rows.{request.param}"
    if request.param == "parquet":
        written.write_bytes(parquet_bytes(ROWS, row_group_size=4))
    else:
        written.write_bytes(arrow_bytes(ROWS, rows=4))  # uncompressed: read in place without a cast
    return str(written)


def test_an_embedding_takes_lists_of_uint16_once_they_are_converted(url: str) -> None:
    embedding = torch.nn.Embedding(1 << 16, 2)
    lists = [row or [] for row in LISTS]
    with DataLoader(url, 3, columns=["tokens", "vector"]) as loader:
        stored = list(loader)
        assert {batch[name].dtype for batch in stored for name in INT64} == {torch.uint16}
        with pytest.raises(RuntimeError, match="UInt16"):
            embedding(stored[0]["vector"])
        state = loader.state_dict()
    # Both jobs at once, so that their blocks are in memory together.
    with (
        DataLoader(url, 3, dtype=INT64, pad_value={"tokens": 65_000}) as loader,
        DataLoader(url, 3, dtype={"tokens": "float32"}, lists="ragged") as others,
    ):
        for at, (batch, other) in enumerate(zip(loader, others, strict=True)):
            rows = slice(3 * at, 3 * at + 3)
            width = max(map(len, lists[rows]))
            padded = [[*row, *[65_000] * (width - len(row))] for row in lists[rows]]
            assert batch["tokens"].dtype == batch["vector"].dtype == torch.int64
            assert batch["tokens"].tolist() == padded
            assert batch["vector"].tolist() == FIXED[rows]
            assert batch["id"].dtype == torch.uint32
            assert embedding(batch["tokens"]).shape == (3, width, 2)
            assert embedding(batch["vector"]).shape == (3, 3, 2)
            assert isinstance(other["tokens"], Ragged)
            assert other["tokens"].values.dtype == torch.float32
            assert other["tokens"].values.tolist() == [float(n) for row in lists[rows] for n in row]
            assert other["vector"].dtype == torch.uint16
        assert loader.schema["tokens"].described == "int64 [B, T]"
        assert loader.schema["tokens"].stored_type.endswith(": uint16>")
        with pytest.raises(SpecMismatch, match="dtype: not given in the state"):
            loader.load_state_dict(state)


def test_columns_of_maps_and_codes_are_converted_and_packs_have_an_option_of_their_own(
    url: str,
) -> None:
    with DataLoader(url, 6, map=doubled, dtype={"twice": "int32"}) as loader:
        (batch,) = loader
    assert batch["twice"].dtype == torch.int32
    assert batch["twice"].tolist() == [0, 2, 4, 6, 8, 10]
    options = {"codes": ["text"], "columns": ["text"], "dtype": {"text": "int16"}}
    with DataLoader(url, 6, **options) as loader:
        (batch,) = loader
    assert batch["text"].dtype == torch.int16
    assert batch["text"].tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(ConfigError, match=r"dtype=.* with pack=.* pass Pack\(…, dtype=…\)"):
        DataLoader(url, 1, pack=Pack("tokens", 8), dtype={"tokens": "int64"})


def test_sources_of_different_types_become_equal(tmp_path: Path) -> None:
    for name, kind in (("a", pa.uint16()), ("b", pa.int64())):
        table = pa.table({"tokens": pa.array([[1, 2], [3]] * 4, pa.list_(kind))})
        (tmp_path / f"{name}.parquet").write_bytes(parquet_bytes(table))
    mixture = Mixture({name: Source(tmp_path / f"{name}.parquet", weight=1) for name in "ab"})
    with DataLoader(mixture, 4) as loader, pytest.raises(ConfigError, match="different columns"):
        len(loader)
    with DataLoader(mixture, 4, dtype={"tokens": "int32"}) as loader:
        assert {batch["tokens"].dtype for batch in loader} == {torch.int32}


def test_a_number_that_does_not_fit_ends_the_run_with_column_number_and_shard(url: str) -> None:
    suffix = Path(url).suffix
    said = rf"rows\{suffix}: a list of its block has 65535 in column 'tokens', which int16 cannot"
    with (
        DataLoader(url, 3, dtype={"tokens": "int16"}) as loader,
        pytest.raises(ConfigError, match=said),
    ):
        list(loader)
    with (
        DataLoader(url, 3, dtype={"token": "int64"}) as loader,
        pytest.raises(ConfigError, match=r"dtype names 'token'.* did you mean 'tokens'"),
    ):
        len(loader)


COUNTRIES = ["de", "fr", None, "ä", "", "de", "at"]
VALUES = ("", "at", "de", "fr", "ä")


def rows_from(start: int, count: int) -> list[dict[str, Any]]:
    return [{"txt": COUNTRIES[i % 7], "cls": i % 3 * 100} for i in range(start, start + count)]


def dictionaries(rows: Sequence[dict[str, Any]]) -> bytes:
    found = pa.Table.from_pylist(list(rows))
    coded = found["txt"].combine_chunks().dictionary_encode()
    return arrow_bytes(found.set_column(0, "txt", coded), rows=100)


def codes_of(rows: Sequence[dict[str, Any]], null: int = -1) -> list[int]:
    return [null if row["txt"] is None else VALUES.index(row["txt"]) for row in rows]


@pytest.mark.parametrize("suffix", WRITERS)
def test_codes_are_the_same_in_every_shard_and_run(tmp_path: Path, suffix: str) -> None:
    # Of a dictionary the second shard has other values, and in another order.
    parts = [rows_from(0, 9), rows_from(3, 9)]
    for number, rows in enumerate(parts):
        content = dictionaries(rows) if suffix == "arrow" else WRITERS[suffix](rows)
        (tmp_path / f"{number}.{suffix}").write_bytes(content)
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
def test_values_are_read_once_and_remembered_and_come_from_the_node_after_a_killed_one(
    tmp_path: Path,
) -> None:
    path, expected = tmp_path / "rows.arrow", codes_of(rows_from(0, 50))
    path.write_bytes(dictionaries(rows_from(0, 50)))
    others = set(own_nodes())
    for kills in (False, False, True):
        with DataLoader(path, 7, codes=["txt"]) as loader:
            assert len(loader) == 8
            if kills:
                (node,) = set(own_nodes()) - others
                node.kill()
                node.wait()
            assert loader.schema["txt"].category_count == len(VALUES)
            assert loader.categories("txt") == VALUES
            (remembered,) = (tmp_path / "cache" / "categories").iterdir()
            assert torch.cat([b["txt"] for b in loader]).tolist() == expected
            state = loader.state_dict()
        remembered.write_bytes(remembered.read_bytes()[:-9])  # damaged: read again
    with (
        DataLoader(path, 7) as loader,
        pytest.raises(SpecMismatch, match=r"codes: .*txt.* in the state"),
    ):
        loader.load_state_dict(state)


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        (pa.string(), pa.list_),
        (pa.dictionary(pa.int8(), pa.string()), pa.large_list),
        (pa.int16(), pa.list_),
    ],
)
def test_values_of_lists_come_as_codes(tmp_path: Path, form: Any, kind: pa.DataType) -> None:
    words = [7, -3, 40, 5] if kind == pa.int16() else ["dog", "", "é", "cat"]
    lists = [
        None if i % 7 == 5 else [None if (i + j) % 9 == 4 else words[(i // 4 + j) % 4] for j in range(i % 4)]
        for i in range(60)
    ]  # fmt: skip
    for shard in range(2):
        some = lists[30 * shard : 30 * shard + 30]
        array = pa.array(some, form(kind.value_type if pa.types.is_dictionary(kind) else kind))
        table = pa.table({"id": range(30 * shard, 30 * shard + 30), "tags": array.cast(form(kind))})
        content = parquet_bytes(table, row_group_size=10)
        (tmp_path / f"{shard}.parquet").write_bytes(content)
    values = tuple(sorted(words, key=lambda word: word if kind == pa.int16() else word.encode()))
    expected = [
        [-1 if word is None else values.index(word) for word in words or ()] for words in lists
    ]
    options: dict[str, Any] = {"codes": ["tags"], "dtype": {"tags": "int32"}}
    with DataLoader(str(tmp_path), 8, True, lists="ragged", **options) as loader:
        assert loader.categories("tags") == values
        assert loader.schema["tags"].category_count == 4
        for batch in loader:
            assert batch["tags"].values.dtype == torch.int32
            starts = batch["tags"].offsets.tolist()
            for at, row in enumerate(batch["id"].tolist()):
                assert batch["tags"].values[starts[at] : starts[at + 1]].tolist() == expected[row]
    with DataLoader(str(tmp_path), 60, pad_value=-7, codes=["tags"], max_length=2) as loader:
        (batch,) = loader
    assert batch["tags"].tolist() == [([*codes, -7, -7])[:2] for codes in expected]


def test_many_values_come_in_several_answers(tmp_path: Path) -> None:
    texts = [f"value {i:06d} {'x' * 20}" for i in range(9000)]
    (tmp_path / "rows.parquet").write_bytes(parquet_bytes(pa.table({"t": texts[::-1]})))
    with DataLoader(str(tmp_path / "rows.parquet"), 100, codes=["t"]) as loader:
        assert loader.categories("t") == tuple(texts)
        assert next(iter(loader))["t"].tolist() == list(range(8999, 8899, -1))


def test_what_has_no_codes_is_told_by_name(tmp_path: Path) -> None:
    table = pa.table({"x": [1.5], "l": [[1.5]], "t": ["a"]})
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


TOKENS = [[], [1], [2, 3, 4], [5, 6, 7, 8, 9], None, [10, 11]]
MARKS = [[row / 2 for row in tokens or []] for tokens in TOKENS]
LIST_ROWS = pa.table(
    {
        "tokens": pa.array(TOKENS, pa.list_(pa.int32())),
        "marks": pa.array(MARKS, pa.large_list(pa.float16())),
        "flags": pa.array([[n % 2 == 1 for n in tokens or []] for tokens in TOKENS]),
        "id": range(len(TOKENS)),
    }
)


@pytest.fixture(params=["parquet", "arrow"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    written = tmp_path / f"rows.{request.param}"
    if request.param == "parquet":
        written.write_bytes(parquet_bytes(LIST_ROWS, row_group_size=4))
    else:
        written.write_bytes(arrow_bytes(LIST_ROWS, rows=4))
    return written


def padded(rows: list[list[Any]], value: Any) -> list[list[Any]]:
    width = max(map(len, rows))
    return [[*row, *[value] * (width - len(row))] for row in rows]


def cut(length: int, side: str) -> list[list[int]]:
    rows = [tokens or [] for tokens in TOKENS]
    return [row[:length] if side == "right" else row[max(0, len(row) - length) :] for row in rows]


@pytest.mark.parametrize("side", ["right", "left"])
def test_lists_are_cut_from_a_side_and_padded_with_a_value(path: Path, side: str) -> None:
    options = {"max_length": {"tokens": 3}, "truncation_side": side, "pad_value": -100}
    with DataLoader(str(path), batch_size=3, **options) as loader:
        batches = list(loader)
    rows = cut(3, side)
    for batch, at in zip(batches, (0, 3), strict=True):
        assert batch["tokens"].tolist() == padded(rows[at : at + 3], -100)
        assert batch["tokens"].dtype == torch.int32
        assert batch["tokens.length"].tolist() == [len(row) for row in rows[at : at + 3]]
        assert batch["flags"].dtype == torch.bool  # -100 is not a bool: zero
        flags = [[n % 2 == 1 for n in tokens or []] for tokens in TOKENS[at : at + 3]]
        assert batch["flags"].tolist() == padded(flags, value=False)
        assert batch["marks"].tolist() == padded(MARKS[at : at + 3], -100.0)


def test_ragged_lists_are_cut_alike(tmp_path: Path) -> None:
    (tmp_path / "rows.arrow").write_bytes(arrow_bytes(LIST_ROWS, rows=4))
    with DataLoader(str(tmp_path), 6, lists="ragged", max_length=2, columns=["tokens"]) as loader:
        (batch,) = loader
    assert batch["tokens"].values.tolist() == [n for row in cut(2, "right") for n in row]
    assert batch["tokens"].offsets.diff().tolist() == [len(row) for row in cut(2, "right")]


def test_a_value_for_each_column_may_be_nan_and_true(tmp_path: Path) -> None:
    (tmp_path / "rows.arrow").write_bytes(arrow_bytes(LIST_ROWS, rows=4))
    pads = {"marks": float("nan"), "flags": True}
    with DataLoader(str(tmp_path / "rows.arrow"), 6, pad_value=pads) as loader:
        (batch,) = loader
        assert not loader.load_state_dict(loader.state_dict())
    beyond = torch.arange(5)[None, :] >= batch["marks.length"][:, None]
    assert batch["marks"].isnan().equal(beyond)
    assert batch["flags"][beyond].all()
    assert not batch["tokens"][beyond].any()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_length": 0}, "max_length=0: pass a number of values"),
        ({"max_length": True}, "max_length=True: pass a number of values"),
        ({"max_length": 2.5}, "max_length=2.5: pass a number"),
        ({"max_length": {"tokens": "3"}}, r"max_length=\{'tokens': '3'\}"),
        ({"max_length": {3: 3}}, "3 is not the name of a column"),
        ({"pad_value": "x"}, "pad_value='x': pass a number"),
        ({"pad_value": {"tokens": None}}, r"pad_value=\{'tokens': None\}"),
        ({"pad_value": 1, "lists": "ragged"}, "ragged lists are not padded"),
        ({"truncation_side": "left"}, "without max_length"),
        ({"truncation_side": "start", "max_length": 3}, "choose one of right, left"),
        ({"columns": {"id": "int64"}, "dtype": {"id": "int32"}}, "name types in one of the two"),
    ],
)
def test_what_no_column_can_be_is_told_at_construction(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        DataLoader("s3://bucket/train/", 3, **options)


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_shards_whose_columns_drifted_are_read_as_one_dataset(tmp_path: Path, suffix: str) -> None:
    write = {"parquet": parquet_bytes, "arrow": arrow_bytes}[suffix]
    rows = 20_000  # enough for places of columns
    first = {"id": range(rows), "score": [1] * rows, "other": ["a" * 16] * rows}
    second = {
        "other": [None] * rows,
        "score": pa.array([2.5, None] * (rows // 2), pa.float32()),
        "id": pa.array(range(rows, 2 * rows), pa.int32()),
        "age": pa.array([30] * rows, pa.int8()),
    }
    for at, columns in enumerate((first, second)):
        (tmp_path / f"{at}.{suffix}").write_bytes(write(pa.table(columns)))

    def read(*names: str, **options: Any) -> dict[str, list[Any]]:
        with DataLoader(str(tmp_path), 1000, columns=[*names], **options) as loader:
            batches = list(loader)
        return {name: torch.cat([batch[name] for batch in batches]).tolist() for name in batches[0]}

    found = read("id", "score", where="id % 100 == 0")
    assert found["id"] == list(range(0, 2 * rows, 100))
    assert found["score"] == [1.0] * (rows // 100) + [2.5] * (rows // 100)
    assert {*read("age", "id", where="score < 2", fill_null={"age": -1})["age"]} == {-1}
    assert sorted(read("age", fill_null=-1, shuffle=True)["age"]) == [-1] * rows + [30] * rows
    with DataLoader(str(tmp_path), 1000, columns=["age", "other"], nulls="mask") as loader:
        missing = torch.cat([batch["age.is_null"] for batch in loader]).tolist()
    assert missing == [True] * rows + [False] * rows
    with pytest.raises(
        SchemaMismatch, match=r"0\.\w+ has no such column.*fill_null=\{\"age\": …\}"
    ):
        read("age")


def test_decimals_and_digits_become_numbers_exactly_or_are_refused(tmp_path: Path) -> None:
    big = "9007199254740993"  # no double
    table = pa.table(
        {
            "price": pa.array([Decimal("0.10"), None, Decimal("-3.05")], pa.decimal128(12, 2)),
            "whole": pa.array([Decimal("1.00")] * 3, pa.decimal128(12, 2)),
            "id": ["-7", "+12", big],
            "level": pa.array(["3", "1e2", "3"]).dictionary_encode(),
            "mixed": ["1", "2", "0x1F"],
        }
    )
    (tmp_path / "a.parquet").write_bytes(parquet_bytes(table))
    types = {"id": "int64", "price": "float32", "whole": "int16", "level": "float16"}
    with DataLoader(str(tmp_path), 3, columns=types, fill_null={"price": 0}) as loader:
        (batch,) = loader
    assert list(batch) == list(types)
    assert batch["id"].tolist() == [-7, 12, int(big)]
    assert torch.equal(batch["price"], torch.tensor([0.10, 0, -3.05]))
    assert (batch["whole"].dtype, batch["whole"].tolist()) == (torch.int16, [1, 1, 1])
    assert (batch["level"].dtype, batch["level"].tolist()) == (torch.float16, [3, 100, 3])
    for column, dtype, value in (
        ("mixed", "int64", "2 of its block has '0x1F'"),
        ("id", "int32", f"2 of its block has '{big}'"),
        ("price", "int64", "0 of its block has 0.10"),
    ):
        refused = pytest.raises(ConfigError, match=f"row {value} in column")
        options = {"columns": {column: dtype}, "fill_null": 0}
        with DataLoader(str(tmp_path), 3, **options) as loader, refused:
            list(loader)
