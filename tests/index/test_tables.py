"""Tables of Delta Lake and Iceberg: the files of one version, as their own packages read them."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from dataplane_torch import DataLoader

from dataplane.commands.datasets import read_block, schema_of
from dataplane.index.indexing import index_dataset
from dataplane.model.errors import ConfigError
from dataplane.plan.manifest import Manifest
from dataplane.store.url_policy import UrlPolicy

DAY = dt.datetime(2026, 1, 2, tzinfo=dt.UTC)
ROWS = pa.table(
    {
        "id": [1, 2, 3, 4],
        "day": [dt.date(2026, 1, 1), dt.date(2026, 1, 1), dt.date(2026, 1, 2), None],
        "k": ["a b", "x/y", None, "__é%20"],
        "at": pa.array(
            [dt.datetime(2026, 1, 1, 12, 0, 0, 5, dt.UTC), None, *[DAY] * 2],
            pa.timestamp("us", "UTC"),
        ),
    }
)


def rows_of(manifest: Manifest) -> list[dict[str, Any]]:
    schema = schema_of(manifest)
    blocks = range(manifest.block_count)
    return [
        row for at in blocks for row in read_block(manifest, at, schema, schema.names).to_pylist()
    ]


def in_order(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: row["id"])


@pytest.fixture(scope="module", autouse=True)
def _begun(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Have deltalake open the descriptors that it keeps."""
    with contextlib.suppress(ImportError):
        import deltalake

        deltalake.write_deltalake(tmp_path_factory.mktemp("begun"), ROWS)


@pytest.fixture
def delta(tmp_path: Path) -> Path:
    """A table of three versions."""
    deltalake = pytest.importorskip("deltalake")
    path = tmp_path / "delta"
    deltalake.write_deltalake(path, ROWS, partition_by=["day", "k", "at"])
    more = ROWS.set_column(0, "id", pa.array([11, 12, 13, 14]))
    deltalake.write_deltalake(path, more, mode="append")
    deltalake.DeltaTable(path).delete("id = 2")
    return path


def test_a_delta_table_has_the_rows_and_types_that_deltalake_reads(delta: Path) -> None:
    import deltalake

    for version, name in ((0, "@0"), (1, "@1"), (2, "@2"), (2, "")):
        manifest = index_dataset(f"delta+{delta}{name}")
        theirs = pa.table(deltalake.DeltaTable(delta, version=version).to_pyarrow_table())
        ours = schema_of(manifest)
        assert {name: ours.field(name).type for name in theirs.schema.names} == dict(
            zip(theirs.schema.names, theirs.schema.types, strict=True)
        )
        assert in_order(rows_of(manifest)) == in_order(theirs.to_pylist())
        assert manifest.urls == (f"delta+file://{delta}@{version}",)


def test_a_version_of_a_delta_table_stays_as_it_was(delta: Path, tmp_path: Path) -> None:
    import deltalake

    manifest = index_dataset(f"delta+{delta}")
    saved = tmp_path / "a.manifest"
    saved.write_bytes(manifest.to_bytes())
    deltalake.write_deltalake(delta, ROWS, mode="append")
    assert index_dataset(manifest.urls) == index_dataset(saved) == manifest
    assert rows_of(index_dataset(saved)) == rows_of(manifest)
    assert index_dataset(f"delta+{delta}") != manifest


def test_a_loader_reads_a_delta_table_by_its_partitions(delta: Path) -> None:
    with DataLoader(f"delta+{delta}", 4, columns=["id"], where="day == '2026-01-02'") as loader:
        (batch,) = loader
        assert sorted(batch["id"].tolist()) == [3, 13]


def test_delta_tables_whose_files_are_not_their_rows_are_refused(delta: Path) -> None:
    with pytest.raises(ConfigError, match=r"is a Delta table.* pass 'delta\+"):
        index_dataset(delta)
    with pytest.raises(ConfigError, match="deltalake cannot open this version"):
        index_dataset(f"delta+{delta}@9")
    with pytest.raises(ConfigError, match="pass only it"):
        index_dataset([f"delta+{delta}", f"{delta}/x.parquet"])
    with pytest.raises(ConfigError, match="a node of a service opens no table"):
        UrlPolicy().check_names([f"delta+{delta}"])
    log = delta / "_delta_log" / f"{0:020}.json"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    for line in lines:
        if "metaData" in line:
            line["metaData"]["configuration"] = {"delta.columnMapping.mode": "name"}
    log.write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(ConfigError, match=r"other names of columns|cannot open"):
        index_dataset(f"delta+{delta}")


@pytest.fixture
def iceberg(tmp_path: Path) -> Any:
    """A table that is written, appended to, and of which a row was deleted."""
    sql = pytest.importorskip("pyiceberg.catalog.sql")
    pytest.importorskip("sqlalchemy")
    from pyiceberg.utils.concurrent import ExecutorFactory

    uri, place = f"sqlite:///{tmp_path}/catalog.db", f"file://{tmp_path}/w"
    catalog = sql.SqlCatalog("c", uri=uri, warehouse=place)
    catalog.create_namespace("n")
    table = catalog.create_table("n.t", schema=ROWS.schema)
    with table.update_spec() as spec:
        spec.add_identity("k")
    table.append(ROWS)
    table.append(ROWS.set_column(0, "id", pa.array([11, 12, 13, 14])))
    table.delete("id = 2")
    yield table
    catalog.close()
    ExecutorFactory.get_or_create().shutdown()  # the package keeps one for the whole process
    ExecutorFactory._instance = None


def test_an_iceberg_table_has_the_rows_that_pyiceberg_reads(iceberg: Any) -> None:
    snapshots = [snapshot.snapshot_id for snapshot in iceberg.snapshots()]
    for name, snapshot in (("", None), *((f"@{each}", each) for each in snapshots)):
        manifest = index_dataset(f"iceberg+{iceberg.metadata_location}{name}")
        theirs = iceberg.scan(snapshot_id=snapshot).to_arrow().to_pylist()
        assert in_order(rows_of(manifest)) == in_order(theirs)
        assert index_dataset(manifest.urls) == manifest


def test_iceberg_tables_whose_files_are_not_their_rows_are_refused(iceberg: Any) -> None:
    folder = Path(iceberg.location().removeprefix("file://"))
    with pytest.raises(ConfigError, match=r"is an Iceberg table.*pass 'iceberg\+'"):
        index_dataset(folder)
    with pytest.raises(ConfigError, match="does not say which version"):
        index_dataset(f"iceberg+{folder}")
    with pytest.raises(ConfigError, match="no such snapshot"):
        index_dataset(f"iceberg+{iceberg.metadata_location}@7")
    with iceberg.update_schema() as change:
        change.rename_column("day", "date")
    with pytest.raises(ConfigError, match="columns that were renamed"):
        index_dataset(f"iceberg+{iceberg.metadata_location}")
