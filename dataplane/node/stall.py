"""The error for a rank that has waited for a batch until its deadline: why it gets none."""

from __future__ import annotations

from collections.abc import Sequence

from dataplane.errors import DataplaneError, DataStallError
from dataplane.node.fetch import Trouble
from dataplane.scheduler.events import Stalled

_URLS_ASKED_MAX = 64


def stall_error(
    stalled: Stalled, urls: Sequence[str], node_id: str, trouble: Trouble
) -> DataplaneError:
    """The store's error, if the next slab lacks blocks that the store does not deliver; else a
    DataStallError that names the stage. `urls` are those of the blocks' shards.
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
    return DataStallError(
        f"no batch for {waited_s:.0f} s: the slab is {stalled.stage}"
        + (f", first of {shard}" if shard else "")
        + f" (node {node_id}); check the store, or raise stall_timeout_s",
        stage=stalled.stage,
        shard=shard,
        node=node_id,
    )


def undecided(waited_s: float, job: str, coordinator: str, node_id: str) -> DataStallError:
    """The error for a rank whose next batches may be of other weights of a mixture."""
    return DataStallError(
        f"no batch for {waited_s:.0f} s: the coordinator at {coordinator} has not said where the"
        f" new weights of `dataplane mix {job}` begin, and the next batches may lie behind it"
        f" (node {node_id}). If it does not answer, restart it; then resume the job",
        stage="coordinator",
        job=job,
        coordinator=coordinator,
        node=node_id,
    )
