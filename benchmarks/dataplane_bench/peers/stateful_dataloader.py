"""torchdata's StatefulDataLoader: torch's, with a state. Datasets and order are the same.

Source: https://meta-pytorch.org/data/main/stateful_dataloader_tutorial.html
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dataplane_bench.model import BenchCase, Settings, TrialTask, Workload
from dataplane_bench.peers import memmaps
from dataplane_bench.peers.base import Batch
from dataplane_bench.peers.torch_dataloader import choices


class StatefulDataLoader:
    """The sampler's state says where an epoch stands, so that nothing is read again."""

    name = "stateful"
    title = "StatefulDataLoader"
    requirements = ("torchdata",)
    distribution = "torchdata"

    def refuses(self, workload: Workload, case: BenchCase) -> str:
        del workload, case
        return ""

    def layout(self, workload: Workload) -> str:
        del workload
        return memmaps.LAYOUT

    def describe(self, workload: Workload) -> str:
        del workload
        return memmaps.DESCRIBES

    def settings(self, workload: Workload, case: BenchCase, cores: int) -> tuple[Settings, ...]:
        return choices(workload, case, cores)

    def prepare(self, workload: Workload, folder: Path) -> None:
        memmaps.write(workload, folder)

    def open(self, task: TrialTask) -> _Opened:
        return _Opened(task)


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
