"""Dataplane for PyTorch: batches as dicts of tensors, straight from shards in object storage."""

import importlib
from typing import TYPE_CHECKING, Any

from dataplane.base import collector

# Turn the garbage collector off during these imports: visiting all the objects that torch creates,
# which live forever, would take as long as the imports themselves.
with collector.resting():
    from dataplane_torch.loader import DataLoader

if TYPE_CHECKING:
    from dataplane.client.statistics import Statistics, bound_of
    from dataplane.model import errors as _errors
    from dataplane.model.errors import *  # noqa: F403
    from dataplane.model.records import Topology
    from dataplane.transforms.mixture_options import Mixture, Source
    from dataplane.transforms.pack_options import Pack
    from dataplane.transforms.stacks import Stack
    from dataplane.transforms.steps import registry as _registry
    from dataplane.transforms.steps.registry import *  # noqa: F403
    from dataplane_torch.dataset import ShardedIterableDataset
    from dataplane_torch.schema import BatchColumn, Schema
    from dataplane_torch.stages import Stage
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
        "Stage",
        "Statistics",
        "Topology",
        "bound_of",
    ]
    __all__ += _errors.__all__
    __all__ += _registry.__all__

# Import these names on first use, so that a loader can start its node before it imports their
# modules. All other public names are image steps or errors.
_MODULES = {
    "BatchColumn": "dataplane_torch.schema",
    "Mixture": "dataplane.transforms.mixture_options",
    "Pack": "dataplane.transforms.pack_options",
    "Ragged": "dataplane_torch.tensors",
    "Schema": "dataplane_torch.schema",
    "ShardedIterableDataset": "dataplane_torch.dataset",
    "Source": "dataplane.transforms.mixture_options",
    "Stage": "dataplane_torch.stages",
    "Stack": "dataplane.transforms.stacks",
    "Statistics": "dataplane.client.statistics",
    "Topology": "dataplane.model.records",
    "bound_of": "dataplane.client.statistics",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        found = getattr(importlib.import_module(_MODULES[name]), name)
    elif name.startswith("_") and name != "__all__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    else:
        from dataplane.model import errors
        from dataplane.transforms.steps import registry

        if name == "__all__":
            return ["DataLoader", *_MODULES, *errors.__all__, *registry.__all__]
        room = errors if name in errors.__all__ else registry
        if name not in room.__all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = getattr(room, name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})
