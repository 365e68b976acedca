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

    Raises:  PeerLost, from every call: the coordinator does not answer.
    """

    async def register_node(self, request: RegisterNodeRequest) -> RegisterNodeResponse:
        """Register a node.

        Raises:  VersionMismatch: the node is of another version.
        """

    async def join(self, request: JoinRequest) -> JoinResponse:
        """Take the place of a rank in a job. When the answer arrives, the place survives a restart
        of the coordinator.

        Raises:  SpecMismatch: a field of the spec differs from the job's; names the field and both
        values.  LeaseFenced: a newer launch of the job runs.  ConfigError: the place is impossible.
        """

    async def heartbeat(self, request: HeartbeatRequest) -> HeartbeatResponse:
        """Renew a node's members. The answer has one verdict per member, in the request's order.

        Raises:  VersionMismatch: the node is of another version.
        """

    async def leave(self, request: LeaveRequest) -> LeaveResponse:
        """Remove a rank that left on purpose. An unknown member, or a member that has moved to
        another node, is not an error: in either case this node no longer has the member.
        """

    async def share_manifest(self, request: ShareManifestRequest) -> ShareManifestResponse:
        """Open a dataset on a node, which other nodes of the job's launch open too.

        Raises:  ConfigError: the request has a field that no node would send.
        """

    async def status(self, request: StatusRequest) -> StatusResponse:
        """Return jobs, ranks and nodes, for people.

        Raises:  ConfigError: no job has that name.
        """

    async def ledger(self, request: LedgerRequest) -> LedgerResponse:
        """Return a job's ledger.

        Raises:  ConfigError: no job has that name.
        """

    async def change(self, request: ChangeRequest) -> ChangeResponse:
        """Leave steps or rows out of a job, from its next start on. When the answer arrives, the
        change survives a restart of the coordinator.

        Raises:  ConfigError: no job has that name; or the change is impossible, or comes too late.
        """
