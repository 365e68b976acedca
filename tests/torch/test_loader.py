"""DataLoader: batches, epochs, state, arguments."""

from __future__ import annotations

import gc
import itertools
import json
import pickle
import subprocess
import sys

import dataplane_torch
import numpy as np
import pytest
import torch
from dataplane_torch import DataLoader, Ragged
from dataplane_torch.options import brief
from fake_node import sample

from dataplane.model import errors
from dataplane.model.config import JobSpec
from dataplane.model.errors import (
    ClosedError,
    ConfigError,
    DataStallError,
    SpecMismatch,
)
from dataplane.model.records import ColumnOptions, End, ListPolicy
from dataplane.rpc.messages import OpenJob

URL = "s3://bucket/shards/*.parquet"


def rows_of(batch) -> list[dict]:
    """A batch as the samples that it was made from."""
    rows = []
    for i in range(len(batch["t"])):
        length = int(batch["tokens.length"][i])
        assert not batch["tokens"].numpy()[i, length:].any()
        start, end = batch["steps"].offsets[i : i + 2].tolist()
        rows.append(
            {
                "x": batch["x"][i].tolist(),
                "t": int(batch["t"][i]),
                "flag": bool(batch["flag"][i]),
                "tokens": batch["tokens"].numpy()[i, :length].tolist(),
                "steps": batch["steps"].values[start:end].tolist(),
                "text": batch["text"][i],
                "raw": batch["raw"][i],
            }
        )
    return rows


def positions(batches) -> list[list[int]]:
    return [batch["t"].tolist() for batch in batches]


def in_order(count: int, size: int, start: int = 0) -> list[list[int]]:
    return [list(range(i, min(i + size, count))) for i in range(start, count, size)]


def test_every_value_of_every_batch_is_right_while_all_are_held(fake) -> None:
    fake(sample_count=300, arena_bytes=6 * 4096)
    with DataLoader(URL, batch_size=7) as loader:
        batches = list(loader)
        assert len(batches) == len(loader) == 43
        assert [row for batch in batches for row in rows_of(batch)] == list(map(sample, range(300)))
        again = list(loader)
        assert rows_of(again[1]) == [sample(t, epoch=1) for t in range(7, 14)]
        assert rows_of(batches[1]) == [sample(t) for t in range(7, 14)]


@pytest.mark.parametrize(
    ("given", "size"),
    [
        ({"global_batch_size": 8}, 4),
        ({"global_batch_size": 7}, 4),
        ({"batch_size": np.int64(3)}, 3),
    ],
)
def test_batch_size_is_that_of_the_rank(fake, given, size) -> None:
    fake(sample_count=30)
    with DataLoader(URL, dp_rank=0, dp_size=2, **given) as loader:
        assert (loader.batch_size, type(loader.batch_size)) == (size, int)
        assert max(len(rows_of(batch)) for batch in loader) == size


def test_the_dataset_of_a_loader_has_the_number_of_samples_of_all_ranks(fake) -> None:
    fake(sample_count=30)
    with DataLoader(URL, global_batch_size=8, dp_rank=1, dp_size=2) as loader:
        dataset = loader.dataset
        assert len(dataset) == 30
        assert dataset
        with pytest.raises(ClosedError, match="only the loader of these shards"):
            len(pickle.loads(pickle.dumps(dataset)))


def test_a_traceback_ends_below_the_users_line_unless_it_is_debugged(monkeypatch) -> None:
    def deep(error: Exception, depth: int = 9) -> None:
        if depth:
            deep(error, depth - 1)
        raise error

    def called(error: Exception) -> None:
        with brief:
            deep(error)

    for level, error, is_whole in [
        ("info", errors.ConfigError("wrong"), False),
        ("debug", errors.ConfigError("wrong"), True),
        ("info", errors.RowOutOfBounds("a bug"), True),
        ("info", KeyError("the user's own"), True),
    ]:
        monkeypatch.setenv("DATAPLANE_LOG_LEVEL", level)
        with pytest.raises(type(error)) as caught:
            called(error)
        assert caught.value is error
        assert (len(caught.traceback) > 9) == is_whole
        assert is_whole or len(caught.traceback) == 3


