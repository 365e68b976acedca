"""Tables of very many columns: a node's work grows linearly with the columns."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from raw_trainer import Node, Trainer

from dataplane.formats import registry
from dataplane.formats.base import RawBlock
from dataplane.formats.conform import check_columns, check_shard
from dataplane.index.indexing import index_dataset
from dataplane.model.config import JobSpec
from dataplane.model.errors import ConfigError
from dataplane.model.records import ColumnOptions
from dataplane.node.dataset import dataset_of
from dataplane.node.datasets import Datasets
from dataplane.plan.manifest import Manifest
from dataplane.settings import default_node_config
from dataplane.transforms.columns import plan_columns
from dataplane.worker.row_layout import (
    may_have_nulls,
    open_stored,
    placed_columns,
    plan_row_layout,
    store,
    stored_bytes,
)

FEW = 60
WIDE = 8_000


def table(columns: int) -> pa.Table:
    names = [f"feature_{i}" for i in range(columns)]
    return pa.Table.from_arrays([pa.array(np.arange(8, dtype=np.float32))] * columns, names)


def shard_of(path: Path, wide: pa.Table) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(wide, path, use_dictionary=False)
    else:
        with pa.ipc.new_file(str(path), wide.schema) as writer:
            writer.write_table(wide)
    return path


def manifest_of(folder: Path, columns: int) -> Manifest:
    return index_dataset(str(shard_of(folder / f"{columns}.arrow", table(columns))))


def calls(work: Callable[[], object]) -> int:
    """How many functions are called, Python's and C's."""
    count = 0

    def counted(_frame: Any, event: str, _arg: object) -> None:
        nonlocal count
        count += event in {"call", "c_call"}

    before = sys.getprofile()
    sys.setprofile(counted)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


class Counted:
    """A schema that counts how often all of its names are listed, which takes time for each."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        self.lists = 0

    @property
    def names(self) -> list[str]:
        self.lists += 1
        return list(self._schema.names)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._schema, name)

    def __iter__(self) -> Iterator[pa.Field]:
        return iter(self._schema)

    def __len__(self) -> int:
        return len(self._schema)


def test_opening_a_dataset_takes_as_many_calls_more_as_it_has_columns_more(tmp_path: Path) -> None:
    def opened(columns: int) -> Callable[[], object]:
        manifest = manifest_of(tmp_path, columns)
        spec = JobSpec(manifest.fingerprint, shuffle=True)
        return lambda: dataset_of(1, manifest, spec, packed=True)

    opened(FEW)()  # what is done once in a process
    once, fourfold = calls(opened(FEW)), calls(opened(4 * FEW))
    assert fourfold < 5 * once


def test_checking_a_shard_takes_as_many_calls_more_as_it_has_columns_more() -> None:
    def checked(columns: int) -> Callable[[], object]:
        schema = table(columns).schema
        return lambda: check_shard(schema, schema, schema.names, "a")

    assert calls(checked(4 * FEW)) < 5 * calls(checked(FEW))


@pytest.mark.parametrize("form", ["arrow", "parquet"])
def test_a_block_of_numbers_is_decoded_without_work_per_column(tmp_path: Path, form: str) -> None:
    def stored(columns: int) -> Callable[[], object]:
        wide = table(columns)
        shard = shard_of(tmp_path / f"{columns}.{form}", wide)
        manifest = index_dataset(str(shard))
        dataset = dataset_of(1, manifest, JobSpec(manifest.fingerprint), packed=True)
        schema = pa.ipc.read_schema(pa.py_buffer(manifest.schema))
        chosen, plan = registry.by_name(form), dataset.columns
        row_layout = plan_row_layout(plan.specs)
        raw, content = dataset.raw_block(0, None), memoryview(shard.read_bytes())
        preamble, body = raw.preamble_place, raw.place
        block = RawBlock(
            raw.url, 0, raw.rows, body, raw.shard_bytes, preamble,
            content[preamble.offset : preamble.offset + preamble.length],
            content[body.offset : body.offset + body.length],
        )  # fmt: skip

        def decoded() -> memoryview:
            batch = chosen.decode(block, schema, plan.leaves.top_level)
            places = placed_columns(batch)
            assert plan.is_plain
            assert not may_have_nulls(places)
            region = memoryview(bytearray(stored_bytes(batch, row_layout)))
            store(batch, plan.specs, row_layout, region, places=places)
            return region

        rows = open_stored(decoded(), plan.specs, row_layout).values[-1].view.reshape(8, -1)
        values = rows[:, : 4 * columns].reshape(-1).view(np.float32).reshape(8, columns)
        assert (values == np.arange(8)[:, None]).all()
        return decoded

    stored(FEW)()  # what is done once in a process
    # pyarrow itself asks for the path and the pages of each column of a Parquet file.
    own = 12 * 3 * FEW if form == "parquet" else FEW
    assert calls(stored(4 * FEW)) < calls(stored(FEW)) + own


