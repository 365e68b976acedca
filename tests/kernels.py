"""The two ways to take rows, which must give the same bytes."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import NoReturn

import pytest

from dataplane.plan.loops import loops
from dataplane.worker.columns import BlockColumns, RowIndex
from dataplane.worker.kernel import kernel
from dataplane.worker.rows import CompiledRows, NumpyRows, Rows


def without(missing: str) -> NoReturn:
    """Fail in CI, which must have this; skip the test elsewhere."""
    told = f"{missing}: install one, and run `make setup`"
    if os.environ.get("CI"):
        pytest.fail(told)
    pytest.skip(told)


def compiled_rows(blocks: Sequence[BlockColumns], row_index: RowIndex) -> Rows:
    """With the compiled kernel, which CI must have."""
    found = kernel()
    if found.library is None:
        without(found.missing)
    return CompiledRows(found.library, blocks, row_index)


def loops_library() -> ctypes.CDLL:
    """The compiled loops of plans, which CI must have."""
    found = loops()
    if found.library is None:
        without(found.missing)
    return found.library


BOTH = (compiled_rows, NumpyRows)
