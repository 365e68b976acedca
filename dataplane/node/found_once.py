"""Values that a node determines by reading, or by running a user's function, once for all that
wait.

Invariants:
1. A value is computed once at a time, however many wait for it. It may be remembered; a failure is
   not: the next caller tries again.
2. The computation continues only as long as somebody waits for it: the function may hang.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

from msgspec import Struct

from dataplane.base import background
from dataplane.model.errors import DataplaneError

_REMEMBERED = 64
T = TypeVar("T")


class _Sought(Struct, Generic[T], eq=False):
    """A value that is being computed, and how many wait for it."""

    result: asyncio.Future[T]
    task: asyncio.Task[None] | None = None
    waiting: int = 0


class FoundOnce(Generic[T]):
    """Values by key; `name` is that of the tasks that compute them. The last `remembered` values
    are kept.
    """

    def __init__(self, name: str, remembered: int = _REMEMBERED) -> None:
        self._name, self._remembered = name, remembered
        self._found: OrderedDict[Hashable, T] = OrderedDict()
        self._sought: dict[Hashable, _Sought[T]] = {}

    async def of(self, key: Hashable, find: Callable[[], Awaitable[T]]) -> T:
        """Return the value of this key, which `find` computes if it is not known.

        Raises:  DataplaneError: raised by `find`.
        """
        if key in self._found:
            return self._found[key]
        sought = self._sought.get(key)
        if sought is None:
            sought = self._sought[key] = _Sought(asyncio.get_running_loop().create_future())
            sought.task = background.start(self._name, self._find(key, sought, find))
        sought.waiting += 1
        try:
            return await asyncio.shield(sought.result)
        finally:
            sought.waiting -= 1
            if not sought.waiting and not sought.result.done() and sought.task is not None:
                self._forget(key, sought)  # at once: the next caller starts again
                sought.task.cancel()

    async def _find(
        self, key: Hashable, sought: _Sought[T], find: Callable[[], Awaitable[T]]
    ) -> None:
        try:
            value = await find()
            self._found[key] = value
            while len(self._found) > self._remembered:
                self._found.popitem(last=False)
            sought.result.set_result(value)
        except DataplaneError as error:
            sought.result.set_exception(error)
            sought.result.exception()  # mark it as retrieved, even if no caller waits any more
        finally:
            self._forget(key, sought)
            sought.result.cancel()

    def _forget(self, key: Hashable, sought: _Sought[T]) -> None:
        if self._sought.get(key) is sought:
            del self._sought[key]
