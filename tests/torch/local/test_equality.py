"""torch's own DataLoader is the model: the same arguments and seeds give the same batches."""

from __future__ import annotations

import itertools
import random
from multiprocessing import forkserver
from typing import Any

import numpy as np
import pytest
import torch
from dataplane_torch import DataLoader
from hypothesis import given, settings
from hypothesis import strategies as st
from local_datasets import ANYTHING, COLLATED, Flow, Samples, Together, as_is, as_pair, is_same
from torch.utils.data._utils.collate import default_collate_fn_map

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:Sparse"),
]


def seeded(kind: type, make: Any, walk: Any) -> list[Any]:
    """Return the results of `walk` over a loader of this class, and the next draws of the generators."""
    random.seed(1)
    np.random.seed(2)  # noqa: NPY002 - what datasets draw from
    torch.manual_seed(3)
    loader = make(kind)
    seen = walk(loader)
    if isinstance(loader, DataLoader):
        loader.close()
    return [*seen, random.random(), float(torch.rand(()))]


def assert_equal(make: Any, walk: Any = None) -> None:
    """Both classes give the same."""
    walk = walk or two_epochs
    expected = seeded(torch.utils.data.DataLoader, make, walk)
    got = seeded(DataLoader, make, walk)
    assert len(got) == len(expected)
    for i, (one, other) in enumerate(zip(got, expected, strict=True)):
        assert is_same(one, other), f"batch {i}: {one!r:.300} is not {other!r:.300}"


def two_epochs(loader: Any) -> list[Any]:
    return [*loader, "end", *loader]


def left_early(loader: Any) -> list[Any]:
    first = list(itertools.islice(loader, 2))
    return [*first, "left", *loader]


workers = st.integers(0, 2)
sizes = st.none() | st.integers(1, 5)


@st.composite
def arguments(draw: Any) -> dict[str, Any]:
    """Any arguments for a loader of a map-style dataset."""
    given: dict[str, Any] = {"num_workers": draw(workers)}
    if given["num_workers"]:
        given["prefetch_factor"] = draw(st.sampled_from([None, 1, 3]))
        given["persistent_workers"] = draw(st.booleans())
    if draw(st.booleans()):
        given["worker_init_fn"] = seeds_itself
    given["batch_size"] = draw(sizes)
    if given["batch_size"] is not None:
        given["drop_last"] = draw(st.booleans())
    given["shuffle"] = draw(st.booleans())
    return given


def seeds_itself(worker_id: int) -> None:
    """A worker_init_fn."""
    random.seed(worker_id + 100)


@given(
    kind=st.sampled_from(sorted(COLLATED)),
    count=st.integers(0, 9),
    together=st.booleans(),
    arguments=arguments(),
    seed=st.none() | st.integers(0, 9),
    walk=st.sampled_from([two_epochs, left_early]),
)
@settings(max_examples=15)
def test_map_style_datasets(kind, count, together, arguments, seed, walk) -> None:
    if not count and arguments["shuffle"]:
        count = 1

    def make(loader: type) -> Any:
        own = {} if seed is None else {"generator": torch.Generator().manual_seed(seed)}
        return loader((Together if together else Samples)(kind, count), **arguments, **own)

    assert_equal(make, walk)


@given(
    kind=st.sampled_from(sorted(COLLATED)),
    count=st.integers(0, 9),
    num_workers=workers,
    batch_size=sizes,
    drop_last=st.booleans(),
    persistent=st.booleans(),
    walk=st.sampled_from([two_epochs, left_early]),
)
@settings(max_examples=12)
def test_iterable_datasets(
    kind, count, num_workers, batch_size, drop_last, persistent, walk
) -> None:
    given = {"num_workers": num_workers, "batch_size": batch_size}
    given |= {"drop_last": drop_last and batch_size is not None}
    given |= {"persistent_workers": persistent and num_workers > 0}
    assert_equal(lambda loader: loader(Flow(kind, count), **given), walk)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("collate_fn", [as_is, as_pair])
def test_collate_functions_may_return_any_type(num_workers, collate_fn) -> None:
    class All(Samples):
        def __getitem__(self, i: int) -> Any:
            return {kind: make(i) for kind, make in ANYTHING.items()}

    assert_equal(
        lambda loader: loader(
            All("", 3), batch_size=2, num_workers=num_workers, collate_fn=collate_fn
        )
    )


