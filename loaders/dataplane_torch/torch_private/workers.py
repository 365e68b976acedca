"""Functions that torch's worker processes run, and functions by which their parent watches them."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import data as torch_data

from dataplane_torch.torch_private.versions import require

_FEEDER = "QueueFeederThread"
_FEEDER_S_MAX = 1.0

require(torch._utils, "ExceptionWrapper")
require(torch.multiprocessing, "_set_thread_name")
require(torch_data, "_utils")
require(torch_data._utils, "signal_handling", "worker")

_signals: Any = torch_data._utils.signal_handling
_worker: Any = torch_data._utils.worker

require(
    _signals,
    *("_error_if_any_worker_fails", "_remove_worker_pids", "_set_SIGCHLD_handler"),
    *("_set_worker_pids", "_set_worker_signal_handlers"),
)
require(_worker, "WorkerInfo", "_generate_state", "_worker_info")

ExceptionWrapper: Any = torch._utils.ExceptionWrapper
"""torch._utils.ExceptionWrapper: the exception being handled, in a form that can be pickled, with
its traceback as text. `reraise()` raises one of its `exc_type`, which may be set to another class
than the exception's, with a message that has that text.
"""


def watch(key: int, pids: Sequence[int]) -> None:
    """torch.utils.data._utils.signal_handling._set_worker_pids and _set_SIGCHLD_handler: from now
    on, `raise_for_dead` checks these processes, and so does torch's handler of SIGCHLD, which is
    installed once, in the main thread only. A key may be used again only after `unwatch`.
    """
    _signals._set_worker_pids(key, tuple(pids))
    _signals._set_SIGCHLD_handler()


def unwatch(key: int) -> None:
    """torch.utils.data._utils.signal_handling._remove_worker_pids."""
    _signals._remove_worker_pids(key)


def raise_for_dead() -> None:
    """torch.utils.data._utils.signal_handling._error_if_any_worker_fails.

    Raises:  RuntimeError: a watched process was killed, or exited with a status other than 0; torch
    reports each process once.
    """
    _signals._error_if_any_worker_fails()


def report_fatal_signals() -> None:
    """torch.utils.data._utils.signal_handling._set_worker_signal_handlers: a worker that dies of
    SIGBUS, SIGSEGV or SIGFPE says so on stderr; one that receives SIGTERM from its parent exits
    with status 0.
    """
    _signals._set_worker_signal_handlers()


def name_thread(name: str) -> None:
    """torch.multiprocessing._set_thread_name: the name of this thread in `ps` and `top`."""
    torch.multiprocessing._set_thread_name(name)


def numpy_seed(base_seed: int, worker_id: int) -> list[int]:
    """torch.utils.data._utils.worker._generate_state: the seed of a worker's numpy, four integers
    of 32 bits.
    """
    words: list[int] = _worker._generate_state(base_seed, worker_id)
    return words


def set_worker_info(worker_id: int, worker_count: int, seed: int, dataset: Any) -> None:
    """Set torch.utils.data._utils.worker._worker_info, which get_worker_info() returns."""
    _worker._worker_info = _worker.WorkerInfo(
        id=worker_id, num_workers=worker_count, seed=seed, dataset=dataset
    )


def end_queues_at_exit() -> None:
    """Make a worker of torch's DataLoader that was started by spawn end normally. Python aborts a
    process that exits while a thread is inside of torch. The thread of a multiprocessing.Queue
    often is, because it pickles tensors, and torch closes the queue without waiting for the thread.
    """
    atexit.register(_join_feeders)


def _join_feeders() -> None:
    for thread in threading.enumerate():
        # Wait only this long: a thread that still runs then is blocked by a pipe that no process
        # reads, and is not inside of torch.
        if thread.name == _FEEDER:
            thread.join(_FEEDER_S_MAX)
