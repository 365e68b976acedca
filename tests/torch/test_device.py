"""DataLoader(device=…) over urls: the host's own batches, on a device that does everything late."""

from __future__ import annotations

import gc
import itertools

import pytest
import torch
from dataplane_torch import DataLoader
from dataplane_torch.device import find_target
from device_steps import content, expect_nothing_left, leaves, step
from fleet import wait_until

from dataplane.client.stream import Batches, SlabStream
from dataplane.model.errors import ClosedError, ConfigError, DataStallError

URL = "s3://bucket/shards/*.parquet"
COUNT, SIZE = 90, 4
STEPS = -(-COUNT // SIZE)


@pytest.fixture
def epochs(fake):
    """A node with six slots, of which a trainer may hold two; what the first seven epochs are."""
    fake(sample_count=COUNT, arena_bytes=6 * 4096)
    with DataLoader(URL, SIZE) as loader:
        return [[content(batch) for batch in loader] for _ in range(7)]


@pytest.mark.parametrize("seed", range(4))
def test_every_batch_equals_the_hosts_however_late_the_device_is(epochs, onto, seed) -> None:
    device = onto(seed)
    with DataLoader(URL, SIZE, device="cuda") as loader:
        for expected in epochs[:2]:
            batches = iter(loader)
            for want in expected:
                step(device, batches, want)
            with pytest.raises(StopIteration):
                next(batches)
        assert loader.statistics().copied_slabs == 0  # memory being read is not held
    assert device.pageable == 0
    del batches
    expect_nothing_left(device)


def test_the_next_batch_is_copied_ahead_if_it_is_here_and_no_other(epochs, onto) -> None:
    device = onto()
    each = [sum(bool(leaf) for leaf in batch) for batch in epochs[0]]
    copies = [0, *itertools.accumulate(each)]
    with DataLoader(URL, SIZE, device="cuda") as loader:
        batches = iter(loader)
        step(device, batches, epochs[0][0])
        for i, want in enumerate(epochs[0][1:], 1):
            reader = loader._shards._reader
            if len(reader._ready) < 2 and i < STEPS - 1:  # the last of its slab
                wait_until(lambda reader=reader: reader._stream.is_at_hand)
            step(device, batches, want)
            assert device.copies == copies[min(i + 2, STEPS)]
        del batches, reader
    expect_nothing_left(device)


def test_a_state_counts_what_was_yielded_and_not_what_was_copied_ahead(epochs, onto) -> None:
    device = onto()
    with DataLoader(URL, SIZE, device="cuda") as loader:
        batches, states = iter(loader), []
        for want in epochs[0]:
            step(device, batches, want)
            states.append(loader.state_dict())
        assert [(state["epoch"], state["cursor"]) for state in states] == [
            *((0, SIZE * (i + 1)) for i in range(STEPS - 1)),
            (1, 0),
        ]
        for stop in (0, 3, 4, STEPS - 2):
            loader.load_state_dict(states[stop])
            batches = iter(loader)
            for want in epochs[0][stop + 1 :]:
                step(device, batches, want)
            assert next(batches, None) is None
        del batches
    expect_nothing_left(device)


def test_a_pass_that_is_left_frees_its_memory_and_keeps_its_position(epochs, onto) -> None:
    device = onto()
    with DataLoader(URL, SIZE, device="cuda") as loader:
        for stop, _ in enumerate(loader):
            if stop == 4:
                break
        assert device.live
        del _
        gc.collect()
        assert device.live == {}
        assert loader.state_dict()["cursor"] == 5 * SIZE
        batches = iter(loader)
        step(device, batches, epochs[1][0])  # the next epoch, as without a device
        loader.close()
        with pytest.raises(ClosedError):
            next(batches)
    del batches
    expect_nothing_left(device)


def test_an_error_of_the_batch_ahead_comes_when_that_batch_is_due(epochs, onto) -> None:
    device = onto()
    with DataLoader(URL, SIZE, device="cuda") as loader:
        batches = iter(loader)
        for want in epochs[0][:2]:
            step(device, batches, want)
        device.refuses = 2  # once for the batch ahead, and once more when it is due
        step(device, batches, epochs[0][2])
        assert device.refuses == 1
        assert loader.state_dict()["cursor"] == 3 * SIZE
        with pytest.raises(RuntimeError, match="out of memory"):
            next(batches)
        assert loader.state_dict()["cursor"] == 3 * SIZE
        for want in epochs[0][3:]:
            step(device, batches, want)
        del batches
    expect_nothing_left(device)


def test_an_interrupt_of_the_batch_ahead_takes_no_batch(epochs, onto, monkeypatch) -> None:
    device = onto()
    with DataLoader(URL, SIZE, device="cuda") as loader:
        batches = iter(loader)
        for want in epochs[0][:2]:
            step(device, batches, want)
        with monkeypatch.context() as patch:
            patch.setattr(device, "copied", interrupt)
            with pytest.raises(KeyboardInterrupt):
                next(batches)
        assert loader.state_dict()["cursor"] == 2 * SIZE
        for want in epochs[0][2:]:
            step(device, batches, want)
        del batches
    expect_nothing_left(device)


def interrupt(_source: torch.Tensor) -> torch.Tensor:
    raise KeyboardInterrupt


def test_the_reader_waits_for_a_slab_only_when_it_is_due(fake, onto, monkeypatch) -> None:
    fake(sample_count=COUNT, hang_after=2)  # slabs of one batch and of three
    device, asked, ask = onto(), [], SlabStream.batches_from

    def counted(stream: SlabStream, at: int) -> list[Batches]:
        asked.append(at)
        return ask(stream, at)

    monkeypatch.setattr(SlabStream, "batches_from", counted)
    with DataLoader(URL, SIZE, device="cuda", timeout=1.5) as loader:
        batches = iter(loader)
        taken = [next(batches) for _ in range(4)]
        assert asked == [0, 1]
        with pytest.raises(DataStallError):
            next(batches)
        assert loader.state_dict()["cursor"] == 4 * SIZE
        assert len(taken) == 4
        del batches, taken
    expect_nothing_left(device)


def test_batches_that_are_held_stay_right(epochs, onto) -> None:
    device = onto()
    with DataLoader(URL, SIZE, device="cuda") as loader:
        held = list(loader)
    device.finish()
    assert [content(batch) for batch in held] == epochs[0]
    assert all(leaf.untyped_storage().nbytes() == leaf.nbytes for leaf in leaves(held))
    del held
    expect_nothing_left(device)


@pytest.mark.parametrize(
    ("device", "match"),
    [
        ("banana", 'pass "cuda"'),
        ("cuda:-1", 'pass "cuda"'),
        (-1, "number of a CUDA device"),
        (True, "number of a CUDA device"),
        (1.5, "number of a CUDA device"),
        ("mps", r"to CUDA devices only. Leave device= out, and move each batch .*\.to\('mps'\)"),
        ("xla", r"to CUDA devices only. Leave device= out, and move each batch .*\.to\('xla'\)"),
        (torch.device("meta"), "CUDA devices"),
        ("cuda:99", "CUDA"),
        (99, "CUDA"),
    ],
)
@pytest.mark.parametrize("dataset", [URL, [1, 2, 3]])
def test_a_device_that_is_not_here_is_refused_before_any_work(device, match, dataset) -> None:
    with pytest.raises(ConfigError, match=match) as told:
        DataLoader(dataset, device=device)
    assert told.value.field == "device"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("device", ["cuda", "cuda:0", 0, torch.device("cuda", 1)])
def test_without_cuda_the_error_says_what_to_do(device) -> None:
    with pytest.raises(ConfigError, match=r"leave device= out"):
        DataLoader([1, 2, 3], device=device)


@pytest.mark.parametrize("device", [None, "cpu", "cpu:0", torch.device("cpu")])
def test_device_cpu_leaves_batches_where_they_are(fake, device) -> None:
    fake(sample_count=8)
    assert find_target(device) is None
    with DataLoader(URL, SIZE, device=device) as loader:
        assert [batch["t"].tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert loader.device is device
