"""Networks between hosts of one machine, on which packets are late, lost, or cut off.

    python tests/hosts_network.py [auto | netem | switch | plain]

measures one between two hosts, and cuts it. "auto" is netem where the kernel has it, else a switch
in user space.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from hosts_namespaces import DEVICE, Host, enter, live_inside, new_host, run_tool, why_not

SWITCH = Path(__file__).with_name("hosts_switch.py")
KINDS = ("auto", "netem", "switch", "plain")
NOBODY = "02:00:00:00:00:01"
QUEUE_PACKETS = "5000"
DELAY_S, LOSS = 0.001, 0.001
RATE_S, CUT_S = 0.3, 0.3

_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0  # linux/if_tun.h
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4 = 0x01, 0x02


class Network(Protocol):
    """The network between hosts. `description` is for people."""

    description: str

    def cut(self, a: Host, b: Host) -> None:
        """Drop all packets between two hosts silently."""

    def join(self, a: Host, b: Host) -> None:
        """Carry them again."""


class Switched:
    """TUN devices and a process that carries their packets."""

    def __init__(self, process: subprocess.Popen[str], delay_s: float, loss: float) -> None:
        self._process = process
        self.description = (
            f"TUN devices and a switch in user space, {delay_s * 1e3:g} ms each way, "
            f"{loss:.2%} of packets (of up to 64 KiB) lost"
        )

    def cut(self, a: Host, b: Host) -> None:
        self._order(f"cut {a.number} {b.number}")

    def join(self, a: Host, b: Host) -> None:
        self._order(f"join {a.number} {b.number}")

    def counts(self) -> dict[str, int]:
        self._order("count")
        assert self._process.stdout is not None
        counts: dict[str, int] = json.loads(self._process.stdout.readline())
        return counts

    def _order(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()


class Bridged:
    """veth pairs into a bridge. A cut gives each host a hardware address of nobody for the other."""

    def __init__(self, description: str) -> None:
        self.description = description

    def cut(self, a: Host, b: Host) -> None:
        for one, other in ((a, b), (b, a)):
            place = (other.address, "lladdr", NOBODY, "dev", DEVICE, "nud", "permanent")
            one.run("ip", "neigh", "replace", *place)

    def join(self, a: Host, b: Host) -> None:
        for one, other in ((a, b), (b, a)):
            one.run("ip", "neigh", "del", other.address, "dev", DEVICE)


@contextlib.contextmanager
def network(
    kind: str, names: Sequence[str], delay_s: float, loss: float
) -> Iterator[tuple[Network, list[Host]]]:
    """Hosts that reach each other. This process becomes the first of them."""
    run_tool("ip", "link", "set", "lo", "up")
    hosts = [new_host(number, name) for number, name in enumerate(names)]
    for host in hosts:
        host.run("ip", "link", "set", "lo", "up")
    with contextlib.ExitStack() as stack:
        made: Network
        if kind == "switch" or (kind == "auto" and not _has_netem()):
            made = Switched(stack.enter_context(_switch(hosts, delay_s, loss)), delay_s, loss)
        else:
            made = _bridge(hosts, None if kind == "plain" else (delay_s, loss))
        enter(*hosts[0].places)
        yield made, hosts


@contextlib.contextmanager
def _switch(hosts: Sequence[Host], delay_s: float, loss: float) -> Iterator[subprocess.Popen[str]]:
    devices = []
    for host in hosts:
        devices.append(host.call(_tun))
        _set_up(host)
    command = [sys.executable, str(SWITCH), str(delay_s), str(loss), *map(str, devices)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, pass_fds=devices, stdin=pipe, stdout=pipe, text=True) as process:
        for device in devices:
            os.close(device)
        try:
            yield process
        finally:
            process.kill()


def _tun() -> int:
    """A device of the thread's namespace, with checksums and segmentation left to the other end."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    flags = _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), flags))
    fcntl.ioctl(device, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4)
    return device


def _bridge(hosts: Sequence[Host], netem: tuple[float, float] | None) -> Bridged:
    """A bridge in the namespace of this process, before it becomes a host."""
    run_tool("ip", "link", "add", "bridge0", "type", "bridge")
    run_tool("ip", "link", "set", "bridge0", "up")
    for host in hosts:
        port = f"port{host.number}"
        peer = ("peer", "name", DEVICE, "netns", host.places[0])
        run_tool("ip", "link", "add", port, "type", "veth", *peer)
        run_tool("ip", "link", "set", port, "master", "bridge0", "up")
        _set_up(host)
        if netem is not None:
            delay_s, loss = netem
            told = ("delay", f"{delay_s * 1e3:g}ms", "loss", f"{loss * 100:g}%")
            host.run("tc", "qdisc", "add", "dev", DEVICE, "root", "netem", *told)
    if netem is None:
        return Bridged("veth pairs, without delay or loss")
    return Bridged(f"veth pairs, netem: {netem[0] * 1e3:g} ms each way, {netem[1]:.2%} lost")


def _set_up(host: Host) -> None:
    host.run("ip", "link", "set", DEVICE, "txqueuelen", QUEUE_PACKETS, "up")
    host.run("ip", "addr", "add", f"{host.address}/24", "dev", DEVICE)


def _has_netem() -> bool:
    trial = ["tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"]
    try:
        had = subprocess.run(trial, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False
    if had:
        run_tool("tc", "qdisc", "del", "dev", "lo", "root")
    return had


def main(kind: str) -> None:
    """One JSON line: how fast one connection is, and what a cut does."""
    if reason := why_not():
        sys.exit(f"hosts_network.py: not on this machine: {reason}")
    live_inside()
    with network(kind, ["a", "b"], DELAY_S, LOSS) as (made, (a, b)):
        listener = a.call(lambda: socket.create_server((a.address, 0)))
        place = listener.getsockname()
        began = time.monotonic()
        client = b.call(lambda: socket.create_connection(place, 30))
        told: dict[str, Any] = {
            "network": made.description,
            "connected_ms": round((time.monotonic() - began) * 1e3, 1),
            "mb_per_s": round(_rate(client, listener.accept()[0]) / 1e6),
        }
        made.cut(a, b)
        try:
            b.call(lambda: socket.create_connection(place, CUT_S))
        except TimeoutError:
            told["cut"] = "silent"
        made.join(a, b)
        b.call(lambda: socket.create_connection(place, 30)).close()
        sys.stdout.write(json.dumps(told | {"joined": True}) + "\n")


def _rate(client: socket.socket, server: socket.socket) -> float:
    """Bytes a second."""

    def send() -> None:
        ends = time.monotonic() + RATE_S
        while time.monotonic() < ends:
            client.sendall(bytes(1 << 18))
        client.close()

    sender = threading.Thread(target=send)
    count, began = 0, time.monotonic()
    sender.start()
    while received := len(server.recv(1 << 18)):
        count += received
    sender.join()
    return count / (time.monotonic() - began)


if __name__ == "__main__":
    main((sys.argv[1:] or ["auto"])[0])
