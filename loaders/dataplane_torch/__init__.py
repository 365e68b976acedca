"""Dataplane for PyTorch: batches as dicts of tensors, straight from shards in object storage."""

from dataplane.client.bound import bound_of
from dataplane.client.statistics import Statistics
from dataplane.transforms.images import (
    CenterCrop,
    Normalize,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
    ToDtype,
    ToLayout,
)
from dataplane.transforms.stacks import Stack
from dataplane_torch.dataset import ShardedIterableDataset
from dataplane_torch.loader import DataLoader
from dataplane_torch.schema import BatchColumn, Schema
from dataplane_torch.tensors import Ragged

__all__ = [
    "BatchColumn",
    "CenterCrop",
    "DataLoader",
    "Normalize",
    "Ragged",
    "RandomHorizontalFlip",
    "RandomResizedCrop",
    "Resize",
    "Schema",
    "ShardedIterableDataset",
    "Stack",
    "Statistics",
    "ToDtype",
    "ToLayout",
    "bound_of",
]
