"""Two ranks over text that a slow map makes tokens of, packed, on a busy machine."""

from __future__ import annotations

import packed_text
import pytest


@pytest.mark.slow
def test_a_slow_map_is_no_stall_and_each_block_is_mapped_once() -> None:
    assert packed_text.main(["--mb", "12", "--load", "6", "--limit", "280"]) == 0
