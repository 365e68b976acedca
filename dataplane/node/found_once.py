"""What a node finds out by running a function of the user, once for all that ask.

Invariants:
1. A value is looked for once at a time, however many wait for it. It is remembered; a failure is
   not: the next one who asks tries again.
2. It is looked for as long as somebody waits for it: the function may hang.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

from msgspec import Struct

from dataplane import background
from dataplane.errors import DataplaneError

_REMEMBERED_MAX = 64
T = TypeVar("T")


class _Sought(Struct, eq=False):
    """A value that is being looked for, by this task, and how many wait for it."""

    task: asyncio.Task[None]
    waiting: int = 0


class FoundOnce(Generic[T]):
    """Values by key; `name` is that of the tasks that look for them."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._found: OrderedDict[Hashable, asyncio.Future[T]] = OrderedDict()
        self._sought: dict[asyncio.Future[T], _Sought] = {}

    async def of(self, key: Hashable, find: Callable[[], Awaitable[T]]) -> T:
        """The value of this key, which `find` looks for if it is not known.

        Raises:  DataplaneError: that of `find`.
        """
        future = self._found.get(key)
        if future is None:
            future = self._found[key] = asyncio.get_running_loop().create_future()
            if len(self._found) > _REMEMBERED_MAX:
                self._found.popitem(last=False)
            task = background.start(self._name, self._find(key, future, find))
            self._sought[future] = _Sought(task)
        sought = self._sought.get(future)
        if sought is None:
            return await asyncio.shield(future)
        sought.waiting += 1
        try:
            return await asyncio.shield(future)
        finally:
            sought.waiting -= 1
            if not sought.waiting and not future.done():
                self._forget(key, future)
                sought.task.cancel()

    async def _find(
        self, key: Hashable, future: asyncio.Future[T], find: Callable[[], Awaitable[T]]
    ) -> None:
        try:
            future.set_result(await find())
        except DataplaneError as error:
            future.set_exception(error)
            future.exception()  # mark it as retrieved, even if no caller waits any more
        finally:
            if not future.done() or future.exception():
                self._forget(key, future)
            self._sought.pop(future, None)
            future.cancel()

    def _forget(self, key: Hashable, future: asyncio.Future[T]) -> None:
        self._sought.pop(future, None)
        if self._found.get(key) is future:
            del self._found[key]
