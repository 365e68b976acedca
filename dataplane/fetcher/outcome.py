"""How a read has ended, whatever has happened: somebody waits for it."""

from __future__ import annotations

from collections.abc import Callable

from dataplane.errors import DataplaneError, ShardNotFound, StoreError
from dataplane.store.race import EndedEarlyError


def outcome(name: str, work: Callable[[], None]) -> DataplaneError | None:
    """The error of `work`, which reads what is called so; None if it has none.

    Raises:  EndedEarlyError: somebody else has read it.
    """
    try:
        work()
    except EndedEarlyError:
        raise
    except ShardNotFound as error:
        again = "restore it, or begin a new run without it"
        return ShardNotFound(
            f"{error}; it was there when the dataset was indexed: {again}", **error.nouns
        )
    except DataplaneError as error:
        return error
    except BaseException as error:  # noqa: BLE001 - also a library's panic: the node waits
        return StoreError(f"{name}: {type(error).__name__}: {error}", shard=name)
    return None
