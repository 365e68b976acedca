"""Values that the ranks of a process group agree on, over the group's existing connections."""

from __future__ import annotations

import os
import uuid

import torch.distributed

from dataplane.errors import PeerLost, SpecMismatch
from dataplane.transforms.pixels_advice import how_to_agree
from dataplane_torch.torch_private.process_group import default_store

_inheritors: set[int] = set()
"""Processes that inherited their parent's group and must not use its connections."""


def launch_token() -> str:
    """A random name that all ranks of the default process group share and no other launch has. It
    is "" on every rank if there is no group, or its store cannot compare and set.

    Raises:  PeerLost: the store does not answer, so the group is lost too.
    """
    return _first_said("dataplane/launch", uuid.uuid4().hex)


def check_pixels(pixels: str) -> None:
    """Check that the nodes of all ranks make the same pixels. The ranks compare this themselves,
    since nodes that they start share no coordinator. Does nothing without a process group.

    Raises:  SpecMismatch: the node of the first rank uses other image decoding software.  PeerLost:
    the store does not answer.
    """
    expected = _first_said("dataplane/pixels", pixels) if pixels else ""
    if expected and expected != pixels:
        raise SpecMismatch(
            f"this rank's node makes images with {pixels}, and another rank's node with "
            f"{expected}. {how_to_agree(expected, pixels)}",
            field="pixels",
            expected=expected,
            found=pixels,
        )


def _first_said(key: str, value: str) -> str:
    """The value of the first rank that called this with the key; "" without a usable store."""
    if not _is_initialized() or os.getpid() in _inheritors:
        return ""
    try:
        store = default_store()
        return str(store.compare_set(key, "", value).decode())
    except torch.distributed.DistError as error:
        raise PeerLost(
            f"the store of the default process group does not answer: {error}", peer="process group"
        ) from error
    except (AttributeError, TypeError, ValueError, RuntimeError):
        # A torch without this function, a group without a store (MPI), or a store that cannot
        # compare and set.
        return ""


def _is_initialized() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _note_fork() -> None:
    if _is_initialized():
        _inheritors.add(os.getpid())


os.register_at_fork(after_in_child=_note_fork)
