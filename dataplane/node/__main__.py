"""The processes of a node, started by exec: an embedded node, or one of its workers.

python -m dataplane.node --listener-fd N     an embedded node on an inherited listening socket
python -m dataplane.node --worker-fd N       a worker on an inherited socket
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import logging
import os
import signal
import socket
import sys


def main() -> int:
    """Exit status 0: it ended as it should."""
    parser = argparse.ArgumentParser(prog="python -m dataplane.node")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--listener-fd", type=int)
    which.add_argument("--worker-fd", type=int)
    parser.add_argument("--embedded", action="store_true", help="end with the last trainer")
    parser.add_argument("--stderr-fd", type=int, help="becomes stderr once the node serves")
    given = parser.parse_args()
    if given.worker_fd is not None:
        from dataplane.node import worker

        worker.main(given.worker_fd)
        return 0
    logging.basicConfig(level=logging.WARNING, format="dataplane node: %(message)s")
    return asyncio.run(_embedded(given.listener_fd, given.stderr_fd))


def _started(stderr_fd: int | None) -> None:
    """While it starts, stderr is a file of the trainer that waits for it and tells its errors."""
    if stderr_fd is not None:
        sys.stderr.flush()
        os.dup2(stderr_fd, 2)
        os.close(stderr_fd)


async def _embedded(descriptor: int, stderr_fd: int | None) -> int:
    from dataplane.config import VERSION
    from dataplane.coordinator.front import Coordinator, CoordinatorConfig
    from dataplane.errors import DataplaneError
    from dataplane.node.server import run_node
    from dataplane.settings import default_node_config

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    # Ctrl-C at a terminal is for the trainer; the node ends when its last trainer has.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        config = dataclasses.replace(default_node_config(), embedded=True)
        coordinator = Coordinator(CoordinatorConfig(version=VERSION, lease_s=config.lease_s))
        await coordinator.start()
        try:
            listener = socket.socket(fileno=descriptor)
            await run_node(config, listener, coordinator, stop, lambda _: _started(stderr_fd))
        finally:
            await coordinator.close()
    except DataplaneError as error:
        sys.stderr.write(f"dataplane node: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
