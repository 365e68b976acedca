"""`dataplane index`, `inspect`, `verify` and `plan` over shards that a test writes."""

from __future__ import annotations

import itertools
import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from bombs import long_line
from dataplane_torch import DataLoader, Pack
from pictures import drawn, encoded
from small_nodes import alone_and_small

from dataplane.cli import run
from dataplane.formats.parquet import Parquet
from dataplane.index.indexing import index_dataset
from dataplane.plan.manifest import Manifest

SHARDS = 3
ROWS = 100
GROUP = 20


@pytest.fixture
def small_node(monkeypatch, tmp_path) -> None:
    alone_and_small(monkeypatch, tmp_path)


@pytest.fixture
def shards(tmp_path) -> Path:
    folder = tmp_path / "shards"
    folder.mkdir()
    for shard in range(SHARDS):
        ids = range(shard * ROWS, (shard + 1) * ROWS)
        table = pa.table(
            {
                "id": pa.array(ids, pa.int64()),
                "blob": [bytes([255, row % 256]) for row in ids],
                "tokens": [[row] * 40 for row in ids],
            }
        )
        pq.write_table(
            table, folder / f"s{shard}.parquet", row_group_size=GROUP, write_page_checksum=True
        )
    return folder


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            "inspect bucket/train",
            "If this is no path, give its whole url, such as s3://bucket/train, hf://datasets/",
        ),
        (
            "inspect both",
            'one format: choose it with format="parquet" (or --format), or pass a pattern',
        ),
        ("inspect hdfs://host/train", "hdfs:// urls cannot be read here: Unable to load"),
        (
            "look photos --join 127.0.0.1:1",
            "to find a job of this name, a coordinator is needed: nobody answers at 127.0.0.1:1",
        ),
    ],
)
def test_mistakes_in_what_is_read_are_answered(
    tmp_path, monkeypatch, capfd, arguments: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("both").mkdir()
    pq.write_table(pa.table({"x": [1]}), "both/a.parquet")
    Path("both/b.jsonl").write_text('{"x": 1}\n')
    assert run(arguments.split()) != 0
    assert words in capfd.readouterr().err


def asked(capsys, *arguments: str, code: int = 0):
    assert run([*arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def damage(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 0xFF
    path.write_bytes(content)


def test_inspect_shows_schema_counts_and_first_samples(shards, capsys):
    found = asked(capsys, "inspect", str(shards), "--rows", "2")
    assert found["schema"]["id"] == "int64"
    assert list(found["schema"]) == ["id", "blob", "tokens"]
    counts = (found["shards"], found["blocks"], found["samples"])
    assert counts == (SHARDS, SHARDS * ROWS // GROUP, SHARDS * ROWS)
    assert [row["id"] for row in found["rows"]] == [0, 1]
    assert found["rows"][0]["blob"] == {"bytes": 2, "hex": "ff00"}


def test_inspect_shows_the_keys_of_folders_as_columns(shards, tmp_path, capsys):
    (tmp_path / "table").mkdir()
    (tmp_path / "table" / "day=1").symlink_to(shards)
    shown = asked(capsys, "inspect", str(tmp_path / "table"), "--rows", "1")
    assert "day" in shown["schema"]
    assert shown["rows"][0]["day"] == 1
    named = str(tmp_path / "table" / "day=1")
    assert "day" not in asked(capsys, "inspect", named, "--rows", "1")["schema"]
    assert run(["inspect", named, "--where", "day == 1"]) != 0
    assert "The folder day=1 was named in full" in capsys.readouterr().err


def test_inspect_walks_on_to_the_next_block_for_more_samples(shards, capsys):
    found = asked(capsys, "inspect", str(shards), "--rows", "150")
    assert [row["id"] for row in found["rows"]] == list(range(150))


def test_the_table_cuts_long_values(shards, capsys):
    assert run(["inspect", str(shards)]) == 0
    out = capsys.readouterr().out
    assert "40 values" in out
    assert max(map(len, out.splitlines())) <= 200


def test_the_table_of_one_sample_says_so(shards, capsys):
    assert run(["inspect", str(shards), "--rows", "1"]) == 0
    assert "first 1 sample " in capsys.readouterr().out


def test_an_index_is_a_file_that_stands_for_the_dataset(shards, tmp_path, capsys):
    target = tmp_path / "all.manifest"
    made = asked(capsys, "index", str(shards / "s*.parquet"), "-o", str(target))
    assert target.is_file()
    found = asked(capsys, "inspect", str(target))
    assert found["fingerprint"] == made["fingerprint"]
    assert sorted(path.name for path in tmp_path.glob("*.tmp")) == []


@pytest.mark.usefixtures("small_node")
def test_categories_saved_in_an_index_are_read_once_for_all_nodes(
    shards, tmp_path, capsys, monkeypatch
):
    target = tmp_path / "train.manifest"
    found = asked(capsys, "index", str(shards), "--codes", "blob,id", "-o", str(target))
    assert (found["values of blob"], found["values of id"]) == (256, 300)
    manifest = Manifest.from_bytes(target.read_bytes())
    assert manifest.categories["blob"].to_pylist() == [bytes([255, i]) for i in range(256)]
    plain = asked(capsys, "index", str(shards))
    assert plain["fingerprint"] == manifest.fingerprint
    # A node that has nothing in its cache takes them from the manifest.
    monkeypatch.setenv("DATAPLANE_CACHE_DIR", str(tmp_path / "another"))
    with DataLoader(str(target), 8, codes=["blob"], columns=["blob"]) as loader:
        assert loader.categories("blob") == tuple(bytes([255, i]) for i in range(256))
        assert next(iter(loader))["blob"].tolist() == list(range(8))
    assert not (tmp_path / "another" / "categories").exists()
    pq.write_table(pa.table({"price": [0.5]}), tmp_path / "prices.parquet")
    assert run(["index", str(tmp_path / "prices.parquet"), "--codes", "price"]) == 2
    assert "codes: column 'price' is of type double" in capsys.readouterr().err


@pytest.mark.usefixtures("small_node")
def test_a_command_takes_no_other_node_than_its_own(tmp_path, capsys, monkeypatch):
    """Not even the one of the command before, which would be there for a while."""
    monkeypatch.setenv("DATAPLANE_LINGER_S", "30")
    pq.write_table(pa.table({"tokens": [[1] * 8, [2] * 4]}), tmp_path / "a.parquet")
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        ways = ("--pack", "tokens,length=8", "--cache-dir", str(folder))
        assert asked(capsys, "index", str(tmp_path / "a.parquet"), *ways)["packs"] == 2
    assert all((folder / "packs").exists() for folder in folders)


@pytest.mark.usefixtures("small_node")
def test_packs_counted_for_an_index_are_counted_once_for_all_nodes(tmp_path, capsys, monkeypatch):
    rows = [[1] * length for length in (5, 3, 8, 2, 6, 1, 4, 3, 20, 0)]
    pq.write_table(pa.table({"tokens": rows, "text": ["x"] * 10}), tmp_path / "a.parquet")
    target, asking = tmp_path / "a.manifest", "tokens,length=8"
    found = asked(capsys, "index", str(tmp_path / "a.parquet"), "--pack", asking, "-o", str(target))
    told = {"packs": 7, "tokens": 52, "tokens in no pack": 0, "percent of padding": 7.14}
    assert told.items() <= found.items()
    wrapped = "tokens,length=8,policy=wrap,long=drop"
    found = asked(capsys, "plan", str(target), "--pack", wrapped, "--global-batch", "2")
    assert (found["packs"], found["documents cut short or left out"]) == (4, 1)
    padded, ranks = "tokens,length=24,policy=pad", ("--global-batch", "2", "--dp-size", "2")
    found = asked(capsys, "plan", str(target), "--pack", padded, *ranks)
    assert (found["packs"], found["step_count"]) == (3, 2)  # the last one joins no other
    # What has nothing in its cache takes them from the manifest.
    monkeypatch.setenv("DATAPLANE_CACHE_DIR", str(tmp_path / "another"))
    planned = asked(capsys, "plan", str(target), "--pack", asking, "--global-batch", "2")
    assert planned["step_count"] == 4
    assert told.items() <= planned.items()
    with DataLoader(str(target), 2, pack=Pack("tokens", 8)) as loader:
        assert len(loader) == 4
        assert sum(int((batch["tokens"] == 1).sum()) for batch in loader) == 52
    assert not (tmp_path / "another" / "packs").exists()
    for wrong, said in (
        ("tokens", "length=0"),
        ("tokens,size=8", "is not one of"),
        ("text,length=8", "lists"),
    ):
        assert run(["index", str(target), "--pack", wrong]) == 2
        assert said in capsys.readouterr().err


def test_an_index_is_remembered_in_the_cache_folder(shards, tmp_path, capsys):
    cache = tmp_path / "cache"
    asked(capsys, "index", str(shards), "--cache-dir", str(cache))
    assert list(cache.rglob("*.manifest"))


@pytest.mark.parametrize(
    ("target", "wanted"),
    [
        ("all.txt", "must end in .manifest"),
        ("no/x.manifest", "no folder"),
        ("s3://bucket/x.manifest", "written to a local file"),
    ],
)
def test_a_manifest_that_could_not_be_used_is_refused_before_any_work(target, wanted, capsys):
    assert run(["index", "s3://nowhere/", "-o", target]) == 2
    assert wanted in capsys.readouterr().err


def test_verify_reads_every_sample_of_good_shards(shards, capsys):
    found = asked(capsys, "verify", str(shards))
    assert found["ok"]
    assert (found["shards"], found["blocks"], found["samples"]) == (3, 15, 300)
    assert found["errors"] == []


def test_verify_names_the_columns_that_it_does_not_look_into(tmp_path, capsys):
    images = [{"bytes": b"no image", "path": "a.jpg"}]
    table = pa.table({"id": [1], "image": images, "raw": [[b"x"]], "text": ["bytes"]})
    pq.write_table(table, tmp_path / "a.parquet")
    assert asked(capsys, "verify", str(tmp_path))["not_decoded"] == ["image", "raw"]
    assert run(["verify", str(tmp_path)]) == 0
    assert "Bytes, such as images, were read and not decoded: image, raw" in capsys.readouterr().out


def test_verify_lists_the_images_that_cannot_be_decoded(tmp_path, capsys):
    """Images are decoded as a trainer does; nulls and other bytes are no images."""
    good = [encoded(drawn(12, 16, seed=row)) for row in range(20)]
    images, bad = list(good), {3: good[3][:-200], 7: b"", 12: b"no image", 19: good[0][:40]}
    images[15] = None
    for row, content in bad.items():
        images[row] = content
    rows = [None if image is None else {"bytes": image, "path": "a.jpg"} for image in images]
    table = pa.table({"id": range(20), "image": rows, "jpg": images, "raw": [b"x"] * 20})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=6)
    pq.write_table(table.slice(0, 3), tmp_path / "b.parquet")
    found = asked(capsys, "verify", str(tmp_path), "--decode", code=1)
    assert (found["images"], found["undecodable"]) == (2 * (15 + 3), 2 * len(bad))
    assert found["not_decoded"] == ["raw"]
    told = [(fault["kind"], fault["shard"].rpartition("/")[2]) for fault in found["errors"]]
    assert told == [("ImageError", "a.parquet")] * 2 * len(bad)
    for column, place in itertools.product(("image.bytes", "jpg"), bad):
        assert any(f"row {place}, column {column!r}: " in e["message"] for e in found["errors"])
    assert run(["verify", str(tmp_path), "--decode"]) == 1
    out = capsys.readouterr().out
    assert "8 of 44 images cannot be decoded" in out
    assert "8 errors in 1 shard" in out
    assert run(["verify", f"{tmp_path}/b.parquet", "--decode"]) == 0
    assert "6 images decoded, no damage found" in capsys.readouterr().out


def test_verify_goes_on_and_lists_every_fault(shards, capsys):
    damage(shards / "s0.parquet", 200)
    (shards / "s1.parquet").write_bytes((shards / "s1.parquet").read_bytes()[:-50])
    pq.write_table(pa.table({"id": ["text"]}), shards / "s3.parquet")
    found = asked(capsys, "verify", str(shards), code=1)
    by_shard = {fault["shard"].rpartition("/")[2]: fault["kind"] for fault in found["errors"]}
    assert by_shard == {
        "s0.parquet": "CorruptShard",
        "s1.parquet": "CorruptShard",
        "s3.parquet": "SchemaMismatch",
    }
    assert found["samples"] == 2 * ROWS - GROUP


def test_verify_says_what_is_wrong_and_where(shards, capsys):
    damage(shards / "s2.parquet", 200)
    assert run(["verify", str(shards)]) == 1
    out = capsys.readouterr().out
    assert "CorruptShard: " in out
    assert "s2.parquet" in out
    assert "1 error in 1 shard" in out


def test_verify_compares_a_manifest_with_the_current_shards(shards, tmp_path, capsys):
    target = tmp_path / "all.manifest"
    asked(capsys, "index", str(shards), "-o", str(target))
    assert asked(capsys, "verify", str(target))["samples"] == 300
    (shards / "s0.parquet").unlink()
    pq.write_table(pa.table({"id": [1]}), shards / "s1.parquet")
    kinds = {fault["kind"] for fault in asked(capsys, "verify", str(target), code=1)["errors"]}
    assert kinds == {"ShardNotFound", "DatasetChangedError"}


def test_a_shard_without_samples_is_accepted(shards, capsys):
    schema = pq.read_schema(shards / "s0.parquet")
    pq.write_table(schema.empty_table(), shards / "s9.parquet")
    found = asked(capsys, "verify", str(shards))
    assert (found["samples"], found["empty"]) == (300, [f"file://{shards}/s9.parquet"])
    assert run(["verify", str(shards)]) == 0
    assert "1 shard without samples: file://" in capsys.readouterr().err
    for _ in ("indexed in another process", "remembered"):
        assert asked(capsys, "inspect", str(shards))["samples"] == 300
        (shards / "s0.parquet").touch()


@pytest.mark.parametrize("command", ["verify", "index", "inspect"])
def test_a_dataset_of_shards_without_samples_is_refused_by_their_names(command, shards, capsys):
    empty = pq.read_schema(shards / "s0.parquet").empty_table()
    for shard in shards.glob("*.parquet"):
        pq.write_table(empty, shard)
    assert run([command, str(shards)]) == 2
    told = capsys.readouterr().err
    assert "no samples: no rows in" in told
    assert "s0.parquet" in told.replace("\n", "")


@pytest.mark.parametrize("chosen", [[], ["--format", "parquet"]])
def test_other_files_of_a_folder_are_no_shards(chosen, shards, capsys):
    (shards / "README.md").write_text("about the shards")
    assert asked(capsys, "verify", str(shards), *chosen)["samples"] == 300
    assert asked(capsys, "inspect", str(shards), *chosen)["shards"] == SHARDS


def test_plan_says_what_an_epoch_costs(shards, capsys):
    found = asked(
        capsys,
        *("plan", str(shards), "--dp-size", "4", "--ranks-per-host", "2", "--global-batch", "7"),
        *("--lanes", "4", "--window", "10"),
    )
    assert found["step_count"] == 43
    assert (found["lanes"], found["window"], found["host_count"]) == (4, 10, 2)
    assert [host["ranks"] for host in found["hosts"]] == ["0-1", "2-3"]
    sizes = index_dataset(shards).block_length
    for host in found["hosts"]:
        count = int(host["begins_with"].split()[0])
        assert count * sizes.min() <= host["first_batch_bytes"] <= count * sizes.max()


def test_plan_warns_on_stderr(shards, capsys):
    assert run(["plan", str(shards), "--global-batch", "200", "--end", "drop"]) == 0
    shown = capsys.readouterr()
    assert "shuffle quality" in shown.out
    assert "times its share" in shown.out
    assert "loses 100 of 300 samples" in shown.err


def test_plan_shows_the_shorter_windows_of_epoch_0(tmp_path, capsys):
    whole = pa.DictionaryArray.from_arrays(np.zeros(50_000, np.int32), [b"x" * 4000])
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"b": whole}), path, row_group_size=1000, store_schema=False)
    for epoch in ("0", "1"):
        found = asked(capsys, "plan", str(path), "--global-batch", "256", "--epoch", epoch)
        assert found["ramp_windows"] == [6250, 6250, 12_500, 25_000]
        assert found["ramp_end"] == 50_000
        assert found["quality"] == 1
        assert 0.7 < found["quality_of_epoch_0"] < 0.8
    assert run(["plan", str(path), "--global-batch", "256"]) == 0
    shown = capsys.readouterr().out
    assert "6,250, 6,250, 12,500, 25,000" in shown
    assert "none of them is full" in shown
    assert "in epoch 0" in shown
    assert run(["plan", str(path), "--global-batch", "256", "--no-shuffle"]) == 0
    assert "first windows" not in capsys.readouterr().out


def test_plan_refuses_impossible_slices(shards, capsys):
    assert run(["plan", str(shards), "--dp-size", "4", "--global-batch", "2"]) == 2
    assert "global batch" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["inspect", "verify", "index"])
