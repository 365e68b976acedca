"""What a rank hears that waits for a batch, or has waited too long."""

from __future__ import annotations

import pytest

from dataplane.model.errors import DataStallError, StoreUnavailable
from dataplane.node.delivery import Called, stall_error, working
from dataplane.rpc.messages import Working
from dataplane.scheduler.events import SlabProgress, Stalled
from dataplane.scheduler.records import BlockPhase

MAPPED = Called("mytext:Tokenise", "mytext:pad")
BLOCKS = "waiting for blocks"


def error_of(progress: SlabProgress, called: Called = MAPPED) -> DataStallError:
    url = ["s3://b/a.parquet"] if progress.stage == BLOCKS else []
    error = stall_error(Stalled(1, 1, 121.0, progress, ()), url, called, "n-1", lambda _: None)
    assert isinstance(error, DataStallError)
    assert error.stage == progress.stage
    assert "no batch for 121 s, and no progress" in str(error)
    assert "node n-1" in str(error)
    return error


@pytest.mark.parametrize(
    ("progress", "words", "advice"),
    [
        (SlabProgress(BLOCKS, 12, 40, BlockPhase.FETCHING), "reading blocks", "the store answers"),
        (SlabProgress(BLOCKS, 12, 40), "waiting for memory for blocks", "block_arena_bytes"),
        (
            SlabProgress("waiting for room in the delivery arena", 40, 40),
            "waiting for room in the delivery arena",
            "delivery_bytes_per_rank",
        ),
        (SlabProgress("plan"), "planning the batch", "log"),
        (SlabProgress("being made by node b"), "being made by node b", "dataplane status"),
    ],
)
def test_a_stall_names_its_stage_and_what_helps_there(
    progress: SlabProgress, words: str, advice: str
) -> None:
    error = error_of(progress)
    assert f"the node is {words}" in str(error)
    assert advice in str(error)
    assert error.nouns["function"] is None
    assert ("store" in advice) == ("store" in str(error))


def test_a_stall_names_the_function_and_how_many_blocks_are_done() -> None:
    error = error_of(SlabProgress(BLOCKS, 12, 40, BlockPhase.DECODING))
    assert "calling map='mytext:Tokenise' over blocks, 12 of 40 blocks are ready" in str(error)
    assert "first missing one of s3://b/a.parquet" in str(error)
    assert (error.nouns["function"], error.nouns["done"]) == ("mytext:Tokenise", 12)
    error = error_of(SlabProgress("assembling", 40, 40))
    assert "calling collate='mytext:pad'" in str(error)
    plain = error_of(SlabProgress(BLOCKS, 12, 40, BlockPhase.DECODING), Called())
    assert "decoding blocks" in str(plain)
    assert "making the batch" in str(error_of(SlabProgress("assembling", 40, 40), Called()))


def test_a_store_that_is_known_to_be_away_is_the_error() -> None:
    away = StoreUnavailable("it refuses connections", store="s3://b")
    progress = SlabProgress(BLOCKS, 12, 40, BlockPhase.FETCHING)
    stalled, urls = Stalled(1, 1, 121.0, progress, ()), ["s3://b/a.parquet"]
    error = stall_error(stalled, urls, MAPPED, "n-1", lambda _: away)
    assert isinstance(error, StoreUnavailable)
    assert "s3://b/a.parquet cannot be read: it refuses connections" in str(error)


def test_a_trainer_hears_what_its_node_does() -> None:
    progress = SlabProgress(BLOCKS, 12, 40, BlockPhase.DECODING)
    assert working(progress, Called("m:f")) == Working("calling map='m:f' over blocks", 12, 40)
