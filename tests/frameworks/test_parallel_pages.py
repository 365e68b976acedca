"""The examples of docs/parallel.md run on as many ranks as their fences say: ```python ranks=4."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from launching import launch
from small_nodes import alone_and_small
from warm import WarmPython, warm_python

PAGE = Path(__file__).resolve().parents[2] / "docs" / "parallel.md"
FENCE = re.compile(r"^```python ranks=(\d+)(?: needs=(\w+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EXAMPLES = [
    pytest.param(int(size), package, text, id=str(nth))
    for nth, (size, package, text) in enumerate(FENCE.findall(PAGE.read_text()))
]
SCRIPT = Path(__file__).parent / "ranks" / "on_page.py"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def python(run_mark: str) -> Iterator[WarmPython]:
    with warm_python("dataplane_torch", "torch._dynamo", "torch.distributed.fsdp") as made:
        yield made


def test_the_page_has_examples_that_run() -> None:
    assert len(EXAMPLES) >= 5


@pytest.mark.parametrize(("size", "package", "text"), EXAMPLES)
def test_an_example_runs_on_its_ranks(size, package, text, tmp_path, monkeypatch, python) -> None:
    if package and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    alone_and_small(monkeypatch, tmp_path)
    rows = [[row + at for at in range(8)] for row in range(48)]
    lists = pa.array(rows, pa.list_(pa.int64(), 8))
    pq.write_table(pa.table({"tokens": lists, "labels": lists}), tmp_path / "rows.parquet")
    out = tmp_path / "out"
    done = launch(python, SCRIPT, out, text, str(tmp_path), size=size)
    assert done == [0] * size, (out / "errors").read_text()