def test_a_url_without_shards_is_exit_status_3(command, tmp_path, capsys):
    assert run([command, str(tmp_path / "nothing.parquet")]) == 3
    assert "nothing.parquet" in capsys.readouterr().err


def test_a_folder_without_shards_is_exit_status_2(tmp_path, capsys):
    (tmp_path / "README.txt").write_text("no shard")
    assert run(["inspect", str(tmp_path)]) == 2
    assert "in an unsupported format" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command", [("inspect",), ("plan", "--global-batch", "8"), ("index",)], ids=lambda each: each[0]
)
def test_what_is_in_a_shard_is_parsed_in_another_process(
    command, shards, small_node, monkeypatch, capsys
):
    def parsed_here(*_: object) -> None:
        pytest.fail("a shard was parsed in the process of the command")

    monkeypatch.setattr(Parquet, "index", parsed_here)
    assert run([command[0], str(shards), *command[1:]]) == 0
    assert f"{SHARDS * ROWS}" in capsys.readouterr().out


@pytest.mark.slow
def test_a_shard_that_takes_too_much_memory_is_named_and_the_command_continues(
    small_node, monkeypatch, tmp_path, capsys
):
    long_line(tmp_path)
    bomb = min(tmp_path.glob("*.gz"))
    monkeypatch.setenv("DATAPLANE_WORKER_MEMORY_BYTES", "256MiB")
    assert run(["inspect", str(bomb)]) == 2
    told = capsys.readouterr().err
    assert "takes more memory than the 256 MiB" in told
    assert bomb.name in told


