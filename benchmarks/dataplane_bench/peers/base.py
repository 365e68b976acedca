"""The contract of an adapter: how one loader is prepared, set, opened and read.

An adapter is a class in a module of this folder; `SYSTEMS` names it. A module of your own
takes part as `--peers package.module:Class`, in the interpreter that runs the benchmark; it is
imported as from where the command is typed. A module itself imports nothing but the standard
library, numpy, pyarrow and dataplane_bench: what the loader needs is imported where it is used,
since only `open` and `prepare` run in the loader's own environment.

What every loader must deliver, so that they can be compared:
- batches of `workload.batch_size` samples, dicts of what model.Kind says, as torch tensors on the
  CPU; at the end of an epoch a smaller batch or none is as good;
- where `workload.delivery` asks for more than samples as they are stored, what its `batch_columns`
  say: a mixture's samples until the first source is exhausted; packs of whole documents, those
  longer than a pack cut every `length` tokens, with the position of each token in its document, and
  a number that tells it from the pack's others; tokens made by peers/tokenising.py. An adapter that
  can do this says so in `delivers`;
- every sample once an epoch (of its rank), shuffled anew each epoch as well as the loader's
  documentation advises: over the whole epoch, or with a buffer of SHUFFLE_BUFFER samples or more;
- where the case has a `cache_share`, it keeps at most `case.cache_bytes_max(...)` of its samples
  from one epoch to the next, in memory and on disk together, or takes no part;
- the best documented settings: whatever its documentation, or an expert, would use on one machine.
  An adapter lists the settings that are worth trying, and the harness tries them.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from dataplane.model.errors import ConfigError
from dataplane_bench.model import BatchKind, BenchCase, Settings, TrialTask, Workload

SHUFFLE_BUFFER = 8192
"""Samples in the shuffle buffer of a loader that cannot shuffle an epoch as a whole."""

Batch = Mapping[str, Any]


class Loader(Protocol):
    """An opened loader, in a process of its own."""

    def epoch(self, number: int) -> Iterator[Batch]:
        """One pass; `number` counts from 0 and decides the order."""

    def close(self) -> None:
        """End everything that it started. May be called twice."""


class Resumable(Loader, Protocol):
    """A loader with a state."""

    def state(self) -> Any:
        """Where the pass under way stands: JSON, or what torch.save takes."""

    def resume(self, state: Any) -> Iterator[Batch]:
        """The rest of the pass that the state is of; called in a new process, once, first."""


class Peer(Protocol):
    """An adapter."""

    name: str
    """On the command line: "webdataset"."""
    title: str
    """In tables: "WebDataset"."""
    requirements: tuple[str, ...]
    """What pip installs into its environment; empty: all is in ours."""
    distribution: str
    """Whose version is told."""

    def layout(self, workload: Workload) -> str:
        """Its format for these samples, a folder's name ("mds", "npy"): adapters with the same name
        share what `prepare` wrote, and must write the same.
        """

    def describe(self, workload: Workload) -> str:
        """Format and way of shuffling, for readers: "MDS shards of 64 MiB, py1e shuffle"."""

    def settings(self, workload: Workload, case: BenchCase, cores: int) -> tuple[Settings, ...]:
        """The settings worth trying, at most four, the documented choice first."""

    def prepare(self, workload: Workload, folder: Path) -> None:
        """Convert the source into the loader's format, in this empty folder."""

    def open(self, task: TrialTask) -> Loader:
        """The loader, set up as `task.settings` says; time counts from here on."""


class RefusingPeer(Peer, Protocol):
    """An adapter of a loader that cannot run every case."""

    def refuses(self, workload: Workload, case: BenchCase) -> str:
        """Why the loader cannot run this case, in half a sentence; "" if it can."""


class ServedPeer(Peer, Protocol):
    """An adapter of a loader that can have a daemon."""

    def serve(self, task: TrialTask) -> tuple[str, Any]:
        """Start the daemon in this process (or below it): what trials need to find it, and an
        object whose `close()` ends it.
        """


class MakingPeer(Peer, Protocol):
    """An adapter of a loader that can mix sources, pack documents, or tokenise texts."""

    delivers: frozenset[BatchKind]
    """What it can deliver, STORED included."""


class Built(Peer, Protocol):
    """An adapter of a loader that is compiled when it is installed."""

    def lacks(self) -> str:
        """The missing system requirement, such as "it needs a C++ compiler"; "" if nothing is
        missing.
        """


SYSTEMS = {
    "dataplane": "dataplane:Dataplane",
    "torch": "torch_dataloader:TorchDataLoader",
    "stateful": "torch_dataloader:StatefulDataLoader",
    "webdataset": "webdataset:WebDataset",
    "mosaic": "mosaic_streaming:MosaicStreaming",
    "litdata": "litdata:LitData",
    "huggingface": "huggingface_datasets:HuggingFaceDatasets",
    "grain": "grain:Grain",
    "spdl": "spdl:Spdl",
    "tf.data": "tf_data:TfData",
    "ray": "ray_data:RayData",
    "ffcv": "ffcv:Ffcv",
    "megatron": "own_files:Megatron",
    "delta": "own_files:Delta",
    "iceberg": "own_files:Iceberg",
    "noop": "harness:Noop",
    "reference": "harness:Reference",
}
OURS, HARNESS, REFERENCE = "dataplane", "noop", "reference"
PEERS = tuple(name for name in SYSTEMS if name not in (OURS, HARNESS, REFERENCE))


def adapter(name: str) -> Any:
    """The adapter of this name, or that of a user: "package.module:Class" (see base.Peer).

    Raises:  ConfigError: no adapter has this name.
    """
    module, _, kind = SYSTEMS.get(name, name).partition(":")
    if name in SYSTEMS:
        imported = importlib.import_module(f"dataplane_bench.peers.{module}")
    elif kind:
        imported = _module_of_user(module)
    else:
        raise ConfigError(f"there is no loader {name!r}", field="peers", found=name)
    if not hasattr(imported, kind):
        raise ConfigError(f"{module} has no class {kind!r}", field="peers", found=name)
    return getattr(imported, kind)()


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
