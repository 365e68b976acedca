"""Values that the ranks of a process group agree on, over the group's existing connections."""

from __future__ import annotations

import json
import os
import socket
import uuid
from typing import Any

import torch.distributed

from dataplane.model.errors import PeerLost, SpecMismatch
from dataplane.model.records import Topology
from dataplane.transforms.pixels_advice import how_to_agree
from dataplane_torch.torch_private.distributed import default_store

_inheritors: set[int] = set()
"""The ids of forked processes, whose inherited process group has connections of the parent."""


def launch_token() -> str:
    """Return a random name that all ranks of the default process group share, and no other launch
    has; "" on every rank if there is no group, or if its store cannot compare and set.

    Raises:  PeerLost: the store does not answer, so the group is lost too.
    """
    return _first_said("dataplane/launch", uuid.uuid4().hex)


def check_pixels(pixels: str) -> None:
    """Check that the nodes of all ranks make the same pixels. The ranks compare this themselves,
    since nodes that they start share no coordinator. Do nothing without a process group.

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


def check_layout(job_id: str, place: Topology, digest: str, stage: int) -> None:
    """Check that all ranks of the group have the same layout and spec for a job that the user has
    not named, in a stage of its run. Nodes that ranks start on several hosts share no coordinator
    that would check it.

    Raises:  SpecMismatch: another rank has declared something else.  PeerLost: the store does not
    answer.
    """
    if place.world_size < 2 or not _is_initialized():
        return
    if torch.distributed.get_world_size() != place.world_size:
        return
    mine: dict[str, Any] = {
        "dp_size": place.dp_size,
        "spec": digest,
        "host": socket.gethostname(),
        "rank": place.rank,
        "dp_rank": place.dp_rank,
        "from": place.source,
    }
    said = _first_said(f"dataplane/layout/{job_id}/{stage}", json.dumps(mine))
    first: dict[str, Any] = json.loads(said) if said else mine
    for field in ("dp_size", "spec"):
        if first[field] != mine[field]:
            lines = "\n".join(
                f"  {one['host']}  rank {one['rank']}  dp_rank {one['dp_rank']} of {one['dp_size']}"
                f"  spec {one['spec'][:8]}  {one['from']}"
                for one in (mine, first)
            )
            raise SpecMismatch(
                f"this rank and another one differ in {field}: give all ranks the same arguments "
                "and the same shards, and make their loaders in the same order. If they read for "
                f"different jobs, give each job a name=\n{lines}",
                field=field,
                expected=first[field],
                found=mine[field],
                rank=place.rank,
            )


def check_weights(job_id: str, place: Topology, number: int, told: str) -> None:
    """Check that all ranks of the group have set the same weights of a mixture, at the same place
    of the job, in their `number`-th call.

    Raises:  SpecMismatch: another rank has declared something else.  PeerLost: the store does not
    answer.
    """
    if place.world_size < 2 or not _is_initialized():
        return
    if torch.distributed.get_world_size() != place.world_size:
        return
    expected = _first_said(f"dataplane/weights/{job_id}/{number}", told) or told
    if expected == told:
        return
    mine, others = told.split(":"), expected.split(":")
    where = f"at sample {mine[1]} of epoch {mine[0]}"
    if mine[:2] == others[:2]:
        what = f"weights {where} that differ from another rank's, or follow different ones"
    else:
        what = f"weights {where}, and another rank at sample {others[1]} of epoch {others[0]}"
    raise SpecMismatch(
        f"rank {place.rank} has set {what}. Every rank must call set_weights with the same weights"
        " after the same step",
        field="weights",
        expected=expected,
        found=told,
        rank=place.rank,
    )


def _first_said(key: str, value: str) -> str:
    """Return the value of the first rank that used this key; "" without a usable store."""
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
        # This torch lacks the function, the group has no store (MPI), or the store cannot compare
        # and set.
        return ""


def _is_initialized() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _note_fork() -> None:
    if _is_initialized():
        _inheritors.add(os.getpid())


os.register_at_fork(after_in_child=_note_fork)