def test_ctrl_c_ends_a_command_at_once_though_the_store_is_silent():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/a.parquet"
        process = subprocess.Popen(
            [sys.executable, "-m", "dataplane", "verify", url],
            stderr=subprocess.PIPE,
            text=True,
        )
        connection, _ = silent.accept()
        with process, connection:
            try:
                connection.recv(1)
                process.send_signal(signal.SIGINT)
                _, told = process.communicate(timeout=60)
            finally:
                process.kill()
    assert process.returncode == 130
    assert told.strip() == "interrupted"


def test_views_are_inspected_planned_and_counted_ahead(
    shards: Path, tmp_path: Path, capsys, monkeypatch
) -> None:
    monkeypatch.setenv("DATAPLANE_CACHE_DIR", str(tmp_path / "cache"))
    part = ("--where", "id % 3 == 0 and id >= 30", "--sample", "0.5")
    found = asked(capsys, "inspect", str(shards), *part, "--rows", "3")
    assert found["of"] == SHARDS * ROWS
    assert 0 < found["samples"] < 90
    assert all(row["id"] % 3 == 0 and row["id"] >= 30 for row in found["rows"])
    planned = asked(capsys, "plan", str(shards), *part, "--global-batch", "1", "--limit", "9")
    assert planned["step_count"] == 9
    target = tmp_path / "d.manifest"
    told = asked(capsys, "index", str(shards), *part, "-o", str(target))
    assert told["samples"] == found["samples"]
    monkeypatch.setenv("DATAPLANE_CACHE_DIR", str(tmp_path / "another"))
    again = asked(capsys, "inspect", str(target), *part, "--rows", "3")
    assert (again["samples"], again["rows"]) == (found["samples"], found["rows"])
    assert not (tmp_path / "another" / "counts").exists(), "the manifest has the counts"
    first, last = (
        asked(capsys, "inspect", str(shards), "--split", one)["samples"]
        for one in ("train:0.9", "validation:0.1")
    )
    assert first + last == SHARDS * ROWS


def test_a_wrong_view_is_told(shards: Path, capsys) -> None:
    for arguments, says in {
        ("--where", "idd > 1"): "did you mean 'id'",
        ("--where", "id >"): "at the end",
        ("--split", "train"): "write NAME:SHARE",
        ("--sample", "2"): "share of all rows",
    }.items():
        assert run(["inspect", str(shards), *arguments]) != 0
        assert says in " ".join(capsys.readouterr().err.split())


def test_inspect_logs_no_work_of_nodes(shards, capsys):
    assert run(["inspect", str(shards), "--where", "id >= 2"]) == 0
    assert "INFO" not in capsys.readouterr().err