def last_first(batch: list[torch.Tensor], *, collate_fn_map: Any = None) -> torch.Tensor:
    """An entry of default_collate_fn_map."""
    del collate_fn_map
    return torch.stack(batch[::-1])


def sets_an_entry(worker_id: int) -> None:
    """A worker_init_fn."""
    del worker_id
    default_collate_fn_map[torch.Tensor] = last_first


@pytest.mark.parametrize("kind", ["long", "long array"])
def test_the_users_way_to_collate_tensors_is_used(kind, monkeypatch) -> None:
    def make(loader: type, **given: Any) -> Any:
        return loader(Samples(kind, 4), 2, num_workers=1, **given)

    assert_equal(lambda loader: make(loader, worker_init_fn=sets_an_entry))
    monkeypatch.setitem(default_collate_fn_map, torch.Tensor, last_first)
    assert_equal(make)
    monkeypatch.delitem(default_collate_fn_map, torch.Tensor)
    if kind == "long":
        with pytest.raises(TypeError, match="default_collate"):
            list(make(DataLoader))


def test_out_of_order_a_slow_worker_does_not_hold_up_the_others() -> None:
    with DataLoader(Waits(), None, num_workers=2, in_order=False, prefetch_factor=1) as loader:
        assert list(itertools.islice(loader, 6)) == [1, 2, 3, 4, 5, 6]


class Waits(Samples):
    """Sample 0 does not come."""

    def __init__(self) -> None:
        super().__init__("int", 100)

    def __getitem__(self, i: int) -> int:
        import threading

        if i == 0:
            threading.Event().wait()
        return i


@pytest.mark.parametrize("context", ["forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_may_be_started_by_spawn_or_forkserver(context) -> None:
    def make(loader: type) -> Any:
        how = {"multiprocessing_context": context} if loader is DataLoader else {}
        return loader(Samples("drawn", 4), 2, shuffle=True, num_workers=1, **how)

    try:
        assert_equal(make, lambda loader: [*loader])
    finally:  # otherwise it lives as long as this process
        forkserver._forkserver._stop()  # type: ignore[attr-defined]


class Bare(Samples):
    """Storages, and tensors without elements."""

    def __getitem__(self, i: int) -> Any:
        return torch.arange(3, device="cpu").untyped_storage(), torch.empty(0, 2, device="cpu")


def sets_a_device(worker_id: int) -> None:
    """A worker_init_fn."""
    del worker_id
    torch.set_default_device("meta")


def test_batches_are_in_host_memory_whatever_the_default_device_is() -> None:
    def make(loader: type) -> Any:
        return loader(
            Bare("", 2), None, num_workers=1, worker_init_fn=sets_a_device, collate_fn=as_is
        )

    def walk(loader: Any) -> list[Any]:
        iterator = iter(loader)
        with torch.device("meta"):
            found = [*iterator]
        return [(storage.tolist(), empty) for storage, empty in found]

    assert_equal(make, walk)


def test_arguments_attributes_and_their_errors() -> None:
    dataset = Samples("int", 10)
    for wrong in (
        {"batch_size": 0},
        {"num_workers": -1},
        {"timeout": -1},
        {"shuffle": True, "sampler": [1]},
        {"batch_sampler": [[1]], "batch_size": 2},
        {"batch_size": None, "drop_last": True},
        {"prefetch_factor": 2},
        {"num_workers": 1, "prefetch_factor": -1},
        {"persistent_workers": True},
        {"num_workers": 1, "multiprocessing_context": "spoon"},
    ):
        errors = []
        for kind in (torch.utils.data.DataLoader, DataLoader):
            with pytest.raises((ValueError, TypeError)) as caught:
                kind(dataset, **wrong)
            errors.append((type(caught.value), str(caught.value)))
        assert errors[0] == errors[1]
    ours, theirs = (
        kind(dataset, 3, shuffle=True, num_workers=2, drop_last=True, timeout=5)
        for kind in (DataLoader, torch.utils.data.DataLoader)
    )
    for name in ("batch_size", "num_workers", "drop_last", "timeout", "prefetch_factor"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert len(ours) == len(theirs) == 3
    assert isinstance(ours, torch.utils.data.DataLoader)
    assert type(ours.sampler) is type(theirs.sampler)
    with pytest.raises(ValueError, match="batch_size"):
        ours.batch_size = 4
    with pytest.raises(TypeError):
        len(DataLoader(Flow("int", 3)))
