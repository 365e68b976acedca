"""The processes of a node, started by exec: an embedded node, or its fork server.

python -m dataplane.node --listener-fd N     an embedded node on an inherited listening socket;
                         --embedded          ends with its last trainer
                         --stderr-fd N       becomes stderr once the node serves
                         --opening-fd N      a file that names the dataset that it opens first
                         --bytecode FOLDER   keep the bytecode of all modules there
python -m dataplane.node --fork-server-fd N  forks workers and processes that index shards
"""

from __future__ import annotations

import contextlib
import getopt
import os
import signal
import sys
from typing import TYPE_CHECKING

from dataplane.base import bytecode

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Collection, Mapping

    from dataplane.model.config import NodeConfig
    from dataplane.model.errors import DataplaneError
    from dataplane.node.manifests import EarlyOpening
    from dataplane.node.pool import WorkerPool
    from dataplane.rpc.messages import DatasetSource

_DORMANT_LINGERS, _DORMANT_S_MIN = 30, 1.0
_LOOK_S = 0.5
_REFUSED = 2


def main() -> int:
    """Run the process. Return its exit status: 2 if Dataplane did not start it, otherwise 0."""
    names = ["listener-fd=", "fork-server-fd=", "stderr-fd=", "opening-fd=", "bytecode="]
    # Not argparse: that takes 8 ms, while a trainer waits for its first batch.
    try:
        given = dict(getopt.getopt(sys.argv[1:], "", [*names, "embedded"])[0])
    except getopt.GetoptError:
        given = {}
    if not {"--listener-fd", "--fork-server-fd"} & given.keys():
        sys.stderr.write(f"loaders start this; `dataplane serve` is for people:\n\n{__doc__}")
        return _REFUSED
    if folder := given.get("--bytecode"):
        bytecode.keep_in(folder)
    from dataplane.base import collector

    collector.start()
    opening_fd, stderr_fd = _number(given, "--opening-fd"), _number(given, "--stderr-fd")
    opening = None if opening_fd is None else _opening(opening_fd)
    from dataplane.worker.forking import ENVIRONMENT, fork_server

    # Set these before anything imports numpy or pyarrow.
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    fork_server_fd = _number(given, "--fork-server-fd")
    if fork_server_fd is not None:
        _be_fork_server(fork_server_fd, has_time=True)
        return 0
    is_remote, has_format = _import_for_both(opening)
    ahead = {"is_remote": is_remote, "has_format": has_format}
    fork_server.acquire(stderr_fd, lambda descriptor: _be_fork_server(descriptor, **ahead))
    from dataplane.model.errors import DataplaneError

    try:
        config, early = _begun(opening)
    except DataplaneError as error:
        return _refused(error)
    import asyncio

    asyncio.run(_to_the_end(int(given["--listener-fd"]), stderr_fd, config, early))
    return 0


def _number(given: Mapping[str, str], name: str) -> int | None:
    return int(given[name]) if name in given else None


def _import_for_both(opening: DatasetSource | None) -> tuple[bool, bool]:
    """Import what both the node and its fork server need, before they part. Return whether the
    dataset lies in an object store, and whether the module of its format was imported.
    """
    from dataplane.formats import registry
    from dataplane.index import indexing  # noqa: F401
    from dataplane.model.errors import DataplaneError
    from dataplane.store.connect import OBSTORE_SCHEMES
    from dataplane.store.urls import local_path, normalise, scheme_of
    from dataplane.transforms import images, packing  # noqa: F401
    from dataplane.worker import stacking  # noqa: F401

    if opening is None:
        return False, False
    try:
        urls = [*map(normalise, opening.urls)]
        if scheme_of(urls[0]) in OBSTORE_SCHEMES:
            from dataplane.store import obstore_store  # noqa: F401
        name = opening.format
        format_ = registry.by_name(name) if name else registry.format_of_url(urls[0])
    except DataplaneError:
        return False, False  # the node reports the error when it opens the dataset
    return all(local_path(url) is None for url in urls), format_ is not None


def _be_fork_server(descriptor: int, **ahead: bool) -> None:
    """Import modules that workers need, in parallel to the node's own imports, and fork children.
    `ahead` are the other arguments of the fork server's main().
    """
    from dataplane.node.fork_server import main

    main(descriptor, **ahead)


def _opening(descriptor: int) -> DatasetSource:
    """Read the dataset to open first, which the trainer has written."""
    import msgspec

    from dataplane.model.typed import complete
    from dataplane.rpc.messages import DatasetSource

    with open(descriptor, "rb") as named:
        content = named.read()
    return DatasetSource(*msgspec.json.decode(content, type=complete(tuple[tuple[str, ...], str])))


