"""A node that a command starts for itself, and the packs of a dataset (`--pack`), which such a node
counts if necessary.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from msgspec import Struct

from dataplane.commands import output
from dataplane.commands.datasets import read_block, schema_of
from dataplane.commands.options import PacksAsked, Settings
from dataplane.index.viewing import counted_packs
from dataplane.model.config import VERSION, JobSpec, NodeConfig
from dataplane.model.errors import ConfigError, DataplaneError, DatasetChangedError
from dataplane.model.records import ColumnOptions, Topology, View
from dataplane.plan import packed_blocks as blocks
from dataplane.plan.manifest import Manifest
from dataplane.plan.packed_blocks import counts_name, made
from dataplane.plan.packs import Packing
from dataplane.plan.views import rows_only
from dataplane.rpc.address import embedded_name
from dataplane.settings import node_config
from dataplane.transforms.options import only
from dataplane.worker.functions import CalledAt, UserFunction, loaded, mapped_block

if TYPE_CHECKING:
    from dataplane.client.session import Session
    from dataplane.rpc.messages import OpenJob


_OPEN_TIMEOUT_S = 7 * 86400.0
"""A week: opening a job may read a whole column of a dataset."""
_ALONE = Topology()


def own_session(request: OpenJob, settings: Settings, cache_dir: str = "") -> Session:
    """Open a session with a node that is started here and ends with the command. The node gets the
    settings of this command line (except `cache_dir`, if given). The node's name is private, so
    that the command does not use a node with other settings, and no other process uses this node.
    The command prints the node's advice.
    """
    from dataplane.client.endpoint import Embedded
    from dataplane.client.launch import node_command
    from dataplane.client.session import Session

    given = [
        f"{resolved.setting.variable}={resolved.value}"
        for resolved in settings.values()
        if resolved.source != "default"  # the node computes defaults itself
    ]
    # Always given, so that a node that cannot write there is an error: commands read its counts.
    given.append(f"DATAPLANE_CACHE_DIR={cache_dir or settings['cache_dir'].value}")
    name = embedded_name(os.getuid(), VERSION, f"command {secrets.token_hex(16)}")
    node = Embedded(name, ("env", *given, "DATAPLANE_LINGER_S=100ms", *node_command()))
    return Session(node, request, open_timeout_s=_OPEN_TIMEOUT_S, warns=False)


def warn_of(session: Session) -> None:
    """Print the advice of the session's node."""
    for each in session.job.advice:
        output.warn(each)


def request_of(
    urls: tuple[str, ...], format_name: str, spec: JobSpec, topology: Topology = _ALONE
) -> OpenJob:
    """Return the request for a job over these urls, in the form that a loader sends."""
    from dataplane.client import identity
    from dataplane.rpc.messages import DatasetSource, OpenJob

    launch = identity.launch_identity({})
    name, source = identity.job_id(launch, urls, None), DatasetSource(urls, format_name)
    return OpenJob(name, launch.incarnation, "", source, topology, spec)


@contextlib.contextmanager
def opened_again(
    manifest: Manifest,
    format_name: str,
    settings: Settings,
    options: ColumnOptions,
    view: View,
    seed: int = 0,
) -> Iterator[Session]:
    """Open a job with these options and this view over a manifest's dataset, on a node that is
    started here. Yield the session when the node has read everything that opening requires.

    Raises:  DatasetChangedError: the dataset is not that of the manifest.  The errors of a job.
    """
    spec = JobSpec("", seed, column_options=options, view=view)
    session = own_session(request_of(manifest.urls, format_name, spec), settings)
    try:
        found = session.job.spec.fingerprint
        if found != manifest.fingerprint:
            raise DatasetChangedError(
                "the dataset has changed since this manifest was made: index it again",
                shard=", ".join(manifest.urls),
                expected=manifest.fingerprint,
                found=found,
            )
        warn_of(session)
        yield session
    finally:
        session.close()


class CountedPacks(Struct, frozen=True):
    """Packs of a dataset: the dataset's manifest, with the counts of the packs; the manifest of the
    packs; the view that has them; and figures about their tokens.
    """

    whole: Manifest
    packs: Manifest
    view: View
    packing: Packing

    def facts(self) -> dict[str, object]:
        """Summarize the packs in a few numbers."""
        found = self.packing
        return {
            "packs": found.packs,
            "tokens": found.tokens,
            "tokens in no pack": found.tokens - found.packed_tokens,
            "percent of padding": round(100 * found.padding, 2),
            "documents cut short or left out": found.short_documents,
        }

    def spec(self) -> JobSpec:
        """Return a job that reads the packs."""
        assert self.view.pack is not None
        columns = only((self.view.pack.column,))
        return JobSpec(self.whole.fingerprint, column_options=columns, view=self.view)


