"""Steps and rows that are left out of a job, over a real service and real trainers."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dataplane_torch import DataLoader, Mixture, Pack, ShardedIterableDataset, Source
from fleet import Service
from plan.plain import substitute
from torch.utils.data import DataLoader as TorchDataLoader

from dataplane.cli import run
from dataplane.model.errors import ConfigError
from dataplane.model.records import Topology
from dataplane.worker.pack_blocks import NO_LABEL

SHARDS, ROWS, GROUP, BATCH = 3, 100, 20, 24
STEPS = -(-SHARDS * ROWS // BATCH)
OPTIONS: dict[str, Any] = {
    "shuffle": True, "seed": 3, "lanes": 2, "window": 40, "columns": ["id"],
}  # fmt: skip
SMALL = ("--block-arena-bytes", "32MiB", "--slab-bytes", "64KiB", "--worker-count", "1",
         "--delivery-bytes-per-rank", "2MiB")  # fmt: skip

Ids = list[list[int]]
Command = Callable[..., Any]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("shards")
    for shard in range(SHARDS):
        ids = np.arange(shard * ROWS, (shard + 1) * ROWS)
        tokens = [[one] * (1 + one * 7 % 23) for one in ids.tolist()]
        table = pa.table({"id": ids, "tokens": tokens})
        pq.write_table(table, folder / f"s{shard}.parquet", row_group_size=GROUP)
    return str(folder)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    name = f"changes-{os.getpid()}:7077"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DATAPLANE_STATE_DIR", str(tmp_path_factory.mktemp("state")))
        patch.setenv("DATAPLANE_SERVICE", name)
        with Service("--listen", "127.0.0.1:0", "--service", name, *SMALL) as made:
            yield made


@pytest.fixture
def command(
    service: Service,
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Command:
    """What a command about this test's job prints as JSON, or, if a status is expected, its error."""
    monkeypatch.setitem(OPTIONS, "name", request.node.name)

    def asked(name: str, *arguments: str, job: str = request.node.name, status: int = 0) -> Any:
        capsys.readouterr()
        as_json = () if status else ("--json",)
        given = [*name.split(), job, *arguments, "--join", service.address, *as_json]
        assert run(given) == status
        told = capsys.readouterr()
        return told.err if status else json.loads(told.out)

    return asked


@contextlib.contextmanager
def ranks(url: Any, size: int = 1, state: Any = None, **more: Any) -> Iterator[list[Any]]:
    """The loaders of all ranks of one launch."""
    with contextlib.ExitStack() as stack:
        made = []
        for rank in range(size):
            place = Topology(rank, size, rank, size, rank, size)
            options = {"topology": place, "global_batch_size": BATCH, **OPTIONS}
            made.append(stack.enter_context(DataLoader(url, **{**options, **more})))
        for loader in made if state else ():
            loader.load_state_dict(state)
        yield made


def joined(passes: Sequence[Ids]) -> Ids:
    """Global batches, from the batches of each rank."""
    return [
        [one for turn in itertools.zip_longest(*step) for one in turn if one is not None]
        for step in zip(*passes, strict=True)
    ]


def read(url: Any, size: int = 1, state: Any = None, **more: Any) -> tuple[Ids, list[Any]]:
    """The global batches of a pass, and the states of all ranks after it."""
    with ranks(url, size, state, **more) as loaders:
        passes = [[batch["id"].tolist() for batch in loader] for loader in loaders]
        return joined(passes), [loader.state_dict() for loader in loaders]


def states_of(url: Any, **more: Any) -> tuple[Ids, list[Any]]:
    """The global batches of a pass, and the state before each and after the last."""
    with ranks(url, **more) as (loader,):
        batches, states = [], [loader.state_dict()]
        for batch in loader:
            batches.append(batch["id"].tolist())
            states.append(loader.state_dict())
        return batches, states


