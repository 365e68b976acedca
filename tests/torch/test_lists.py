"""Lists of numbers as tensors: what pads them, and how long they may be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from dataplane_torch import DataLoader
from shards import arrow_bytes, json_lines, parquet_bytes

from dataplane.model.errors import ConfigError, SpecMismatch

pytestmark = pytest.mark.usefixtures("shared_node")

TOKENS = [[], [1], [2, 3, 4], [5, 6, 7, 8, 9], None, [10, 11]]
MARKS = [[row / 2 for row in tokens or []] for tokens in TOKENS]
ROWS = pa.table(
    {
        "tokens": pa.array(TOKENS, pa.list_(pa.int32())),
        "marks": pa.array(MARKS, pa.large_list(pa.float16())),
        "flags": pa.array([[n % 2 == 1 for n in tokens or []] for tokens in TOKENS]),
        "id": range(len(TOKENS)),
    }
)


@pytest.fixture(params=["parquet", "arrow", "jsonl"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    kept = ROWS if request.param != "jsonl" else ROWS.drop_columns(["marks"])
    content = {
        "parquet": lambda: parquet_bytes(kept, row_group_size=4),
        "arrow": lambda: arrow_bytes(kept, rows=4),
        "jsonl": lambda: json_lines(kept.to_pylist()),
    }[request.param]()
    found = tmp_path / f"rows.{request.param}"
    found.write_bytes(content)
    return found


def padded(rows: list[list[Any]], value: Any) -> list[list[Any]]:
    width = max(map(len, rows))
    return [[*row, *[value] * (width - len(row))] for row in rows]


def cut(length: int, side: str) -> list[list[int]]:
    rows = [tokens or [] for tokens in TOKENS]
    return [row[:length] if side == "right" else row[max(0, len(row) - length) :] for row in rows]


@pytest.mark.parametrize("side", ["right", "left"])
def test_lists_are_cut_from_a_side_and_padded_with_a_value(path: Path, side: str) -> None:
    options = {"max_length": {"tokens": 3}, "truncation_side": side, "pad_value": -100}
    with DataLoader(str(path), batch_size=3, **options) as loader:
        batches = list(loader)
    rows = cut(3, side)
    for batch, at in zip(batches, (0, 3), strict=True):
        assert batch["tokens"].tolist() == padded(rows[at : at + 3], -100)
        assert batch["tokens"].dtype == (torch.int64 if path.suffix == ".jsonl" else torch.int32)
        assert batch["tokens.length"].tolist() == [len(row) for row in rows[at : at + 3]]
        assert batch["flags"].dtype == torch.bool  # -100 is not a bool: zero
        flags = [[n % 2 == 1 for n in tokens or []] for tokens in TOKENS[at : at + 3]]
        assert batch["flags"].tolist() == padded(flags, value=False)
        if "marks" in batch:
            assert batch["marks"].tolist() == padded(MARKS[at : at + 3], -100.0)


def test_ragged_lists_are_cut_alike(tmp_path: Path) -> None:
    (tmp_path / "rows.arrow").write_bytes(arrow_bytes(ROWS, rows=4))
    with DataLoader(str(tmp_path), 6, lists="ragged", max_length=2, columns=["tokens"]) as loader:
        (batch,) = loader
    assert batch["tokens"].values.tolist() == [n for row in cut(2, "right") for n in row]
    assert batch["tokens"].offsets.diff().tolist() == [len(row) for row in cut(2, "right")]


def test_a_value_for_each_column_may_be_nan_and_true(tmp_path: Path) -> None:
    (tmp_path / "rows.arrow").write_bytes(arrow_bytes(ROWS, rows=4))
    pads = {"marks": float("nan"), "flags": True}
    with DataLoader(str(tmp_path / "rows.arrow"), 6, pad_value=pads) as loader:
        (batch,) = loader
        assert loader.load_state_dict(loader.state_dict()) is None
    beyond = torch.arange(5)[None, :] >= batch["marks.length"][:, None]
    assert batch["marks"].isnan().equal(beyond)
    assert batch["flags"][beyond].all()
    assert not batch["tokens"][beyond].any()


def test_a_state_of_other_lists_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "rows.arrow").write_bytes(arrow_bytes(ROWS, rows=4))
    with DataLoader(str(tmp_path / "rows.arrow"), 3, max_length=3) as loader:
        state = loader.state_dict()
    with (
        DataLoader(str(tmp_path / "rows.arrow"), 3, max_length=4) as loader,
        pytest.raises(SpecMismatch, match="max_length_all: 3 in the state, 4 here"),
    ):
        loader.load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_length": 0}, "max_length=0: pass a number of values"),
        ({"max_length": True}, "max_length=True: pass a number of values"),
        ({"max_length": 2.5}, "max_length=2.5: pass a number"),
        ({"max_length": {"tokens": "3"}}, r"max_length=\{'tokens': '3'\}"),
        ({"max_length": {3: 3}}, "3 is not the name of a column"),
        ({"pad_value": "x"}, "pad_value='x': pass a number"),
        ({"pad_value": {"tokens": None}}, r"pad_value=\{'tokens': None\}"),
        ({"pad_value": 1, "lists": "ragged"}, "ragged lists are not padded"),
        ({"truncation_side": "left"}, "without max_length"),
        ({"truncation_side": "start", "max_length": 3}, "choose one of right, left"),
    ],
)
def test_what_no_list_can_be_is_told_at_construction(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        DataLoader("s3://bucket/train/", 3, **options)


def test_a_column_without_lists_is_reported_when_the_job_opens(tmp_path: Path) -> None:
    (tmp_path / "rows.arrow").write_bytes(arrow_bytes(ROWS, rows=4))
    with (
        DataLoader(str(tmp_path / "rows.arrow"), 3, max_length={"id": 3}) as loader,
        pytest.raises(ConfigError, match="max_length names 'id', which is not a column of lists"),
    ):
        len(loader)
