"""While a trainer waits, none of a node's workers is idle: on a virtual clock."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_workers import IDLE_MAX, Host, idle_in_batches, idle_in_pieces


@settings(max_examples=12)
@given(
    st.integers(1, 64),
    st.integers(1, 512),
    st.integers(1, 64),
    st.floats(-5, -1),
    st.integers(0, 9),
)
def test_while_a_trainer_waits_all_workers_make_pieces_of_its_slabs(
    workers: int, rows: int, batches: int, power: float, seed: int
) -> None:
    assert idle_in_pieces(workers, rows, batches, 10**power, seed) <= IDLE_MAX


def test_pieces_are_larger_while_every_worker_has_one() -> None:
    host = Host(16, 64, 1, 0.0014, is_divisible=True)
    host.run(4.0)
    later = sorted(host.pieces[100:])
    assert max(host.pieces[:50]) == 16  # the first slabs show how long a row takes
    assert later[len(later) // 2] == 4


@settings(max_examples=12)
@given(st.integers(1, 64), st.integers(1, 64), st.floats(-3, -1), st.integers(0, 9))
def test_workers_that_make_whole_slabs_are_all_busy_while_a_trainer_waits(
    workers: int, batches: int, power: float, seed: int
) -> None:
    assert idle_in_batches(workers, batches, 10**power, seed) <= IDLE_MAX


@settings(max_examples=8)
@given(st.integers(2, 8), st.integers(1, 32), st.booleans(), st.integers(0, 9))
def test_ranks_of_one_host_get_equal_shares_of_its_workers(
    ranks: int, workers: int, is_divisible: bool, seed: int
) -> None:
    host = Host(workers, 64, 4, 0.001, is_divisible=is_divisible, ranks=ranks, seed=seed)
    host.run(ranks * 30 * 0.256 / min(workers, 8))
    assert min(host.slabs) >= 0.7 * max(host.slabs) - 4