def test_skipped_steps_are_passed_over_on_any_number_of_ranks_and_at_any_resume(
    shards: str, command: Command
) -> None:
    whole, before = states_of(shards)
    told = command("skip", "--steps", "4:7", "--epoch", "0")
    assert (told["is_running"], told["entry"]["position"]) == (False, {"cursor": 96, "epoch": 0})
    left = [*whole[:4], *whole[7:]]
    found, states = states_of(shards)
    assert found == left
    assert [state["cursor"] for state in states[:6]] == [0, 24, 48, 72, 96, 192]
    for size in (2, 3, 4):
        batches, after = read(shards, size)
        assert batches == left
        assert {state["digest"]["value"] for state in after} == {states[-1]["digest"]["value"]}
    for at, state in enumerate(before[:-1]):  # before, inside and after
        batches, _ = read(shards, 1 + at % 3, state)
        assert batches == (left[at:] if at < 4 else whole[max(at, 7) :])
    for at in (3, 4, 5):
        batches, after = read(shards, 2, states[at])
        assert (batches, after[0]["digest"]) == (left[at:], states[-1]["digest"])
    with ranks(shards) as (loader,):
        assert len(loader) == STEPS - 3
        assert len(list(loader)) == STEPS - 3
        loader.set_epoch(1)
        assert len(loader) == STEPS


def test_a_running_job_refuses_what_it_has_begun_and_goes_on_as_it_is(
    shards: str, command: Command
) -> None:
    with ranks(shards) as (loader,):
        passing = iter(loader)
        batches = [next(passing)["id"].tolist() for _ in range(3)]
        while command("ledger show") == []:
            threading.Event().wait(0.05)
        for steps in ("0:2", "0:9"):
            said = command("skip", "--steps", steps, status=2)
            assert "the first step that can be skipped is step" in said
            assert "stop it, skip them, and resume it from a checkpoint at step 0" in said
        told = command("skip", "--steps", "9:11")
        assert told["is_running"]
        batches += [batch["id"].tolist() for batch in passing]
        assert len(batches) == STEPS
    found, _ = read(shards)
    assert found == [*batches[:9], *batches[11:]]
    for wrong, why in (("5", "FIRST:STOP"), ("7:7", "has steps 0:13"), ("9:14", "has steps 0:13")):
        assert why in command("skip", "--steps", wrong, status=2)
    assert "no job is called 'k'" in command("skip", "--steps", "0:1", job="k", status=2)


def test_workers_of_torchs_loader_take_their_turns_round_a_skip(
    shards: str, command: Command
) -> None:
    whole, _ = read(shards)
    command("skip", "--steps", "3:6")
    options = {"batch_size": BATCH, **OPTIONS}
    dataset = ShardedIterableDataset(shards, **options)
    loader = TorchDataLoader(dataset, batch_size=None, num_workers=2)
    assert len(dataset) == STEPS - 3
    assert [batch["id"].tolist() for batch in loader] == [*whole[:3], *whole[6:]]
    dataset.close()


