"""Find and reach the node of this host: an embedded node that this process starts, or a node that
`dataplane serve` runs.

A trainer opens only abstract Unix sockets, and no network connections.
"""

from __future__ import annotations

import os
import socket
import time

from msgspec import Struct, field

from dataplane.client.launch import BegunNode, node_command, start_node
from dataplane.client.waiting import Notice
from dataplane.client.wire import NoAnswer, Wire, hello, welcomed, wire_of
from dataplane.model.config import VERSION
from dataplane.model.errors import DataplaneError, PeerLost
from dataplane.rpc import local
from dataplane.rpc.address import embedded_name, served_name
from dataplane.rpc.messages import DatasetSource, Welcome

START_TIMEOUT_S = 60.0


class Embedded(Struct, frozen=True):
    """The node that the ranks of this host share. The first rank starts it."""

    name: str
    command: tuple[str, ...] = field(default_factory=node_command)

    @property
    def start_s(self) -> float:
        """The time that a start may take, since a busy machine starts processes slowly."""
        return START_TIMEOUT_S

    @property
    def whom(self) -> str:
        """The node's description in messages."""
        return "the node of this run on this host"

    remedy = ""

    def reach(self, deadline: float, notice: Notice, source: DatasetSource) -> tuple[Wire, Welcome]:
        """Connect, or bind the socket name and start a node on it, which will open this dataset.
        Return a connection on which the node has sent its Welcome, and the Welcome.

        Raises:  PeerLost: the node ended during its start (with its last output, and the noun
        `status` if it exited by itself: another node would fail in the same way); or the node does
        not answer; or another process has the name but is exiting or not listening yet.
        """
        try:
            sock = local.connect(self.name, _left(deadline))
        except PeerLost as error:
            try:
                begun = self._started(deadline, source)
            except FileExistsError:
                raise error from None
            return begun.welcomed(deadline, notice)
        return _welcomed(sock, deadline, self.name, notice)

    def given_up(self, waited_s: float, error: PeerLost) -> PeerLost:
        """Return the error for a node that was lost several times."""
        return PeerLost(
            f"{self.whom} did not answer for {waited_s:.0f} s, or was lost several times (a node "
            f"that is killed has most likely run out of memory); the last error: {error}",
            peer=f"@{self.name}",
            last_error=str(error),
        )

    def begin(self, source: DatasetSource) -> BegunNode | None:
        """Start the node before its first use, unless its name is taken by a node or by a rank that
        is starting one. The node begins to open this dataset. Do not wait, and raise no errors:
        `reach` tries again.
        """
        try:
            return self._started(time.monotonic() + START_TIMEOUT_S, source)
        except (FileExistsError, DataplaneError):
            return None

    def _started(self, deadline: float, source: DatasetSource) -> BegunNode:
        """Bind the socket name and start a node.

        Raises:  FileExistsError: the name is taken.  ConfigError: no node can be started.
        """
        listener = local.listen(self.name)
        try:
            # Connect before the child is started, so that the kernel ends this process's waiting
            # calls if the child ends.
            wire = wire_of(local.connect(self.name, _left(deadline)), self.name)
            try:
                node = start_node(listener, self.command, source)
            except BaseException:
                wire.close()
                raise
        finally:
            listener.close()
        return BegunNode(wire, node, self.name)


class Served(Struct, frozen=True):
    """The node of this host that `dataplane serve` runs for the coordinator at `address`."""

    address: str
    name: str

    @property
    def start_s(self) -> float:
        """The minimum is 0: other processes start this node, and the settings apply."""
        return 0.0

    @property
    def whom(self) -> str:
        """The node's description in messages."""
        return f"a node of service {self.address} on this host"

    @property
    def remedy(self) -> str:
        """The way to start such a node."""
        return (
            f"start `dataplane serve` here, or `dataplane serve --node --join {self.address}` if"
            " the coordinator is on another host, as this same user"
        )

    def begin(self, source: DatasetSource) -> None:  # noqa: ARG002
        """Do nothing: other processes start this node."""
        return

    def reach(
        self,
        deadline: float,
        notice: Notice,
        source: DatasetSource,  # noqa: ARG002
    ) -> tuple[Wire, Welcome]:
        """Connect.

        Raises:  PeerLost: no node serves here.
        """
        sock = local.connect(self.name, _left(deadline))
        return _welcomed(sock, deadline, self.name, notice)

    def given_up(self, waited_s: float, error: PeerLost) -> PeerLost:
        """Return the error to raise if no node could be reached."""
        return PeerLost(
            f"no node of service {self.address} answered on this host within {waited_s:.0f} s "
            f"({error}): {self.remedy}",
            peer=self.address,
            last_error=str(error),
        )


Endpoint = Embedded | Served
"""A way to reach a node. A value that may be pickled and sent to DataLoader workers."""


def find_endpoint(service: str | None, run: str) -> Endpoint:
    """Return the endpoint of `service`; without a service, that of this run's embedded node.

    Raises:  ConfigError: `service` is not an address.
    """
    if service:
        return Served(service, served_name(os.getuid(), service))
    return Embedded(embedded_name(os.getuid(), VERSION, run))


def _welcomed(
    sock: socket.socket, deadline: float, name: str, notice: Notice
) -> tuple[Wire, Welcome]:
    wire = wire_of(sock, name)
    try:
        request_id = hello(wire, deadline)
    except NoAnswer:
        wire.close()
        raise PeerLost(f"the node at @{name} does not answer", peer=f"@{name}") from None
    except BaseException:
        wire.close()
        raise
    return wire, welcomed(wire, request_id, name, deadline, notice)


def _left(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())