def imported_map(name: str) -> UserFunction:
    """Import the function of this name from where a training script would import it.

    Raises:  ConfigError, FunctionError: the function cannot be imported.
    """
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    return loaded("map", name)


def read_mapped(
    rows: Manifest, block: int, view: View, seed: int, epoch: int = 0
) -> pa.RecordBatch:
    """Read the rows of a block, with the columns that the view's map makes of them in this epoch.

    Raises:  as `imported_map` and `read_block`.  FunctionError: the map fails.
    """
    function, schema = imported_map(view.map), schema_of(rows)
    reads = schema.names if function.reads is None else function.reads
    batch = read_block(rows, block, schema, reads, view=rows_only(view))
    shard = int(rows.block_shard[block])
    at = CalledAt("map", view.map, rows.shards.urls[shard], rows.block_in_shard(block))
    drawn = epoch if view.per_epoch else None
    return mapped_block(function, batch, seed, shard, at, resizes=view.resizes, epoch=drawn)


def name_of_counts(rows: Manifest, view: View, seed: int, function: UserFunction | None) -> str:
    """Return `counts_name` for a view with this function as its map."""
    is_seeded = view.bad_max or (function is not None and function.takes_generator)
    code = "" if function is None else function.code
    return counts_name(rows, view, seed if is_seeded else 0, code)


def with_packs(
    manifest: Manifest,
    asked: PacksAsked,
    format_name: str,
    settings: Settings,
    rows: View,
    seed: int,
) -> CountedPacks:
    """Count these packs of the view's rows. `seed` is the seed of the map.

    Raises:  As `PacksAsked.view`.  ConfigError: a column cannot be packed.  The errors of a job.
    """
    view = asked.view(rows)
    name = name_of_counts(manifest, view, seed, imported_map(view.map) if view.map else None)
    cache_dir = node_config(settings).cache_dir
    counts = counted_packs(manifest, name, cache_dir)
    if counts is None:
        assert view.pack is not None
        options = only((view.pack.column,))
        with opened_again(manifest, format_name, settings, options, view, seed):
            pass  # opening the job makes the node count the packs
        counts = counted_packs(manifest, name, cache_dir)
    if counts is None:
        raise DataplaneError(
            f"the counts of the packs are missing from the cache folder {cache_dir} just after they"
            " were computed: check that the folder is writable and nothing deletes its files"
        )
    return CountedPacks(
        blocks.with_counts(manifest, name, counts),
        blocks.packed(manifest, np.ascontiguousarray(counts[:, 1])),
        view,
        blocks.packing_in(counts),
    )


def packs_in(rows: Manifest, view: View, seed: int, config: NodeConfig) -> Manifest:
    """Return the manifest of the samples of a view that are counted, from the manifest of the
    view's rows.

    Raises:  ConfigError: the samples were not counted here, or come from a map that may not be
    called or cannot be imported.
    """
    pack = view.pack
    function = _allowed(view.map, config) if view.map else None
    counts = counted_packs(rows, name_of_counts(rows, view, seed, function), config.cache_dir)
    if counts is not None:
        return made(rows, view, np.ascontiguousarray(counts[:, 1]))
    if pack is None:
        raise ConfigError(
            f"the rows that {view.map!r} makes were not counted on this machine with that function "
            "as it is now: set --cache-dir to the folder of a node that counted them",
            field="map",
        )
    if view.map:
        raise ConfigError(
            f"the packs of this job were not counted on this machine with {view.map!r} as it is"
            " now: give --data a manifest that has them (dataplane index … --map"
            f" {view.map} --pack {pack.column},length={pack.length} -o FILE), or set --cache-dir to"
            " the folder of a node that counted them",
            field="pack",
        )
    raise ConfigError(
        "the packs of this job were not counted on this machine: give --data a manifest that"
        f" has them (dataplane index … --pack {pack.column},length={pack.length} -o FILE)",
        field="pack",
    )


def _allowed(name: str, config: NodeConfig) -> UserFunction:
    """Import the function of a map.

    Raises:  ConfigError: the command line does not allow the function, or it cannot be imported.
    """
    if not config.allows_function(name):
        raise ConfigError(
            f"the number of this job's samples depends on {name!r}, which this command may not "
            f"call: pass --allowed-functions {name}",
            field="map",
        )
    return imported_map(name)
