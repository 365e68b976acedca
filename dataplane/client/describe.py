"""Requests of a job's column types and code values to its node, in as many messages as needed."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from dataplane.client.mount import Mount
from dataplane.client.session import Session
from dataplane.client.waiting import Notice, Patience
from dataplane.client.wire import NoAnswer
from dataplane.model.errors import ConfigError, DataStallError, PeerLost
from dataplane.rpc.messages import (
    CategoriesRead,
    ColumnsDescribed,
    DescribeColumns,
    DescribedColumn,
    ReadCategories,
)

T = TypeVar("T")


def describe_columns(session: Session) -> tuple[DescribedColumn, ...]:
    """Return the columns of a job's batches, in order. Open the job if needed.

    Raises:  DataStallError: no answer within the stall timeout.  DataplaneError: the node's error.
    """
    return answer_of(session, _columns)


def read_categories(session: Session, column: str) -> tuple[Any, ...]:
    """Return the values that the codes of a column stand for: str, bytes, int or bool, sorted.

    Raises:  ConfigError: the column is not delivered as codes.  Also as `describe_columns`.
    """
    return tuple(category_values(session, column).to_pylist())


def category_values(session: Session, column: str) -> Any:
    """Return the values that the codes of a column stand for, as an Arrow array."""
    if not isinstance(column, str):
        raise ConfigError(
            f"categories({column!r:.80}): pass the name of a column of codes=[…]", field="column"
        )
    return answer_of(session, partial(_categories, column))


def answer_of(session: Session, ask: Callable[[Mount, float], T]) -> T:
    """Request something about this job from its node, or from the node that replaces it.

    Raises:  DataStallError: no answer within the stall timeout.  DataplaneError: the node's error.
    """
    mount = session.mount()
    stall_s = session.stall_timeout_s(mount.job)
    deadline = time.monotonic() + stall_s
    patience = Patience(deadline, deadline)
    notice = Notice("a node that answers a question about the job", job=mount.job_id)
    while True:
        try:
            found = ask(mount, deadline)
        except NoAnswer:
            raise DataStallError(
                f"the node did not answer a question about the job within {stall_s:g} s",
                stage="describe",
                node=mount.node_id,
            ) from None
        except PeerLost as error:
            session.lost(mount)
            if not patience.pause(notice, error):
                raise
            mount = session.mount(deadline)
        else:
            notice.over()
            return found


def _columns(mount: Mount, deadline: float) -> tuple[DescribedColumn, ...]:
    found: list[DescribedColumn] = []
    while True:
        body, _ = mount.call(DescribeColumns(mount.job_id, len(found)), deadline)
        if not isinstance(body, ColumnsDescribed):
            raise PeerLost(f"the node answered with {body!r:.200}", peer=mount.node_id)
        found += body.columns
        if not body.columns or len(found) >= body.column_count:
            return tuple(found)


def _categories(column: str, mount: Mount, deadline: float) -> Any:
    import pyarrow as pa

    parts: list[Any] = []
    count = 0
    while True:
        body, _ = mount.call(ReadCategories(mount.job_id, column, count), deadline)
        if not isinstance(body, CategoriesRead):
            raise PeerLost(f"the node answered with {body!r:.200}", peer=mount.node_id)
        with pa.ipc.open_stream(body.values) as reader:
            parts.append(reader.read_next_batch().column(0))
        count += len(parts[-1])
        if not len(parts[-1]) or count >= body.value_count:
            return pa.concat_arrays(parts)
