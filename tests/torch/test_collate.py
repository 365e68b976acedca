"""collate=: a function of the user, called by workers over each batch."""

from __future__ import annotations

import itertools
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import user_functions
from dataplane_torch import (
    DataLoader,
    Mixture,
    RandomResizedCrop,
    ShardedIterableDataset,
    Source,
    ToDtype,
)
from device_steps import content, step
from fleet import kill_workers, own_nodes, wait_until
from pictures import encoded
from PIL import Image

from dataplane.model.errors import BudgetTooSmall, ConfigError, FunctionError
from dataplane.worker.functions import batch_generator

pytestmark = pytest.mark.usefixtures("shared_node")


def shards(folder: Path, rows: int = 256, blocks: int = 4, count: int = 2) -> Path:
    """Rows (row, txt, ids) of Parquet shards, in blocks."""
    folder.mkdir(exist_ok=True)
    for shard in range(count):
        first = shard * rows
        numbers = list(range(first, first + rows))
        texts = [None if number % 7 == 3 else "é" * (number % 19) for number in numbers]
        ids = [[number] * (number % 5) for number in numbers]
        table = pa.table({"row": numbers, "txt": texts, "ids": ids})
        pq.write_table(table, folder / f"{shard}.parquet", row_group_size=rows // blocks)
    return folder


def arrays(batch: dict[str, Any]) -> dict[str, Any]:
    """A batch as a function gets it."""
    return {
        name: column.numpy() if isinstance(column, torch.Tensor) else column
        for name, column in batch.items()
    }


def same(found: dict[str, torch.Tensor], expected: dict[str, Any]) -> bool:
    """Whether a batch has these arrays, in this order."""
    pairs = zip(found.values(), map(np.asarray, expected.values()), strict=True)
    return list(found) == list(expected) and all(
        (mine.numpy().dtype, mine.shape) == (other.dtype, other.shape)
        and np.array_equal(mine.numpy(), other)
        for mine, other in pairs
    )


def test_batches_are_what_the_function_makes_of_those_of_a_loader_without_it(
    tmp_path: Path,
) -> None:
    shards(tmp_path)
    given: dict[str, Any] = {"batch_size": 24, "shuffle": True, "seed": 3}
    with DataLoader(tmp_path, collate=user_functions.padded, **given) as loader:
        assert str(loader.schema).splitlines()[1:] == [
            "ids                int32 [?, ?]",
            "row                int64 [?]",
            "total              int64 []",
            "cube               float64 [?, ?, ?, ?]",
        ]
        plain = DataLoader(tmp_path, **given)
        for found, batch in zip(loader, plain, strict=True):
            assert same(found, user_functions.padded(arrays(batch)))
        assert len(loader) == len(plain)


def test_random_numbers_depend_on_the_step_and_on_nothing_else(tmp_path: Path) -> None:
    shards(tmp_path)
    size, seed = 20, 11

    def read(rank: int, state: Any = None, epoch: int = 0) -> list[dict[str, torch.Tensor]]:
        place = {"dp_rank": rank, "dp_size": 2, "name": "noise"}
        given = {"collate": user_functions.noisy_batch, "shuffle": True, "seed": seed}
        with DataLoader(tmp_path, global_batch_size=2 * size, **given, **place) as loader:
            if state is not None:
                loader.load_state_dict(state)
            loader.set_epoch(epoch)
            found = []
            for batch in loader:
                found.append(batch)
                if state is None and len(found) == 5:
                    states.append(loader.state_dict())
            return found

    for rank, epoch in ((0, 0), (1, 0), (1, 3)):
        states: list[Any] = []
        whole = read(rank, epoch=epoch)
        for at, batch in enumerate(whole):
            expected = batch_generator(seed, epoch, 2 * size * at, rank).random(3)
            assert batch["noise"].tolist() == expected.tolist()
        resumed = read(rank, states[0], epoch)
        assert [arrays_of(one) for one in resumed] == [arrays_of(one) for one in whole[5:]]


def arrays_of(batch: dict[str, torch.Tensor]) -> dict[str, list[Any]]:
    return {name: column.tolist() for name, column in batch.items()}


def test_batches_that_outgrow_what_the_first_one_suggests_are_delivered(tmp_path: Path) -> None:
    shards(tmp_path)
    with DataLoader(tmp_path, 16, collate=user_functions.grows) as loader:
        for step, batch in enumerate(loader):
            assert batch["wide"].shape == (2, 16 * step * 20)
            assert batch["wide"].eq(16 * step).all()


def test_a_batch_that_no_slab_can_hold_is_refused_with_what_to_set(tmp_path: Path) -> None:
    shards(tmp_path)
    loader = iter(DataLoader(tmp_path, 32, collate=user_functions.too_large))
    for _ in range(4):
        next(loader)
    with pytest.raises(BudgetTooSmall, match=r"batch of step 4 .*delivery_bytes_per_rank"):
        next(loader)


def test_a_job_does_not_wait_for_the_slow_function_of_another_job_over_the_same_dataset(
    tmp_path: Path, own_node: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATAPLANE_WORKER_COUNT", "2")
    rows = pa.table({"row": range(64), "folder": [str(tmp_path)] * 64})
    pq.write_table(rows, tmp_path / "a.parquet", row_group_size=16)
    with (
        DataLoader(tmp_path, 8, name="quick", collate=user_functions.only_row) as quick,
        DataLoader(tmp_path, 8, name="slow", collate=user_functions.waits_at_a_gate) as slow,
    ):
        quick_batches = itertools.chain.from_iterable(itertools.repeat(quick))
        next(quick_batches)
        reader = threading.Thread(target=list, args=(slow,))
        reader.start()
        while not any(tmp_path.glob("at_gate-*")):
            next(quick_batches)
        assert len(list(itertools.islice(quick_batches, 20))) == 20  # epochs of eight batches
        assert len(list(tmp_path.glob("at_gate-*"))) == 1  # the other worker was left to `quick`
        (tmp_path / "open").touch()
        reader.join()


def test_a_failing_function_is_named_with_its_traceback_and_the_step(tmp_path: Path) -> None:
    shards(tmp_path)
    loader = DataLoader(tmp_path, 16, collate=user_functions.fails_at_a_row)
    batches = iter(loader)
    for _ in range(6):
        next(batches)
    state = loader.state_dict()
    for _ in range(2):  # a resumed run says the same
        with pytest.raises(FunctionError) as caught:
            next(batches)
        told, name = str(caught.value), "user_functions:fails_at_a_row"
        assert f"the batch of step 6: collate='{name}' failed: ValueError: row 4 is not" in told
        assert "raise ValueError(f" in told
        assert "dataplane/worker" not in told
        assert (caught.value.function, caught.value.step) == (name, 6)
        again = DataLoader(tmp_path, 16, collate=name)
        again.load_state_dict(state)
        batches = iter(again)


def test_what_workers_cannot_call_is_refused_before_the_first_batch(tmp_path: Path) -> None:
    shards(tmp_path)
    with pytest.raises(ConfigError, match="collate: a lambda has no name"):
        DataLoader(tmp_path, collate=lambda batch: batch)
    with pytest.raises(ConfigError, match="collate='nowhere:pad': workers find no module"):
        next(iter(DataLoader(tmp_path, collate="nowhere:pad")))
    with pytest.raises(FunctionError, match="step 0: collate='user_functions:mixes' failed: KeyE"):
        next(iter(DataLoader(tmp_path, collate="user_functions:mixes")))
    stages = {0: ["nothing"]}
    with pytest.raises(ConfigError, match="columns of the batches are ids, row, total, cube"):
        next(
            iter(DataLoader(tmp_path, 8, collate="user_functions:padded", columns_by_stage=stages))
        )
    with pytest.raises(ConfigError, match="'ids', which has no sequence"):
        next(iter(DataLoader(tmp_path, 8, collate=user_functions.padded, sequence_part=["ids"])))


def test_the_function_gets_what_mixtures_maps_stacks_and_views_leave(tmp_path: Path) -> None:
    shards(tmp_path / "web")
    code = Source(shards(tmp_path / "code"), weight=1, map=user_functions.twice)
    sources = {"web": Source(tmp_path / "web", weight=2), "code": code}
    stacked = {
        "map": user_functions.nested,
        "stack": {"ab": ["a", "b"]},
        "split": ("validation", 0.3),
    }
    for url, names, given in (
        (tmp_path / "web", ["matrix", "ab"], {**stacked, "columns": ["matrix", "a", "b"]}),
        (Mixture(sources, source_column="from"), ["row", "from"], {"columns": ["row"]}),
    ):
        given |= {"batch_size": 16, "shuffle": True}
        with DataLoader(url, collate=user_functions.sums, **given) as loader:
            for found, batch in zip(loader, DataLoader(url, **given), strict=True):
                assert same(found, user_functions.sums(arrays(batch)))
                assert list(found) == names


def test_the_function_gets_the_pixels_of_a_batch(tmp_path: Path) -> None:
    images = [encoded(Image.new("RGB", (24, 24), (4 * at, at, 0))) for at in range(40)]
    pq.write_table(pa.table({"jpg": images}), tmp_path / "0.parquet", row_group_size=10)
    given: dict[str, Any] = {
        "batch_size": 8,
        "shuffle": True,
        "transforms": {"jpg": [RandomResizedCrop(16)]},
    }
    with DataLoader(tmp_path, collate=user_functions.mixes, **given) as loader:
        for found, batch in zip(loader, DataLoader(tmp_path, **given), strict=True):
            pixels = batch["jpg"].float()
            assert found["shape"].tolist() == [8, 16, 16, 3]
            assert found["jpg"].equal((pixels + pixels[found["other"]]) / 2)
    given["transforms"] = {"jpg": [RandomResizedCrop(16), ToDtype("bfloat16")]}
    with pytest.raises(ConfigError, match="column 'jpg' comes as bfloat16, which numpy does not"):
        next(iter(DataLoader(tmp_path, collate=user_functions.mixes, **given)))


def test_a_device_and_torchs_workers_get_the_same_batches(tmp_path: Path, onto: Any) -> None:
    shards(tmp_path)
    with DataLoader(tmp_path, 16, collate=user_functions.padded) as loader:
        every = list(loader)
        expected = [arrays_of(batch) for batch in every]
    device = onto()
    with DataLoader(tmp_path, 16, collate=user_functions.padded, device="cuda") as loader:
        batches = iter(loader)
        for batch in every:
            step(device, batches, content(batch))
    dataset = ShardedIterableDataset(tmp_path, 16, collate=user_functions.padded)
    found = torch.utils.data.DataLoader(dataset, None, num_workers=2)
    assert [arrays_of(batch) for batch in found] == expected


def rows_of(loader: Any) -> list[int]:
    return [row for batch in loader for row in batch["row"].tolist()]


def test_batches_have_the_columns_that_the_map_returns(tmp_path: Path) -> None:
    shards(tmp_path)
    loader = DataLoader(tmp_path, batch_size=100, shuffle=True, map=user_functions.letters)
    told = str(loader.schema)
    assert [line.split()[0] for line in told.splitlines()[1:]] == [
        "row",
        "ids",
        "ids.length",
        "size",
    ]
    plain = DataLoader(tmp_path, batch_size=100, shuffle=True, columns=["row"])
    order = rows_of(plain)
    seen = []
    for batch in loader:
        for row, ids, length, size in zip(
            *(column.tolist() for column in batch.values()), strict=True
        ):
            count = 0 if row % 7 == 3 else row % 19
            assert (length, size, ids[:length]) == (count, count, [ord("é")] * count)
            seen.append(row)
        assert batch["size"].dtype == torch.int32
    assert seen == order, "a map changes no row's place in the order"
    state = loader.state_dict()
    assert state, "it is resumed like any loader"
    named = DataLoader(tmp_path, batch_size=512, map="user_functions:letters", columns=["size"])
    (batch,) = named
    assert list(batch) == ["size"]


def test_options_of_columns_are_about_what_the_map_returns(tmp_path: Path) -> None:
    shards(tmp_path)
    loader = DataLoader(
        tmp_path,
        batch_size=64,
        shuffle=True,
        map=user_functions.nested,
        stack={"ab": ["a", "b"]},
        fill_null={"maybe": -5},
        columns=["vector", "matrix", "text", "bytes", "flag", "maybe"],
    )
    for batch in loader:
        rows = batch["ab"][:, 0].to(torch.int64)
        assert batch["ab"][:, 1].equal(rows + 0.5)
        assert batch["vector"].equal(torch.stack([rows, rows + 1], 1).float())
        assert batch["matrix"].shape == (64, 2, 2)
        assert batch["matrix"][:, 1].equal(torch.stack([rows, -rows], 1))
        assert batch["text"] == [f"row {row}" for row in rows.tolist()]
        assert batch["bytes"] == [bytes([row % 256]) for row in rows.tolist()]
        assert batch["flag"].equal(rows % 2 == 0)
        assert batch["maybe"].equal(torch.where(rows % 2 == 0, rows, -5))
    masked = DataLoader(tmp_path, map=user_functions.nested, columns=["maybe"], nulls="mask")
    assert [line.split()[0] for line in str(masked.schema).splitlines()[1:]] == [
        *("maybe", "maybe.is_null"),
    ]
    with pytest.raises(ConfigError, match="maybe"):
        next(iter(DataLoader(tmp_path, batch_size=64, map=user_functions.nested)))
    with pytest.raises(
        ConfigError,
        match=r"there is no column 'txt'; did you mean 'text'\? The dataset has: vector",
    ):
        next(iter(DataLoader(tmp_path, map=user_functions.nested, columns=["txt"])))
    with pytest.raises(ConfigError, match="codes= and map= cannot be combined"):
        next(iter(DataLoader(tmp_path, map=user_functions.nested, codes=["text"])))
    steps = {"text": [RandomResizedCrop(8)]}
    with pytest.raises(ConfigError, match="column 'text' does not hold encoded images"):
        next(iter(DataLoader(tmp_path, map=user_functions.nested, transforms=steps)))


def test_a_failing_function_is_named_with_its_traceback_and_the_block(tmp_path: Path) -> None:
    shards(tmp_path)
    loader = iter(DataLoader(tmp_path, batch_size=64, map=user_functions.fails_late))
    next(loader)
    with pytest.raises(FunctionError) as caught:
        next(loader)
    told, name = str(caught.value), "user_functions:fails_late"
    assert "ValueError: row 36 is not to my taste" in told
    assert "raise ValueError(f" in told
    assert f"0.parquet, block 1: map='{name}' failed" in told
    assert (caught.value.function, caught.value.block) == (name, 1)


@pytest.mark.usefixtures("own_node")
def test_an_object_is_made_once_a_worker_and_gets_the_columns_that_it_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = tmp_path / "counted"
    monkeypatch.setenv("COUNTED", str(counted))
    loader = DataLoader(shards(tmp_path / "shards"), batch_size=32, map=user_functions.Counted)
    for _ in range(2):
        assert all(batch["count"].eq(1).all() for batch in loader)
    made = counted.read_text(encoding="utf-8").split()
    assert len(made) == len(set(made)) <= (os.cpu_count() or 1)


def test_blocks_that_grow_beyond_what_the_first_rows_suggest_are_delivered(
    tmp_path: Path,
) -> None:
    shards(tmp_path, rows=512, blocks=2, count=1)
    loader = DataLoader(tmp_path, batch_size=64, shuffle=True, map=user_functions.large)
    lengths = sorted(length for batch in loader for length in batch["ids.length"].tolist())
    assert lengths == [row // 2 for row in range(512)]


def test_a_dataset_with_and_without_a_map_is_read_by_one_node(tmp_path: Path) -> None:
    shards(tmp_path)
    plain = iter(DataLoader(tmp_path, batch_size=64, columns=["row"]))
    mapped = iter(DataLoader(tmp_path, batch_size=64, columns=["row"], map=user_functions.twice))
    for _ in range(8):
        assert (2 * next(plain)["row"]).equal(next(mapped)["row"])


@pytest.mark.usefixtures("own_node")
def test_a_function_that_hangs_keeps_no_worker_from_others_once_its_loader_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HUNG", str(tmp_path / "hung"))
    monkeypatch.setenv("DATAPLANE_STALL_TIMEOUT_S", "600")
    os.mkfifo(tmp_path / "hung")
    folder, options = shards(tmp_path / "shards"), {"batch_size": 64, "columns": ["row"]}
    plain = DataLoader(folder, **options)
    first = next(iter(plain))  # it keeps the node
    for argument in ("map", "collate"):
        with DataLoader(folder, **options, **{argument: "user_functions:hangs_later"}) as hanging:
            batches = iter(hanging)
            assert next(batches)["row"].equal(first["row"])
            worker = int((tmp_path / "hung").read_text())
        assert rows_of(DataLoader(folder, **options)) == list(range(512))
        wait_until(lambda worker=worker: not psutil.pid_exists(worker))


EDITED = """
import numpy as np

def made(columns):
    rows = columns["row"]
    rows = np.asarray(rows) if isinstance(rows, np.ndarray) else rows.to_numpy()
    wide = np.full((len(rows), 2048), {version}, np.float32)
    return {{"row": rows, "wide": wide}}
"""


@pytest.mark.usefixtures("own_node")
@pytest.mark.parametrize("argument", ["map", "collate"])
def test_a_job_has_one_version_of_a_function_that_is_edited_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argument: str
) -> None:
    module = tmp_path / f"edited_{argument}.py"
    module.write_text(EDITED.format(version=1))
    monkeypatch.syspath_prepend(tmp_path)
    folder = shards(tmp_path / "shards", rows=2048, blocks=32)
    name = f"edited_{argument}:made"
    loader = iter(DataLoader(folder, batch_size=32, **{argument: name}))
    versions = {int(next(loader)["wide"][0, 0])}
    module.write_text(EDITED.format(version=2))
    for node in own_nodes():
        kill_workers(node)
    with pytest.raises(FunctionError, match="is not the function with which this job was opened"):
        versions |= {int(version) for batch in loader for version in batch["wide"][:, 0]}
    assert versions == {1}


@pytest.mark.usefixtures("own_node")
def test_a_slow_map_is_no_stall(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shuffled batch has rows of all blocks: its first one takes longer than the timeout."""
    monkeypatch.setenv("DATAPLANE_STALL_TIMEOUT_S", "4")
    shards(tmp_path)
    loader = DataLoader(tmp_path, batch_size=64, shuffle=True, map=user_functions.slow)
    assert sorted(rows_of(loader)) == list(range(512))
