"""The interface of a coordinator, wherever it runs."""

from __future__ import annotations

from typing import Protocol

from dataplane.rpc.membership import (
    ChangeRequest,
    ChangeResponse,
    HeartbeatRequest,
    HeartbeatResponse,
    JoinRequest,
    JoinResponse,
    LeaveRequest,
    LeaveResponse,
    LedgerRequest,
    LedgerResponse,
    RegisterNodeRequest,
    RegisterNodeResponse,
    StatusRequest,
    StatusResponse,
)
from dataplane.rpc.sharing import ShareManifestRequest, ShareManifestResponse


class Coordination(Protocol):
    """A coordinator: in this process, or behind gRPC. Every call may be repeated.

    Every call raises PeerLost if the coordinator does not answer.
    """

    async def register_node(self, request: RegisterNodeRequest) -> RegisterNodeResponse:
        """Register a node.

        Raises:  VersionMismatch: the node is of another version.
        """

    async def join(self, request: JoinRequest) -> JoinResponse:
        """A rank takes its place in a job. When the answer arrives, the place survives a restart of
        the coordinator.

        Raises:  SpecMismatch: field, expected, found.  LeaseFenced: a newer launch of the job
        runs.  ConfigError: an impossible place.
        """

    async def heartbeat(self, request: HeartbeatRequest) -> HeartbeatResponse:
        """A node renews its members; the answer has one verdict per member, in the request's order.

        Raises:  VersionMismatch: the node is of another version.
        """

    async def leave(self, request: LeaveRequest) -> LeaveResponse:
        """A rank left on purpose. A member that is unknown, or that another node has by now, is no
        error: it is gone from this node either way.
        """

    async def share_manifest(self, request: ShareManifestRequest) -> ShareManifestResponse:
        """A node opens a dataset, which other nodes of the job's launch open too.

        Raises:  ConfigError: it names something that no node would.
        """

    async def status(self, request: StatusRequest) -> StatusResponse:
        """Jobs, ranks and nodes, for people.

        Raises:  ConfigError: no job has that name.
        """

    async def ledger(self, request: LedgerRequest) -> LedgerResponse:
        """A job's ledger.

        Raises:  ConfigError: no job has that name.
        """

    async def change(self, request: ChangeRequest) -> ChangeResponse:
        """Leave steps or rows out of a job, from its next start on. When the answer arrives, the
        change survives a restart of the coordinator.

        Raises:  ConfigError: no job has that name; it is not possible, or not any more.
        """
