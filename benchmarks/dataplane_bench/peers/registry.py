"""All systems by name, in the order of tables."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from dataplane.model.errors import ConfigError

SYSTEMS = {
    "dataplane": "dataplane:Dataplane",
    "torch": "torch_dataloader:TorchDataLoader",
    "stateful": "stateful_dataloader:StatefulDataLoader",
    "webdataset": "webdataset:WebDataset",
    "mosaic": "mosaic_streaming:MosaicStreaming",
    "litdata": "litdata:LitData",
    "huggingface": "huggingface_datasets:HuggingFaceDatasets",
    "grain": "grain:Grain",
    "spdl": "spdl:Spdl",
    "tf.data": "tf_data:TfData",
    "ray": "ray_data:RayData",
    "ffcv": "ffcv:Ffcv",
    "noop": "noop:Noop",
    "reference": "reference:Reference",
}
OURS, HARNESS, REFERENCE = "dataplane", "noop", "reference"
PEERS = tuple(name for name in SYSTEMS if name not in (OURS, HARNESS, REFERENCE))


def adapter(name: str) -> Any:
    """The adapter of this name, or that of a user: "package.module:Class" (see base.Peer).

    Raises:  ConfigError: no adapter has this name.
    """
    module, _, kind = SYSTEMS.get(name, name).partition(":")
    if name in SYSTEMS:
        found = importlib.import_module(f"dataplane_bench.peers.{module}")
    elif kind:
        found = _module_of_user(module)
    else:
        raise ConfigError(f"there is no loader {name!r}", field="peers", found=name)
    if not hasattr(found, kind):
        raise ConfigError(f"{module} has no class {kind!r}", field="peers", found=name)
    return getattr(found, kind)()


def folder_of(name: str) -> Path | None:
    """The folder from which a user's adapter is imported; None for ours."""
    if name in SYSTEMS:
        return None
    module = _module_of_user(name.partition(":")[0])
    file = Path(str(module.__file__))
    depth = module.__name__.count(".") + (file.name == "__init__.py")
    return file.absolute().parents[depth]


def _module_of_user(name: str) -> ModuleType:
    # As with `python -m`: also from the current directory.
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f"{name} cannot be imported: {error}", field="peers") from error
