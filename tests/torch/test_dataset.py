"""ShardedIterableDataset inside of torch's own DataLoader."""

from __future__ import annotations

import itertools
import pickle
import threading
import time

import pytest
import torch
from dataplane_torch import Ragged, ShardedIterableDataset
from fake_node import sample
from torch.utils.data import DataLoader as TorchLoader

from dataplane.model.errors import ConfigError
from dataplane.rpc.messages import CloseJob, OpenJob

URL = "s3://bucket/shards"
# On a machine with fewer processors than workers.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


def positions(batches) -> list[list[int]]:
    return [batch["t"].tolist() for batch in batches]


def in_order(count: int, size: int, start: int = 0) -> list[list[int]]:
    return [list(range(i, min(i + size, count))) for i in range(start, count, size)]


def loader_of(dataset, workers: int, method: str | None = "fork", **given) -> TorchLoader:
    context = method if workers else None
    return TorchLoader(
        dataset, batch_size=None, num_workers=workers, multiprocessing_context=context, **given
    )


@pytest.mark.parametrize(("workers", "method"), [(0, None), (1, "fork"), (3, "fork"), (1, "spawn")])
def test_the_order_is_exact_with_any_number_of_workers(fake, workers, method) -> None:
    node = fake(sample_count=110, arena_bytes=6 * 4096)
    dataset = ShardedIterableDataset(URL, batch_size=4)
    batches = list(loader_of(dataset, workers, method))
    assert positions(batches) == in_order(110, 4)
    assert batches[2]["x"].tolist() == [sample(t)["x"] for t in range(8, 12)]
    assert batches[3]["text"] == [sample(t)["text"] for t in range(12, 16)]
    assert isinstance(batches[3]["steps"], Ragged)
    batches[2]["x"].zero_()
    assert len(dataset) == len(batches)
    members = {one.member_id for one in node.seen if isinstance(one, OpenJob)}
    assert len(members) == workers + 1
    assert len({one.job_id for one in node.seen if isinstance(one, OpenJob)}) == 1
    dataset.close()


@pytest.mark.parametrize("persistent", [False, True])
def test_every_pass_is_the_next_epoch_and_set_epoch_reaches_the_workers(fake, persistent) -> None:
    fake(sample_count=40)
    dataset = ShardedIterableDataset(URL, batch_size=4)
    loader = loader_of(dataset, 2, persistent_workers=persistent)
    for epoch in (0, 1):
        assert {int(batch["x"][0, 3]) for batch in loader} == {epoch}
    dataset.set_epoch(7)
    batches = list(loader)
    assert {int(batch["x"][0, 3]) for batch in batches} == {7}
    assert positions(batches) == in_order(40, 4)


def epochs_of(batches) -> set[int]:
    return {int(batch["x"][0, 3]) for batch in batches}


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (3, False), (2, True)])
def test_a_pass_that_is_left_early_is_an_epoch(fake, workers, persistent) -> None:
    fake(sample_count=40)
    dataset = ShardedIterableDataset(URL, batch_size=4)
    loader = loader_of(dataset, workers, persistent_workers=persistent)
    found = []
    for taken in (1, 3, 10, 1, 20):
        torch.manual_seed(5)  # torch draws the same seed for the workers of each pass
        batches = list(itertools.islice(loader, taken))
        assert positions(batches) == in_order(40, 4)[:taken]
        found.append(epochs_of(batches))
    assert found == [{epoch} for epoch in range(5)]
    dataset.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_passes_at_once_are_epochs_of_their_own(fake, workers) -> None:
    fake(sample_count=40)
    dataset = ShardedIterableDataset(URL, batch_size=4)
    loader = loader_of(dataset, workers)
    pairs = list(zip(loader, loader, strict=True))
    found = [[pair[i] for pair in pairs] for i in range(2)]
    assert [positions(batches) for batches in found] == [in_order(40, 4)] * 2
    first, second = map(epochs_of, found)
    assert first | second == {0, 1}
    assert len(first) == len(second) == 1
    assert epochs_of(loader) == {2}
    dataset.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_is_of_the_last_pass_also_when_that_is_over(fake, workers) -> None:
    fake(sample_count=40)
    dataset = ShardedIterableDataset(URL, batch_size=4)
    loader = loader_of(dataset, workers)
    assert len(list(itertools.islice(loader, 3))) == 3
    iterator = iter(loader)
    for taken in range(1, 11):
        next(iterator)
        state = dataset.state_dict(taken)
        place = (1, taken * 4) if taken < 10 else (2, 0)
        assert (state["epoch"], state["cursor"]) == place
    assert next(iterator, None) is None
    assert dataset.state_dict(10) == state
    assert (dataset.state_dict()["epoch"], dataset.state_dict()["cursor"]) == (2, 0)
    assert epochs_of(loader) == {2}
    dataset.close()


