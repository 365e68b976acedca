"""The kernel and its oracle, which must give the same bytes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import pytest
from oracles import packs
from oracles.rows import NumpyRows

from dataplane.worker import gather, packing
from dataplane.worker.columns import BlockColumns, RowIndex
from dataplane.worker.rows import Rows


def without(missing: str) -> NoReturn:
    """Fail in CI, which must have this; skip the test elsewhere."""
    told = f"{missing}: install one, and run `make setup`"
    if os.environ.get("CI"):
        pytest.fail(told)
    pytest.skip(told)


Open = Callable[[Sequence[BlockColumns], RowIndex], Any]
BOTH: tuple[Open, ...] = (Rows, NumpyRows)


@contextmanager
def rows_by(how: Open) -> Iterator[None]:
    """Slabs that are begun meanwhile take their rows from one of `BOTH`."""
    write_packs = packing.write_packs if how is Rows else packs.write_packs
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather, "Rows", how)
        patch.setattr(packing, "Rows", how)
        patch.setattr(packing, "write_packs", write_packs)
        yield
