"""Starts a node for a command, and opens a job there."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from dataplane.commands.options import Settings

if TYPE_CHECKING:
    from dataplane.client.session import Session
    from dataplane.rpc.messages import OpenJob


_OPEN_TIMEOUT_S = 7 * 86400.0
"""Opening may read a whole column of a dataset."""


def own_session(request: OpenJob, settings: Settings) -> Session:
    """A session with a node started here, which gets the settings of this command line and ends
    with the command.
    """
    from dataplane.client import identity
    from dataplane.client.endpoint import Embedded
    from dataplane.client.launch import node_command
    from dataplane.client.session import Session
    from dataplane.config import VERSION
    from dataplane.rpc import names

    given = [
        f"{one.setting.variable}={one.value}"
        for one in settings.values()
        if one.source != "default"  # which the node computes by itself
    ]
    run = identity.node_name(identity.launch_identity({}))
    name = names.embedded_name(os.getuid(), VERSION, run)
    node = Embedded(name, ("env", *given, *node_command()))
    return Session(node, request, open_timeout_s=_OPEN_TIMEOUT_S)
