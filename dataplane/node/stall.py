"""Answer a rank that waits for a batch: with the progress of its slab, or why there is none."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from dataplane.model.errors import DataplaneError, DataStallError
from dataplane.node.fetch import Trouble
from dataplane.rpc.messages import Working
from dataplane.scheduler.events import SlabProgress, Stalled
from dataplane.scheduler.records import BlockPhase, SlabPhase
from dataplane.scheduler.stalls import NO_ROOM, PLAN

_URLS_ASKED_MAX = 64
_RAISE = "or raise stall_timeout_s"
_STORE = f"check that the store answers (`dataplane doctor URL` tries it), {_RAISE}"
_MEMORY = (
    "raise block_arena_bytes, or close other jobs of this node (`dataplane status` shows how full"
    " its memory is)"
)
_WORKERS = "check in the node's log and with `top` what its workers wait for: a disk may not answer"
_TRAINER = "let go of batches that are no longer needed, or raise delivery_bytes_per_rank"
_NODE = "see the node's log"


class Called(Struct, frozen=True):
    """The functions of a job that workers call: their names, "" without."""

    map: str = ""
    collate: str = ""


def working(progress: SlabProgress, called: Called) -> Working:
    """Return the progress of a slab, for the trainer that waits for it."""
    return Working(_words(progress, called)[0], progress.done, progress.total)


def stall_error(
    stalled: Stalled, urls: Sequence[str], called: Called, node_id: str, trouble: Trouble
) -> DataplaneError:
    """Return the store's error, if the next slab lacks blocks that the store does not deliver; else
    a DataStallError that names the stage and the function. `urls` are those of the blocks' shards.
    """
    waited_s, shard = stalled.waited_s, urls[0] if urls else None
    for url in [*dict.fromkeys(urls)][:_URLS_ASKED_MAX]:
        error = trouble(url)
        if error is not None:
            return type(error)(
                f"no batch for {waited_s:.0f} s, since {url} cannot be read: {error} "
                f"(node {node_id}). Repair the store, or raise stall_timeout_s",
                **{**error.nouns, "shard": url, "node": node_id},
            )
    progress = stalled.progress
    words, function, advice = _words(progress, called)
    ready = f", {progress.done} of {progress.total} blocks are ready" if progress.phase else ""
    return DataStallError(
        f"no batch for {waited_s:.0f} s, and no progress: the node is {words}{ready}"
        + (f", the first missing one of {shard}" if shard else "")
        + f" (node {node_id}); {advice}",
        stage=progress.stage,
        shard=shard,
        node=node_id,
        function=function or None,
        done=progress.done,
        total=progress.total,
    )


def _words(progress: SlabProgress, called: Called) -> tuple[str, str, str]:
    """Describe the node's work for this slab, the function that it calls, and what helps if that
    hangs.
    """
    stage = progress.stage
    if stage == SlabPhase.WAITING.value:
        if progress.phase is BlockPhase.FETCHING:
            return "reading blocks", "", _STORE
        if progress.phase is not BlockPhase.DECODING:
            return "waiting for memory for blocks", "", _MEMORY
        if called.map:
            return f"calling map={called.map!r} over blocks", called.map, _WORKERS
        return "decoding blocks", "", _WORKERS
    if stage == SlabPhase.ASSEMBLING.value:
        if called.collate:
            return f"calling collate={called.collate!r}", called.collate, _WORKERS
        return "making the batch", "", _WORKERS
    if stage == NO_ROOM:
        return stage, "", f"{_TRAINER}, {_RAISE}"
    if stage == PLAN:
        return "planning the batch", "", _NODE
    return stage, "", f"`dataplane status` shows the nodes of the job, {_RAISE}"


def undecided(waited_s: float, job: str, coordinator: str, node_id: str) -> DataStallError:
    """Return the error for a rank whose next batches may have changed weights of a mixture."""
    return DataStallError(
        f"no batch for {waited_s:.0f} s: the coordinator at {coordinator} has not said where the"
        f" new weights of `dataplane mix {job}` begin, and the next batches may lie behind it"
        f" (node {node_id}). If it does not answer, restart it; then resume the job",
        stage="coordinator",
        job=job,
        coordinator=coordinator,
        node=node_id,
    )
