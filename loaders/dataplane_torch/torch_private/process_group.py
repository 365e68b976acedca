"""The store behind torch.distributed's default process group."""

from __future__ import annotations

from typing import Any

import torch.distributed


def default_store() -> Any:
    """torch.distributed.distributed_c10d._get_default_store: the key-value store that all ranks of
    the default group used to find each other. Every rank has it, however the group was created.

    Raises:  ValueError: there is no group.  AttributeError: this torch has no such function; treat
    it like a group without a store.
    """
    return torch.distributed.distributed_c10d._get_default_store()
