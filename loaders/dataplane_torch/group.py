"""What the ranks of a process group agree on, over the connections that it has already."""

from __future__ import annotations

import os
import uuid

import torch.distributed

from dataplane.errors import PeerLost

_KEY = "dataplane/launch"
_inheritors: set[int] = set()
"""Processes whose group is their parent's: its connections are not theirs to use."""


def launch_token() -> str:
    """A random name that all ranks of the default process group share and no other launch has; ""
    where there is no group, or its store cannot tell: then none of the ranks has a token.

    Raises:  PeerLost: the store does not answer, so the group is lost too.
    """
    if not _is_initialized() or os.getpid() in _inheritors:
        return ""
    try:
        # Not public, but the one store that every rank has, whatever the group was made from.
        store = torch.distributed.distributed_c10d._get_default_store()  # noqa: SLF001 - see above
        return str(store.compare_set(_KEY, "", uuid.uuid4().hex).decode())
    except torch.distributed.DistError as error:
        raise PeerLost(
            f"the store of the default process group does not answer: {error}", peer="process group"
        ) from error
    except (AttributeError, TypeError, ValueError, RuntimeError):
        # Another torch, a group without a store (MPI), or a store that cannot compare.
        return ""


def _is_initialized() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _note_fork() -> None:
    if _is_initialized():
        _inheritors.add(os.getpid())


os.register_at_fork(after_in_child=_note_fork)
