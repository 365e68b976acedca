"""Index the dataset of the first loader in a process of its own, while the node still imports.

The process is forked from the node as soon as the node has imported the modules that it needs.

Invariants:
1. The process parses files that may be damaged, so it has the memory limit of an indexing process,
   and its failures are not reported: if it has no result after a moment, the node indexes for
   itself.
2. The process does not outlive the node, its deadline, or that moment.
3. It is forked from a process with one thread.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from typing import NoReturn

import msgspec

from dataplane import machine
from dataplane.errors import DataplaneError
from dataplane.index.found import FoundDataset
from dataplane.node.scout import DEADLINE_S, Scout, end_child
from dataplane.security.environment import forget_secrets
from dataplane.typed import complete

MEMORY_BYTES = 1 << 30
_PIECE_BYTES = 1 << 20


class IndexAhead:
    """The request, and the pipe of the answer. `urls` and `format_name` are those of the dataset;
    without a scout it is local.
    """

    def __init__(self, urls: tuple[str, ...], format_name: str, scout: Scout | None) -> None:
        self.urls, self.format_name, self.scout = urls, format_name, scout
        self._answer, self._answers = os.pipe2(os.O_CLOEXEC)
        self._pid = 0

    def start(self) -> None:
        """Fork the process that answers. Once."""
        # Imported here, so that the node does it, which needs most of it, too.
        from dataplane.index import ahead  # noqa: F401

        # If it cannot be forked, the node indexes.
        with contextlib.suppress(OSError):
            self._pid = os.fork()
            if not self._pid:
                self._answer_and_exit()
        os.close(self._answers)
        if self.scout is not None:
            self.scout.let_go()

    def found(self, patience_s: float) -> FoundDataset | None:
        """Return the result; None if there is none within this time. Call it once."""
        try:
            content = _received(self._answer, time.monotonic() + patience_s)
            if content is None:
                return None
            return msgspec.msgpack.decode(content, type=complete(FoundDataset))
        except (OSError, msgspec.DecodeError):
            return None
        finally:
            os.close(self._answer)
            if self.scout is not None:
                self.scout.end()
            if self._pid:
                end_child(self._pid)

    def _answer_and_exit(self) -> NoReturn:
        try:
            machine.set_process("dp-indexer", dies_with_parent=True)
            forget_secrets()
            needed = (self._answers, *(() if self.scout is None else (self.scout.descriptor,)))
            machine.close_descriptors(keep=needed)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(DEADLINE_S)
            machine.limit_memory(MEMORY_BYTES)
            with open(self._answers, "wb", closefd=False) as answers:
                answers.write(msgspec.msgpack.encode(self._find()))
        except BaseException:  # noqa: BLE001, S110 - the node finds it, and says what is wrong
            pass
        finally:
            os._exit(0)

    def _find(self) -> FoundDataset:
        """Index, in the forked process.

        Raises:  DataplaneError: nothing can be indexed.
        """
        from dataplane.index.ahead import found_ahead
        from dataplane.settings import default_node_config

        cache_dir = ""
        with contextlib.suppress(DataplaneError):
            cache_dir = default_node_config().cache_dir
        if self.scout is None:
            return found_ahead(self.urls, self.format_name, None, cache_dir)
        scouted = self.scout.found(DEADLINE_S)
        if scouted is None:
            raise DataplaneError("the scout has found nothing")
        return found_ahead(self.urls, self.format_name, scouted, cache_dir, self.scout.read)


def _received(pipe: int, deadline: float) -> bytes | None:
    """Read until the other end is closed; None if it is not closed by the deadline."""
    pieces = []
    while True:
        if not select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
            return None
        pieces.append(os.read(pipe, _PIECE_BYTES))
        if not pieces[-1]:
            return b"".join(pieces)
