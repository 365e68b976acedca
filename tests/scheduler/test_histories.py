"""Some histories; `python tests/scheduler_histories.py` runs thousands."""

from __future__ import annotations

import pytest
from scheduler_histories import failure

_TOGETHER = 40


@pytest.mark.parametrize("first", range(0, 80, _TOGETHER))
def test_every_invariant_holds_after_every_event_of_a_history(first: int) -> None:
    for seed in range(first, first + _TOGETHER):
        what = failure(seed)
        assert not what, f"{what}again: python tests/scheduler_histories.py --seed {seed}"
