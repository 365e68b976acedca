"""A switch in user space between TUN devices, which delays packets and loses some of them.

    python tests/hosts_switch.py DELAY_S LOSS FD…

For machines whose kernel lacks netem. Device i has the address 10.77.0.(i + 1). Packets come with
the kernel's offloads, up to 64 KiB long, as they do through a veth; one of them is lost as a whole.
Orders, one a line on stdin: `cut A B` (drop all packets between these devices, silently),
`join A B` (carry them again), `count` (print how many were carried, lost and dropped, as JSON).
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import sys
import time
from collections import deque

PACKET_BYTES_MAX = 70_000
HEADER_BYTES = 10  # struct virtio_net_hdr, of linux/virtio_net.h
LAST_OF_SOURCE = HEADER_BYTES + 15  # the last byte of each address in an IPv4 header
LAST_OF_TARGET = HEADER_BYTES + 19
AT_ONCE = 64
WAITING_MAX = 20_000


class Switch:
    """Carries packets until its orders end."""

    def __init__(self, delay_s: float, loss: float, devices: list[int]) -> None:
        self.delay_s, self.loss, self.devices = delay_s, loss, devices
        self.cuts: set[tuple[int, int]] = set()
        self.waiting: deque[tuple[float, int, bytes]] = deque()
        self.counts = {"carried": 0, "carried_bytes": 0, "lost": 0, "dropped": 0}

    def run(self, orders: int) -> None:
        for device in self.devices:
            os.set_blocking(device, False)
        sources = [*self.devices, orders]
        while True:
            pause = max(0.0, self.waiting[0][0] - time.monotonic()) if self.waiting else None
            ready, _, _ = select.select(sources, [], [], pause)
            for fd in ready:
                if fd != orders:
                    self._take(fd)
                elif not self._obey(os.read(orders, 1 << 16).decode()):
                    return
            self._send()

    def _take(self, device: int) -> None:
        """Read what a host sent."""
        due = time.monotonic() + self.delay_s
        for _ in range(AT_ONCE):
            try:
                packet = os.read(device, PACKET_BYTES_MAX)
            except BlockingIOError:
                return
            if packet[HEADER_BYTES] >> 4 != 4:
                continue
            source, target = packet[LAST_OF_SOURCE] - 1, packet[LAST_OF_TARGET] - 1
            if not 0 <= target < len(self.devices):
                continue
            if (source, target) in self.cuts or len(self.waiting) > WAITING_MAX:
                self.counts["dropped"] += 1
            elif random.random() < self.loss:
                self.counts["lost"] += 1
            else:
                self.waiting.append((due, self.devices[target], packet))

    def _send(self) -> None:
        """Write what has waited long enough."""
        now = time.monotonic()
        while self.waiting and self.waiting[0][0] <= now:
            _, device, packet = self.waiting.popleft()
            with contextlib.suppress(OSError):
                os.write(device, packet)
            self.counts["carried"] += 1
            self.counts["carried_bytes"] += len(packet)

    def _obey(self, orders: str) -> bool:
        for line in orders.splitlines():
            match line.split():
                case ["cut", a, b]:
                    self.cuts |= {(int(a), int(b)), (int(b), int(a))}
                case ["join", a, b]:
                    self.cuts -= {(int(a), int(b)), (int(b), int(a))}
                case ["count"]:
                    sys.stdout.write(json.dumps(self.counts) + "\n")
                    sys.stdout.flush()
        return bool(orders)


if __name__ == "__main__":
    Switch(float(sys.argv[1]), float(sys.argv[2]), list(map(int, sys.argv[3:]))).run(0)
