"""The store behind torch.distributed's default process group."""

from __future__ import annotations

from typing import Any

import torch.distributed


def default_store() -> Any:
    """torch.distributed.distributed_c10d._get_default_store: the key-value store that all ranks of
    the default group met at; the one store that every rank has, whatever the group was made from.

    Raises:  ValueError: there is no group.  AttributeError: this torch has no such function; who
    asks must do without a store, as with groups that have none.
    """
    return torch.distributed.distributed_c10d._get_default_store()
