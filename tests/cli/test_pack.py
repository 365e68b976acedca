"""`dataplane pack`: new shards with the rows of a dataset, in order, once, whatever interrupts it."""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset
import pytest
from fleet import wait_until
from msgspec import structs
from servers import S3Server, reach
from shards import parquet_bytes, tar_bytes

from dataplane.cli import run
from dataplane.commands.datasets import read_block, schema_of
from dataplane.index.indexing import index_dataset
from dataplane.model.errors import ConfigError, FunctionError
from dataplane.model.records import View
from dataplane.pack import PackedPart, PackJob, pack_shards, write_part
from dataplane.plan.manifest import Manifest
from dataplane.settings import default_node_config
from dataplane.store.connect import connect, forget
from dataplane.transforms.options import view_of

ROWS, GROUP = 240, 20
TABLE = pa.table(
    {
        "id": range(ROWS),
        "txt": [None if row % 7 == 0 else f"row {row} ä" for row in range(ROWS)],
        "ids": [[row] * (row % 3) for row in range(ROWS)],
        "kind": pa.array([f"k{row % 2}" for row in range(ROWS)]).dictionary_encode(),
    }
)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    for shard in range(2):
        folder = tmp_path / "source" / f"part={shard}"
        folder.mkdir(parents=True)
        content = parquet_bytes(TABLE.slice(shard * ROWS // 2, ROWS // 2), row_group_size=GROUP)
        (folder / "a.parquet").write_bytes(content)
    return tmp_path / "source"


def packed(source: Path, dest: object, **given: Any) -> tuple[Manifest, list[PackedPart]]:
    given = {"shard_bytes": 2000, **given}
    return pack_shards([str(source)], str(dest), default_node_config(), **given)


def rows_of(manifest: Manifest) -> list[dict[str, Any]]:
    schema = schema_of(manifest)
    blocks = range(manifest.block_count)
    return [
        row for at in blocks for row in read_block(manifest, at, schema, schema.names).to_pylist()
    ]


EXPECTED = [{**row, "part": row["id"] // (ROWS // 2)} for row in TABLE.to_pylist()]


@pytest.mark.parametrize("format_name", ["parquet", "arrow"])
def test_the_rows_of_a_pack_are_those_of_its_source(
    tmp_path: Path, source: Path, format_name: str
) -> None:
    manifest, parts = packed(source, tmp_path / "d", format_name=format_name)
    assert len(parts) > 2
    assert rows_of(manifest) == EXPECTED
    assert (
        schema_of(manifest)
        .remove_metadata()
        .equals(schema_of(index_dataset(source)).remove_metadata())
    )
    saved = index_dataset(tmp_path / "d" / "_dataplane" / "dataset.manifest")
    assert saved == manifest == index_dataset(tmp_path / "d")
    lines = (tmp_path / "d" / "_dataplane" / "sha256sums").read_text().splitlines()
    for line in lines:
        digest, name = line.split("  ")
        assert hashlib.sha256((tmp_path / "d" / name).read_bytes()).hexdigest() == digest
    assert len(lines) == len(parts) == len(manifest.shards)
    others = pa.dataset.dataset(tmp_path / "d", format=format_name)
    assert others.to_table()["id"].to_pylist() == [*range(ROWS)], "other readers see shards alone"


def test_a_tar_has_texts_and_bytes_as_they_are_and_other_values_as_json(
    tmp_path: Path, source: Path
) -> None:
    manifest, _ = packed(source, tmp_path / "d", format_name="tar", columns=["id", "txt", "ids"])
    got = [(row["id"], row["txt"], json.loads(row["ids"])) for row in rows_of(manifest)]
    assert got == [(row["id"], row["txt"], row["ids"]) for row in EXPECTED]


def images(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        mark = b"\x89PNG" if name.endswith(".png") else b"\xff\xd8"
        (folder / name).write_bytes(mark + name.encode())
    return folder


@pytest.mark.parametrize("format_name", ["parquet", "arrow", "tar"])
def test_a_pack_of_a_folder_of_images_has_its_rows(tmp_path: Path, format_name: str) -> None:
    folder = images(tmp_path / "i", "v1.5/b/0.jpg", "v1.5/b/1.JPEG", "car/0.png", "car/1.jpg")
    expected = rows_of(index_dataset(folder))
    got = rows_of(packed(folder, tmp_path / "d", format_name=format_name)[0])
    if format_name == "tar":  # a key has no suffix, a label is a file and a number
        classes = sorted({row["label"] for row in expected})
        expected = [
            {
                "__key__": row["__key__"].rpartition(".")[0],
                "png": row["image"],  # named after the first
                "cls": classes.index(row["label"]),
                "label": row["label"].encode(),
            }
            for row in expected
        ]
        (shard,) = (tmp_path / "d").glob("*.tar")
        with tarfile.open(shard) as archive:
            members = {name for name in archive.getnames() if "0." in name}
        assert members == {f"car/0.{name}" for name in ("png", "label", "cls")} | {
            f"v1.5/b/0.{name}" for name in ("jpg", "label", "cls")
        }
    assert len(got) == 4
    assert got == expected


def test_a_tar_keeps_the_names_of_columns_and_takes_labels_that_a_map_makes(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    members = {"0.jpeg": b"\x89PNG 0", "1.jpeg": b"\xff\xd8 1"}
    (tmp_path / "s" / "a.tar").write_bytes(tar_bytes(members.items()))
    expected = [{"__key__": n[0], "jpeg": content} for n, content in members.items()]
    assert rows_of(packed(tmp_path / "s", tmp_path / "d", format_name="tar")[0]) == expected
    folder = images(tmp_path / "i", "b/0.jpg", "car/0.png")
    given = {"format_name": "tar", "map_name": "user_functions:labels_by_length"}
    got = rows_of(packed(folder, tmp_path / "e", **given)[0])
    assert [row["label"] for row in got] == [b"1", b"3"]


NO_TARS = {
    "a dot": ('{"__key__": "0.left", "t": 1}\n', "'0.left' cannot be a key of a tar"),
    "out of the folder": ('{"__key__": "../../evil", "t": 1}\n', r"'\.\./\.\./evil' cannot be"),
    "the root": ('{"__key__": "/evil", "t": 1}\n', "'/evil' cannot be a key"),
    "no key": ('{"__key__": "a", "t": 1}\n{"__key__": null, "t": 1}\n', "None cannot be a key"),
    "twice": ('{"__key__": "a", "t": 1}\n' * 2, "'a' cannot be a key of a tar.*two rows"),
    "nulls": ('{"t": 1}\n{"t": null}\n{"t": 3}\n', "0000001' has only nulls"),
    "two images": ('{"jpg": "a"}\n{"png": "b"}\n', "jpg and png would be read as one column"),
}


@pytest.mark.parametrize("name", NO_TARS)
def test_rows_that_a_tar_would_lose_or_change_are_refused(tmp_path: Path, name: str) -> None:
    content, why = NO_TARS[name]
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=why):
        packed(tmp_path / "a.jsonl", tmp_path / "d", format_name="tar")
    assert not [*tmp_path.glob("d/*.tar")]
    assert packed(tmp_path / "a.jsonl", tmp_path / "e")[0].sample_count == content.count("\n")


def test_two_images_of_one_key_are_refused_in_a_tar_and_may_be_numbered(tmp_path: Path) -> None:
    folder = images(tmp_path / "i", "a/0.left.jpg", "a/0.right.jpg")
    with pytest.raises(ConfigError, match=r"'a/0\.left\.jpg' cannot be a key of a tar"):
        packed(folder, tmp_path / "d", format_name="tar")
    given = {"format_name": "tar", "columns": ["image", "label"]}
    got = rows_of(packed(folder, tmp_path / "e", **given)[0])
    assert [row["jpg"] for row in got] == [row["image"] for row in rows_of(index_dataset(folder))]


def test_of_two_packs_into_a_folder_at_once_the_second_is_refused(
    tmp_path: Path, source: Path
) -> None:
    refused = []

    def together(job: PackJob, parts: Sequence[int]) -> Iterable[PackedPart]:
        with pytest.raises(ConfigError, match="another pack writes to"):
            packed(source, tmp_path / "d")
        refused.append(job)
        return [write_part(job, part) for part in parts]

    manifest, parts = packed(source, tmp_path / "d", run=together)
    assert (manifest.sample_count, len(refused)) == (ROWS, 1)
    record = tmp_path / "d" / structs.replace(parts[0], sha256="0" * 64).record
    record.touch()
    with pytest.raises(ConfigError, match="two packs wrote to"):
        packed(source, tmp_path / "d")


def test_a_pack_has_the_rows_and_columns_of_a_view_and_a_map(tmp_path: Path, source: Path) -> None:
    view = View(where="id % 3 == 1 and part = 1", limit=30)
    manifest, _ = packed(source, tmp_path / "a", view=view, columns=["id", "part"])
    left = [row for row in EXPECTED if row["id"] % 3 == 1 and row["part"] == 1][:30]
    assert rows_of(manifest) == [{"id": row["id"], "part": 1} for row in left]
    manifest, _ = packed(source, tmp_path / "b", view=view_of(sample=0.5))
    assert 80 < manifest.sample_count < 160
    assert [row for row in EXPECTED if row in rows_of(manifest)] == rows_of(manifest)
    given = {"map_name": "user_functions:doubles_ids", "columns": ["twice"]}
    manifest, _ = packed(source, tmp_path / "c", view=View(where="id > 200"), **given)
    assert rows_of(manifest) == [{"twice": 2 * row} for row in range(201, ROWS)]
    with pytest.raises(ConfigError, match="no column 'nope'; there are"):
        packed(source, tmp_path / "e", map_name="user_functions:doubles_ids", columns=["nope"])
    manifest, _ = packed(source, tmp_path / "f", columns=["id", "id"])
    assert rows_of(manifest) == [{"id": row} for row in range(ROWS)]
    with pytest.raises(FunctionError, match="user_functions:twice"):
        packed(source, tmp_path / "d", map_name="user_functions:twice")


def test_a_pack_goes_on_where_it_was_stopped_and_touches_no_other_files(
    tmp_path: Path, source: Path
) -> None:
    written: list[int] = []

    def stopping(job: PackJob, parts: Sequence[int]) -> Iterable[PackedPart]:
        for part in parts:
            if len(written) == 2:
                raise KeyboardInterrupt
            written.append(part)
            yield write_part(job, part)

    dest = tmp_path / "d"
    with pytest.raises(KeyboardInterrupt):
        packed(source, dest, run=stopping)
    before = {path: path.stat().st_mtime_ns for path in dest.glob("part-*")}
    assert len(before) == 2
    with pytest.raises(ConfigError, match="shards of another pack"):
        packed(source, dest, view=View(where="id > 3"))
    manifest, parts = packed(source, dest)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert rows_of(manifest) == EXPECTED
    assert packed(source, dest, run=stopping) == (manifest, parts)
    with pytest.raises(ConfigError, match=r"other objects, such as part=0/a\.parquet"):
        packed(dest, source)
    for urls in (source, source / "**"):
        with pytest.raises(ConfigError, match="is a part of the source"):
            packed(urls, source / "packed")
    assert not (source / "packed").exists()
    with pytest.raises(ConfigError, match="format 'jsonl' cannot be written"):
        packed(source, tmp_path / "e", format_name="jsonl")
    for name in ("webdataset", "WDS"):
        with pytest.raises(ConfigError, match=f"format '{name}' cannot.*did you mean 'tar'"):
            packed(source, tmp_path / "e", format_name=name)
    with pytest.raises(ConfigError, match="no column 'x'"):
        packed(source, tmp_path / "e", columns=["x"])


def test_a_pack_in_a_bucket_is_that_of_a_folder(
    tmp_path: Path, source: Path, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    reach(s3_server, monkeypatch)
    url = f"s3://{s3_server.bucket()}/train"
    try:
        manifest, parts = packed(source, url)
        assert [part.sha256 for part in parts] == [
            part.sha256 for part in packed(source, tmp_path / "d")[1]
        ]
        assert index_dataset(f"{url}/_dataplane/dataset.manifest", connect=connect) == manifest
        assert manifest.sample_count == ROWS
    finally:
        forget()


PROGRAM = """
import sys
from dataplane.pack import in_processes, pack_shards
from dataplane.settings import default_node_config
source, dest = sys.argv[1:]
given = {"shard_bytes": 1, "map_name": "user_functions:hangs_from_30", "run": in_processes(2)}
pack_shards([source], dest, default_node_config(), **given)
"""


def test_processes_that_are_killed_leave_whole_shards_and_a_command_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, dest = tmp_path / "source", tmp_path / "d"
    source.mkdir()
    for shard in range(6):
        content = parquet_bytes(pa.table({"id": range(shard * 10, shard * 10 + 10)}))
        (source / f"{shard}.parquet").write_bytes(content)
    monkeypatch.setenv("GO_ON", str(tmp_path / "go on"))
    program = [sys.executable, "-c", PROGRAM, str(source), str(dest)]
    with subprocess.Popen(program, cwd=Path(__file__).parents[1]) as running:
        wait_until(lambda: len(list(dest.glob("_dataplane/0*"))) == 3)
        running.send_signal(signal.SIGKILL)
    assert len(index_dataset(dest).shards) == 3
    (tmp_path / "go on").touch()
    monkeypatch.setattr("dataplane.pack.SHARD_BYTES", 1)
    command = ["pack", str(source), str(dest), "--map", "user_functions:hangs_from_30", "--json"]
    assert run([*command, "--workers", "1"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["shards"], facts["rows"]) == (6, 60)
    ids = [row["id"] for row in rows_of(index_dataset(facts["manifest"]))]
    assert ids == list(range(60))