def test_the_last_line_of_an_error_is_near_the_users(fake) -> None:
    fake(open_error="it is wrong")
    for use in (
        iter,
        len,
        DataLoader.state_dict,
        lambda loader: loader.schema,
        lambda _: DataLoader(""),
    ):
        with DataLoader(URL) as loader, pytest.raises(ConfigError) as caught:
            use(loader)
        assert len(caught.traceback) <= 4
    fake(sample_count=9, hang_after=0)
    with DataLoader(URL, timeout=0.2) as loader:
        iterator = iter(loader)
        with pytest.raises(DataStallError) as stalled:
            next(iterator)
        assert len(stalled.traceback) <= 4


def test_errors_can_be_imported_from_here() -> None:
    assert set(dataplane_torch.__all__) > set(errors.__all__)
    for name in errors.__all__:
        assert getattr(dataplane_torch, name) is getattr(errors, name)
    with pytest.raises(AttributeError, match="no attribute 'Noun'"):
        dataplane_torch.Noun  # noqa: B018


def test_dtypes_shapes_and_writing_in_place(fake) -> None:
    fake()
    with DataLoader(URL, batch_size=7, pin_memory=not torch.cuda.is_available()) as loader:
        batch = next(iter(loader))
    assert (batch["x"].dtype, batch["x"].shape) == (torch.int32, (7, 4))
    assert batch["flag"].dtype == torch.bool
    assert batch["tokens"].dtype == torch.uint16
    assert batch["tokens.length"].dtype == torch.int64
    assert isinstance(batch["steps"], Ragged)
    assert batch["steps"].offsets.shape == (8,)
    batch["x"].mul_(2)
    assert batch["x"][1].tolist() == [2, 4, 6, 0]
    assert batch["x"].untyped_storage().nbytes() == 7 * 4 * 4
    assert not any(value.is_pinned() for value in batch.values() if isinstance(value, torch.Tensor))


def test_fewer_samples_than_ranks_are_refused(fake) -> None:
    fake(sample_count=10)
    given = {"global_batch_size": 4, "name": "more"}
    with DataLoader(URL, dp_rank=0, dp_size=1, **given) as loader:
        batches = iter(loader)
        next(batches), next(batches)
        state = loader.state_dict()
        assert next(batches)["t"].tolist() == [8, 9]
    with DataLoader(URL, dp_rank=0, dp_size=2, **given) as loader:
        loader.load_state_dict(state)
        assert [batch["t"].tolist() for batch in loader] == [[8]]
    with DataLoader(URL, dp_rank=0, dp_size=4, **given) as loader:
        loader.load_state_dict(state)
        with pytest.raises(ConfigError, match=r"has fewer samples \(2\) than .* ranks \(4\)"):
            next(iter(loader))


def test_padding_is_counted(fake) -> None:
    fake(sample_count=10)
    with DataLoader(URL, batch_size=4, end="pad") as loader:
        assert loader.valid_count is None
        counts = [(batch["t"].tolist(), loader.valid_count) for batch in loader]
    assert counts[-1] == ([8, 9, 0, 1], 2)
    assert [count for _, count in counts] == [4, 4, 2]


def test_every_pass_is_the_next_epoch_also_after_one_that_was_left_early(fake) -> None:
    fake(sample_count=20)
    with DataLoader(URL, batch_size=4) as loader:
        assert {int(batch["x"][0, 3]) for batch in loader} == {0}
        assert loader.epoch == 1
        batch = next(iter(loader))
        assert (int(batch["x"][0, 3]), loader.epoch, loader.state_dict()["cursor"]) == (1, 1, 4)
        assert {int(batch["x"][0, 3]) for batch in loader} == {2}
        assert loader.epoch == 3
        loader.set_epoch(9)
        assert {int(batch["x"][0, 3]) for batch in loader} == {9}
        assert loader.state_dict()["epoch"] == 10
        for epoch in (10, 11):
            assert [int(b["x"][0, 3]) for b, _ in zip(loader, "ab", strict=False)] == [epoch] * 2
        for epoch in (12, 13):
            assert [int(b["x"][0, 3]) for b in itertools.islice(loader, 3)] == [epoch] * 3
            assert (loader.epoch, loader.state_dict()["cursor"]) == (epoch, 12)
        state = loader.state_dict()
        for _ in range(2):  # a state is used by one pass
            loader.load_state_dict(state)
            assert [int(batch["x"][0, 3]) for batch in itertools.islice(loader, 1)] == [13]
            assert {int(batch["x"][0, 3]) for batch in loader} == {14}
        for _ in range(3):  # a user who sets the epoch has it
            loader.set_epoch(4)
            assert [next(iter(loader))["x"][0, 3].item()] == [4]


