"""Wait for a coordinator that does not answer yet, since it may start later than its nodes; and for
other ranks, if a trainer has closed a loader and opens another one of the same job.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from dataplane.model.errors import DataStallError, NotWrittenError, PeerLost, SpecMismatch

T = TypeVar("T")

_PAUSE_S_MAX = 1.0
_REOPENING_S = 60.0


async def pause() -> None:
    """Pause between two attempts. It is short, since each attempt itself waits for an answer."""
    await asyncio.sleep(random.uniform(0, _PAUSE_S_MAX))  # noqa: S311 - jitter is no secret


async def patiently(
    ask: Callable[[], Awaitable[T]], timeout_s: float, *, job: str, coordinator: str, node: str
) -> T:
    """Return the answer of `ask`, which is called again until the coordinator answers, and while
    other ranks have not closed their old loaders of a job that is reopened with other arguments.

    Raises:  DataStallError: not within `timeout_s`.  DataplaneError: as `ask`.
    """
    began = time.monotonic()
    while True:
        try:
            return await ask()
        except PeerLost as error:
            waited_s = time.monotonic() - began
            if waited_s >= timeout_s:
                raise unanswered(waited_s, error, job, coordinator, node) from error
        except SpecMismatch as error:
            if not error.reopened or time.monotonic() - began >= min(timeout_s / 2, _REOPENING_S):
                raise
        await pause()


def unanswered(
    waited_s: float, last: PeerLost | None, job: str, coordinator: str, node: str
) -> DataStallError:
    """The error for a rank whose job waits for the coordinator; `last` came with its last try."""
    why = "" if last is None else f" ({last})"
    sentence = (
        f"the coordinator at {coordinator} has not answered node {node} for {waited_s:.0f} s{why}. "
        "Start it (`dataplane serve --coordinator`), or correct the node's --join"
    )
    if isinstance(last, NotWrittenError):
        sentence = f"for {waited_s:.0f} s, {last}"
    return DataStallError(
        f"job {job!r} cannot be joined: {sentence}",
        stage="join",
        job=job,
        coordinator=coordinator,
        node=node,
        last_error="" if last is None else str(last),
    )
