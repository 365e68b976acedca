"""Views over real nodes: some rows of a dataset, in every format, on any number of ranks."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from dataplane_torch import DataLoader, Mixture, Source
from shards import WRITERS, parquet_bytes

from dataplane.model.errors import ConfigError, SpecMismatch

pytestmark = pytest.mark.usefixtures("shared_node")
ROWS = 120


def written(folder: Path, suffix: str = "arrow", shards: int = 2) -> str:
    folder.mkdir(exist_ok=True)
    for shard in range(shards):
        rows = [{"id": shard * ROWS + i, "x": i / 2} for i in range(ROWS)]
        (folder / f"{shard}.{suffix}").write_bytes(WRITERS[suffix](rows))
    return str(folder)


def read(url: str, **given: Any) -> list[int]:
    """The ids of an epoch, in order."""
    with DataLoader(url, batch_size=16, columns=["id"], **given) as loader:
        batches = list(loader)
        assert len(batches) == len(loader)
    return [int(value) for batch in batches for value in batch["id"]]


@pytest.mark.parametrize("suffix", WRITERS)
def test_splits_samples_and_limits_have_their_rows_in_every_format(
    tmp_path: Path, suffix: str
) -> None:
    url = written(tmp_path / "d", suffix)
    every = list(range(2 * ROWS))
    train, validation = (read(url, split=one) for one in (("train", 0.8), ("validation", 0.2)))
    assert sorted(train + validation) == every
    assert train == sorted(train)
    assert 0 < len(validation) < len(train)
    assert read(url, limit=ROWS + 7) == every[: ROWS + 7]
    both = read(url, sample=0.5, split=("train", 0.8))
    assert both == [row for row in read(url, sample=0.5) if row in set(train)]
    assert read(url, sample=0.5, split=("train", 0.8), limit=5) == both[:5]


@pytest.mark.parametrize("suffix", WRITERS)
def test_conditions_have_their_rows_in_every_format(tmp_path: Path, suffix: str) -> None:
    url = written(tmp_path / "d", suffix)
    expected = [row for row in range(2 * ROWS) if row % 3 == 1 and row > 50]
    assert read(url, where="id % 3 == 1 and id > 50") == expected
    assert read(url, where="id < 3 or id >= 235") == [0, 1, 2, *range(235, 240)]  # empty blocks
    train = read(url, where="id % 3 == 1", split=("train", 0.6), shuffle=True)
    other = read(url, where="id % 3 == 1", split=("validation", 0.4))
    assert sorted(train + other) == list(range(1, 2 * ROWS, 3))


def test_mistakes_in_a_condition_are_told_when_the_loader_is_made_or_opened(tmp_path: Path) -> None:
    url = written(tmp_path / "d")
    with pytest.raises(ConfigError, match="at the end: expected a column"):
        DataLoader(url, where="id ==")
    for where, says in {"idd > 1": "did you mean 'id'", "id == 'x'": "id .int64.: it is compared",
                        "id > 1000": "none of the 240 rows"}.items():  # fmt: skip
        with pytest.raises(ConfigError, match=says):
            read(url, where=where)


def test_a_condition_that_rules_out_nulls_needs_no_values_for_them(tmp_path: Path) -> None:
    rows = [{"id": i if i % 3 else None, "label": i % 2 or None} for i in range(60)]
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "0.parquet").write_bytes(WRITERS["parquet"](rows))
    url = str(tmp_path / "d")
    with pytest.raises(ConfigError, match="'id'"):
        read(url, where="label is not null")
    expected = [i for i in range(60) if i % 3 and i % 2]
    assert read(url, where="label is not null and id >= 0") == expected


def test_codes_are_those_of_the_whole_dataset_whatever_the_view(tmp_path: Path) -> None:
    rows = [{"id": i, "kind": "abc"[i % 3]} for i in range(30)]
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "0.parquet").write_bytes(WRITERS["parquet"](rows))
    with DataLoader(
        str(tmp_path / "d"), codes=["kind"], where="kind == 'c'", batch_size=30
    ) as some:
        assert some.categories("kind") == ("a", "b", "c")
        assert next(iter(some))["kind"].tolist() == [2] * 10


def test_codes_of_a_mixture_are_those_of_all_its_sources(tmp_path: Path) -> None:
    for name, kinds in (("one", "ac"), ("two", "bcd")):
        (tmp_path / name).mkdir()
        rows = [{"id": i, "kind": kinds[i % len(kinds)]} for i in range(30)]
        (tmp_path / name / "0.parquet").write_bytes(WRITERS["parquet"](rows))
    one, two = (Source(tmp_path / name, weight=0.5) for name in ("one", "two"))
    mixture = Mixture({"one": one, "two": two}, source_column="from")
    with DataLoader(mixture, batch_size=12, codes=["kind"], shuffle=True) as loader:
        values, count = loader.categories("kind"), 0
        assert values == ("a", "b", "c", "d")
        for batch in loader:
            columns = (batch[name].tolist() for name in ("id", "kind", "from"))
            for row, code, source in zip(*columns, strict=True):
                kinds = ("ac", "bcd")[source]
                assert values[code] == kinds[row % len(kinds)]
                count += 1
    assert count == 60
    with DataLoader(str(tmp_path / "one"), batch_size=30, codes=["kind"]) as alone:
        assert alone.categories("kind") == ("a", "c")
        assert next(iter(alone))["kind"].tolist() == [0, 1] * 15
    table = pa.table({"id": [1], "kind": [7]})
    (tmp_path / "three").mkdir()
    (tmp_path / "three" / "0.parquet").write_bytes(parquet_bytes(table, row_group_size=1))
    mixture = Mixture({"one": one, "three": Source(tmp_path / "three", weight=0.5)})
    with pytest.raises(ConfigError, match="has text in source 'one' and int64 in 'three'"):
        next(iter(DataLoader(mixture, batch_size=2, codes=["kind"])))


def test_sources_of_a_mixture_have_views_of_their_own(tmp_path: Path) -> None:
    url = written(tmp_path / "d")
    sources = {
        "low": Source(url, weight=0.5, where="id < 60"),
        "high": Source(url, weight=0.5, where="id >= 120", limit=60),
    }
    with DataLoader(Mixture(sources), batch_size=20, columns=["id"], shuffle=True) as loader:
        ids = [int(value) for batch in loader for value in batch["id"]]
    assert sorted(ids) == [*range(60), *range(120, 180)]


def test_a_view_resumes_exactly_and_refuses_the_state_of_another(tmp_path: Path) -> None:
    url = written(tmp_path / "d")
    view = {"batch_size": 16, "shuffle": True, "split": ("train", 0.75)}
    with DataLoader(url, **view) as loader:
        whole = [batch["id"].tolist() for batch in loader]
    with DataLoader(url, **view) as loader:
        passed = iter(loader)
        head = [next(passed)["id"].tolist() for _ in range(3)]
        state = loader.state_dict()
    with DataLoader(url, **view) as loader:
        loader.load_state_dict(state)
        assert head + [batch["id"].tolist() for batch in loader] == whole
    with (
        DataLoader(url, where="id > 3", **view) as other,
        pytest.raises(SpecMismatch, match=r"loader: where: not given in the state, id > 3 here\. "),
    ):
        other.load_state_dict(state)
    with (
        DataLoader(url, **{**view, "split": ("train", 0.5)}) as other,
        pytest.raises(SpecMismatch, match=r"loader: split_to: 0\.75 in the state, 0\.5 here\. To"),
    ):
        other.load_state_dict(state)


def test_a_view_without_rows_is_refused(tmp_path: Path) -> None:
    url = written(tmp_path / "d")
    with pytest.raises(ConfigError, match=rf"none of the 240 rows of .*{url}.* is left by sample"):
        read(url, sample=1e-9)


OPTIONS: list[dict[str, Any]] = [
    {"fill_null": -1, "lists": "ragged", "shuffle": True},
    {"nulls": "mask", "max_length": 2, "pad_value": 9},
    {"columns": ["id"], "stack": {"s": ["a", "b", "c", "x"]}, "fill_null": 0, "shuffle": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=["ragged", "masked", "stacked and shuffled"])
@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_a_view_is_delivered_as_a_dataset_of_only_its_rows(
    tmp_path: Path, suffix: str, options: dict[str, Any]
) -> None:
    rows = [
        {"id": i, "a": i / 2, "b": float(-i), "c": i * 1.5, "x": i / 3, "n": i if i % 5 else None,
         "tokens": list(range(i % 4)), "text": f"row {i}" if i % 7 else None,
         "meta": {"kind": "abc"[i % 3], "ok": i % 2 == 0}}
        for i in range(ROWS)
    ]  # fmt: skip
    left = [row for row in rows if row["meta"]["kind"] != "b" and 1 in row["tokens"]]
    for name, some in {"all": rows, "left": left}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / f"0.{suffix}").write_bytes(WRITERS[suffix](some))

    def of(name: str, **view: str) -> list[list[str]]:
        with DataLoader(str(tmp_path / name), batch_size=ROWS, **options, **view) as loader:
            (batch,) = loader
        columns = {one: values for one, values in batch.items() if "offsets" not in dir(values)}
        ragged = {one: _lists(values) for one, values in batch.items() if one not in columns}
        return sorted([repr(list(value)) for value in zip(*[
            values.tolist() if hasattr(values, "tolist") else values
            for values in (columns | ragged).values()
        ], strict=True)])  # fmt: skip

    where = "meta.kind != 'b' and any(t == 1 for t in tokens)"
    assert of("all", where=where) == of("left")


def _lists(ragged: Any) -> list[list[int]]:
    bounds = ragged.offsets.tolist()
    return [ragged.values[a:b].tolist() for a, b in itertools.pairwise(bounds)]
