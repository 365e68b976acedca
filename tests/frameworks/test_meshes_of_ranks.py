"""Real ranks over gloo: DDP, FSDP2 with tensor parallelism, pipeline stages, context parallelism."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from launching import launch
from small_nodes import alone_and_small
from warm import WarmPython, warm_python

COUNT, WIDTH = 48, 8
pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).parent / "ranks" / "on_meshes.py"


@pytest.fixture(autouse=True)
def small_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    alone_and_small(monkeypatch, tmp_path)


@pytest.fixture
def url(tmp_path: Path) -> str:
    tokens = [[row * 100 + at for at in range(WIDTH)] for row in range(COUNT)]
    table = pa.table(
        {
            "id": range(COUNT),
            "tokens": pa.array(tokens, pa.list_(pa.int64(), WIDTH)),
            "label": [row / 7 for row in range(COUNT)],
        }
    )
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=12)
    return str(tmp_path / "rows.parquet")


@pytest.fixture(scope="module")
def python(run_mark: str) -> Iterator[WarmPython]:
    needed = ("fsdp", "pipelining", "tensor.parallel", "device_mesh")
    modules = [f"torch.distributed.{name}" for name in needed]
    with warm_python("dataplane_torch", "torch._dynamo", *modules) as made:
        yield made


@pytest.mark.parametrize(
    ("layout", "size", "source"),
    [
        ("ddp", 2, "torch.distributed: rank 0 of 2"),
        ("fsdp", 4, "DeviceMesh(dp=2, tp=2), batch axes: dp"),
        ("pipeline", 8, "DeviceMesh(dp=2, pp=2, tp=2), batch axes: dp"),
        ("context", 4, "DeviceMesh(dp=2, cp=2), batch axes: dp"),
    ],
)
def test_ranks_of_a_mesh_read_each_sample_once_and_peers_read_the_same(
    layout, size, source, tmp_path, url, python
) -> None:
    out = tmp_path / "out"
    done = launch(python, SCRIPT, out, layout, url, str(out), size=size)
    assert done == [0] * size, (out / "errors").read_text()
    found = [json.loads((out / f"{rank}.json").read_text()) for rank in range(size)]
    assert found[0]["source"] == source
    assert [one["dp_rank"] for one in found] == [rank * 2 // size for rank in range(size)]
    by_rank = {one["dp_rank"]: one["seen"] for one in found}
    assert all(one["seen"] == by_rank[one["dp_rank"]] for one in found)
    seen = [sample for batches in by_rank.values() for batch in batches for sample in batch]
    assert sorted(seen) == list(range(COUNT))
