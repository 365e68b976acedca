"""Every Arrow type from file to batch, over a real node: the values that were written, or a refusal
that names column, type and file.
"""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest
from arrow_layouts import cases
from dataplane_torch import DataLoader
from foreign_values import difference, leaf_types, leaves, needs_fill

from dataplane.cli import run
from dataplane.model.errors import ConfigError, SchemaMismatch

pytestmark = pytest.mark.usefixtures("shared_node")


def is_written_and_read(arrays: list[pa.Array]) -> bool:
    """Whether Arrow itself can write both as one stream, read it back and join the parts."""
    sink = pa.BufferOutputStream()
    try:
        with pa.ipc.new_stream(sink, pa.schema([("x", arrays[0].type)])) as writer:
            for array in arrays:
                writer.write_batch(pa.record_batch([array], ["x"]))
        pa.ipc.open_stream(sink.getvalue()).read_all().combine_chunks()
    except (pa.ArrowException, OSError):
        return False
    return True


def test_every_layout_comes_as_what_was_written(tmp_path: Path) -> None:
    found = {name: arrays for name, arrays in cases() if is_written_and_read(arrays)}
    assert len(found) > 300
    batches = [
        pa.record_batch([arrays[version] for arrays in found.values()], list(found))
        for version in (0, 1)
    ]
    with pa.ipc.new_stream(tmp_path / "all.arrows", batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    # As pyarrow reads them: it loses values of dictionaries in dictionaries when it writes them.
    expected = leaves(pa.ipc.open_stream(tmp_path / "all.arrows").read_all())
    fills = {name: 0 for name, kind in leaf_types(batches[0].schema) if needs_fill(kind)}
    with DataLoader(
        str(tmp_path / "all.arrows"), batch_size=4, lists="ragged", fill_null=fills
    ) as loader:
        assert difference(expected, list(loader)) == ""


def test_a_type_that_pyarrow_has_no_arrays_of_is_refused_by_name_and_can_be_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "old.arrows"
    path.write_bytes(with_month_interval())
    refusal = (
        r"old\.arrows: not supported: column 'm' is of type month_interval; .*columns=\[…\]: x"
    )
    with (
        DataLoader(str(path), batch_size=2) as loader,
        pytest.raises(ConfigError, match=refusal),
    ):
        next(iter(loader))
    with DataLoader(str(path), batch_size=2, columns=["x"]) as loader:
        assert [batch["x"].tolist() for batch in loader] == [[1, 2]]
    assert run(["inspect", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rows"] == [{"x": 1}, {"x": 2}]
    assert found["not_supported"] == {"m": "is of type month_interval"}
    assert run(["verify", str(path)]) == 1
    assert "not supported: column 'm'" in capsys.readouterr().out


def test_a_time_that_nanoseconds_cannot_hold_is_refused_also_by_a_condition(data_dir: Path) -> None:
    path = str(data_dir / "odd" / "int96-year-9999.parquet")
    refusal = r"row 1 of block 0: column 'end' has 9999-12-31T00:00:00, and INT96"
    for options in ({}, {"where": "end > '2020-01-01'"}, {"where": "end < '2000-01-01'"}):
        with (
            DataLoader(path, batch_size=2, **options) as loader,
            pytest.raises(SchemaMismatch, match=refusal),
        ):
            list(loader)
    with DataLoader(path, batch_size=2, columns=["id"]) as loader:
        assert [batch["id"].tolist() for batch in loader] == [[0, 1]]


def with_month_interval() -> bytes:
    """A stream whose column `m` says that it has months: the unit of an interval, in its schema."""
    kind = pa.month_day_nano_interval()
    batch = pa.record_batch([pa.array([(1, 2, 3), None], kind), pa.array([1, 2])], ["m", "x"])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    content = bytes(sink.getvalue())
    for at in (at for at, byte in enumerate(content[:400]) if byte == 2):
        changed = content[:at] + bytes(1) + content[at + 1 :]
        try:
            types = pa.ipc.open_stream(changed).schema.types
        except (pa.ArrowException, OSError):
            continue
        if [str(kind) for kind in types] == ["month_interval", "int64"]:
            return changed
    raise AssertionError("the unit of the interval was not found")
