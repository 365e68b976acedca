"""On a real CUDA device, where there is one: what the fake device promises in its place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dataplane_torch import DataLoader
from device_steps import content, leaves
from fleet import wait_until
from local_datasets import LONG
from torch.utils.data import Dataset

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]

URL = "s3://bucket/shards/*.parquet"
COUNT, SIZE = 2000, 4
# Six slots of small slabs. The node overwrites what it has back.
NODE = {"sample_count": COUNT, "arena_bytes": 6 * 4096}
_LATE = 2_000_000  # cycles: about a millisecond


@pytest.fixture(scope="module", autouse=True)
def context() -> None:
    """What CUDA keeps for good is made before the first test is watched."""
    if torch.cuda.is_available():
        torch.ones(8).pin_memory().to("cuda", non_blocking=True).sum().item()


class Rows(Dataset[Any]):
    """Long tensors, numbers and texts."""

    def __len__(self) -> int:
        return 400

    def __getitem__(self, i: int) -> Any:
        return {"x": torch.full((LONG,), i, dtype=torch.int16), "pair": (i, f"no. {i}")}


def loader_of(kind: str, **given: Any) -> DataLoader:
    if kind == "urls":
        return DataLoader(URL, SIZE, **given)
    return DataLoader(Rows(), SIZE, num_workers=int(kind), **given)


@pytest.fixture
def expected(fake):
    """Return an epoch's batches, by the kind of loader."""
    fake(**NODE)

    def of(kind: str) -> list[list[bytes]]:
        with loader_of(kind) as loader:
            return [content(batch) for batch in loader]

    return of


@pytest.mark.parametrize("kind", ["urls", "2"])
def test_a_batch_that_is_dropped_right_after_its_copy_began_arrives_whole(expected, kind) -> None:
    want = expected(kind)
    streams = [torch.cuda.Stream() for _ in range(3)]
    copies = []
    with loader_of(kind, pin_memory=True) as loader:
        for i, batch in enumerate(loader):
            assert all(leaf.is_pinned() for leaf in leaves(batch) if leaf.numel())
            with torch.cuda.stream(streams[i % 3]):
                torch.cuda._sleep(_LATE)
                copies.append([leaf.to("cuda", non_blocking=True) for leaf in leaves(batch)])
            del batch
    torch.cuda.synchronize()
    assert [content(one) for one in copies] == want


@pytest.mark.parametrize("kind", ["urls", "0", "2"])
@pytest.mark.parametrize("device", ["cuda", "cuda:0", 0, torch.device("cuda")])
def test_batches_on_the_device_equal_those_on_the_host(expected, kind, device) -> None:
    want = expected(kind)
    with loader_of(kind, device=device) as loader:
        found = list(loader)
    assert all(leaf.device == torch.device("cuda", 0) for leaf in leaves(found))
    assert [content(batch) for batch in found] == want


@pytest.mark.parametrize("kind", ["urls", "2"])
def test_a_late_step_reads_its_own_batch_whatever_is_copied_meanwhile(expected, kind) -> None:
    """Its tensors are dropped before the step that reads them begins, in changing streams."""
    want = expected(kind)
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    results = []
    with loader_of(kind, device="cuda") as loader:
        batches = iter(loader)
        for i in range(len(want)):
            with torch.cuda.stream(streams[i % 2]):
                batch = next(batches)
                torch.cuda._sleep(_LATE)
                results.append([leaf.clone() for leaf in leaves(batch)])
                del batch
    torch.cuda.synchronize()
    assert [content(one) for one in results] == want


def test_leaving_a_pass_early_frees_device_memory(expected) -> None:
    del expected
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with DataLoader(URL, SIZE, device="cuda") as loader:
        for i, _ in enumerate(loader):
            if i == 9:
                break
        del _
        assert torch.cuda.memory_allocated() == before
        state = loader.state_dict()
        assert state["cursor"] == 10 * SIZE
        mount = loader._shards._session.mount()
    wait_until(lambda: mount.held_bytes == 0)


def test_memory_of_the_host_goes_back_while_a_long_step_computes(expected) -> None:
    """Over urls, slabs wait for copies and not for steps: otherwise this memory is too small."""
    want = expected("urls")
    with DataLoader(URL, SIZE, device="cuda", timeout=20) as loader:
        next(batches := iter(loader))
        torch.cuda._sleep(4_000_000_000)  # seconds
        end = torch.cuda.current_stream().record_event()
        found = [next(batches) for _ in range(60)]
        assert loader.statistics().copied_slabs == 0
        was_early = not end.query()
        assert [content(batch) for batch in found] == want[1:61]
    assert was_early
