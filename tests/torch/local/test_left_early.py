"""A pass that a loop leaves early ends as it does with torch."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from dataplane_torch import DataLoader
from torch.utils.data import IterableDataset


class Notes(IterableDataset[int]):
    """Notes in a file when an iterator of it ends."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __iter__(self) -> Iterator[int]:
        try:
            yield from range(100)
        finally:
            with self.path.open("a") as file:
                file.write("ended\n")


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"num_workers": 1},
        {"num_workers": 1, "persistent_workers": True},
        {"num_workers": 1, "prefetch_factor": 40},
    ],
)
def test_iterators_of_the_dataset_end_when_a_pass_is_left(given, tmp_path) -> None:
    ended = []
    for kind in (torch.utils.data.DataLoader, DataLoader):
        path = tmp_path / kind.__module__
        path.touch()
        loader = kind(Notes(path), 2, **given)
        seen = []
        for _ in range(2):
            for batch in loader:
                assert batch.tolist() == [0, 1]
                break
            seen.append(path.read_text() if "persistent_workers" not in given else "later")
        del loader
        gc.collect()
        ended.append([*seen, path.read_text()])
    assert ended[0] == ended[1]
    assert ended[0][-1].count("ended") == 2
