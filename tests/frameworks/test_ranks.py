"""Two ranks under each framework: the samples of each rank, and those of a resumed run."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from launching import launch
from small_nodes import alone_and_small
from warm import WarmPython, warm_python

COUNT, STEPS = 48, 6
RANKS = Path(__file__).parent / "ranks"


@pytest.fixture(autouse=True)
def small_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A real node, embedded, with little memory, and loaders that no launch of ours is in."""
    alone_and_small(monkeypatch, tmp_path)


@pytest.fixture
def url(tmp_path: Path) -> str:
    table = pa.table({"id": range(COUNT + 9), "text": ["2 2"] * (COUNT + 9)})
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=12)
    return str(tmp_path / "rows.parquet")


@pytest.fixture(scope="module")
def python(run_mark: str) -> Iterator[WarmPython]:
    """All that ranks import, once."""
    frameworks = ("accelerate", "lightning", "transformers.trainer")
    with warm_python("dataplane_torch", "torch._dynamo", *frameworks) as made:
        yield made


def told(out: Path, name: str) -> list:
    """The report of each rank."""
    return [json.loads((out / f"{name}-{rank}.json").read_text()) for rank in range(2)]


def assert_shared_out(ranks: list[list[list[int]]]) -> None:
    """In every epoch each sample went to one rank, once, and epochs differ."""
    epochs = [[ids for rank in ranks for ids in rank[at : at + STEPS]] for at in (0, 6, 12)]
    assert [len(rank) for rank in ranks] == [3 * STEPS] * 2
    for epoch in epochs:
        assert sorted(sample for ids in epoch for sample in ids) == list(range(COUNT))
    assert epochs[0] != epochs[1] != epochs[2]


@pytest.mark.parametrize("framework", ["lightning", "transformers"])
def test_ranks_share_an_epoch_and_go_on_from_the_frameworks_own_checkpoint(
    framework, tmp_path, url, python
) -> None:
    out = tmp_path / "out"
    done = launch(python, RANKS / f"on_{framework}.py", out, str(out), "dataset", url)
    assert done == [0, 0], (out / "errors").read_text()
    for nth in ("0", "1"):
        found = told(out, nth)
        assert_shared_out([rank["whole"] for rank in found])
        for rank in found:
            assert len(rank["first"]) == 9
            assert rank["first"] + rank["rest"] == rank["whole"]


def test_accelerate_goes_on_after_its_ranks_were_killed(tmp_path, url, python) -> None:
    out = tmp_path / "out"
    sources = (str(out), "dataset", url)
    killed = launch(python, RANKS / "on_accelerate.py", out, "first", *sources)
    assert -signal.SIGKILL in killed, (out / "errors").read_text()
    done = launch(python, RANKS / "on_accelerate.py", out, "rest", *sources)
    assert done == [0, 0], (out / "errors").read_text()
    for nth in ("0", "1"):
        whole, first, rest = (told(out, f"{nth}-{what}") for what in ("whole", "first", "rest"))
        assert_shared_out(whole)
        assert [a + b for a, b in zip(first, rest, strict=True)] == whole
        # Every fourth step, and the last of an epoch: the loader says which that is.
        for updates in told(out, f"{nth}-whole-updates"):
            assert updates == [False, False, False, True, False, True] * 3
