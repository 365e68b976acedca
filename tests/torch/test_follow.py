"""Runs that change on every world; `follow=True`, with which each epoch has the shards that are there
at its begin.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import recipes
from dataplane_torch import DataLoader, Mixture, ShardedIterableDataset, Source

from dataplane.cli import run
from dataplane.model.errors import ConfigError
from dataplane.model.records import Topology

ROWS, BATCH = 20, 8
OPTIONS: dict[str, Any] = {"shuffle": True, "seed": 3, "global_batch_size": BATCH, "name": "f"}


@contextlib.contextmanager
def ranks(url: Any, size: int, state: Any = None, **more: Any) -> Iterator[list[Any]]:
    with contextlib.ExitStack() as stack:
        loaders = []
        for rank in range(size):
            place = Topology(rank, size, rank, size, rank, size)
            loader = DataLoader(url, topology=place, **OPTIONS, **more)
            loaders.append(stack.enter_context(loader))
        for loader in loaders if state is not None else ():
            loader.load_state_dict(state)
        yield loaders


def read(loaders: list[Any]) -> list[list[int]]:
    """The rows of each global batch of a pass, sorted."""
    passes = [[batch["id"].tolist() for batch in loader] for loader in loaders]
    return [sorted(itertools.chain(*step)) for step in zip(*passes, strict=True)]


@pytest.mark.parametrize("size", [1, 3])
def test_each_epoch_has_what_is_there_at_its_begin_on_any_number_of_ranks(
    size: int, tmp_path: Path, shared_node: None, capsys: pytest.CaptureFixture[str]
) -> None:
    def write(shard: int) -> str:
        table = pa.table({"id": range(shard * ROWS, (shard + 1) * ROWS)})
        pq.write_table(table, tmp_path / f"day-{shard}.parquet", row_group_size=5)
        return str(tmp_path / f"day-{shard}.parquet")

    def twin(epoch: int, *urls: str) -> list[list[int]]:
        with ranks([*urls], 1) as loaders:
            loaders[0].set_epoch(epoch)
            return read(loaders)

    days, url = [write(0), write(1)], str(tmp_path / "day-*.parquet")
    with ranks(url, size, follow=True) as loaders:
        passes = [iter(loader) for loader in loaders]
        first = [sorted(itertools.chain(*(next(each)["id"].tolist() for each in passes)))]
        days.append(write(2))
        assert [*first, *read(passes)] == twin(0, *days[:2])
        assert read(loaders) == twin(1, *days)
        assert read(loaders) == twin(2, *days)  # nothing has changed
        passes = [iter(loader) for loader in loaders]
        third = [sorted(itertools.chain(*(next(each)["id"].tolist() for each in passes)))]
        states = [json.loads(json.dumps(loader.state_dict())) for loader in loaders]
    assert all(state == states[0] for state in states)
    assert [stage["epoch"] for stage in states[0]["stages"]] == [1]
    days.append(write(3))
    with ranks(url, 4 - size, states[0], follow=True) as loaders:
        assert [*third, *read(loaders)] == twin(3, *days[:3])
        assert read(loaders) == twin(4, *days)
        assert [stage["epoch"] for stage in loaders[0].state_dict()["stages"]] == [1, 4]
        (tmp_path / "ledger").write_text(loaders[0].ledger())
    capsys.readouterr()
    assert run(["trace", str(tmp_path / "ledger"), "--epoch", "3", "--step", "0", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [sorted(int(row["shard"][-9]) * ROWS + row["row"] for row in rows)] == third
    assert run(["ledger", "verify", str(tmp_path / "ledger")]) == 0
    with pytest.raises(ConfigError, match=r"follow is an option of dataplane_torch\.DataLoader"):
        ShardedIterableDataset(url, BATCH, follow=True)


def test_a_mixture_that_grows_keeps_the_weights_that_were_set(
    tmp_path: Path, shared_node: None
) -> None:
    def write(name: str, start: int) -> None:
        pq.write_table(pa.table({"id": range(start, start + 40)}), tmp_path / f"{name}.parquet")

    def share(batches: list[list[int]]) -> float:
        rows = list(itertools.chain(*batches))
        return sum(row >= 1000 for row in rows) / len(rows)

    write("a0", 0)
    write("b0", 1000)
    sources = {name: Source(str(tmp_path / f"{name}*.parquet"), weight=1.0) for name in "ab"}
    mixture = Mixture(sources, exhausted="cycle", length=80)
    with ranks(mixture, 1, follow=True) as loaders:
        loaders[0].set_weights({"a": 0.9, "b": 0.1})
        write("a1", 40)
        assert share(read(loaders)) == 0.1
        batches = iter(loaders[0])
        next(batches)
        state = json.loads(json.dumps(loaders[0].state_dict()))
        rest = [sorted(batch["id"].tolist()) for batch in batches]
        assert share(rest) < 0.2
        ended = json.loads(json.dumps(loaders[0].state_dict()))
    write("a2", 80)
    write("b1", 1040)
    with ranks(mixture, 2, state, follow=True) as loaders:
        assert read(loaders) == rest
        expected = read(loaders)
        assert share(expected) == 0.1
        assert {row // 40 for row in itertools.chain(*expected)} > {0, 1, 2}
    with ranks(mixture, 1, ended, follow=True) as loaders:
        assert share(read(loaders)) == 0.1


@pytest.mark.slow
@pytest.mark.parametrize("change", ["restart", "unread", "finish"])
@pytest.mark.parametrize("recipe", recipes.RECIPES)
def test_every_change_gives_equal_batches_on_every_world_wherever_it_is_resumed(
    recipe: str, change: str, tmp_path: Path, shared_node: None
) -> None:
    """Forty cases with test_stages.py, whose twins say how often each sample comes."""
    folder = recipes.write(tmp_path)
    shards, after, old, new = recipes.RECIPES[recipe]
    former: Any = {"a": recipes.some(folder, 0, 1), "b": recipes.some(folder, 2, 3)}
    former = former if shards == "mixed" else recipes.some(folder, *shards)
    after = recipes.urls(folder, after)
    state = recipes.state_after(recipes.urls(folder, shards), 2, **old)
    if (recipe, change) == ("view", "unread"):
        with pytest.raises(ConfigError, match="had other rows in the state's run"):
            list(recipes.ranks(after, 1, state, change, former, **new).__enter__())
        return
    expected, states = list[Any](), [state]
    with recipes.ranks(after, 1, state, change, former, **new) as (loader,):
        for batch in itertools.chain(loader, loader):
            expected.append(recipes.ids_of(batch))
            states.append(json.loads(json.dumps(loader.state_dict())))
        (tmp_path / "ledger").write_text(loader.ledger())
    assert run(["ledger", "verify", str(tmp_path / "ledger")]) == 0
    for size, at in itertools.product((2, 3, 4), (0, 1, len(expected) // 2, len(expected) - 1)):
        with recipes.ranks(after, size, states[at], change, former, **new) as loaders:
            rest = list[Any]()
            while len(rest) < len(expected) - at:
                rest += recipes.read(loaders)
            assert rest == expected[at:]
            digests = {loader.state_dict()["digest"]["value"] for loader in loaders}
            assert digests == {states[-1]["digest"]["value"]}
