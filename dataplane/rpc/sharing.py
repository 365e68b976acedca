"""Messages to a coordinator of nodes that open the same dataset, and its answers.

All are frozen values, used outside this package instead of protobuf classes. Their names and fields
are those of proto/dataplane/rpc/v1/sharing.proto, whose comments are the specification; a test
compares the two.
"""

from __future__ import annotations

import enum

from msgspec import Struct


class NodeWork(Struct, frozen=True):
    """The progress of long work on a dataset, before a job is open: `done` of `total` units. The
    rest takes about `left_s`. A `total` or `left_s` of 0 is unknown.
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
    """Report that a node opens a dataset with these urls for one launch of a job, and the state of
    the dataset's manifest on this node.

    `name` is a hash (16 bytes) of everything that the manifest depends on. Other nodes can fetch
    the manifest at `data_address`; "" if they cannot. HELD: `fingerprint` is the fingerprint of the
    manifest. WANTED: `refused_by` is a node that did not give the manifest, if any. MAKING: `work`
    is this node's progress.
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
    """A node's next step for a manifest: MAKE the manifest, for other nodes too; WAIT while another
    node makes it; FETCH it from a node that has it; KEEP it for other nodes; or make it for this
    node ALONE.
    """

    MAKE = "make"
    WAIT = "wait"
    FETCH = "fetch"
    KEEP = "keep"
    ALONE = "alone"


class ShareManifestResponse(Struct, frozen=True):
    """The node's next step; for FETCH and KEEP, the key for data connections; for WAIT, the
    progress of the other node. The key is secret, and therefore not in the repr.
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
