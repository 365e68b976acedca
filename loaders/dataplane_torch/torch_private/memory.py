"""How torch collates tensors, shares them with other processes, and pins them for a device."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any, cast

import torch
from torch.utils import data as torch_data

from dataplane_torch.torch_private.versions import require

require(torch.UntypedStorage, "_new_shared")
require(ForkingPickler, "_extra_reducers")
require(torch_data, "_utils")
require(torch_data._utils, "collate", "pin_memory")
require(torch_data._utils.collate, "collate_tensor_fn", "default_collate_fn_map")
require(torch_data._utils.pin_memory, "pin_memory")

_collate: Any = torch_data._utils.collate

stack_tensors: Callable[..., torch.Tensor] = _collate.collate_tensor_fn
"""torch.utils.data._utils.collate.collate_tensor_fn: default_collate calls it for a list of
tensors. In a worker it stacks them into storage of `new_shared_storage`.
"""

pin_memory: Callable[..., Any] = torch_data._utils.pin_memory.pin_memory
"""torch.utils.data._utils.pin_memory.pin_memory: a copy of a batch in pinned memory: its tensors,
and all objects with their own pin_memory(). Its `device` is `PassNames.pinned_for`. Up to torch 2.6
a tuple becomes a list; newer versions keep the tuple.
"""

tensor_reducers: dict[type, Any] = cast("Any", ForkingPickler)._extra_reducers
"""multiprocessing.reduction.ForkingPickler._extra_reducers, where torch.multiprocessing registers
how tensors and storages are pickled for another process: as names of shared memory.
"""


def collate_tensors_by(stack: Callable[..., torch.Tensor]) -> None:
    """Set torch.utils.data._utils.collate.default_collate_fn_map[torch.Tensor]: default_collate
    calls `stack(tensors, collate_fn_map=…)` from now on, in this process. Does nothing if a user
    has set another function.
    """
    if _collate.default_collate_fn_map.get(torch.Tensor) is stack_tensors:
        _collate.default_collate_fn_map[torch.Tensor] = stack


def new_shared_storage(size_bytes: int) -> Any:
    """torch.UntypedStorage._new_shared: storage in shared memory. torch's own collate functions use
    it in a worker, so that sending the storage to the trainer copies nothing.
    """
    return torch.UntypedStorage._new_shared(size_bytes)  # type: ignore[no-untyped-call]


def make_no_shared_storage() -> None:
    """Replace torch.UntypedStorage._new_shared: from now on, requests for shared storage in this
    process get private memory. For workers that send their tensors in another way.
    """
    storage: Any = torch.UntypedStorage
    storage._new_shared = _new_private_storage


def has_cuda_context(index: int) -> bool:
    """torch._C._cuda_hasPrimaryContext: whether this process has a context on a CUDA device; asking
    creates none. Only builds for CUDA or ROCm have the function: call it only if there are devices.

    Raises:  VersionMismatch: this torch lacks it.
    """
    require(torch._C, "_cuda_hasPrimaryContext")
    return bool(torch._C._cuda_hasPrimaryContext(index))  # type: ignore[attr-defined]


def _new_private_storage(size_bytes: int, *, device: str = "cpu") -> Any:
    storage: Any = torch.UntypedStorage
    return storage(size_bytes, device=device)
