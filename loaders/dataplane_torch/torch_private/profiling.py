"""Ranges of our work in profiles: `dataplane.wait`, while a trainer waits for a slab, and
`dataplane.copy`, while copies to a device are begun.
"""

from __future__ import annotations

import contextlib
import os
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd import profiler

from dataplane_torch.torch_private.versions import require

require(profiler, "_is_profiler_enabled")

_NOTHING = contextlib.nullcontext()
_HAS_NVTX = "NVTX_INJECTION64_PATH" in os.environ and torch.version.cuda is not None
"""Whether this process was started by a profiler that reads NVTX, such as Nsight Systems."""


def in_profile(name: str) -> AbstractContextManager[Any]:
    """Return a range of this name for the active profiler; without a profiler, do nothing.

    torch.autograd.profiler._is_profiler_enabled: whether torch.profiler, or emit_nvtx, is active.
    Reading it costs nothing; entering a range that nobody sees would take microseconds.
    """
    if profiler._is_profiler_enabled:
        return profiler.record_function(name)
    nvtx: Any = torch.cuda.nvtx
    return nvtx.range(name) if _HAS_NVTX else _NOTHING