def test_an_iterator_that_is_asked_for_no_batch_is_no_epoch(fake) -> None:
    fake(sample_count=20)
    with DataLoader(URL, batch_size=4) as loader:
        iter(loader)
        late, first = iter(loader), iter(loader)
        assert int(next(first)["x"][0, 3]) == 0
        assert int(next(late)["x"][0, 3]) == 1
        assert (loader.epoch, loader.state_dict()["cursor"]) == (1, 4)
        iterator = iter(loader)
        assert (loader.epoch, loader.state_dict()["cursor"]) == (2, 0)
        assert {int(batch["x"][0, 3]) for batch in iterator} == {2}
        assert {int(batch["x"][0, 3]) for batch in first} == {0}
        assert list(first) == []
        assert loader.state_dict()["epoch"] == 3


def test_a_pass_whose_first_batch_fails_is_begun_again_where_it_was(fake) -> None:
    node = fake(sample_count=20)
    with DataLoader(URL, batch_size=4, timeout=0.3) as loader:
        next(iter(loader))
        loader.load_state_dict(loader.state_dict())
        node.script.hang_after = 0
        with pytest.raises(DataStallError):
            next(iter(loader))
        node.script.hang_after = None
        assert positions(loader) == in_order(20, 4, start=4)
        assert loader.epoch == 1


def test_a_pass_is_over_after_its_last_batch_even_without_stop_iteration(fake) -> None:
    fake(sample_count=20)
    with DataLoader(URL, batch_size=4) as loader:
        for epoch in range(3):
            iterator = iter(loader)
            assert [int(next(iterator)["x"][0, 3]) for _ in range(5)] == [epoch] * 5


def test_set_epoch_may_change_a_pass_until_its_first_batch(fake) -> None:
    fake(sample_count=20)
    with DataLoader(URL, batch_size=4) as loader:
        next(iter(loader))
        state = loader.state_dict()
        loader.load_state_dict(state)
        for told, left in ((0, 4), (3, 5)):  # the same epoch keeps the place
            loader.load_state_dict(state)
            iterator = iter(loader)
            loader.sampler.set_epoch(told)
            assert [int(batch["x"][0, 3]) for batch in iterator] == [told] * left


def test_two_iterators_at_once_walk_by_themselves(fake) -> None:
    fake(sample_count=40)
    with DataLoader(URL, batch_size=4) as loader:
        for one, two in zip(loader, loader, strict=True):
            assert (one["t"].tolist(), one["x"][0, 3].item()) == (two["t"].tolist(), 0)
            assert two["x"][0, 3].item() == 1
            one["x"].zero_()
            assert two["x"].any()
        iterator = iter(loader)
        next(iterator)
        assert positions(loader) == in_order(40, 4)
        assert next(iterator)["t"].tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize("dp_size", [1, 2])
def test_resuming_from_any_step_gives_the_same_suffix(fake, dp_size) -> None:
    fake(sample_count=30)
    place = {"global_batch_size": 4, "dp_rank": dp_size - 1, "dp_size": dp_size, "name": "resume"}
    with DataLoader(URL, **place) as loader, DataLoader(URL, **place) as other:
        states = [loader.state_dict()]
        whole = []
        for batch in loader:
            whole.append(rows_of(batch))
            states.append(loader.state_dict())
        states.append(loader.state_dict())
        for k, state in enumerate(states[:-1]):
            assert len(json.dumps(state)) < 1024
            assert (state["epoch"], state["cursor"]) == ((0, 4 * k) if k < 8 else (1, 0))
            other.load_state_dict(json.loads(json.dumps(state)))
            assert other.state_dict() == state
            other.set_epoch(0)
            assert [rows_of(batch) for batch in other] == whole[k:]
            assert other.state_dict() == states[-1]
        assert states[-1] == {**states[0], "epoch": 1, "digest": states[-1]["digest"]}
        digests = [state["digest"]["value"] for state in states[:-1]]
        assert len(set(digests)) == len(digests)
        assert not digests[0]
        other.load_state_dict(states[3])
        other.set_epoch(5)
        assert next(iter(other))["t"].tolist() == [row["t"] for row in whole[0]]


