"""Start a node for a command, and open a job there."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dataplane.commands import output
from dataplane.commands.options import Settings
from dataplane.model.config import VERSION, JobSpec
from dataplane.model.errors import DatasetChangedError
from dataplane.model.records import ColumnOptions, Topology, View
from dataplane.rpc.address import embedded_name

if TYPE_CHECKING:
    from dataplane.client.session import Session
    from dataplane.plan.manifest import Manifest
    from dataplane.rpc.messages import OpenJob


_OPEN_TIMEOUT_S = 7 * 86400.0
"""A week: opening a job may read a whole column of a dataset."""


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
    if cache_dir:
        given.append(f"DATAPLANE_CACHE_DIR={cache_dir}")
    name = embedded_name(os.getuid(), VERSION, f"command {secrets.token_hex(16)}")
    node = Embedded(name, ("env", *given, "DATAPLANE_LINGER_S=100ms", *node_command()))
    return Session(node, request, open_timeout_s=_OPEN_TIMEOUT_S, warns=False)


def warn_of(session: Session) -> None:
    """Print the advice of the session's node."""
    for each in session.job.advice:
        output.warn(each)


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
    from dataplane.client import identity
    from dataplane.rpc.messages import DatasetSource, OpenJob

    launch = identity.launch_identity({})
    request = OpenJob(
        identity.job_id(launch, manifest.urls, None),
        launch.incarnation,
        "",
        DatasetSource(manifest.urls, format_name),
        Topology(),
        JobSpec("", seed, column_options=options, view=view),
    )
    session = own_session(request, settings)
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
