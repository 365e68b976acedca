"""torch.utils.data.DataLoader over arrays in mapped files, by batches or by samples.

torchdata's StatefulDataLoader adds a state to it: datasets and order are the same.

Sources: https://docs.pytorch.org/docs/stable/data.html, "Disable automatic batching";
https://meta-pytorch.org/data/main/stateful_dataloader_tutorial.html
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dataplane_bench.model import (
    BatchKind,
    BenchCase,
    ColumnType,
    Settings,
    StorageKind,
    TrialTask,
    Workload,
)
from dataplane_bench.peers import memmaps
from dataplane_bench.peers.base import Batch, Loader

if TYPE_CHECKING:
    pass


def _torch(task: TrialTask) -> Loader:
    from torch.utils.data import DataLoader

    from dataplane_bench.peers.torch_datasets import TorchPeer

    return TorchPeer(DataLoader, task)


def _stateful(task: TrialTask) -> Loader:
    return _Opened(task)


@dataclass(frozen=True, slots=True)
class TorchDataLoader:
    """A map-style dataset with a shuffling sampler; from S3 an iterable one."""

    name: str = "torch"
    title: str = "torch DataLoader"
    requirements: tuple[str, ...] = ()
    distribution: str = "torch"
    delivers: frozenset[BatchKind] = frozenset(
        {BatchKind.STORED, BatchKind.MIXED, BatchKind.TOKENISED}
    )
    open: Callable[[TrialTask], Loader] = _torch

    def layout(self, workload: Workload) -> str:
        return memmaps.LAYOUT

    def describe(self, workload: Workload) -> str:
        match workload.delivery:
            case BatchKind.MIXED:
                return f"{memmaps.DESCRIBES}; a sampler of the bench's own mixes the sources"
            case BatchKind.TOKENISED:
                return f"{memmaps.DESCRIBES}; texts become tokens in collate_fn"
            case _:
                return memmaps.DESCRIBES

    def settings(self, workload: Workload, case: BenchCase, cores: int) -> tuple[Settings, ...]:
        return choices(workload, case, cores)

    def prepare(self, workload: Workload, folder: Path) -> None:
        memmaps.write(workload, folder)


StatefulDataLoader = functools.partial(
    TorchDataLoader, "stateful", "StatefulDataLoader", ("torchdata",), "torchdata",
    frozenset({BatchKind.STORED}), _stateful,
)  # fmt: skip
"""The sampler's state says where an epoch stands, so that nothing is read again."""


def choices(workload: Workload, case: BenchCase, cores: int) -> tuple[Settings, ...]:
    """The settings worth trying with these samples, the tutorials' choice first.

    A gather of wide or many rows can use threads of torch's own instead of worker processes; where
    other programs take some of the cores, these threads wait for each other.
    """
    share = max(cores // case.process_count, 1)
    has_images = bool(workload.of_kind(ColumnType.IMAGE))
    if case.store is StorageKind.S3:
        # The clients have threads of their own, so that only decoding needs more processes.
        counts = (share, 2 * share if has_images else 0)
        return tuple(
            {"client": client, **_workers(count)}
            for client in ("s3fs", "obstore")
            for count in counts
        )
    if has_images:
        return (_workers(share), _workers(2 * share))
    if workload.delivery is BatchKind.TOKENISED:
        return tuple({"fetch": "batch", **_workers(count)} for count in (max(share, 2), 0))
    threads = share > 1 and workload.shape != "text"
    return (
        {"fetch": "item", **_workers(share)},
        {"fetch": "batch", "num_workers": 0},
        *(({"fetch": "batch", "num_workers": 0, "threads": share},) if threads else ()),
        {"fetch": "batch", **_workers(max(share, 2))},
    )


def _workers(count: int) -> Settings:
    return {"num_workers": count, "prefetch_factor": 4} if count else {"num_workers": 0}


class _Opened:
    def __init__(self, task: TrialTask) -> None:
        from torchdata.stateful_dataloader import StatefulDataLoader as Loader

        from dataplane_bench.peers.torch_datasets import TorchPeer

        self._opened = TorchPeer(Loader, task)

    def epoch(self, number: int) -> Iterator[Batch]:
        return self._opened.epoch(number)

    def state(self) -> Any:
        return self._opened.loader.state_dict()

    def resume(self, state: Any) -> Iterator[Batch]:
        self._opened.loader.load_state_dict(state)
        return self._opened.rest()

    def close(self) -> None:
        self._opened.close()
