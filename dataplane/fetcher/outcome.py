"""Turn the end of a read into an outcome, whatever happened, since somebody waits for it."""

from __future__ import annotations

from collections.abc import Callable

from dataplane.errors import DataplaneError, ShardNotFound, StoreError
from dataplane.store.race import EndedEarlyError


def outcome(name: str, work: Callable[[], None]) -> DataplaneError | None:
    """Return the error of `work`, which performs the read called `name`; None if it has none.

    Raises:  EndedEarlyError: another request has read it.
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
