"""torch's DataLoader and its iterators: base classes, and the attributes that we read.

A pass must derive from torch's iterators, since loops, profilers and frameworks check for that, and
datasets and samplers depend on the seeds that their constructors draw, and on the order of draws.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

import torch
from torch.utils.data import dataloader

from dataplane_torch.torch_private.versions import require

require(
    dataloader,
    *("_BaseDataLoaderIter", "_SingleProcessDataLoaderIter"),
    *("_DatasetKind", "_sharding_worker_init_fn"),
)
require(dataloader._DatasetKind, "Iterable", "Map", "create_fetcher")
require(dataloader._BaseDataLoaderIter, "_next_data", "_next_index", "_reset")
require(torch.utils.data.DataLoader, "_get_iterator", "_index_sampler")

_OF_LOADER = ("_IterableDataset_len_called", "_dataset_kind", "_iterator")
_OF_PASS = (
    *("_auto_collation", "_base_seed", "_collate_fn", "_dataset", "_drop_last", "_num_workers"),
    *("_num_yielded", "_persistent_workers", "_pin_memory", "_pin_memory_device", "_rank"),
    *("_sampler_iter", "_shared_seed", "_timeout", "_world_size"),
)

_T_co = TypeVar("_T_co", covariant=True)


class DatasetFetcher(Protocol):
    """torch.utils.data._utils.fetch._MapDatasetFetcher or _IterableDatasetFetcher: reads the
    samples of one batch from a dataset, and collates them.

    Only the latter has `dataset_iter`, the dataset's iterator, and `ended`, which is True once the
    iterator has no more samples. Both may be set.
    """

    dataset_iter: Any
    ended: bool

    def fetch(self, possibly_batched_index: Any) -> Any:
        """Return the batch for an index, or for a list of indices.

        Raises:  StopIteration: an iterable dataset has ended.  Also whatever the dataset raises.
        """
        ...


def fetcher_of(
    dataset: Any,
    *,
    is_iterable: bool,
    auto_collation: bool,
    collate_fn: Callable[[Any], Any],
    drop_last: bool,
) -> DatasetFetcher:
    """torch.utils.data.dataloader._DatasetKind.create_fetcher. For an iterable dataset this calls
    iter() on the dataset.
    """
    kinds: Any = dataloader._DatasetKind
    kind = kinds.Iterable if is_iterable else kinds.Map
    made: DatasetFetcher = kinds.create_fetcher(
        kind, dataset, auto_collation, collate_fn, drop_last
    )
    return made


def sharding_init_fn(
    init_fn: Callable[[int], None] | None, world_size: int, rank: int
) -> Callable[[int], None]:
    """torch.utils.data.dataloader._sharding_worker_init_fn: a worker_init_fn that tells a DataPipe
    which share of it a worker reads, and then calls `init_fn`. It can be pickled.
    """
    return functools.partial(dataloader._sharding_worker_init_fn, init_fn, world_size, rank)


class LoaderBase(torch.utils.data.DataLoader[_T_co]):
    """torch.utils.data.DataLoader; `_new_pass` makes its iterators."""

    @property
    def _kept_pass(self) -> Any:
        """DataLoader._iterator: the iterator whose workers persist, or None. Loops and frameworks
        look for it there.
        """
        return self._iterator

    @_kept_pass.setter
    def _kept_pass(self, kept: Any) -> None:
        self._iterator = kept

    def _new_pass(self) -> Any:
        """Return a new iterator: torch's own, unless a subclass overrides this."""
        return super()._get_iterator()

    def _get_iterator(self) -> Any:
        """Return a new iterator; called by torch's own methods."""
        return self._new_pass()

    def __getstate__(self) -> dict[str, Any]:
        """Pickle a loader without its iterator."""
        return {**self.__dict__, "_iterator": None}


def is_iterable(loader: Any) -> bool:
    """DataLoader._dataset_kind: whether torch treats the dataset as iterable."""
    require(loader, *_OF_LOADER)
    return bool(loader._dataset_kind == dataloader._DatasetKind.Iterable)


def index_sampler(loader: Any) -> Any:
    """DataLoader._index_sampler: the batch sampler, or the sampler if nothing is batched."""
    return loader._index_sampler


