"""The coordinator behind gRPC. It only loads, listens, answers and stops: `state` decides."""

from __future__ import annotations

from dataplane.coordinator.front import Coordinator, CoordinatorConfig
from dataplane.rpc.serve import GrpcServer
from dataplane.security.security import Security

DRAIN_S = 5.0


class CoordinatorServer:
    """One coordinator at one address. Use: `await start()`, `await stop()`."""

    def __init__(self, config: CoordinatorConfig, address: str, security: Security) -> None:
        self._address = address
        self._security = security
        self._coordinator = Coordinator(config)
        self._grpc: GrpcServer | None = None

    @property
    def coordinator(self) -> Coordinator:
        """The same coordinator without gRPC, for a node in this process."""
        return self._coordinator

    async def start(self) -> str:
        """Load the store, bind the address, and answer. Return the address with its real port.

        Raises:  ConfigError: the address is taken or not allowed; the store is locked, damaged or
        of a newer version. Nothing is left running in that case.
        """
        self._grpc = GrpcServer(self._address, self._security)
        try:
            # Check the address before the store is opened, so that a second service fails because
            # of its address rather than because of a locked file.
            self._grpc.check_free()
            await self._coordinator.start()
            return await self._grpc.start(self._coordinator)
        except BaseException:
            await self.stop(0.0)
            raise

    async def stop(self, grace_s: float = DRAIN_S) -> None:
        """Answer calls in flight, reject others, and write pending records; may be called twice."""
        if self._grpc is not None:
            await self._grpc.stop(grace_s)
        await self._coordinator.close()