def test_a_state_of_another_job_is_refused_with_what_differs(fake) -> None:
    fake()
    with DataLoader(URL, seed=1) as loader:
        state = loader.state_dict()
    with DataLoader(URL, seed=2) as loader, pytest.raises(SpecMismatch) as caught:
        loader.load_state_dict(state)
    assert "seed: 1 in the state, 2 here." in str(caught.value)
    assert (caught.value.field, caught.value.expected, caught.value.found) == ("seed", "1", "2")
    with (
        DataLoader(URL, seed=1) as loader,
        pytest.raises(SpecMismatch, match="had 99 samples and now has 100"),
    ):
        loader.load_state_dict({**state, "sample_count": 99})


def test_the_job_has_all_options_of_the_user(fake, monkeypatch) -> None:
    node = fake()
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "carried")
    with DataLoader(
        ["a.parquet", "s3://b/*"], 8, shuffle=True, seed=3, drop_last=True, columns=["x"],
        lists="ragged", fill_null={"x": 1}, format="parquet", lanes=4, window=64, timeout=9,
    ) as loader:  # fmt: skip
        len(loader)
    (job,) = (one for one in node.seen if isinstance(one, OpenJob))
    assert job.source.urls[0].startswith("/")
    assert job.source.urls[0].endswith("a.parquet")
    assert (job.source.urls[1], job.source.format) == ("s3://b/*", "parquet")
    assert (job.topology.dp_rank, job.topology.dp_size) == (1, 2)
    columns = ColumnOptions(("x",), ListPolicy.RAGGED, (("x", 1.0),))
    assert job.spec == JobSpec("", 3, True, 4, 64, 16, End.DROP, column_options=columns)
    assert job.job_id.startswith("elastic-carried/")


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": None}, "batch_size=None"),
        ({"batch_size": 2, "global_batch_size": 4}, "pass one"),
        ({"drop_last": True, "end": "pad"}, "pass one"),
        ({"end": "wrap"}, "ragged, drop, pad"),
        ({"lists": "nested"}, "padded, ragged"),
        ({"columns": "x"}, "a list of names"),
        ({"columns": []}, "selects nothing"),
        ({"seed": -1}, "seed=-1"),
        ({"lanes": 0}, "lanes=0"),
        ({"timeout": -1}, "timeout"),
        ({"dp_rank": 1}, "belong together"),
        ({"service": "nowhere"}, "not an address"),
        ({"num_workers": 4}, "ShardedIterableDataset"),
        ({"sampler": [1]}, "order comes from"),
        ({"collate_fn": print}, "dicts of tensors"),
    ],
)
def test_impossible_arguments_are_refused_before_any_work(arguments, match) -> None:
    with pytest.raises(ConfigError, match=match):
        DataLoader(URL, **arguments)


def test_torchs_own_defaults_are_accepted_and_nonsense_is_not(fake) -> None:
    fake()
    DataLoader(URL, num_workers=0, sampler=None, persistent_workers=False, in_order=True)
    with pytest.raises(TypeError, match="btach_size"):
        DataLoader(URL, btach_size=3)


@pytest.mark.parametrize("neither", [None, 3, object()])
def test_what_is_no_url_and_no_dataset_is_refused(neither) -> None:
    with pytest.raises(ConfigError, match="neither"):
        DataLoader(neither)


def test_closing_and_garbage_collection_leave_nothing_behind_and_print_nothing(fake) -> None:
    node = fake()
    loader = DataLoader(URL, batch_size=4)
    batch = next(iter(loader))
    del loader
    gc.collect()
    assert rows_of(batch) == [sample(t) for t in range(4)]
    assert "gone" not in node.seen
    del batch
    loader = DataLoader(URL, batch_size=4)
    iterator = iter(loader)
    batch = next(iterator)
    loader.close()
    loader.close()
    assert rows_of(batch) == [sample(t) for t in range(4)]
    with pytest.raises(ClosedError):
        next(iterator)
    with pytest.raises(ClosedError):
        len(loader)


def test_an_import_is_light_and_looks_for_no_garbage_and_an_end_with_batches_is_silent(
    fake,
) -> None:
    fake()  # all in one process, since importing torch takes seconds
    code = (
        "import gc, sys\n"
        "looked = []\n"
        "gc.callbacks.append(lambda phase, facts: looked.append(facts['generation']))\n"
        "import dataplane_torch\n"
        "assert not {'pyarrow', 'grpc', 'obstore', 'google.protobuf'} & set(sys.modules)\n"
        f"loader = dataplane_torch.DataLoader({URL!r}, 4)\n"
        "assert looked.count(2) == 0 and gc.isenabled(), looked\n"
        "iterator = iter(loader)\n"
        "held = [next(iterator) for _ in range(5)]\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
