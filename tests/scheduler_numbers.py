"""Which number orders give to a block."""

from __future__ import annotations

from dataplane.scheduler import events
from dataplane.scheduler.dataset import DatasetLookup
from dataplane.scheduler.records import SlabTask


def number_of(datasets: DatasetLookup, dataset_id: int, block: int) -> int | None:
    """A block's number in orders over these datasets, if it belongs to one of them."""
    for dataset in datasets.datasets:
        if dataset.dataset_id == dataset_id:
            return datasets.number(dataset, block)
    return None


def is_of(task: SlabTask, effect: events.Fetch | events.DecodeBlock) -> bool:
    """Whether a task needs the block that is loaded."""
    number = number_of(task.datasets, effect.dataset_id, effect.block)
    return number is not None and task.needs(number)
