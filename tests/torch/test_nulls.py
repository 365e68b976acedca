"""Nulls over real nodes: reported when a loader opens, in every format."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from dataplane_torch import DataLoader
from shards import (
    arrow_bytes,
    example_bytes,
    json_lines,
    parquet_bytes,
    tar_bytes,
    tfrecord_bytes,
    zipped,
)

from dataplane.model.errors import ConfigError

pytestmark = pytest.mark.usefixtures("shared_node")

Rows = Sequence[dict[str, Any]]


def as_parquet(rows: Rows) -> bytes:
    return parquet_bytes(pa.Table.from_pylist(list(rows)), row_group_size=10)


def as_arrow(rows: Rows) -> bytes:
    return arrow_bytes(pa.Table.from_pylist(list(rows)), rows=10)


def as_jsonl(rows: Rows) -> bytes:
    return json_lines(rows)


def as_tfrecord(rows: Rows) -> bytes:
    return tfrecord_bytes(
        example_bytes({k: ("int64_list", [v]) for k, v in row.items() if v is not None})
        for row in rows
    )


def as_tar(rows: Rows) -> bytes:
    return tar_bytes(
        (f"{i:06d}.{name}", str(value).encode())
        for i, row in enumerate(rows)
        for name, value in row.items()
        if value is not None
    )


WRITERS: dict[str, Callable[[Rows], bytes]] = {
    "parquet": as_parquet,
    "arrow": as_arrow,
    "jsonl": as_jsonl,
    "jsonl.gz": lambda rows: zipped(as_jsonl(rows)),
    "tfrecord": as_tfrecord,
    "tar": as_tar,
}
# Names that are integers in a tar file, too.
ROWS = [{"cls": i, "id": None if i % 4 == 3 else i, "inx": i or None} for i in range(40)]


@pytest.mark.parametrize("suffix", WRITERS)
def test_columns_with_nulls_are_refused_together_before_the_first_batch(tmp_path, suffix):
    (tmp_path / f"0.{suffix}").write_bytes(WRITERS[suffix](ROWS[1:3]))
    (tmp_path / f"1.{suffix}").write_bytes(WRITERS[suffix](ROWS))
    order = {"batch_size": 6, "columns": ["cls", "id", "inx"]}
    with (
        DataLoader(str(tmp_path), **order) as loader,
        pytest.raises(ConfigError, match=rf"2 columns: .*1\.{suffix}\).*none: pass") as told,
    ):
        len(loader)
    assert 'fill_null={"id": 0, "inx": 0}' in str(told.value)
    with DataLoader(str(tmp_path), **order, fill_null={"id": 0, "inx": -7}) as loader:
        found = torch.cat([torch.stack([b["cls"], b["id"], b["inx"]], 1) for b in loader]).tolist()
    want = [[r["cls"], r["id"] or 0, -7 if r["inx"] is None else r["inx"]] for r in ROWS]
    assert found == [*want[1:3], *want]
    stack = {"x": ["inx", "id"]}
    with DataLoader(str(tmp_path), 6, columns=["cls"], stack=stack, nulls="mask") as loader:
        batches = list(loader)
    masks = torch.cat([batch["x.is_null"] for batch in batches])
    assert masks.dtype == torch.bool
    want = [[row["inx"] is None, row["id"] is None] for row in ROWS]
    assert masks.tolist() == [*want[1:3], *want]
    want = [[row["inx"] or 0, row["id"] or 0] for row in ROWS]
    assert torch.cat([batch["x"] for batch in batches]).tolist() == [*want[1:3], *want]
    assert not torch.cat([batch["cls.is_null"] for batch in batches]).any()


@pytest.mark.parametrize("lists", ["padded", "ragged"])
def test_masks_tell_null_lists_texts_and_objects_from_empty_ones(tmp_path, lists):
    rows = [
        {"l": [1, 2], "t": "a", "b": b"", "o": [["x"]], "f": 1.0},
        {"l": None, "t": None, "b": None, "o": None, "f": None},
        {"l": [], "t": "", "b": b"b", "o": [], "f": 2.0},
    ]
    path = tmp_path / "a.parquet"
    path.write_bytes(as_parquet(rows))
    with DataLoader(str(path), batch_size=3, lists=lists, nulls="mask") as loader:
        (batch,) = loader
    for name in rows[0]:
        assert batch[f"{name}.is_null"].tolist() == [False, True, False]
    assert batch["t"] == ["a", None, ""]
    assert torch.equal(batch["f"].isnan(), batch["f.is_null"])
    lengths = batch["l"].offsets.diff() if lists == "ragged" else batch["l.length"]
    assert lengths.tolist() == [2, 0, 0]


def test_nulls_that_the_index_did_not_see_are_told_together_by_the_first_block_with_one(tmp_path):
    """Of JSON lines only the first 4 MiB are parsed for an index."""
    rows = [{"x": i, "y": i, "text": "t" * 400} for i in range(15_000)]
    rows[14_000] |= {"x": None}
    rows[14_001] |= {"y": None}
    path = Path(tmp_path) / "long.jsonl"
    path.write_bytes(as_jsonl(rows))
    with DataLoader(str(path), batch_size=1000, columns=["x", "y"]) as loader:
        assert len(loader) == 15
        with pytest.raises(ConfigError, match=r'long.jsonl has nulls in 2 columns.*"x": 0, "y": 0'):
            list(loader)