@pytest.mark.parametrize("taken", [10, 3])
def test_workers_leave_the_job_when_they_end(fake, taken) -> None:
    node = fake(sample_count=40)
    dataset = ShardedIterableDataset(URL, batch_size=4)
    assert len(list(itertools.islice(loader_of(dataset, 2), taken))) == taken
    deadline = time.monotonic() + 60
    while node.seen.count("gone") < 2:
        assert time.monotonic() < deadline, list(node.seen)
        threading.Event().wait(0.01)
    assert [type(one) for one in node.seen].count(CloseJob) == 2
    dataset.close()


def test_more_workers_than_steps_are_no_trouble(fake) -> None:
    fake(sample_count=5)
    dataset = ShardedIterableDataset(URL, batch_size=4)
    loader = loader_of(dataset, 3)
    assert positions(loader) == in_order(5, 4)
    assert {int(batch["x"][0, 3]) for batch in loader} == {1}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_resumes_in_the_same_order(fake, workers) -> None:
    fake(sample_count=40)
    dataset = ShardedIterableDataset(URL, batch_size=4)
    iterator = iter(loader_of(dataset, workers))
    for _ in range(3):
        next(iterator)
    state = dataset.state_dict(3) if workers else dataset.state_dict()
    assert (state["epoch"], state["cursor"]) == (0, 12)
    del iterator
    other = ShardedIterableDataset(URL, batch_size=4)
    other.load_state_dict(state)
    other.set_epoch(0)
    assert positions(loader_of(other, workers)) == in_order(40, 4, start=12)
    assert {int(batch["x"][0, 3]) for batch in loader_of(other, workers)} == {1}
    dataset.close()
    other.close()


def test_a_workers_own_state_resumes_that_worker(fake) -> None:
    fake(sample_count=40)
    dataset = ShardedIterableDataset(URL, batch_size=4)
    base = dataset.state_dict()
    info = torch.utils.data._utils.worker.WorkerInfo(id=1, num_workers=2, seed=0, dataset=dataset)
    torch.utils.data._utils.worker._worker_info = info
    try:
        iterator = iter(dataset)
        assert [next(iterator)["t"][0].item() for _ in range(2)] == [4, 12]
        state = dataset.state_dict()
        assert state == {**base, "step": 5, "step_stride": 2}
        del iterator
        dataset.load_state_dict(state)
        assert [batch["t"][0].item() for batch in dataset] == [20, 28, 36]
    finally:
        torch.utils.data._utils.worker._worker_info = None
    dataset.load_state_dict(state)
    with pytest.raises(ConfigError, match="saved with 2 DataLoader workers, and now there are 1"):
        iter(dataset)
    with pytest.raises(ConfigError, match="damaged"):
        dataset.load_state_dict({**state, "step": "x"})
    dataset.close()


def test_it_travels_as_a_value(fake) -> None:
    fake(sample_count=8)
    dataset = ShardedIterableDataset(URL, batch_size=4)
    assert len(dataset) == 2
    other = pickle.loads(pickle.dumps(dataset))
    assert positions(other) == positions(dataset) == in_order(8, 4)
    other.close()
    dataset.close()


def test_wrong_arguments_are_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="batch_size=0"):
        ShardedIterableDataset(URL, batch_size=0)
    with pytest.raises(ConfigError, match="epoch=-1: pass a whole number"):
        ShardedIterableDataset(URL).set_epoch(-1)


def test_a_state_of_the_last_step_is_an_empty_pass_of_its_epoch(fake) -> None:
    fake(sample_count=40)
    dataset = ShardedIterableDataset(URL, batch_size=4)
    iterator = iter(loader_of(dataset, 0))
    for _ in range(10):
        next(iterator)
    state = dataset.state_dict()
    assert (state["epoch"], state["cursor"]) == (1, 0)
    assert dataset.state_dict(10) == state
    del iterator
    other = ShardedIterableDataset(URL, batch_size=4)
    other.load_state_dict(state)
    assert other.state_dict() == state
    for told, left in ((None, set()), (0, set()), (1, {1})):
        other.load_state_dict(state)
        if told is not None:
            other.set_epoch(told)
        assert {int(batch["x"][0, 3]) for batch in loader_of(other, 0)} == left
        after = {int(batch["x"][0, 3]) for batch in loader_of(other, 0)}
        assert after == ({2} if left else {1})
    other.load_state_dict({})
    assert {int(batch["x"][0, 3]) for batch in loader_of(other, 0)} == {0}
    dataset.close()
    other.close()


def test_tensors_are_in_host_memory_whatever_the_default_device_is(fake) -> None:
    fake(sample_count=2)
    with torch.device("meta"):
        dataset = ShardedIterableDataset(URL, 1, dp_rank=1, dp_size=2)
        (batch,) = dataset
    assert batch["x"].shape[0] == 1
    tensors = [value for value in batch.values() if isinstance(value, torch.Tensor)]
    assert {tensor.device.type for tensor in tensors} == {"cpu"}
    dataset.close()