def _begun(opening: DatasetSource | None) -> tuple[NodeConfig, EarlyOpening | None]:
    """Read the settings, and begin to open the dataset before further imports: the thread that
    opens it mostly waits for the store.
    """
    from msgspec import structs

    from dataplane.base.machine import raise_descriptor_limit
    from dataplane.base.trace import Trace, configure
    from dataplane.base.units import ways_to_set
    from dataplane.node.manifests import EarlyOpening
    from dataplane.settings import cache_dir, default_node_config

    raise_descriptor_limit()
    config = structs.replace(default_node_config(), embedded=True)
    configure(config.log_level, config.log_format)
    if not config.cache_dir:
        Trace("node").failed(
            "the default cache folder cannot be created: each start indexes datasets again",
            folder=cache_dir(),
            advice=ways_to_set("cache_dir", "FOLDER"),
        )
    return config, None if opening is None else EarlyOpening(config, opening)


def _refused(error: DataplaneError) -> int:
    sys.stderr.write(f"dataplane node: {error}\n")
    return _REFUSED


async def _to_the_end(
    descriptor: int, stderr_fd: int | None, config: NodeConfig, early: EarlyOpening | None
) -> None:
    """Run a node, then exit at once: a thread may be stuck in a read from a store that hangs."""
    status = await _embedded(descriptor, stderr_fd, config, early)
    sys.stderr.flush()
    os._exit(status)


def _started(stderr_fd: int | None) -> None:
    """Redirect stderr after the start. Until then it is a file, from which the waiting trainer
    reads errors. The node and not the trainer copies the file, since threads of the node may log
    until stderr is redirected, and after the trainer has its Welcome.
    """
    from dataplane.base import collector

    collector.settle()
    if stderr_fd is None or os.path.samestat(os.fstat(stderr_fd), os.fstat(2)):
        return
    sys.stderr.flush()
    log_fd = os.dup(2)
    os.dup2(stderr_fd, 2)
    with contextlib.suppress(OSError):  # the trainer's stderr may be closed
        os.write(2, os.pread(log_fd, os.fstat(log_fd).st_size, 0))
    os.close(log_fd)


async def _embedded(
    descriptor: int, stderr_fd: int | None, config: NodeConfig, early: EarlyOpening | None
) -> int:
    import asyncio

    from dataplane.base import background
    from dataplane.base.trace import Trace
    from dataplane.model.errors import DataplaneError

    background.end_process_on_failure()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    # Ctrl-C at a terminal is meant for the trainer; the node exits after its last trainer.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        from dataplane.node.pool import WorkerPool

        while True:
            pool = WorkerPool.of(config, Trace("node"), stderr_fd)
            try:
                trainers = await _serve(config, descriptor, pool, stop, stderr_fd, early)
            finally:
                pool.close()
            if not await _is_wanted_again(descriptor, trainers, config.linger_s, stop):
                return 0
            early = None
    except DataplaneError as error:
        return _refused(error)
    except Exception as error:  # noqa: BLE001 - a stuck thread must not keep the process alive
        background.end_process("node", error)
    return 0


async def _is_wanted_again(
    descriptor: int, trainers: Collection[int], linger_s: float, stop: asyncio.Event
) -> bool:
    """Wait for another connection as long as one of these processes lives, but at most
    `_DORMANT_LINGERS` times `linger_s`. So a trainer that starts again after a failure, or with
    another number of ranks, need not wait for our imports. The fork server stays, but workers end
    and arenas are freed.
    """
    import asyncio

    from dataplane.base.machine import has_ended

    if linger_s < _DORMANT_S_MIN:
        return False
    loop, called = asyncio.get_running_loop(), asyncio.Event()
    deadline = loop.time() + _DORMANT_LINGERS * linger_s
    loop.add_reader(descriptor, called.set)
    try:
        while not stop.is_set() and loop.time() < deadline and not all(map(has_ended, trainers)):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await called.wait()
                    return True
    finally:
        loop.remove_reader(descriptor)
    return False


async def _serve(
    config: NodeConfig,
    descriptor: int,
    pool: WorkerPool,
    stop: asyncio.Event,
    stderr_fd: int | None,
    early: EarlyOpening | None,
) -> Collection[int]:
    """Serve trainers. Return the ids of the processes that connected last."""
    import socket

    from dataplane.coordinator.front import Coordinator, CoordinatorConfig
    from dataplane.model.config import VERSION
    from dataplane.node.server import run_node
    from dataplane.security.node_identity import own_identity

    coordinator = Coordinator(CoordinatorConfig(version=VERSION, lease_s=config.lease_s))
    await coordinator.start()
    try:
        return await run_node(
            config,
            socket.socket(fileno=os.dup(descriptor)),
            coordinator,
            own_identity().node_id,
            stop,
            ready=lambda: _started(stderr_fd),
            pool=pool,
            early=early,
        )
    finally:
        await coordinator.close()


if __name__ == "__main__":
    sys.exit(main())
