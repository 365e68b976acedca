"""Waiting for a coordinator that does not answer yet: it may start later than its nodes."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from dataplane.errors import DataStallError, PeerLost

T = TypeVar("T")

_PAUSE_S_MAX = 1.0


async def pause() -> None:
    """Pause between two attempts. It is short, since each attempt itself waits for an answer."""
    await asyncio.sleep(random.uniform(0, _PAUSE_S_MAX))  # noqa: S311 - jitter is no secret


async def patiently(
    ask: Callable[[], Awaitable[T]], timeout_s: float, *, job: str, coordinator: str, node: str
) -> T:
    """The answer of `ask`, which is called again until the coordinator answers.

    Raises:  DataStallError: not within `timeout_s`.  DataplaneError: as `ask`.
    """
    began = time.monotonic()
    while True:
        try:
            return await ask()
        except PeerLost as error:
            waited_s = time.monotonic() - began
            if waited_s >= timeout_s:
                raise unanswered(waited_s, str(error), job, coordinator, node) from error
        await pause()


def unanswered(
    waited_s: float, last_error: str, job: str, coordinator: str, node: str
) -> DataStallError:
    """The error for a rank whose job waits for the coordinator."""
    return DataStallError(
        f"job {job!r} cannot be joined: the coordinator at {coordinator} has not answered node "
        f"{node} for {waited_s:.0f} s"
        + (f" ({last_error})" if last_error else "")
        + ". Start it (`dataplane serve --coordinator`), or correct the node's --join",
        stage="join",
        job=job,
        coordinator=coordinator,
        node=node,
        last_error=last_error,
    )