def test_a_row_that_is_taken_out_is_replaced_by_one_of_its_block_and_nothing_else_moves(
    shards: str, command: Command
) -> None:
    whole, before = states_of(shards)
    told = command("tombstone", "--row", "s0.parquet:7", "--row", "2:99")
    assert told["entry"]["payload"]["rows"] == [[0, 7], [2, 99]]
    found, states = states_of(shards)
    flat, after = [[one for batch in each for one in batch] for each in (whole, found)]
    moved = {one: other for one, other in zip(flat, after, strict=True) if one != other}
    assert moved.keys() == {7, 299}
    assert all(one // GROUP == other // GROUP for one, other in moved.items())
    for size in (2, 3, 4):
        batches, ends = read(shards, size)
        assert batches == found
        assert {end["digest"]["value"] for end in ends} == {states[-1]["digest"]["value"]}
    assert states[-1]["digest"] != before[-1]["digest"]
    batches, _ = read(shards, 2, before[5])
    assert batches == found[5:]
    step = next(step for step, batch in enumerate(whole) if 7 in batch)
    traced = command("trace", "--epoch", "0", "--step", str(step))
    at = whole[step].index(7)
    assert (traced[at]["row"], traced[at]["instead_of"]) == (moved[7], 7)
    replayed = command("replay", "--epoch", "0", "--step", str(step))
    assert [row["values"]["id"] for row in replayed] == found[step]
    (gone,) = command("where", "--row", "0:7", "--epochs", "0")
    assert (gone["step"], gone["taken_out_for"], gone["seen"]) == (step, moved[7], False)
    both = command("where", "--row", f"0:{moved[7]}", "--epochs", "0")
    assert {one["instead_of"] for one in both} == {None, 7}
    assert command("ledger verify")["ok"]
    shown = command("ledger show")
    assert [one["payload"]["rows"] for one in shown if one["kind"] == "tombstone"] == [
        [[0, 7], [2, 99]]
    ]


def test_what_cannot_be_taken_out_is_refused(shards: str, command: Command) -> None:
    read(shards)
    some = [part for row in range(20, 39) for part in ("--row", f"1:{row}")]
    command("tombstone", *some)
    said = command("tombstone", "--row", "s1.parquet:39", status=2)
    assert "rows 20 to 39 of file://" in said
    assert "a whole block" in said
    assert "SHARD:ROW" in command("tombstone", "--row", "7", status=2)
    assert "has no row 100" in command("tombstone", "--row", "0:100", status=2)
    ids = sorted({one for batch in read(shards)[0] for one in batch})
    assert ids == [one for one in range(300) if not 120 <= one < 139]
    with pytest.raises(ConfigError, match="or another view of it"):
        read(shards, where="id > 3")


def test_rows_of_a_mixture_of_views_are_replaced_by_rows_of_the_same_view_and_source(
    shards: str, command: Command
) -> None:
    urls = [f"{shards}/s{at}.parquet" for at in range(SHARDS)]
    web = Source(urls[:2], 2.0, where="id % 2 == 0")
    mixed = Mixture({"web": web, "code": Source(urls[2], 1.0)}, exhausted="renormalise")
    whole, before = states_of(mixed)
    data = [part for url in urls[:2] for part in ("--data", f"web={url}")]
    data += ["--data", f"code={urls[2]}"]
    said = command("tombstone", "--row", "web:0:7", *data, status=2)
    assert "1 row not in the view of this job, so it never reads them: web:0:7" in said
    said = command("tombstone", "--row", "0:6", *data, status=2)
    assert "mixes web, code; give SOURCE:SHARD:ROW" in said
    rows = [
        part for row in ("web:s1.parquet:6", "web:0:44", "web:0:45", "code:0:6") for part in ("--row", row)
    ]  # fmt: skip
    told = command("tombstone", *rows, *data)["entry"]["payload"]
    assert (told["rows"], told["sources"]) == (
        [[0, 6, 1], [0, 44, 0, 2], [1, 6, 0, 3]],
        ["web", "code"],
    )
    found, states = states_of(mixed)
    flat, after = [[one for batch in each for one in batch] for each in (whole, found)]
    moved = {one: other for one, other in zip(flat, after, strict=True) if one != other}
    assert moved.keys() == {106, 44, 206}
    assert all(one // GROUP == other // GROUP for one, other in moved.items())
    assert {moved[one] % 2 for one in (106, 44)} == {0}
    batches, ends = read(mixed, 3, before[4])
    assert batches == found[4:]
    assert read(mixed, 2)[1][0]["digest"] == states[-1]["digest"] != ends[0]["digest"]
    step = next(step for step, batch in enumerate(whole) if 106 in batch)
    at = whole[step].index(106)
    of_step = ("--epoch", "0", "--step", str(step), *data)
    traced = command("trace", *of_step)[at]
    assert (traced["source"], traced["row"], traced["instead_of"]) == ("web", moved[106] - 100, 6)
    assert [row["values"]["id"] for row in command("replay", *of_step)] == found[step]
    named = ("--source", "web", "--epochs", "0", *data)
    (gone,) = command("where", "--row", "1:6", *named)
    assert (gone["step"], gone["taken_out_for"]) == (step, moved[106] - 100)
    both = command("where", "--row", f"1:{moved[106] - 100}", *named)
    assert {one["instead_of"] for one in both} == {None, 6}
    check_documents_of_packs(mixed, data, command)


def packs_in(batch: Any) -> list[Any]:
    columns = (batch[name].tolist() for name in ("tokens", "document_ids", "labels"))
    return [*zip(*columns, strict=True)]


def check_documents_of_packs(mixed: Mixture, data: list[str], command: Command) -> None:
    """The same of packs: each token is the id of its document."""
    pack = Pack("tokens", 32, outputs=["document_ids", "labels"])
    options = {"name": "p", "global_batch_size": 8, "pack": pack, "columns": None}

    def packs(size: int = 1, state: Any = None) -> list[Any]:
        with ranks(mixed, size, state, **options) as loaders:
            return joined([[packs_in(batch) for batch in loader] for loader in loaders])

    def saved(count: int) -> Any:
        with ranks(mixed, **options) as (loader,):
            for _ in itertools.islice(loader, count):
                pass
            return loader.state_dict()

    whole, state = packs(), saved(2)
    rows = ("--row", "web:s1.parquet:6", "--row", "code:0:6")
    told = command("tombstone", *rows, *data, job="p")["entry"]["payload"]
    assert told["rows"] == [[0, 6, 1], [1, 6, 0, 3]]
    found, moved = packs(), dict[int, int]()
    for tokens, ids, labels, after, ids_after, labels_after in (
        (*one, *other)
        for step in zip(whole, found, strict=True)
        for one, other in zip(*step, strict=True)
    ):
        assert ids == ids_after
        moved |= {one: other for one, other in zip(tokens, after, strict=True) if one != other}
        assert [moved.get(one, one) for one in tokens] == after
        for one, other, label, label_after in zip(tokens, after, labels, labels_after, strict=True):
            # The last token of a part of a longer document has a label.
            assert label_after in ((label,) if one == other else (other, NO_LABEL))
    assert moved.keys() == {106, 206}
    assert all(one // GROUP == other // GROUP for one, other in moved.items())
    assert packs(2) == found
    # The last step of one rank has too few packs for four.
    assert [*itertools.chain(*packs(4, state))] == [*itertools.chain(*found[2:])]
    step = next(at for at, batch in enumerate(found) if batch != whole[at])
    of_step = ("--epoch", "0", "--step", str(step), *data)
    traced = command("trace", *of_step, job="p")
    replayed = command("replay", *of_step, job="p")
    for one, values in zip(traced, replayed, strict=True):
        tokens = found[step][one["position"] - 8 * step][0]
        begin, end = one["place"], one["place"] + one["tokens"]
        assert tokens[begin:end] == json.loads(str(values["values"]["tokens"]))
    other = moved[106] - 100
    stands = [one for one in traced if one["instead_of"] is not None]
    assert {(one["source"], one["row"], one["instead_of"]) for one in stands} <= {
        ("web", other, 6),
        ("code", moved[206] - 200, 6),
    }
    named = ("--source", "web", "--epochs", "0", *data)
    gone = command("where", "--row", "1:6", *named, job="p")
    assert {one["taken_out_for"] for one in gone} == {other}
    both = command("where", "--row", f"1:{other}", *named, job="p")
    assert {one["instead_of"] for one in both} == {None, 6}
    assert {one["position"] for one in gone} < {one["position"] for one in both}


def test_a_shard_that_is_lost_is_replaced_by_others_and_nothing_else_moves(
    shards: str, command: Command, tmp_path: Path
) -> None:
    for shard in range(SHARDS):
        shutil.copy(f"{shards}/s{shard}.parquet", tmp_path)
    manifest = str(tmp_path / "all.manifest")
    assert (
        run(["index", *(f"{tmp_path}/s{at}.parquet" for at in range(SHARDS)), "-o", manifest]) == 0
    )
    whole, before = states_of(manifest)
    data = ("--data", manifest)
    (tmp_path / "s1.parquet").unlink()
    command("tombstone", "--shard", "s1.parquet", *data)
    lost, blocks, expected = range(5, 10), SHARDS * ROWS // GROUP, []
    for batch in whole:
        twin = []
        for row in batch:
            block, at = divmod(row, GROUP)
            if block in lost:
                block = substitute(3, 1, block * GROUP - ROWS, blocks, lost)
            twin.append(block * GROUP + at)
        expected.append(twin)
    found, states = states_of(manifest)
    assert found == expected
    for size in (2, 4):
        assert read(manifest, size)[0] == expected
        assert read(manifest, size, before[5])[0] == expected[5:]
    assert states[-1]["digest"] != before[-1]["digest"]
    step, at = next(
        (step, batch.index(row))
        for step, batch in enumerate(whole)
        for row in batch
        if row // ROWS == 1
    )
    traced = command("trace", "--epoch", "0", "--step", str(step), *data)
    assert [int(one["shard"][-9]) * ROWS + one["row"] for one in traced] == expected[step]
    stand_in = expected[step][at]
    both = command(
        "where", "--row", f"{stand_in // ROWS}:{stand_in % ROWS}", "--epochs", "0", *data
    )
    assert [one["step"] for one in both if one.get("for_lost")].count(step) >= 1
    (gone,) = command("where", "--row", f"1:{whole[step][at] - ROWS}", "--epochs", "0", *data)
    assert (gone["is_lost"], gone["seen"]) == (True, False)
    assert command("ledger verify")["ok"]
    rest = [part for shard in (0, 2) for part in ("--shard", f"{shard}")]
    said = command("tombstone", *rest, *data, status=2)
    assert "all shards that the job reads would be taken out" in said
