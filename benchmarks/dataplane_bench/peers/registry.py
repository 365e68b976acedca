"""All systems by name, in the order of tables."""

from __future__ import annotations

import importlib
from typing import Any

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
    """The adapter of this name (see base.Peer).   Raises:  KeyError: there is none."""
    module, _, kind = SYSTEMS[name].partition(":")
    return getattr(importlib.import_module(f"dataplane_bench.peers.{module}"), kind)()
