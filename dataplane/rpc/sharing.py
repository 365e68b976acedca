"""Messages of nodes that open the same dataset to a coordinator, and its answers.

Frozen values, used outside this package instead of protobuf classes. Names and fields equal those
of proto/dataplane/rpc/v1/sharing.proto, whose comments are the specification; a test compares
the two.
"""

from __future__ import annotations

import enum

from msgspec import Struct


class NodeWork(Struct, frozen=True):
    """How far long work on a dataset is, before a job is open: so many of the `total` units are
    done, and the rest takes about `left_s`; 0 if that is unknown.
    """

    what: str
    dataset: str
    done: int
    total: int
    unit: str
    left_s: float = 0.0


class ManifestState(enum.StrEnum):
    """The state of the manifest that a node opens."""

    WANTED = "wanted"
    MAKING = "making"
    HELD = "held"
    FAILED = "failed"


class ShareManifestRequest(Struct, frozen=True):
    """A node opens a dataset with these urls for one launch of a job. `name` is a hash of all that
    the manifest depends on, 16 bytes. Other nodes get it at `data_address`, if there is one.
    `fingerprint` is that of a manifest that is HELD, `refused_by` a node that did not give it,
    `work` how far this node is that is MAKING it.
    """

    node_id: str
    job_id: str
    incarnation: str
    name: bytes
    urls: tuple[str, ...] = ()
    data_address: str = ""
    state: ManifestState = ManifestState.WANTED
    fingerprint: str = ""
    refused_by: str = ""
    work: NodeWork | None = None


class ManifestTurn(enum.StrEnum):
    """The next step of a node for a manifest: MAKE it, for others too; WAIT while another node
    does; FETCH it from one that has it; KEEP it for others; or make it for itself ALONE.
    """

    MAKE = "make"
    WAIT = "wait"
    FETCH = "fetch"
    KEEP = "keep"
    ALONE = "alone"


class ShareManifestResponse(Struct, frozen=True):
    """Whose turn it is, and for FETCH and KEEP the key of data connections: in no log, and not in a
    repr either. For WAIT, how far the other node is.
    """

    turn: ManifestTurn
    node_id: str = ""
    address: str = ""
    line: str = ""
    generation: int = 0
    key: bytes = b""
    pause_s: float = 0.0
    work: NodeWork | None = None

    def __repr__(self) -> str:
        return (
            f"ShareManifestResponse({self.turn.value}, node_id={self.node_id!r}, "
            f"address={self.address!r}, pause_s={self.pause_s})"
        )
