"""Tables of Delta Lake and Iceberg: the files of one version, as their own packages read them."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
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


def rewrite(table: Path, action: str, **values: object) -> None:
    """Change the actions of this kind in the first version of a Delta table."""
    log = table / "_delta_log" / f"{0:020}.json"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    for line in lines:
        line.get(action, {}).update(values)
    log.write_text("\n".join(map(json.dumps, lines)))


# The vector of the protocol's description: it marks six of the rows 0 to 29.
VECTOR = {
    "storageType": "i",
    "pathOrInlineDv": "^Bg9^0rr910000000000iXQKl0rr91000f55c8Xg0@@D72lkbi5=-{L",
    "sizeInBytes": 40,
    "cardinality": 6,
}


def test_a_delta_table_with_deletion_vectors_is_refused(tmp_path: Path) -> None:
    deltalake = pytest.importorskip("deltalake")
    deltalake.write_deltalake(tmp_path, pa.table({"id": range(30)}))
    features = {"readerFeatures": ["deletionVectors"], "writerFeatures": ["deletionVectors"]}
    rewrite(tmp_path, "protocol", minReaderVersion=3, minWriterVersion=7, **features)
    assert len(rows_of(index_dataset(f"delta+{tmp_path}"))) == 30
    rewrite(tmp_path, "add", deletionVector=VECTOR)
    with pytest.raises(ConfigError, match="rows that deletion vectors mark as deleted"):
        index_dataset(f"delta+{tmp_path}")


def test_delta_tables_whose_files_are_not_their_rows_are_refused(delta: Path) -> None:
    with pytest.raises(ConfigError, match=r"is a Delta table.* pass 'delta\+"):
        index_dataset(delta)
    with pytest.raises(ConfigError, match="deltalake cannot open this version"):
        index_dataset(f"delta+{delta}@9")
    with pytest.raises(ConfigError, match="pass only it"):
        index_dataset([f"delta+{delta}", f"{delta}/x.parquet"])
    with pytest.raises(ConfigError, match="a node of a service opens no table"):
        UrlPolicy().check_names([f"delta+{delta}"])
    rewrite(delta, "metaData", configuration={"delta.columnMapping.mode": "name"})
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


def test_an_iceberg_table_with_files_of_deletes_is_refused(iceberg: Any) -> None:
    from pyiceberg import manifest as parts

    class Deletes(parts.ManifestWriterV2):
        def content(self) -> parts.ManifestContent:
            return parts.ManifestContent.DELETES

        @property
        def _meta(self) -> dict[str, str]:
            return {**super()._meta, "content": "deletes"}

    snapshot, folder = iceberg.current_snapshot(), f"{iceberg.location()}/metadata"
    number, manifests = snapshot.snapshot_id, snapshot.manifests(iceberg.io)
    entries = [entry for some in manifests for entry in some.fetch_manifest_entry(iceberg.io)]
    deletes = parts.DataFile.from_args(
        content=parts.DataFileContent.POSITION_DELETES, file_path=f"{folder}/d.parquet",
        file_format=parts.FileFormat.PARQUET, partition=entries[0].data_file.partition, record_count=1,
        file_size_in_bytes=100,
    )  # fmt: skip
    output = iceberg.io.new_output(f"{folder}/d.avro")
    with Deletes(iceberg.spec(), iceberg.schema(), output, number, "null") as writer:
        added = parts.ManifestEntryStatus.ADDED
        writer.add_entry(
            parts.ManifestEntry.from_args(status=added, snapshot_id=number, data_file=deletes)
        )
    output = iceberg.io.new_output(f"{folder}/l.avro")
    with parts.write_manifest_list(2, output, number, None, 9, "null") as files:
        files.add_manifests([*manifests, writer.to_manifest_file()])
    path = Path(iceberg.metadata_location.removeprefix("file://"))
    metadata = json.loads(path.read_text())
    metadata["snapshots"][-1] |= {"manifest-list": f"{folder}/l.avro", "sequence-number": 9}
    path.write_text(json.dumps(metadata | {"last-sequence-number": 9}))
    with pytest.raises(ConfigError, match="has files of deleted rows"):
        index_dataset(f"iceberg+{iceberg.metadata_location}")


def test_iceberg_tables_whose_files_have_other_columns_are_refused(iceberg: Any) -> None:
    with iceberg.update_schema() as change:
        change.delete_column("day")
    with pytest.raises(ConfigError, match="with the column 'day', which was dropped"):
        index_dataset(f"iceberg+{iceberg.metadata_location}")
    first = iceberg.snapshots()[0].snapshot_id
    manifest = index_dataset(f"iceberg+{iceberg.metadata_location}@{first}")
    assert in_order(rows_of(manifest)) == in_order(ROWS.to_pylist())
    path = Path(iceberg.metadata_location.removeprefix("file://"))
    metadata = json.loads(path.read_text())
    for schema in metadata["schemas"]:
        schema["fields"][-1]["initial-default"] = "2026-01-01T00:00:00+00:00"
    path.write_text(json.dumps(metadata))
    with pytest.raises(ConfigError, match="values for files that lack them"):
        index_dataset(f"iceberg+{iceberg.metadata_location}@{first}")


@pytest.mark.parametrize("also", [False, True])
def test_iceberg_tables_whose_files_lack_partition_columns_are_refused(
    iceberg: Any, tmp_path: Path, also: bool
) -> None:
    """The values of such columns are in the metadata alone, and in the names of folders."""
    table = iceberg.catalog.create_table("n.u", schema=ROWS.select(["id", "k"]).schema)
    with table.update_spec() as spec:
        spec.add_identity("k")
    if also:
        table.append(ROWS.select(["id", "k"]))
        assert len(rows_of(index_dataset(f"iceberg+{table.metadata_location}"))) == 4
    file = tmp_path / "k=a" / "a.parquet"
    file.parent.mkdir()
    with_k = pa.table({"id": [7], "k": ["a"]})
    pq.write_table(with_k, file)
    table.add_files([f"file://{file}"])
    pq.write_table(with_k.select(["id"]), file)
    with pytest.raises(ConfigError, match="files without the partition column 'k'"):
        index_dataset(f"iceberg+{table.metadata_location}")


def test_a_folder_whose_log_has_no_version_is_no_delta_table(tmp_path: Path) -> None:
    pytest.importorskip("deltalake")
    (tmp_path / "_delta_log").mkdir()
    with pytest.raises(ConfigError, match="its _delta_log has no version: restore the log, or"):
        index_dataset(f"delta+{tmp_path}")
