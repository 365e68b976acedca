"""What a node tells of a job beside its batches, in as many answers as it takes."""

from __future__ import annotations

import random
import threading
import time

from dataplane.client.mount import Mount
from dataplane.client.session import Session
from dataplane.errors import DataStallError, PeerLost
from dataplane.rpc.messages import ColumnsDescribed, DescribeColumns, DescribedColumn

_PAUSE_S_MAX = 1.0


def describe_columns(session: Session) -> tuple[DescribedColumn, ...]:
    """The columns of a job's batches, in their order; opens the job where needed.

    Raises:  DataStallError: no answer within the stall timeout.  DataplaneError: as the node says.
    """
    mount = session.mount()
    stall_s = session.stall_timeout_s(mount.job)
    deadline = time.monotonic() + stall_s
    while True:
        try:
            return _columns(mount, deadline)
        except TimeoutError as error:
            raise DataStallError(
                f"the node did not describe its columns within {stall_s:g} s",
                stage="describe",
                node=mount.node_id,
            ) from error
        except PeerLost:
            session.lost(mount)
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise
            threading.Event().wait(min(random.uniform(0, _PAUSE_S_MAX), left_s))  # noqa: S311
            mount = session.mount(deadline)


def _columns(mount: Mount, deadline: float) -> tuple[DescribedColumn, ...]:
    found: list[DescribedColumn] = []
    while True:
        body, _ = mount.wire.call(DescribeColumns(mount.job_id, len(found)), deadline)
        if not isinstance(body, ColumnsDescribed):
            raise PeerLost(f"the node answered with {body!r:.200}", peer=mount.node_id)
        found += body.columns
        if not body.columns or len(found) >= body.column_count:
            return tuple(found)
