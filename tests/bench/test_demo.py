"""The demo: its proof holds and detects faults, and the demo leaves nothing behind."""

from __future__ import annotations

import contextlib
import io
import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dataplane_bench.demo import proof
from dataplane_bench.demo.__main__ import QUICK_STEPS, main
from dataplane_bench.demo.journal import (
    ROW_TOKENS,
    JournalReader,
    JournalWriter,
    Step,
    corpus,
    parquet_shards,
)
from dataplane_bench.demo.stages import DemoLength
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.model.records import Region
from dataplane.plan.manifest import Manifest
from dataplane.plan.shards import Shard

DEMO = [sys.executable, "-P", "-m", "dataplane_bench.demo", "--quick"]
TIMEOUT_S = 280


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    """The demos that a test started; those still running are killed."""
    demos: list[subprocess.Popen[str]] = []
    yield demos
    for demo in demos:
        if demo.poll() is None:
            demo.kill()
        demo.communicate()


def start(started, *options):
    demo = subprocess.Popen(
        [*DEMO, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    started.append(demo)
    return demo


def no_new_sockets(before):
    """Whether none stays: a server that another test is just ending may have one for a moment."""
    for _ in range(1000):
        if stale_sockets() <= before:
            return True
        threading.Event().wait(0.01)
    return False


def stale_sockets():
    """SeaweedFS's sockets in /tmp without a listener: some process left them behind."""
    found = set()
    for path in Path("/tmp").glob("seaweedfs-*.sock"):
        with contextlib.closing(socket.socket(socket.AF_UNIX)) as caller:
            try:
                caller.connect(str(path))
            except ConnectionRefusedError:
                found.add(path)
            except OSError:
                continue
    return found


@pytest.mark.slow  # `make test-others` runs it
def test_the_proof_of_the_demo_holds_and_the_demo_leaves_nothing_behind(
    started, tmp_path, monkeypatch
):
    monkeypatch.setenv("AWS_PROFILE", "of-somebody-else")
    monkeypatch.setenv("DATAPLANE_CACHE_DIR", str(tmp_path / "not-used"))
    sockets = stale_sockets()
    demo = start(started, "--json", "--resume-ranks", "1")
    told, shown = demo.communicate(timeout=TIMEOUT_S)
    assert demo.returncode == 0, shown
    found = json.loads(told)
    length = DemoLength(QUICK_STEPS, 2, 1)
    assert found["holds"]
    assert {name for name, check in found["checks"].items() if check["holds"]} == {
        "every_sample_once",
        "planned_order",
        "uninterrupted_order",
        "right_content",
        "same_steps_again",
        "trainers_apart",
    }
    assert found["samples"] == length.sample_count
    assert found["steps"] == length.steps
    assert found["resumed_from_step"] % length.checkpoint_every == 0
    assert length.kill_after <= found["killed_after_step"] < length.steps
    assert found["resumed_from_step"] <= found["killed_after_step"]
    assert (found["loader_state"]["epoch"], found["loader_state"]["cursor"]) == (1, 0)
    assert found["losses"]["before_kill"] == pytest.approx(
        found["losses"]["after_resume"], rel=1e-4
    )
    assert found["losses"]["last"] < found["losses"]["first"]
    assert found["service_exit_status"] == 0
    assert not (tmp_path / "not-used").exists()
    assert no_new_sockets(sockets)


@pytest.mark.slow
def test_ctrl_c_in_the_middle_of_training_leaves_nothing(started):
    sockets = stale_sockets()
    demo = start(started)
    shown = ""
    while "checkpoint\n" not in shown:
        line = demo.stdout.readline()
        assert line, (shown, demo.stderr.read())
        shown += line
    demo.send_signal(signal.SIGINT)
    told, errors = demo.communicate(timeout=TIMEOUT_S)
    assert demo.returncode == 128 + signal.SIGINT
    assert "nothing is left behind" in told
    assert not errors
    assert no_new_sockets(sockets)


@pytest.mark.parametrize("arguments", [["--steps", "3"], ["--ranks", "99"]])
def test_invalid_arguments_of_the_demo_are_refused(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert arguments[0] in capsys.readouterr().err


# -- the proof -----------------------------------------------------------------------------------


@given(order=st.permutations(range(12)), at=st.integers(0, 11), other=st.integers(0, 11))
def test_a_missing_a_repeated_and_a_misplaced_sample_are_noticed(order, at, other):
    ids = np.array(order)
    assert proof.complete(ids, 12).holds
    assert proof.as_planned(ids, ids.copy()).holds
    assert not proof.complete(np.delete(ids, at), 12).holds
    assert not proof.complete(np.insert(ids, at, ids[other]), 12).holds
    assert not proof.complete(np.insert(ids, at, 12), 12).holds
    assert not proof.complete(np.append(ids, -1), 12).holds
    assert not proof.as_planned(np.delete(ids, at), ids).holds
    swapped = ids.copy()
    swapped[[at, other]] = ids[[other, at]]
    assert proof.as_planned(swapped, ids).holds == (at == other)


@settings(max_examples=30)
@given(ids=st.permutations(range(8)), at=st.integers(0, 7))
def test_a_sample_with_other_bytes_is_noticed(ids, at):
    sums = np.arange(100, 108)
    kept = np.stack([np.array(ids), sums[ids]], axis=1)
    assert proof.right_content(kept, sums).holds
    assert proof.as_uninterrupted(kept, kept.copy()).holds
    wrong = kept.copy()
    wrong[at, 1] += 1
    assert not proof.right_content(wrong, sums).holds
    assert not proof.as_uninterrupted(wrong, kept).holds


def a_step(number, ids, loss=1.0):
    return Step(number, loss, tuple(ids), 8, 0.1, 0.01, saved=False)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_shares_of_the_ranks_join_to_the_global_batch(ranks):
    batch = tuple(range(40, 47))
    told = [[a_step(1, batch[rank::ranks])] for rank in range(ranks)]
    assert proof.steps_of(told) == {1: (batch, 1.0)}


def test_a_step_that_one_rank_did_not_finish_is_not_counted():
    assert sorted(proof.steps_of([[a_step(1, [0]), a_step(2, [2])], [a_step(1, [1])]])) == [1]


def test_lost_steps_must_be_made_again_from_the_same_samples():
    before = {step: ((step,), 1.0) for step in (1, 2, 3)}
    assert proof.made_again(before, {2: ((2,), 1.0), 3: ((3,), 1.0)}, 1).holds
    assert not proof.made_again(before, {2: ((2,), 1.0)}, 1).holds
    assert not proof.made_again(before, {2: ((2,), 1.0), 3: ((9,), 1.0)}, 1).holds
    assert not proof.made_again(before, {}, 3).holds, "nothing was lost: nothing is shown"


def test_without_observations_nothing_is_proved_about_trainers():
    assert proof.kept_apart(3, []).holds
    assert not proof.kept_apart(0, []).holds
    assert not proof.kept_apart(3, ["a trainer talks to S3"]).holds


def test_planned_ids_count_the_rows_of_the_dataset():
    rows = np.array([3, 1, 4])
    shard = Shard("s3://b/a", 100, "e", 3, Region(0, 0), zero_copy=False)
    manifest = Manifest(
        ("s3://b/",), "parquet", b"", (shard,), np.zeros(3, int), rows, np.arange(3) * 10,
        np.full(3, 10), rows * 8,
    )  # fmt: skip
    assert sorted(proof.planned_ids(manifest, 7, 0).tolist()) == list(range(8))


# -- what it is made of --------------------------------------------------------------------------


def test_shards_hold_every_sample_once_in_several_row_groups():
    text = corpus(50)
    shards = parquet_shards(text, 4, 5)
    files = [pq.ParquetFile(io.BytesIO(shards[name])) for name in sorted(shards)]
    assert all(file.num_row_groups > 1 for file in files)
    table = pa.concat_tables([file.read() for file in files])
    assert table["id"].to_pylist() == list(range(50))
    tokens = table["tokens"].combine_chunks().flatten().to_numpy()
    assert np.array_equal(tokens.reshape(50, ROW_TOKENS), text.tokens)


def test_too_little_text_is_an_error():
    with pytest.raises(ValueError, match="bytes of source"):
        corpus(10_000_000)


def test_a_journal_is_read_line_by_line_while_it_is_written(tmp_path):
    path = tmp_path / "rank-0.jsonl"
    reader = JournalReader(path)
    assert reader.new() == []
    steps = [a_step(number, [number, 9]) for number in (1, 2)]
    writer = JournalWriter(path)
    writer.write(steps[0])
    with path.open("a") as file:
        file.write('{"step": 2, "lo')
    assert reader.new() == steps[:1]
    assert reader.new() == []
    writer.close()


@given(steps=st.integers(16, 1000), ranks=st.integers(1, 4))
def test_trainers_are_killed_between_two_checkpoints_and_before_the_end(steps, ranks):
    length = DemoLength(steps, ranks, ranks)
    assert length.kill_after % length.checkpoint_every != 0
    assert length.checkpoint_every < length.kill_after < steps
    assert length.sample_count % 16
