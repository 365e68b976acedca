"""state_dict() and load_state_dict(): the same suffix from any step of any epoch, repeatedly."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from dataplane_torch import DataLoader
from hypothesis import given, settings
from hypothesis import strategies as st
from local_datasets import Backwards, Flow, Growing, Samples, is_same
from torch.utils.data import (
    DistributedSampler,
    IterableDataset,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from dataplane.model.errors import ConfigError, DataplaneError, VersionMismatch

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Counting(IterableDataset[int]):
    """An iterable dataset whose iterator has a state."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> CountingIterator:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return CountingIterator(range(first, self.count, step))


class CountingIterator:
    """Its iterator; `drawn` shows that no sample was skipped by drawing it."""

    def __init__(self, numbers: range) -> None:
        self.numbers, self.next = numbers, 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self.next == len(self.numbers):
            raise StopIteration
        self.next += 1
        return self.numbers[self.next - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next, "tensor": torch.tensor(self.next)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = int(state["tensor"])


class Own(IterableDataset[int]):
    """An iterable dataset that has a state itself, and is its own iterator's place."""

    def __init__(self, count: int) -> None:
        self.count, self.at = count, 0

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        start, self.at = self.at, 0
        for i in range(first + start * step, self.count, step):
            self.at = i // step + 1
            yield i
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def walk(loader: DataLoader, step: int) -> Iterator[Any]:
    """`step` batches, pass after pass, where a pass that is over counts as a batch."""
    while True:
        for batch in loader:
            if not step:
                return
            step -= 1
            yield batch
        if not step:
            return
        step -= 1
        yield "end"


def goes_on(
    make: Any,
    stop: int,
    more: int,
    *,
    other: Any = None,
    is_json: bool = True,
    tail: int = 2,
) -> None:
    """A loader that loads the state of another one after `stop` batches says what that would have,
    and does so again when that, or its own next state, is loaded once more. After the last batch
    of a pass, that is the end of the pass.
    """
    torch.manual_seed(5)
    with make() as loader:
        whole = list(walk(loader, stop + more + tail + 2))
    torch.manual_seed(5)
    with make() as loader:
        seen = list(walk_and_stop(loader, stop))
        state = loader.state_dict()
    assert is_same(seen, whole[:stop])
    if is_json:
        state = json.loads(json.dumps(state))
    torch.manual_seed(99)
    with (other or make)() as loader:
        for _ in range(2):
            loader.load_state_dict(state)
            seen = list(walk_and_stop(loader, more))
            assert is_same(seen, whole[stop : stop + more]), (seen, whole, stop)
        again = loader.state_dict()
    with (other or make)() as loader:
        loader.load_state_dict(json.loads(json.dumps(again)) if is_json else again)
        at = stop + more
        assert is_same(list(walk_and_stop(loader, tail)), whole[at : at + tail])


def walk_and_stop(loader: DataLoader, step: int) -> Iterator[Any]:
    """The same, but its iterator is not asked for more."""
    return itertools.islice(walk(loader, step + 1), step)


workers = st.integers(0, 2)


@given(
    count=st.integers(1, 9),
    batch_size=st.none() | st.integers(1, 4),
    stop=st.integers(0, 12),
    more=st.integers(0, 5),
    num_workers=st.tuples(workers, workers),
    shuffle=st.booleans(),
    own=st.booleans(),
    every=st.sampled_from([0, 1, 3]),
    persistent=st.booleans(),
)
@settings(max_examples=9)
def test_map_style_with_any_number_of_workers(
    count, batch_size, stop, more, num_workers, shuffle, own, every, persistent
) -> None:
    def make(worker_count: int) -> DataLoader:
        generator = torch.Generator().manual_seed(3) if own else None
        return DataLoader(
            Samples("int", count),
            batch_size,
            shuffle=shuffle,
            num_workers=worker_count,
            generator=generator,
            snapshot_every_n_steps=every,
            persistent_workers=persistent and worker_count > 0,
        )

    before, after = num_workers
    tail = 2
    # The pass after this one is the default generator's, not the state's; and workers that persist
    # draw no seed before it.
    if shuffle and (not own or (persistent and (before > 0) != (after > 0))):
        length = len(make(0)) + 1
        is_last = stop % length == length - 1
        more, tail = 0 if is_last else min(more, length - stop % length), 0
    goes_on(lambda: make(before), stop, more, other=lambda: make(after), tail=tail)


@given(
    kind=st.sampled_from([Counting, Own, lambda count: Flow("int", count)]),
    count=st.integers(0, 9),
    batch_size=st.none() | st.integers(1, 4),
    stop=st.integers(0, 10),
    more=st.integers(0, 4),
    num_workers=workers,
    every=st.sampled_from([0, 1, 2, 5]),
    drop_last=st.booleans(),
)
@settings(max_examples=9)
def test_iterable_with_and_without_a_state(
    kind, count, batch_size, stop, more, num_workers, every, drop_last
) -> None:
    goes_on(
        lambda: DataLoader(
            kind(count),
            batch_size,
            num_workers=num_workers,
            snapshot_every_n_steps=every,
            drop_last=drop_last and batch_size is not None,
        ),
        stop,
        more,
        is_json=kind is not Counting,
    )


@given(
    count=st.integers(1, 8),
    stop=st.integers(0, 9),
    more=st.integers(0, 5),
    num_workers=st.tuples(workers, workers),
    every=st.sampled_from([0, 1, 4]),
)
@settings(max_examples=6)
def test_a_sampler_with_a_state(count, stop, more, num_workers, every) -> None:
    def make(worker_count: int) -> DataLoader:
        given = {"num_workers": worker_count, "snapshot_every_n_steps": every}
        return DataLoader(Samples("int", count), 2, sampler=Backwards(count), **given)

    before, after = num_workers
    goes_on(lambda: make(before), stop, more, other=lambda: make(after))


@pytest.mark.parametrize(("num_workers", "stop"), [(0, 3), (2, 0), (2, 3), (2, 5)])
def test_a_map_style_dataset_with_a_state(num_workers, stop) -> None:
    goes_on(lambda: DataLoader(Growing(12), 2, num_workers=num_workers), stop, 6 - stop)


@given(count=st.integers(1, 20), stop=st.integers(0, 9), num_workers=st.integers(1, 2))
@settings(max_examples=10)
def test_out_of_order_nothing_is_lost_and_nothing_twice(count, stop, num_workers) -> None:
    given = {"num_workers": num_workers, "in_order": False, "batch_size": 2, "shuffle": True}
    with DataLoader(Samples("int", count), **given) as loader:
        seen = list(itertools.islice(loader, stop))
        state = json.loads(json.dumps(loader.state_dict()))
    if len(seen) == len(loader):
        return
    for other in (given, {"batch_size": 2, "shuffle": True}):
        with DataLoader(Samples("int", count), **other) as loader:
            loader.load_state_dict(state)
            batches = [*seen, *loader]
            assert sorted(i for batch in batches for i in batch.tolist()) == list(range(count))


@pytest.mark.parametrize("stop", [0, 1, 7])
def test_a_loaded_state_is_returned_unchanged(stop) -> None:
    with DataLoader(Growing(20), num_workers=2) as loader:
        batches = iter(loader)
        for _ in range(stop):
            next(batches)
        state = loader.state_dict()
    with DataLoader(Growing(20), num_workers=2) as loader:
        loader.load_state_dict(state)
        assert loader.state_dict() == state


class DrawsEarly(Sampler[list[int]]):
    """Draws its batches when an iterator of it is made."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([batch.tolist() for batch in torch.randperm(12).split(2)])

    def __len__(self) -> int:
        return 6


@pytest.mark.parametrize("before", [0, 1])
def test_a_sampler_that_draws_before_it_is_asked(before) -> None:
    def make(num_workers: int) -> DataLoader:
        sampler = DrawsEarly()
        return DataLoader(Samples("int", 12), batch_sampler=sampler, num_workers=num_workers)

    for after in (0, 1):
        goes_on(lambda: make(before), 2, 3, other=lambda after=after: make(after), tail=2)


def test_resuming_leaves_the_default_generator_alone() -> None:
    with DataLoader(Samples("int", 8), 2, shuffle=True) as loader:
        list(itertools.islice(loader, 2))
        state = loader.state_dict()
        torch.manual_seed(4)
        before = torch.get_rng_state()
        loader.load_state_dict(state)
        list(loader)
        assert torch.equal(torch.get_rng_state(), before)


class DrawsLate(Sampler[int]):
    """Draws its order when it is asked for its first index."""

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(12).tolist()

    def __len__(self) -> int:
        return 12


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    "order",
    [
        {"shuffle": True},
        {"sampler": SubsetRandomSampler(range(12))},
        {"sampler": WeightedRandomSampler([1.0] * 12, 12)},
        {"sampler": DrawsLate()},
        {"batch_sampler": DrawsEarly()},
    ],
    ids=["shuffle", "subset", "weighted", "late", "early"],
)
def test_a_state_taken_after_the_loop_gives_the_order_of_the_next_pass(num_workers, order) -> None:
    if "batch_sampler" not in order:
        order = {**order, "batch_size": 4}

    def passes(loader: DataLoader) -> list[int]:
        return [int(i) for batch in loader for i in batch]

    with DataLoader(Samples("int", 12), num_workers=num_workers, **order) as loader:
        passes(loader)
        state = loader.state_dict()
        following = passes(loader)
    with DataLoader(Samples("int", 12), num_workers=num_workers, **order) as loader:
        for _ in range(2):
            torch.manual_seed(4)
            before = torch.get_rng_state()
            loader.load_state_dict(json.loads(json.dumps(state)))
            iterator = iter(loader)
            state = loader.state_dict()
            assert torch.equal(torch.get_rng_state(), before)
            torch.rand(3)
            assert [int(i) for batch in iterator for i in batch] == following


class Unsized(Sampler[int]):
    """A sampler that does not tell its length."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(8))

    def __len__(self) -> int:
        raise LookupError("how many they are, nobody knows")


def test_a_pass_of_a_sampler_whose_length_raises_is_resumed() -> None:
    state = taken(DataLoader(Samples("int", 8), 2, sampler=Unsized()), 3)
    with DataLoader(Samples("int", 8), 2, sampler=Unsized()) as loader:
        loader.load_state_dict(state)
        assert [batch.tolist() for batch in loader] == [[6, 7]]


def test_numbers_of_numpy_are_saved_as_json() -> None:
    state = taken(DataLoader(Samples("int", 8), 2, num_workers=np.int64(1)))  # type: ignore[arg-type]
    assert json.loads(json.dumps(state))["worker_count"] == 1


def taken(loader: DataLoader, steps: int = 1) -> dict[str, Any]:
    """The state after some steps."""
    with loader:
        iterator = iter(loader)  # an abandoned pass is not asked for the positions of its workers
        list(itertools.islice(iterator, steps))
        return loader.state_dict()


def test_a_state_of_another_loader_is_refused_with_what_differs() -> None:
    map_style = taken(DataLoader(Samples("int", 8), 2))
    flow = taken(DataLoader(Flow("int", 8), 2, num_workers=2))
    url = {"version": 1, "spec_digest": "d", "epoch": 0, "cursor": 0, "sample_count": 1}
    for loader, state, error, told in [
        (DataLoader(Samples("int", 8), 2), flow, ConfigError, "an iterable dataset"),
        (DataLoader(Flow("int", 8), 2), map_style, ConfigError, "a map-style dataset"),
        (DataLoader(Samples("int", 8), 3), map_style, ConfigError, "batch_size=2"),
        (DataLoader(Samples("int", 9), 2), map_style, ConfigError, "had 8 samples .* has 9"),
        (DataLoader(Flow("int", 8), 2, num_workers=1), flow, ConfigError, "num_workers=2"),
        (DataLoader(Flow("int", 8), 2), {**flow, "version": 2}, VersionMismatch, "version 2"),
        (DataLoader(Samples("int", 8), 2), url, ConfigError, "over urls"),
        (
            DataLoader(Samples("int", 8), 2),
            {"version": 1, "x": 2},
            ConfigError,
            "no source and version of ours, but version, x",
        ),
        (
            DataLoader(Samples("int", 8), 2, shuffle=True),
            map_style,
            ConfigError,
            "by BatchSampler over SequentialSampler, .* by BatchSampler over RandomSampler",
        ),
        (DataLoader(Samples("int", 8), 2), [1], ConfigError, "is not the state"),
        (DataLoader(Samples("int", 8), 2), None, ConfigError, "None is not the state"),
    ]:
        with pytest.raises(error, match=told):
            loader.load_state_dict(state)


def test_a_state_of_another_number_of_ranks_is_refused() -> None:
    def of(rank: int, count: int, *, is_list: bool = False) -> DataLoader:
        sampler = DistributedSampler(range(64), count, rank)
        return DataLoader(range(64), 4, sampler=[*sampler] if is_list else sampler)

    state = json.loads(json.dumps(taken(of(0, 2))))
    for before, now, said in [
        (state, of(0, 1), "with 2 replicas of the sampler, and the sampler has 1 now.*on as many"),
        (taken(of(0, 2, is_list=True)), of(0, 1, is_list=True), "with 32 indices .* has 64 now"),
    ]:
        with now, pytest.raises(ConfigError, match=said):
            now.load_state_dict(before)
    with of(1, 2) as loader:  # another rank of as many
        loader.load_state_dict(state)
        assert len(list(loader)) == 7
    changed = {**state, "shares": {**state["shares"], "replicas": 1}}
    old = {name: value for name, value in state.items() if name not in {"shares", "checksum"}}
    with of(0, 1) as loader:
        with pytest.raises(ConfigError, match="do not have its checksum"):
            loader.load_state_dict(changed)
        loader.load_state_dict(old)
        assert len(list(loader)) == 15
    with of(0, 2) as loader, of(0, 1) as other:  # the next epoch may be of other ranks
        assert len(list(loader)) == 8
        other.load_state_dict(loader.state_dict())
        assert len(list(other)) == 16


def test_a_sampler_may_be_replaced_between_epochs() -> None:
    ended = taken(DataLoader(Samples("int", 8), 2), 5)
    with DataLoader(Samples("int", 8), 2, shuffle=True) as loader:
        loader.load_state_dict(ended)
        assert len(list(loader)) == 4


@pytest.mark.parametrize(("where", "name", "value", "said"), [
    ("sampler", "drawn", 2**31, "after 2147483648 batches of an epoch, and the sampler .* gives 4"),
    ("sampler", "drawn", 2**63, "drawn"),
    ("sampler", "drawn", 0, "drawn is 0"),
    ("sampler", "missing", [1, 2], "missing is 1"),
    ("sampler", "missing", "ab", "missing"),
    ("sampler", "epochs", {"sampler": 2**63}, "epochs"),
    ("", "base_seed", 2**64, "base_seed"),
    ("", "base_seed", -1, "base_seed"),
    ("", "next_worker", 3, "next_worker is 3"),
])  # fmt: skip
def test_a_damaged_state_is_refused_by_its_checksum_and_without_one_by_its_values(
    where, name, value, said
) -> None:
    def loader() -> DataLoader:
        return DataLoader(Samples("int", 8), 2, shuffle=True)

    def begin() -> None:
        with loader() as other:
            other.load_state_dict(state)
            iter(other)

    state = json.loads(json.dumps(taken(loader(), 2)))
    (state[where] if where else state)[name] = value
    with pytest.raises(ConfigError, match=r"damaged|checksum"):
        begin()
    del state["checksum"]
    with pytest.raises(ConfigError, match=said):
        begin()


def test_every_value_of_a_state_is_in_its_checksum() -> None:
    state = json.loads(json.dumps(taken(DataLoader(Samples("int", 8), 2, shuffle=True), 2)))
    for part, name, value in [
        (state, "step", 1), (state, "base_seed", 5), (state["sampler"], "drawn", 3),
        (state["sampler"]["generators"], "torch", ""), (state["workers"][0], "fetched", 3),
    ]:  # fmt: skip
        before, part[name] = part[name], value
        assert before != value
        with DataLoader(Samples("int", 8), 2, shuffle=True) as loader:
            with pytest.raises(ConfigError, match="do not have its checksum"):
                loader.load_state_dict(state)
            part[name] = before
            loader.load_state_dict(state)
            assert len(list(loader)) == 2


@st.composite
def damaged(draw: Any) -> Any:
    """A state in which one thing is not what it was; older ones have no checksum that would say
    so.
    """
    state = json.loads(json.dumps(taken(DataLoader(Samples("int", 8), 2, shuffle=True))))
    del state["checksum"]
    within = draw(st.sampled_from([state, state["sampler"], state["workers"][0]]))
    name = draw(st.sampled_from(sorted(within)))
    if draw(st.booleans()):
        del within[name]
    else:
        large = st.sampled_from([2**31, 2**63 - 1, 2**63, 2**64, -(2**64)])
        values = st.none() | st.integers(-2, 3) | large | st.text(max_size=2)
        values |= st.sampled_from([[], {}, [1, 2], [[1], [2]], {"a": 2**70}, 0.5, True])
        within[name] = draw(values | st.just({"loader": "x", "torch": "eA=="}))
    return state


@given(damaged())
@settings(max_examples=80)
def test_any_state_is_read_or_refused(state) -> None:
    with DataLoader(Samples("int", 8), 2, shuffle=True) as loader:
        try:
            loader.load_state_dict(state)
            list(itertools.islice(loader, 5))
        except DataplaneError:
            pass
