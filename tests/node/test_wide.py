"""Tables of very many columns: what a node does for them grows as they do, and no faster."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from raw_trainer import Node, Trainer

from dataplane.config import JobSpec
from dataplane.errors import ConfigError
from dataplane.formats.conform import check_columns, check_shard
from dataplane.model import ColumnOptions
from dataplane.node.dataset import dataset_of
from dataplane.node.datasets import Datasets
from dataplane.node.index import open_dataset
from dataplane.plan.manifest import Manifest
from dataplane.settings import default_node_config
from dataplane.transforms.columns import plan_columns

FEW = 60
WIDE = 8_000


def table(columns: int) -> pa.Table:
    names = [f"feature_{i}" for i in range(columns)]
    return pa.Table.from_arrays([pa.array(np.arange(8, dtype=np.float32))] * columns, names)


def manifest_of(folder: Path, columns: int) -> Manifest:
    path = folder / f"{columns}.arrow"
    wide = table(columns)
    with pa.ipc.new_file(str(path), wide.schema) as writer:
        writer.write_table(wide)
    return open_dataset(str(path))


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


def test_the_names_of_all_columns_are_not_listed_for_each_of_them() -> None:
    schema = Counted(table(FEW).schema)
    names = [field.name for field in schema]
    check_columns(schema, names)
    check_shard(schema, schema, names, "a")
    plan_columns(schema)
    assert schema.lists < FEW / 10


def test_a_column_that_is_not_there_is_told_with_some_of_those_that_are() -> None:
    with pytest.raises(ConfigError, match=r"'other'; it has feature_0, .*feature_99 and 400 more"):
        check_columns(table(500).schema, ["other"])


def test_a_table_is_planned_beside_the_event_loop(tmp_path: Path) -> None:
    """The loop, and with it every other trainer, goes on: its own thread has nothing to do for a
    column.
    """

    def opened(columns: int) -> Callable[[], object]:
        manifest = manifest_of(tmp_path, columns)
        spec = JobSpec(manifest.fingerprint, shuffle=True)

        async def scene() -> None:  # whose result asyncio.run() would print to itself
            await Datasets(default_node_config()).open(manifest, spec, {})

        return lambda: asyncio.run(scene())

    opened(FEW)()
    assert calls(opened(4 * FEW)) < calls(opened(FEW)) + FEW


def test_a_table_is_planned_once_for_equal_jobs(tmp_path: Path) -> None:
    manifest = manifest_of(tmp_path, FEW)
    spec = JobSpec(manifest.fingerprint, shuffle=True)

    async def scene() -> None:
        datasets = Datasets(default_node_config())
        first, second = await asyncio.gather(*(datasets.open(manifest, spec, {}) for _ in range(2)))
        assert first is second is await datasets.open(manifest, spec, {})
        other = JobSpec(manifest.fingerprint, shuffle=True, seed=1)
        assert await datasets.open(manifest, other, {}) is first  # they share blocks
        datasets.forget(first)
        assert not len(datasets)

    asyncio.run(scene())


def test_a_table_that_cannot_be_planned_is_planned_anew(tmp_path: Path) -> None:
    manifest = manifest_of(tmp_path, FEW)
    wrong = JobSpec(manifest.fingerprint, column_options=ColumnOptions(("no such",)))

    async def scene() -> None:
        datasets = Datasets(default_node_config())
        for _ in range(2):
            with pytest.raises(ConfigError, match="no such"):
                await datasets.open(manifest, wrong, {})
        assert not len(datasets)
        assert await datasets.open(manifest, JobSpec(manifest.fingerprint), {})

    asyncio.run(scene())


def test_a_table_with_more_columns_than_a_packet_can_tell_is_read(tmp_path: Path) -> None:
    """The names of 8,000 columns alone are more than a packet has."""
    path = tmp_path / "a.arrow"
    wide = table(WIDE)
    with pa.ipc.new_file(str(path), wide.schema) as writer:
        writer.write_table(wide)
    with Node(tmp_path, worker_count=1) as node, Trainer(node) as trainer:
        columns = trainer.open(str(path)).columns
        assert [column.name for column in columns] == wide.schema.names
        first = next(trainer.slabs())
        assert {tuple(values) for values in trainer.values(first)[0]} == {(0.0, 1.0, 2.0, 3.0)}
        trainer.close()
