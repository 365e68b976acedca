"""What torch's worker processes do, and what their parent does about them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import data as torch_data

from dataplane_torch.torch_private.versions import require

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
"""torch._utils.ExceptionWrapper: the exception being handled, with its traceback as text, to be
pickled. `reraise()` raises one of the same type, whose message has that text.
"""


def watch(key: int, pids: Sequence[int]) -> None:
    """torch.utils.data._utils.signal_handling._set_worker_pids and _set_SIGCHLD_handler: from now
    on `raise_for_dead` looks at these processes, also in a handler of SIGCHLD, which torch installs
    once, in the main thread only. Until `unwatch` a key may be given once.
    """
    _signals._set_worker_pids(key, tuple(pids))
    _signals._set_SIGCHLD_handler()


def unwatch(key: int) -> None:
    """torch.utils.data._utils.signal_handling._remove_worker_pids."""
    _signals._remove_worker_pids(key)


def raise_for_dead() -> None:
    """torch.utils.data._utils.signal_handling._error_if_any_worker_fails.

    Raises:  RuntimeError: a process that is watched was killed, or exited with another status than
    0; torch tells of each once.
    """
    _signals._error_if_any_worker_fails()


def report_fatal_signals() -> None:
    """torch.utils.data._utils.signal_handling._set_worker_signal_handlers: a worker that ends by
    SIGBUS, SIGSEGV or SIGFPE says so on stderr; one that gets SIGTERM from its parent ends with
    status 0.
    """
    _signals._set_worker_signal_handlers()


def name_thread(name: str) -> None:
    """torch.multiprocessing._set_thread_name: the name of this thread in `ps` and `top`."""
    torch.multiprocessing._set_thread_name(name)


def numpy_seed(base_seed: int, worker_id: int) -> list[int]:
    """torch.utils.data._utils.worker._generate_state: what torch seeds a worker's numpy with, four
    integers of 32 bits.
    """
    words: list[int] = _worker._generate_state(base_seed, worker_id)
    return words


def set_worker_info(worker_id: int, worker_count: int, seed: int, dataset: Any) -> None:
    """torch.utils.data._utils.worker._worker_info: what get_worker_info() returns from now on."""
    _worker._worker_info = _worker.WorkerInfo(
        id=worker_id, num_workers=worker_count, seed=seed, dataset=dataset
    )