def test_indexing_a_shard_of_numbers_takes_two_calls_for_each_column_at_most(
    tmp_path: Path,
) -> None:
    def indexed(columns: int) -> Callable[[], object]:
        shard = shard_of(tmp_path / f"{columns}.arrow", table(columns))
        return lambda: index_dataset(str(shard))

    indexed(FEW)()
    assert calls(indexed(4 * FEW)) < calls(indexed(FEW)) + 2 * 3 * FEW


def test_places_of_columns_are_those_that_pyarrow_reports() -> None:
    plain, some = pa.array([1.0, 2.0, 3.0, 4.0]), pa.array([1, None, 3, None], pa.int32())
    batch = pa.record_batch({"a": plain, "b": some, "c": pa.nulls(4)})
    for part in (batch, batch.slice(1, 2)):
        places = placed_columns(part)
        assert places[:, :3].tolist() == [
            [len(array), places[at, 1], array.offset] for at, array in enumerate(part.columns)
        ]
        assert places[0, 1] == 0  # no validity, no nulls
        assert places[1, 1] in {part.column(1).null_count, -1}
        assert places[:2, 3].tolist() == [part.column(i).buffers()[1].address for i in range(2)]
        assert may_have_nulls(places)


def test_a_table_of_numbers_with_nulls_is_filled_like_any_other(tmp_path: Path) -> None:
    """The way for blocks without nulls is not taken."""
    columns = {f"c{i}": pa.array([i, None, 3, 4], pa.int32()) for i in range(6)}
    shard = shard_of(tmp_path / "nulls.arrow", pa.table(columns))
    fills = tuple((name, 9.0) for name in columns)
    with Node(tmp_path, worker_count=1) as node, Trainer(node) as trainer:
        options = ColumnOptions(fill_null=fills)
        trainer.open(str(shard), shuffle=True, global_batch=4, column_options=options)
        first = trainer.values(next(trainer.slabs()))[0]
        assert [sorted(map(int, column)) for column in first] == [
            sorted([i, 9, 3, 4]) for i in range(6)
        ]
        trainer.close()


def test_the_names_of_all_columns_are_not_listed_for_each_of_them() -> None:
    schema = Counted(table(FEW).schema)
    names = [field.name for field in schema]
    check_columns(schema, names)
    check_shard(schema, schema, names, "a")
    plan_columns(schema)
    assert schema.lists < FEW / 10


def test_the_error_about_an_unknown_column_lists_some_that_exist() -> None:
    with pytest.raises(ConfigError, match=r"'other'; it has feature_0, .*feature_99 and 400 more"):
        check_columns(table(500).schema, ["other"])


def test_a_table_is_planned_beside_the_event_loop(tmp_path: Path) -> None:
    """The event loop keeps serving other trainers: its own thread does no work per column."""

    def opened(columns: int) -> Callable[[], object]:
        manifest = manifest_of(tmp_path, columns)
        spec = JobSpec(manifest.fingerprint, shuffle=True)

        async def scene() -> None:  # whose result asyncio.run() would print to itself
            await Datasets(default_node_config()).open(manifest, spec, {})

        return lambda: asyncio.run(scene())

    opened(FEW)()
    assert calls(opened(4 * FEW)) < calls(opened(FEW)) + FEW


async def test_a_table_is_planned_once_for_equal_jobs(tmp_path: Path) -> None:
    manifest = manifest_of(tmp_path, FEW)
    spec = JobSpec(manifest.fingerprint, shuffle=True)

    datasets = Datasets(default_node_config())
    first, second = await asyncio.gather(*(datasets.open(manifest, spec, {}) for _ in range(2)))
    assert first is second is await datasets.open(manifest, spec, {})
    other = JobSpec(manifest.fingerprint, shuffle=True, seed=1)
    assert await datasets.open(manifest, other, {}) is first  # they share blocks
    datasets.forget(first)
    assert not len(datasets)


async def test_a_table_whose_planning_failed_is_planned_again(tmp_path: Path) -> None:
    manifest = manifest_of(tmp_path, FEW)
    wrong = JobSpec(manifest.fingerprint, column_options=ColumnOptions(("no such",)))

    datasets = Datasets(default_node_config())
    for _ in range(2):
        with pytest.raises(ConfigError, match="no such"):
            await datasets.open(manifest, wrong, {})
    assert not len(datasets)
    assert await datasets.open(manifest, JobSpec(manifest.fingerprint), {})


def test_a_table_with_more_columns_than_fit_a_packet_is_read(tmp_path: Path) -> None:
    """The names of 8,000 columns do not fit one packet."""
    wide = table(WIDE)
    path = shard_of(tmp_path / "a.arrow", wide)
    with Node(tmp_path, worker_count=1) as node, Trainer(node) as trainer:
        columns = trainer.open(str(path)).columns
        assert [column.name for column in columns] == wide.schema.names
        first = next(trainer.slabs())
        assert {tuple(values) for values in trainer.values(first)[0]} == {(0.0, 1.0, 2.0, 3.0)}
        trainer.close()
