"""Rows that cannot be read: other rows take their places, the same on every rank, in every resumed
run, and as docs/order.md says; each is in the job's ledger, and too many end the run.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from awry import Awry
from dataplane_torch import CenterCrop, DataLoader, Pack
from fleet import Log, Service
from pictures import drawn, encoded
from sample_files import litdata_bytes, litdata_index, mds_bytes, megatron_bytes
from shards import example_bytes, json_lines, npy_bytes, tar_bytes, tfrecord_bytes

from dataplane.cli import run
from dataplane.model.errors import ConfigError, CorruptShard, FunctionError, ShardNotFound
from dataplane.plan.tombstones import substitute, substitute_key

LOG = "service.log"
ROWS, SHARD, GROUP, SEED, LARGE = 120, 60, 5, 5, 60_000
BAD = (3, 17, 18, 40, 70, 119)
BAD_GROUPS = ((0, 4), (1, 11))
OPTIONS: dict[str, Any] = {"shuffle": True, "seed": SEED, "on_bad": "replace", "bad_max": 0.1}


def texts() -> list[str]:
    return [f"no. {row} " + "x" * 40 for row in range(ROWS)]


def jsonl(shard: int) -> bytes:
    lines = json_lines({"id": row, "text": texts()[row]} for row in of_shard(shard)).splitlines()
    rows = zip(of_shard(shard), lines, strict=True)
    return b"".join((line[:-5] if row in BAD else line) + b"\n" for row, line in rows)


def tfrecord(shard: int) -> bytes:
    records = [
        example_bytes(
            {"id": ("int64_list", [row]), "text": ("bytes_list", [texts()[row].encode()])}
        )
        for row in of_shard(shard)
    ]
    content, at = bytearray(tfrecord_bytes(records)), 0
    for row, record in zip(of_shard(shard), records, strict=True):
        if row in BAD:
            content[at + 20] ^= 1
        at += len(record) + 16
    return bytes(content)


def tar(shard: int) -> bytes:
    def members() -> Iterator[tuple[str, bytes]]:
        for row in of_shard(shard):
            yield f"{row:03}.id", str(row).encode()
            yield f"{row:03}.txt", b"\xff" * 9 if row in BAD else texts()[row].encode()

    return tar_bytes(members())


def images(shard: int) -> bytes:
    def members() -> Iterator[tuple[str, bytes]]:
        for row in of_shard(shard):
            image = encoded(drawn(12, 12, seed=row % 7))
            yield f"{row:03}.id", str(row).encode()
            yield f"{row:03}.jpg", image[:-200] if row in BAD else image

    return tar_bytes(members())


def of_shard(shard: int) -> range:
    return range(shard * SHARD, (shard + 1) * SHARD)


def table_of(shard: int) -> pa.Table:
    rows = of_shard(shard)
    return pa.table({"id": pa.array(rows), "text": texts()[rows.start : rows.stop]})


def parquet(shard: int) -> bytes:
    """A file of which one row group has a wrong checksum."""
    sink = io.BytesIO()
    options = {"write_page_checksum": True, "compression": "none"}
    pq.write_table(table_of(shard), sink, row_group_size=GROUP, **options)
    content, facts = bytearray(sink.getvalue()), pq.ParquetFile(sink).metadata
    column = facts.row_group(dict(BAD_GROUPS)[shard]).column(1)
    at = content.index(texts()[dict(BAD_GROUPS)[shard] * GROUP + shard * SHARD].encode())
    assert column.dictionary_page_offset < at
    content[at] ^= 1
    return bytes(content)


def arrow(shard: int) -> bytes:
    """A file of which one record batch cannot be decompressed."""
    noise = np.random.default_rng(0).bytes(LARGE * SHARD)  # small batches are read together
    large = [noise[LARGE * row : LARGE * (row + 1)] for row in range(SHARD)]
    sink, table = io.BytesIO(), table_of(shard).append_column("noise", [large])
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_file(sink, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=GROUP)
    content = bytearray(sink.getvalue())
    ends, at = [], 0
    while (at := content.find(b"\x28\xb5\x2f\xfd", at + 1)) >= 0:
        ends.append(at)
    per_batch = len(ends) * GROUP // SHARD
    bad = ends[per_batch * dict(BAD_GROUPS)[shard]]
    content[bad : bad + 12] = b"\0" * 12
    return bytes(content)


def whole(shard: int) -> bytes:
    """A file without damage; where= and functions fail at rows of it."""
    large = [2**62 if row in BAD else row for row in of_shard(shard)]
    sink, table = io.BytesIO(), table_of(shard).append_column("large", [large])
    pq.write_table(table, sink, row_group_size=SHARD)
    return sink.getvalue()


def csv(shard: int) -> bytes:
    lines = [f"{row},{texts()[row]}{',' * (row in BAD)}\n" for row in of_shard(shard)]
    return "".join(["id,text\n", *lines]).encode()


def undecodable(content: bytes, shard: int) -> bytes:
    """The content with bytes that are not UTF-8 in place of the texts of bad rows."""
    for row in {*BAD} & {*of_shard(shard)}:
        text = texts()[row].encode()
        assert text in content
        content = content.replace(text, b"\xff" * len(text))
    return content


def rows(shard: int) -> list[dict[str, Any]]:
    return [{"id": row, "text": texts()[row]} for row in of_shard(shard)]


def mds(shard: int) -> bytes:
    return undecodable(mds_bytes({"id": "int", "text": "str"}, rows(shard)), shard)


def litdata(shard: int) -> dict[str, bytes]:
    kinds, names = {"id": "int", "text": "str"}, ["chunk-0-0.bin", "chunk-0-1.bin"]
    content = undecodable(litdata_bytes(kinds, rows(shard)), shard)
    return {names[shard]: content, "index.json": litdata_index(kinds, names)}


def tokens_of(shard: int) -> list[np.ndarray]:
    return [np.full(4, row, "<u2") for row in of_shard(shard)]


def megatron(shard: int) -> dict[str, bytes]:
    return dict(
        zip((f"{shard}.bin", f"{shard}.idx"), megatron_bytes(tokens_of(shard)), strict=True)
    )


def npy(shard: int) -> bytes:
    return npy_bytes(np.array([(row,) for row in of_shard(shard)], [("id", "<i8")]))


def lost_files(shard: int) -> dict[str, bytes]:
    """A table of paths, some of which name no file."""
    named = {f"{row}.png": b"%d" % row for row in of_shard(shard)}
    table = json_lines({"id": row, "path": f"{row}.png"} for row in of_shard(shard))
    bad = {f"{row}.png" for row in BAD}
    return {f"{shard}.jsonl": table} | {n: body for n, body in named.items() if n not in bad}


def folder(shard: int) -> dict[str, bytes]:
    """Files of images, of which some are cut short. Their names are the numbers of the rows."""
    return {
        f"{row:03}.png": encoded(drawn(12, 12, seed=row % 7), "PNG")[: -200 if row in BAD else None]
        for row in of_shard(shard)
    }


FORMATS: dict[str, tuple[str, Callable[[int], bytes | dict[str, bytes]], dict[str, Any]]] = {
    "jsonl": ("jsonl", jsonl, {}),
    "tfrecord": ("tfrecord", tfrecord, {}),
    "tar": ("tar", tar, {}),
    "images": ("tar", images, {"transforms": {"jpg": [CenterCrop(8)]}, "columns": ["id", "jpg"]}),
    "parquet": ("parquet", parquet, {}),
    "arrow": ("arrow", arrow, {}),
    "map": ("parquet", whole, {"map": "user_functions:rejects"}),
    "csv": ("csv", csv, {"dtype": {"id": "int64"}}),
    "mds": ("mds", mds, {}),
    "litdata": ("bin", litdata, {}),
    "megatron": ("bin", megatron, {"map": "user_functions:of_tokens"}),
    "tokens": (
        "bin",
        lambda shard: np.concatenate(tokens_of(shard)).tobytes(),
        {"map": "user_functions:of_tokens", "format": "tokens:uint16,length=4"},
    ),
    "npy": ("npy", npy, {"map": "user_functions:rejects"}),
    "lost": ("jsonl", lost_files, {"files": "path"}),
    "folder": (
        "png",
        folder,
        {"map": "user_functions:of_names", "transforms": {"image": [CenterCrop(8)]}},
    ),
    "delta": ("parquet", parquet, {}),
    "where": ("parquet", whole, {"where": "large * 4 >= 0", "columns": ["id"]}),
    "collate": ("parquet", whole, {"collate": "user_functions:collates"}),
}
BY_BLOCK = {"parquet", "arrow", "delta"}


def stands_for(name: str) -> dict[int, int]:
    """Return each bad row, and the row that takes its place."""
    if name not in BY_BLOCK:
        instead, size = {}, ROWS if name == "folder" else SHARD  # all files are one shard
        for row in BAD:
            shard, bad = row // size, {at % size for at in BAD if at // size == row // size}
            keyed = substitute_key(SEED, shard, row % size)
            instead[row] = shard * size + substitute(keyed, size, bad)
        return instead
    groups, bad_groups = SHARD // GROUP, {shard * SHARD // GROUP + at for shard, at in BAD_GROUPS}
    instead = {}
    for group in bad_groups:
        keyed, tried = substitute_key(SEED, group // groups, group % groups * GROUP), {group}
        while (other := substitute(keyed, 2 * groups, tried)) in bad_groups:
            tried.add(other)
        instead |= {group * GROUP + at: other * GROUP + at for at in range(GROUP)}
    return instead


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with contextlib.suppress(ImportError):  # deltalake keeps the descriptors that it opens
        import deltalake

        deltalake.write_deltalake(tmp_path_factory.mktemp("begun"), table_of(0))
    name, state = f"bad-rows-{os.getpid()}:7077", str(tmp_path_factory.mktemp("state"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DATAPLANE_STATE_DIR", state)
        patch.setenv("DATAPLANE_SERVICE", name)
        patch.setenv("DATAPLANE_ALLOWED_FUNCTIONS", "user_functions")
        patch.setenv(
            "PYTHONPATH",
            os.pathsep.join((str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", ""))),
        )
        arguments = ("--listen", "127.0.0.1:0", "--service", name, "--worker-count", "2")
        with Service(*arguments, within=("env",), log=Path(state, LOG)) as served:
            yield served.address


def folder_of(tmp_path: Path, name: str) -> str:
    suffix, write, _ = FORMATS[name]
    for shard in range(2):
        written = write(shard)
        several = written if isinstance(written, dict) else {f"{shard}.{suffix}": written}
        for path, content in several.items():
            (tmp_path / path).write_bytes(content)
    if name == "delta":
        pytest.importorskip("deltalake").convert_to_deltalake(tmp_path)
        manifest = str(tmp_path / "table.manifest")  # nodes of a service open no tables
        assert run(["index", f"delta+{tmp_path}", "-o", manifest]) == 0
        return manifest
    return str(tmp_path)


def ids(loader: DataLoader) -> list[int]:
    return [number for batch in loader for number in batch["id"].tolist()]


@pytest.mark.parametrize("name", FORMATS)
def test_bad_rows_are_replaced_alike_everywhere_and_are_in_the_ledger(
    tmp_path: Path, service: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, instead = folder_of(tmp_path, name), stands_for(name)
    options = {**OPTIONS, "global_batch_size": 12, **FORMATS[name][2]}
    planned = None
    if name in {"images", "map", "where", "collate"}:
        plain = {"shuffle": True, "seed": SEED, "columns": ["id"], "global_batch_size": 12}
        with DataLoader(folder, **plain) as loader:
            planned = ids(loader)
    with DataLoader(folder, name=name, **options) as loader:
        alone = ids(loader)
    if planned is not None:
        assert alone == [instead.get(row, row) for row in planned]
    assert sorted(alone) == sorted(instead.get(row, row) for row in range(ROWS))
    size = 3
    state = None
    parts: list[list[int]] = [[] for _ in range(size)]
    ranks = [
        DataLoader(folder, name=f"{name}-{size}", dp_rank=at, dp_size=size, **options)
        for at in range(size)
    ]
    for at, loader in enumerate(ranks):
        batches = iter(loader)
        for _ in range(4):
            parts[at] += next(batches)["id"].tolist()
        state = loader.state_dict()
        loader.close()
    begun = [row for rows in zip(*parts, strict=True) for row in rows]
    with DataLoader(folder, name=f"{name}-{size}-on", **options) as loader:
        loader.load_state_dict(state)
        assert begun + ids(loader) == alone
    rows = {row["row"] + SHARD * row["shard"]: row for row in quarantined(service, name, capsys)}
    assert rows.keys() == instead.keys()
    if name not in BY_BLOCK:
        assert {
            row: SHARD * noted["shard"] + noted["instead"] for row, noted in rows.items()
        } == instead


@pytest.mark.parametrize("is_remote", [False, True])
def test_a_shard_that_was_deleted_since_it_was_indexed_is_replaced(
    tmp_path: Path, service: str, awry: Awry, capsys: pytest.CaptureFixture[str], *, is_remote: bool
) -> None:
    for shard in range(10):
        table = pa.table({"id": range(shard * 12, shard * 12 + 12)})
        path = tmp_path / f"{shard}.parquet"
        pq.write_table(table, path, row_group_size=6)
        awry.objects[f"bucket/{shard}.parquet"] = path.read_bytes()
    manifest = str(tmp_path / "all.manifest")
    source = f"{awry.endpoint}/bucket/{{0..9}}.parquet" if is_remote else str(tmp_path)
    assert run(["index", source, "-o", manifest]) == 0
    (tmp_path / "4.parquet").unlink()
    del awry.objects["bucket/4.parquet"]
    options, job = {**OPTIONS, "global_batch_size": 12}, f"gone-{is_remote}"
    refused = pytest.raises(ShardNotFound, match=r'4\.parquet: .*on_bad="replace"')
    with DataLoader(manifest, 12, shuffle=True) as loader, refused:
        ids(loader)
    with DataLoader(manifest, **options, name=job) as loader:
        whole = ids(loader)
    assert {*range(ROWS)} - {*whole} == {*range(48, 60)}
    assert len(whole) == ROWS
    over = pytest.raises(CorruptShard, match="bad_max")
    with DataLoader(manifest, name=f"{job}-2", **{**options, "bad_max": 0.05}) as loader, over:
        ids(loader)
    ranks = [
        DataLoader(manifest, name=f"{job}-3", dp_rank=at, dp_size=3, **options) for at in range(3)
    ]
    parts = [ids(loader) for loader in ranks]
    for loader in ranks:
        loader.close()
    assert [row for rows in zip(*parts, strict=True) for row in rows] == whole
    noted = quarantined(service, job, capsys)
    assert {(row["shard"], row["row"]) for row in noted} == {(4, row) for row in range(12)}
    steps = [whole[at : at + 12] for at in range(0, ROWS, 12)]
    for step, batch in enumerate(steps):
        asked = ("trace", job, "--step", str(step), "--data", manifest, "--join", service)
        assert run([*asked, "--json"]) == 0
        told = capsys.readouterr()
        rows = json.loads(told.out)
        planned = [12 * int(row["shard"].split(".")[-2][-1]) + row["row"] for row in rows]
        count = sum(shown != read for shown, read in zip(planned, batch, strict=True))
        assert (f"{count} row" if count else "these are the planned rows") in told.err
    for shard in (0, 1, 2, 3, 5, 6):  # blocks of these are tried in the places of others
        (tmp_path / f"{shard}.parquet").unlink()
        del awry.objects[f"bucket/{shard}.parquet"]
    with DataLoader(manifest, name=f"{job}-4", **{**options, "bad_max": 1.0}) as loader:
        ids(loader)
    reasons = [row["reason"] for row in quarantined(service, f"{job}-4", capsys)]
    assert not [why for why in reasons if "parquet" in why.partition("; replaced by")[0]]


def test_a_bad_block_is_one_line_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The log of the service of other tests may have reached its limit of such lines.
    folder, log = folder_of(tmp_path, "parquet"), tmp_path / "lines.log"
    name = f"lines-{os.getpid()}:7077"
    monkeypatch.setenv("DATAPLANE_SERVICE", name)
    monkeypatch.setenv("DATAPLANE_STATE_DIR", str(tmp_path / "state"))
    with Service("--listen", "127.0.0.1:0", "--service", name, "--worker-count", "1", log=log):
        with DataLoader(folder, 12, name="blocks", **OPTIONS) as loader:
            ids(loader)
        assert len(Log(log).wait_for("block replaced job=blocks", 2)) == 2
        assert "row replaced job=blocks" not in Log(log).read()


def test_bad_blocks_are_one_entry_each_of_the_error(tmp_path: Path, service: str) -> None:
    options = {**OPTIONS, "shuffle": False, "bad_max": 1 / ROWS}
    with (
        DataLoader(folder_of(tmp_path, "parquet"), 12, **options) as loader,
        pytest.raises(CorruptShard, match=r"0\.parquet rows 20 to 2\d: .* to 0\.0") as caught,
    ):
        list(loader)
    read = int(str(caught.value).partition(" rows of this epoch")[0])  # some are read ahead
    assert str(caught.value).count("replaced by") == -(-read // GROUP)


def test_a_collate_that_takes_no_row_ends_the_run(tmp_path: Path, service: str) -> None:
    pq.write_table(pa.table({"id": [7] * 20}), tmp_path / "0.parquet")
    options = {**OPTIONS, "bad_max": 1, "collate": "user_functions:refuses"}
    with (
        DataLoader(str(tmp_path), 2, **options) as loader,
        pytest.raises(
            FunctionError, match=r"(?s)never.*none of the 20 rows of its block can take it"
        ),
    ):
        ids(loader)


def quarantined(address: str, job: str, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    while True:
        capsys.readouterr()
        assert run(["ledger", "show", job, "--join", address, "--json"]) == 0
        shown = json.loads(capsys.readouterr().out)
        if shown[-1]["kind"] == "end":
            entries = [entry["payload"]["rows"] for entry in shown if entry["kind"] == "quarantine"]
            return [row for rows in entries for row in rows]
        threading.Event().wait(0.05)


def test_a_run_that_ended_at_a_bad_row_goes_on_with_another_one(
    tmp_path: Path, service: str
) -> None:
    folder, options = folder_of(tmp_path, "jsonl"), {"shuffle": True, "seed": SEED}
    with DataLoader(folder, 12, **options) as loader:
        with pytest.raises(CorruptShard, match="broken JSON"):
            list(loader)
        state = loader.state_dict()
    with DataLoader(folder, 12, **OPTIONS) as loader:
        loader.load_state_dict(state)
        rest = ids(loader)
    with DataLoader(folder, 12, **OPTIONS) as loader:
        assert ids(loader)[state["cursor"] :] == rest


def test_too_many_bad_rows_end_the_run_with_a_list(tmp_path: Path, service: str) -> None:
    folder = folder_of(tmp_path, "jsonl")
    with DataLoader(folder, 12, **{**OPTIONS, "bad_max": 5 / ROWS}) as loader:
        with pytest.raises(
            CorruptShard, match=r"6 rows .* more than the 5 that bad_max= "
        ) as caught:
            list(loader)
        for row in BAD:
            assert f"{row // SHARD}.jsonl row {row % SHARD}: " in str(caught.value)


def test_shards_that_cannot_be_indexed_are_left_out(
    tmp_path: Path, service: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for shard in range(4):
        (tmp_path / f"{shard}.parquet").write_bytes(whole(shard % 2))
    content = whole(0)
    (tmp_path / "2.parquet").write_bytes(content[: len(content) // 2])
    (tmp_path / "3.parquet").write_bytes(b"")
    says = (
        r"2\.parquet: .*; .*3\.parquet: .* is empty.*2 of 4 shards, with [\d.]+% of the bytes, .*"
    )
    for options, way in (({}, 'on_bad="replace"'), (OPTIONS, "a larger bad_max=")):
        with (
            DataLoader(str(tmp_path), 12, **options) as loader,
            pytest.raises(CorruptShard, match=says + way),
        ):
            ids(loader)
    options = {**OPTIONS, "bad_max": 0.3}
    with DataLoader(str(tmp_path), 12, name="left-out", **options) as loader:
        alone = ids(loader)
    assert sorted(alone) == list(range(ROWS))
    listed = [
        (row["shard"], row["reason"][:22]) for row in quarantined(service, "left-out", capsys)
    ]
    assert listed == [(2, "the shard is left out,"), (3, "the shard is left out,")]
    asked = ("left-out", "--step", "0", "--data", str(tmp_path), "--join", service, "--json")
    assert run(["trace", *asked]) == 0
    with DataLoader(str(tmp_path), 12, **options) as loader:
        begun = [number for batch in itertools.islice(loader, 3) for number in batch["id"].tolist()]
        state = loader.state_dict()
    with DataLoader(str(tmp_path), 12, **options) as loader:
        loader.load_state_dict(state)
        assert begun + ids(loader) == alone
    (tmp_path / "2.parquet").unlink()
    for shards in ("with an empty one", "all good"):
        with DataLoader(str(tmp_path), 12, **OPTIONS) as loader:
            assert ids(loader) == alone, shards
        (tmp_path / "3.parquet").unlink(missing_ok=True)


def test_a_block_without_a_good_image_is_replaced_by_another(tmp_path: Path, service: str) -> None:
    good, bad = encoded(drawn(12, 12)), b"no image"
    groups = [[(group in {1, 5} and bad) or good] * 4 for group in range(8)]
    images = [image for group in groups for image in group]
    table = pa.table({"id": range(32), "jpg": images})
    pq.write_table(table, tmp_path / "0.parquet", row_group_size=4)
    options = {**OPTIONS, "bad_max": 0.3, "transforms": {"jpg": [CenterCrop(8)]}}
    options |= {"global_batch_size": 4}
    found = []
    for size in (1, 2):
        ranks = [
            DataLoader(str(tmp_path), name=f"no-image-{size}", dp_rank=at, dp_size=size, **options)
            for at in range(size)
        ]
        each = [[batch["id"].tolist() for batch in loader] for loader in ranks]
        found.append([sorted(itertools.chain(*step)) for step in zip(*each, strict=True)])
        for loader in ranks:
            loader.close()
    assert found[0] == found[1]
    read = [row for step in found[0] for row in step]
    assert {row // 4 for row in read} == {0, 2, 3, 4, 6, 7}
    assert len(read) == 32


def test_the_limit_is_of_the_epoch_on_whichever_nodes_its_rows_are_read(
    tmp_path: Path, service: str
) -> None:
    folder, name = folder_of(tmp_path, "jsonl"), f"bad-rows-too-{os.getpid()}:7078"
    log = Path(os.environ["DATAPLANE_STATE_DIR"], "node.log")
    options = {"shuffle": False, "on_bad": "replace", "bad_max": 5 / ROWS, "name": "both"}
    with (
        Service("--node", "--join", service, "--service", name, within=("env",), log=log),
        DataLoader(folder, 12, dp_rank=0, dp_size=2, **options) as first,
        DataLoader(folder, 12, dp_rank=1, dp_size=2, service=name, **options) as second,
        pytest.raises(CorruptShard, match=r"6 rows .* more than the 5 that bad_max= ") as caught,
    ):
        # The coordinator counts the rows of both nodes meanwhile.
        all(ids(loader) for loader in itertools.cycle((first, second)))
    assert 1 <= str(caught.value).count(".jsonl row ") < len(BAD)


def test_rows_that_are_repaired_count_no_more(tmp_path: Path, service: str) -> None:
    folder, options = folder_of(tmp_path, "jsonl"), {**OPTIONS, "bad_max": 5 / ROWS}
    with (
        DataLoader(folder, 12, name="repaired", **options) as loader,
        pytest.raises(CorruptShard, match="6 rows"),
    ):
        list(loader)
    for shard in range(2):
        lines = json_lines({"id": row, "text": texts()[row]} for row in of_shard(shard))
        (tmp_path / f"{shard}.jsonl").write_bytes(lines)
    with DataLoader(folder, 12, name="repaired", **options) as loader:
        assert sorted(ids(loader)) == list(range(ROWS))


@pytest.mark.parametrize("name", ["jsonl", "parquet"])
def test_bad_rows_of_a_view_are_replaced_by_rows_of_it(
    tmp_path: Path, service: str, name: str
) -> None:
    folder = folder_of(tmp_path, name)
    with DataLoader(folder, 12, where="id % 2 == 0", **OPTIONS) as loader:
        read = ids(loader)
    bad = set(stands_for(name))
    assert all(row % 2 == 0 and row not in bad for row in read)
    assert {row for row in range(0, ROWS, 2) if row not in bad} == set(read)
    for part in ("train", "validation"):
        with DataLoader(folder, 12, split=(part, 0.5), **OPTIONS) as loader:
            parts = set(ids(loader))
        assert parts.isdisjoint(bad)
        read = [*parts] if part == "train" else [*read, *parts]
    assert len(read) == len(set(read)), "no row of one part is in the other"


def test_documents_that_a_map_rejects_are_in_no_pack(tmp_path: Path, service: str) -> None:
    for shard in range(2):
        rows = of_shard(shard)
        table = pa.table({"id": pa.array(rows), "tokens": [[row] * 9 for row in rows]})
        pq.write_table(table, tmp_path / f"{shard}.parquet")
    pack = Pack("tokens", length=32)
    options = {**OPTIONS, "pack": pack, "map": "user_functions:rejects"}
    with DataLoader(str(tmp_path), 4, **options) as loader:
        tokens = {token for batch in loader for token in batch["tokens"].flatten().tolist()}
    assert tokens == {row for row in range(ROWS) if row not in BAD} | {0}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"on_bad": "skip"}, "on_bad='skip': choose \"raise\""),
        ({"bad_max": 0.1}, 'bad_max=0.1 without on_bad="replace"'),
        ({"on_bad": "replace", "bad_max": 0}, "bad_max=0: pass the share"),
        ({"on_bad": "replace", "bad_max": 1.5}, "1 at most"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        DataLoader("/nowhere", 1, **options)


def test_the_log_of_a_node_says_which_rank_gets_no_batch_and_which_job_does_not_open(
    tmp_path: Path, service: str
) -> None:
    folder, log = folder_of(tmp_path, "jsonl"), Log(Path(os.environ["DATAPLANE_STATE_DIR"], LOG))
    with DataLoader(folder, 12, name="damaged") as loader, pytest.raises(CorruptShard):
        ids(loader)
    (line, *_) = log.wait_for("no batch job=damaged")
    assert f"rank=0 shard=file://{folder}/" in line
    assert "error=" in line
    with (
        DataLoader(folder, 12, name="lost", columns=["lost"]) as loader,
        pytest.raises(ConfigError),
    ):
        ids(loader)
    (line, *_) = log.wait_for("job not opened job=lost")
    assert "rank=0 error=" in line
