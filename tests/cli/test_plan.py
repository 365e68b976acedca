"""`dataplane plan` warns as a loader does; `dataplane inspect` shows any value."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from arrow_layouts import cases
from servers import S3Server, reach
from small_nodes import alone_and_small

from dataplane.cli import run
from dataplane.commands.datasets import shown

SHARDS, BLOCKS, ROWS, ROW_BYTES = 2, 32, 16, 512
STORED = SHARDS * BLOCKS * ROWS * ROW_BYTES


@pytest.fixture
def url(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Blocks of 8 KiB, and a node with room for half of them."""
    alone_and_small(monkeypatch, tmp_path)
    monkeypatch.setenv("DATAPLANE_BLOCK_ARENA_BYTES", str(STORED // 2))
    reach(s3_server, monkeypatch)
    name = s3_server.bucket()
    s3_server.put(name, {f"{at}.parquet": shard(at, BLOCKS * ROWS, ROWS) for at in range(SHARDS)})
    return f"s3://{name}/"


def shard(seed: int, row_count: int, block_rows: int) -> bytes:
    random, body = np.random.default_rng(seed), io.BytesIO()
    rows = [random.bytes(ROW_BYTES) for _ in range(row_count)]
    table = pa.table({"x": pa.array(rows, pa.binary(ROW_BYTES))})
    pq.write_table(table, body, row_group_size=block_rows, compression="none", use_dictionary=False)
    return body.getvalue()


def planned(capsys: pytest.CaptureFixture[str], url: str, *options: str) -> dict[str, Any]:
    job = ("--seed", "3", "--lanes", "2", "--window", "32", "--global-batch", "8")
    assert run(["plan", url, *job, *options, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_open_windows_that_do_not_fit_are_told_as_a_loader_does(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    hosts = ("--dp-size", "2", "--ranks-per-host", "1")
    for arena, is_too_small in ((STORED // 2, False), (20 << 10, True)):
        found = planned(capsys, url, *hosts, "--block-arena-bytes", str(arena))
        text = " ".join(found["warnings"])
        assert ("of blocks open on a host, and its block arena has" in text) == is_too_small
        assert ("raise block_arena_bytes to" in text) == is_too_small
        job = ("--seed", "3", "--lanes", "2", "--window", "32", "--global-batch", "8", *hosts)
        assert run(["plan", url, *job, "--block-arena-bytes", str(arena)]) == 0
        shown = capsys.readouterr()
        assert " ".join(shown.err.split()).count("warning:") == len(found["warnings"])


def test_sources_of_a_mixture_share_the_memory_of_a_host(
    url: str, s3_server: S3Server, capsys: pytest.CaptureFixture[str]
) -> None:
    """The warning is a loader's, for as many hosts as are asked about."""
    s3_server.put(url.split("/")[2], {"b/0.parquet": shard(9, BLOCKS * ROWS, ROWS)})
    sources = ("--source", f"a={url}0.parquet,weight=1", "--source", f"b={url}b/,weight=1")
    job = ("--seed", "3", "--lanes", "2", "--window", "32", "--global-batch", "8", "--json")
    for arena, hosts, is_too_small in (
        (STORED * 2, 1, False), (STORED // 2, 1, True), (STORED // 2, 2, True),
    ):  # fmt: skip
        ranks = ("--dp-size", str(hosts), "--ranks-per-host", "1")
        assert run(["plan", *sources, *job, *ranks, "--block-arena-bytes", str(arena)]) == 0
        shown = capsys.readouterr()
        told = " ".join(json.loads(shown.out)["warnings"])
        assert ("of blocks open on a host, and its block arena has" in told) == is_too_small
        assert ("raise block_arena_bytes to" in told) == is_too_small
        assert ("or use more hosts" in told) == (is_too_small and hosts == 1)
        busy = "waiting for the node of this run"
        assert all(busy in line for line in shown.err.splitlines())


def test_what_is_said_of_a_shuffle_is_among_the_warnings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """80 blocks of 4 MB, all of whose rows are one in the file."""
    rows = pa.DictionaryArray.from_arrays(np.zeros(80_000, np.int32), [b"x" * 4000])
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"b": rows}), path, row_group_size=1000, store_schema=False)
    poor = ("--lanes", "1", "--window", "1000", "--global-batch", "256")
    (said,) = planned(capsys, str(path), *poor)["warnings"]
    assert "the samples of a batch come from about 1 of 80 blocks" in said
    assert not planned(capsys, str(path), *poor, "--no-shuffle")["warnings"]


def test_hosts_of_the_table_have_as_many_ranks_as_asked(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for options, ranks in (((), 8), (("--dp-size", "4"), 8), (("--ranks-per-host", "3"), 3)):
        found = planned(capsys, url, *options)
        assert [row["dp_size"] for row in found["by_host_count"][:2]] == [ranks, 2 * ranks]
        assert found["host_count"] == 1


def test_a_host_without_a_sample_in_its_first_batch_is_shown_so(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    hosts = ("--dp-size", "8", "--ranks-per-host", "4", "--limit", "3")
    shown = [one["begins_with"] for one in planned(capsys, url, *hosts)["hosts"]]
    assert shown == ["1 block of 0.parquet", "no sample"]


NS, MAX = pa.timestamp("ns"), 2**63 - 1


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        (NS, 1, "1970-01-01T00:00:00.000000001"),
        (NS, -1, "1969-12-31T23:59:59.999999999"),
        (NS, 1730982834123456789, "2024-11-07T12:33:54.123456789"),
        (NS, MAX, "2262-04-11T23:47:16.854775807"),
        (pa.timestamp("ns", "Europe/Berlin"), 0, "1970-01-01T00:00:00.000000000Z"),
        (pa.timestamp("ns", "+01:00"), 0, "1970-01-01T00:00:00.000000000Z"),
        (pa.timestamp("us", "No/Where"), 1, "1970-01-01T00:00:00.000001Z"),
        (pa.timestamp("s"), -62135596800, "0001-01-01T00:00:00"),
        (pa.timestamp("s"), -62135596801, "-62135596801 s"),
        (pa.timestamp("s"), 253402300799, "9999-12-31T23:59:59"),
        (pa.timestamp("ms"), MAX, f"{MAX} ms"),
        (pa.timestamp("us"), -(2**63), f"{-(2**63)} us"),
        (pa.date32(), 19_000, "2022-01-08"),
        (pa.date32(), 2**31 - 1, f"{2**31 - 1} days"),
        (pa.date64(), 86_400_000, "1970-01-02"),
        (pa.date64(), 86_400_001, "1970-01-02T00:00:00.001"),
        (pa.date64(), MAX, f"{MAX} ms"),
        (pa.time32("s"), 86_399, "23:59:59"),
        (pa.time64("ns"), 86_399_999_999_999, "23:59:59.999999999"),
        (pa.time64("us"), MAX, f"{MAX} us"),
        (pa.time32("ms"), -1, "-1 ms"),
        (pa.duration("ns"), -1, "-PT0.000000001S"),
        (pa.duration("s"), MAX, f"PT{MAX}S"),
        (pa.duration("us"), 1_500_000, "PT1.500000S"),
    ],
)
def test_times_are_shown_with_all_digits(kind: pa.DataType, value: int, expected: str) -> None:
    width = pa.int32() if kind.bit_width == 32 else pa.int64()
    array = pa.array([value, None], width).view(kind)
    assert shown(array) == [expected, None]
    assert shown(pa.array([[value]], pa.list_(width)).cast(pa.list_(kind)))[0] == [expected]


def test_any_arrow_value_is_shown_as_json_has_it() -> None:
    for name, arrays in cases():
        for array in arrays:
            found = shown(array)
            assert len(json.loads(json.dumps(found, default=str))) == len(array), name


def test_fields_of_one_name_are_all_shown() -> None:
    array = pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], ["x", "x"])
    assert shown(array) == [[["x", 1], ["x", 2]]]


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_inspect_shows_times_that_python_has_no_value_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    table = pa.table(
        {
            "deep": pa.array([[{"t": 1730982834123456789}]], pa.list_(pa.struct([("t", NS)]))),
            "far": pa.array([2**31 - 1], pa.date32()),
            "long": pa.array([MAX], pa.duration("us")),
        }
    )
    pq.write_table(table, tmp_path / "times.parquet")
    assert run(["inspect", str(tmp_path / "times.parquet"), *flags]) == 0
    out = capsys.readouterr().out
    for text in ("2024-11-07T12:33:54.123456789", "2147483647 days", "PT9223372036854.775807S"):
        assert text in out


def test_what_json_lacks_is_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = [float("nan"), float("inf"), -float("inf"), -0.5]
    table = pa.table({"x": pa.array(values), "l": [[one] for one in values]})
    pq.write_table(table, tmp_path / "x.parquet")
    assert run(["inspect", str(tmp_path / "x.parquet"), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["rows"]
    assert [row["x"] for row in rows] == ["NaN", "Infinity", "-Infinity", -0.5]
    assert [row["l"] for row in rows] == [[row["x"]] for row in rows]
