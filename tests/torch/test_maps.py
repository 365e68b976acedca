"""`map=` with `resizes=True`: a map drops and multiplies rows. The twin is a dataset whose blocks
store what the map makes. With `per_epoch=True` it draws anew in each epoch.
"""

from __future__ import annotations

import itertools
import json
import os
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import user_functions
from dataplane_torch import DataLoader, Mixture, Pack, Source
from plan.plain import substitute

from dataplane.cli import run
from dataplane.model.errors import ConfigError, FunctionError, SpecMismatch
from dataplane.worker.functions import block_generator

pytestmark = pytest.mark.usefixtures("shared_node")
ROWS, GROUP = 60, 12
MAPPED: dict[str, Any] = {"map": user_functions.repeats, "resizes": True}
SHUFFLED: dict[str, Any] = {"shuffle": True, "seed": 3, "lanes": 2, "window": 20}


def written(folder: Path, seed: int = 0, shards: int = 2) -> tuple[str, str]:
    """Rows (id, times), and the rows that `repeats` makes of each block; some make none."""
    draw = random.Random(seed)
    stored, made = folder / "stored", folder / "made"
    for place in (stored, made):
        place.mkdir()
    for shard in range(shards):
        ids = range(shard * ROWS, (shard + 1) * ROWS)
        times = [0 if row % ROWS // GROUP == 3 else draw.choice((0, 0, 1, 1, 2, 5)) for row in ids]
        table = pa.table({"id": ids, "times": times, "row": ids})
        pq.write_table(table, stored / f"{shard}.parquet", row_group_size=GROUP)
        parts = [table.slice(at, GROUP) for at in range(0, ROWS, GROUP)]
        write_blocks(made / f"{shard}.parquet", parts)
    return str(stored), str(made)


def write_blocks(path: Path, parts: list[pa.Table]) -> None:
    made = [pa.table(user_functions.repeats(dict(zip(part.column_names, part.itercolumns(),
                                                     strict=True)))) for part in parts]  # fmt: skip
    with pq.ParquetWriter(path, made[0].schema) as writer:
        for table in made:
            writer.write_table(table, row_group_size=1000)


def batches_of(url: Any, state: Any = None, **given: Any) -> tuple[list[list[Any]], list[Any]]:
    """The rows of each batch, and the state after each."""
    with DataLoader(url, **{"global_batch_size": 12, **given}) as loader:
        if state is not None:
            loader.load_state_dict(state)
        count, rows, states = len(loader), [], []
        for batch in loader:
            rows.append([*zip(batch["id"].tolist(), batch["copy"].tolist(), strict=True)])
            states.append(loader.state_dict())
        assert state is not None or len(rows) == count
    return rows, states


def dealt(ranks: list[list[list[Any]]]) -> list[list[Any]]:
    return [
        [row for turn in itertools.zip_longest(*step) for row in turn if row is not None]
        for step in zip(*ranks, strict=True)
    ]


def same(batches: list[list[Any]], expected: list[list[Any]]) -> None:
    """Compare batches; where the last two are cut may depend on the ranks."""
    count = max(min(len(batches), len(expected)) - 2, 0)
    assert batches[:count] == expected[:count]
    assert [*itertools.chain(*batches)] == [*itertools.chain(*expected)]


@pytest.mark.parametrize("order", [{}, SHUFFLED], ids=["stored", "shuffled"])
def test_rows_are_those_of_a_dataset_that_stores_them_on_any_ranks_and_after_any_resume(
    tmp_path: Path, order: dict[str, Any]
) -> None:
    stored, made = written(tmp_path, seed=len(order))
    expected, _ = batches_of(made, **order)
    found, states = batches_of(stored, **MAPPED, **order)
    assert found == expected
    for size in (2, 3):
        ranks = [batches_of(stored, dp_rank=at, dp_size=size, **MAPPED, **order)[0]
                 for at in range(size)]  # fmt: skip
        same(dealt(ranks), expected)
    for step in (0, 2, len(expected) - 3):
        rest = [batches_of(stored, states[step], dp_rank=at, dp_size=2, **MAPPED, **order)[0]
                for at in range(2)]  # fmt: skip
        same(dealt(rest), expected[step + 1 :])


def test_the_map_gets_the_rows_of_the_view_and_the_limit_counts_them(tmp_path: Path) -> None:
    stored, _ = written(tmp_path)
    where = "id % 3 == 1 and times < 5"
    for view in ({"where": where}, {"where": where, "split": ("train", 0.6)}, {"limit": 20}):
        with DataLoader(stored, batch_size=500, **view) as loader:
            (batch,) = loader
        columns = {name: pa.array(batch[name].tolist()) for name in ("id", "times")}
        made = user_functions.repeats(columns)
        found, _ = batches_of(stored, global_batch_size=500, **view, **MAPPED)
        assert found == [[*zip(made["id"].to_pylist(), made["copy"].to_pylist(), strict=True)]]


def test_sources_of_a_mixture_may_resize(tmp_path: Path) -> None:
    stored, made = written(tmp_path)
    mixtures = [
        Mixture({"a": Source(url, weight=0.5, **own), "b": Source(made, weight=0.5, limit=30)})
        for url, own in ((stored, MAPPED), (made, {}))
    ]
    found, expected = (batches_of(mixture, shuffle=True, seed=1)[0] for mixture in mixtures)
    assert found == expected


def test_commands_name_the_rows_that_the_map_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stored, _ = written(tmp_path)
    with DataLoader(stored, 16, **MAPPED, **SHUFFLED) as loader:
        batch = next(iter(loader))
        (tmp_path / "ledger").write_text(loader.ledger())
    cache = os.environ["DATAPLANE_CACHE_DIR"]
    command = ["replay", str(tmp_path / "ledger"), "--step", "0", "--cache-dir", cache, "--json"]
    assert run(command) != 0
    assert "--allowed-functions" in capsys.readouterr().err
    allowed = ["--allowed-functions", "user_functions:"]
    assert run([*command, *allowed]) == 0
    rows = [row["values"] for row in json.loads(capsys.readouterr().out)]
    assert rows == [
        {"id": row, "copy": copy}
        for row, copy in zip(batch["id"].tolist(), batch["copy"].tolist(), strict=True)
    ]


@pytest.mark.usefixtures("own_node")
def test_a_block_with_other_rows_than_were_counted_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored, _ = written(tmp_path)
    says = tmp_path / "rows"
    says.write_text("7")
    monkeypatch.setenv("ROWS_FILE", str(says))
    options = {"map": user_functions.returns_as_a_file_says, "resizes": True, "columns": ["id"]}
    with DataLoader(stored, 16, **options) as loader:
        assert len([row for batch in loader for row in batch["id"].tolist()]) == 70
        says.write_text("5")
    with (
        pytest.raises(FunctionError, match=r"block 0: .* returned 5 rows, and 7 when .* counted"),
        DataLoader(stored, 16, **options) as loader,
    ):
        next(iter(loader))


def test_mistakes_are_named(tmp_path: Path) -> None:
    stored, _ = written(tmp_path)
    with pytest.raises(FunctionError, match="one row for each, unless the loader has resizes=True"):
        batches_of(stored, map=user_functions.repeats)
    with pytest.raises(ConfigError, match="makes no rows of the 24 rows"):
        batches_of(stored, where="id >= 36 and id < 48 or id >= 96 and id < 108", **MAPPED)
    with pytest.raises(ConfigError, match=r"no column 'copy'.* where= comes before map="):
        batches_of(stored, where="copy > 1", **MAPPED)
    with pytest.raises(ConfigError, match="without map="):
        DataLoader(stored, resizes=True)
    with pytest.raises(ConfigError, match="an empty list to leave a document out"):
        DataLoader(stored, pack=Pack("id", 8), **MAPPED)
    with pytest.raises(ConfigError, match="resizes='no'"):
        DataLoader(stored, map=user_functions.repeats, resizes="no")


def test_a_map_draws_anew_in_each_epoch_the_same_on_any_ranks_and_after_any_resume(
    tmp_path: Path,
) -> None:
    url, _ = written(tmp_path)
    given: dict[str, Any] = {"shuffle": True, "seed": 3, "global_batch_size": 32, "per_epoch": True}

    def noise(state: Any = None, epochs: int = 1, **own: Any) -> list[dict[int, float]]:
        found: list[dict[int, float]] = []
        with DataLoader(url, map=user_functions.noisy, **given, **own) as loader:
            if state is not None:
                loader.load_state_dict(state)
            for _ in range(epochs):
                found.append({})
                for batch in loader:
                    pairs = zip(batch["row"].tolist(), batch["noise"].tolist(), strict=True)
                    found[-1] |= dict(pairs)
        return found

    whole = noise(epochs=4)
    for epoch, own in enumerate(whole):
        expected = [
            block_generator(3, shard, block, epoch).random(GROUP).tolist()
            for shard, block in itertools.product(range(2), range(ROWS // GROUP))
        ]
        assert [own[row] for row in range(2 * ROWS)] == [*itertools.chain(*expected)]
    ranks = [noise(epochs=3, dp_rank=rank, dp_size=2) for rank in range(2)]
    assert [one | other for one, other in zip(*ranks, strict=True)] == whole[:3]
    with DataLoader(url, map=user_functions.noisy, **given) as loader:
        assert len(list(loader)) == 4
        passed = iter(loader)
        for _ in range(2):
            next(passed)
        state = loader.state_dict()
    rest, following = noise(state, epochs=2)
    assert 0 < len(rest) < 2 * ROWS
    assert rest.items() <= whole[1].items()
    assert following == whole[2]


def test_what_cannot_be_drawn_in_each_epoch_is_refused(tmp_path: Path) -> None:
    url, _ = written(tmp_path)
    with pytest.raises(FunctionError, match="takes no argument 'generator', and per_epoch=True"):
        next(iter(DataLoader(url, map=user_functions.twice, per_epoch=True)))
    with pytest.raises(ConfigError, match="per_epoch=True without map="):
        DataLoader(url, per_epoch=True)
    others: list[dict[str, Any]] = [{"resizes": True}, {"pack": Pack("ids", 8)}]
    for other in others:
        with pytest.raises(ConfigError, match="per_epoch=True with resizes= or pack="):
            DataLoader(url, map=user_functions.noisy, per_epoch=True, **other)


def test_what_a_changed_recipe_left_unread_is_read_once_with_more_shards(tmp_path: Path) -> None:
    stored, _ = written(tmp_path, seed=1)
    head, states = batches_of(stored, **MAPPED, **SHUFFLED)
    table = pa.table({"id": range(500, 520), "times": [2] * 20, "row": range(20)})
    pq.write_table(table, f"{stored}/2.parquet")
    every, _ = batches_of(stored, **MAPPED)
    with DataLoader(stored, 9, **MAPPED, **{**SHUFFLED, "seed": 8}) as loader:
        loader.load_state_dict(states[3], change="unread")
        rest = [
            pair
            for batch in loader
            for pair in zip(batch["id"].tolist(), batch["copy"].tolist(), strict=True)
        ]
    assert sorted([*itertools.chain(*head[:4]), *rest]) == sorted(itertools.chain(*every))


def test_a_row_at_which_the_map_fails_is_replaced_before_its_rows_are_counted(
    tmp_path: Path,
) -> None:
    stored, _ = written(tmp_path)
    options: dict[str, Any] = {"map": user_functions.repeats_but_3, "resizes": True, "seed": 4}
    found, _ = batches_of(stored, on_bad="replace", bad_max=0.1, **options)
    given = pq.read_table(f"{stored}/0.parquet").slice(0, GROUP).to_pydict()
    instead = substitute(4, 0, 3, GROUP, {3})
    times = [given["times"][instead if row == 3 else row] for row in range(GROUP)]
    ids = [instead if row == 3 else row for row in range(GROUP)]
    expected = [(row, copy) for row, count in zip(ids, times, strict=True) for copy in range(count)]
    assert [*itertools.chain(*found)][: len(expected)] == expected


@pytest.mark.parametrize("mixes", [False, True])
def test_a_state_is_refused_if_a_changed_map_makes_as_many_rows_of_other_blocks(
    tmp_path: Path, mixes: bool
) -> None:
    stored, _ = written(tmp_path)
    dozens = user_functions.doubles_even_dozens, user_functions.doubles_odd_dozens

    def opened(function: Any, **given: Any) -> DataLoader:
        url: Any = stored
        if mixes:
            url = Mixture({"a": Source(stored, weight=1, map=function, resizes=True)})
            return DataLoader(url, 12, seed=3, **given)
        return DataLoader(url, 12, seed=3, map=function, resizes=True, **given)

    states = []
    for function in dozens:
        with opened(function) as loader:
            next(iter(loader))
            states.append(loader.state_dict())
    changed = {**states[1], "dataset": states[0]["dataset"]}  # as if the file had been edited
    with opened(dozens[1]) as loader:
        with pytest.raises(SpecMismatch, match="or the module of map= was changed"):
            loader.load_state_dict(changed)
        loader.load_state_dict(states[1])
        next(iter(loader))
    with opened(dozens[1], shuffle=True) as loader:
        with pytest.raises(ConfigError, match="map= makes other rows than it did"):
            loader.load_state_dict(changed, change="unread")
        loader.load_state_dict(changed, change="restart")
        assert len([*loader]) == len(loader)