def told_length(loader: Any) -> int | None:
    """DataLoader._IterableDataset_len_called: the length that an iterable dataset reported when
    len(loader) was called; None before. torch warns if it yields more samples than that.
    """
    length: int | None = loader._IterableDataset_len_called
    return length


def _attribute(name: str) -> Any:
    """Return a property that reads and sets an attribute of torch's."""

    def put(torch_pass: object, value: Any) -> None:
        setattr(torch_pass, name, value)

    return property(operator.attrgetter(name), put)


class PassNames:
    """The attributes of torch's iterators, all of which derive from _BaseDataLoaderIter. The
    constructor copies them from the loader, and draws from the loader's generator in this order:
    the seed of DataPipes, whatever iter(sampler) draws, the base seed.
    """

    auto_collation: bool = _attribute("_auto_collation")
    """Whether indices come in lists, one list per batch."""
    base_seed: int = _attribute("_base_seed")
    """The seed of worker 0; worker i has this plus i. Drawn by the constructor."""
    collate_fn: Callable[[Any], Any] = _attribute("_collate_fn")
    dataset: Any = _attribute("_dataset")
    """The loader's dataset; a DataPipe has been seeded."""
    drop_last: bool = _attribute("_drop_last")
    indices: Iterator[Any] = _attribute("_sampler_iter")
    """The index sampler's iterator, from which the next index is drawn."""
    is_pinning: bool = _attribute("_pin_memory")
    """Whether batches are pinned: the user asked for it and there is a device, which is a
    CUDA device in torch 2.6 and any accelerator in 2.13.
    """
    persists: bool = _attribute("_persistent_workers")
    pinned_for: str | None = _attribute("_pin_memory_device")
    """The device argument of `pin_memory`."""
    rank: int = _attribute("_rank")
    """The rank in the default process group; 0 without one."""
    shared_seed: int | None = _attribute("_shared_seed")
    """The seed that the DataPipes of all ranks share; None for other datasets."""
    timeout_s: float = _attribute("_timeout")
    """How long to wait for a batch; 0 waits for ever."""
    worker_count: int = _attribute("_num_workers")
    world_size: int = _attribute("_world_size")
    """The ranks of the default process group; 1 without one."""
    yielded_count: int = _attribute("_num_yielded")
    """Batches so far. torch's __next__ counts them, and compares the count with `told_length`."""


class LocalPassBase(PassNames, dataloader._SingleProcessDataLoaderIter):
    """torch's iterator with num_workers=0. __next__ calls the `next_batch` of a subclass."""

    fetcher: DatasetFetcher = _attribute("_dataset_fetcher")
    next_batch: Any = dataloader._SingleProcessDataLoaderIter._next_data
    """Load the next batch in this process, and pin it.  Raises:  StopIteration: none is left."""

    def __init_subclass__(cls) -> None:
        cls._next_data = cls.next_batch  # type: ignore[method-assign]

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        require(self, *_OF_PASS, "_dataset_fetcher")


class WorkerPassBase(PassNames, dataloader._BaseDataLoaderIter):
    """The base class of torch's iterators. __next__ calls the `next_batch` of a subclass, which
    raises StopIteration when there is no batch left.
    """

    next_batch: Any = dataloader._BaseDataLoaderIter._next_data

    def __init_subclass__(cls) -> None:
        cls._next_data = cls.next_batch  # type: ignore[method-assign]

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        require(self, *_OF_PASS)

    next_index: Any = dataloader._BaseDataLoaderIter._next_index
    """Return the next of `indices`.  Raises:  StopIteration: no index is left."""

    def begin_again(self, loader: Any, *, is_first: bool = False) -> None:
        """Prepare the next pass as torch does: make a new iterator of the sampler, seed DataPipes
        again, and count from 0. torch's iterator with workers also calls this when constructed.
        """
        super()._reset(loader, is_first)

    @property
    def processes(self) -> list[Any]:
        """The worker processes."""
        return []

    def close(self) -> None:
        """End the worker processes."""

    # These are further members of torch's iterator with workers, which frameworks and tests use.

    @property
    def _workers(self) -> list[Any]:
        return self.processes

    def _shutdown_workers(self) -> None:
        self.close()

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        self.begin_again(loader, is_first=first_iter)
