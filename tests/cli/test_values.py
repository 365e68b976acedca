"""`dataplane inspect` shows any value exactly, and no value crashes it."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from arrow_layouts import cases

from dataplane.cli import run
from dataplane.commands.datasets import shown

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
