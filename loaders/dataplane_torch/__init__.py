"""Dataplane for PyTorch: batches as dicts of tensors, straight from shards in object storage."""

from dataplane import collector

# What imports make stays. Without this, Python looks at all that torch has made meanwhile, which
# takes as long as the imports.
with collector.resting():
    from dataplane.client.bound import bound_of
    from dataplane.client.statistics import Statistics
    from dataplane.model import Topology
    from dataplane.transforms.mixture_options import Mixture, Source
    from dataplane.transforms.pack_options import Pack
    from dataplane.transforms.stacks import Stack
    from dataplane.transforms.steps import registry as _registry
    from dataplane.transforms.steps.registry import *  # noqa: F403
    from dataplane_torch.dataset import ShardedIterableDataset
    from dataplane_torch.loader import DataLoader
    from dataplane_torch.schema import BatchColumn, Schema
    from dataplane_torch.tensors import Ragged

__all__ = [
    "BatchColumn",
    "DataLoader",
    "Mixture",
    "Pack",
    "Ragged",
    "Schema",
    "ShardedIterableDataset",
    "Source",
    "Stack",
    "Statistics",
    "Topology",
    "bound_of",
]
__all__ += _registry.__all__
