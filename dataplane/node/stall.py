"""Why a rank gets no batch: the error for one that has waited as long as it may."""

from __future__ import annotations

from dataplane.errors import DataplaneError, DataStallError
from dataplane.node.dataset import Dataset
from dataplane.node.fetch import Trouble
from dataplane.scheduler.events import Stalled

_URLS_ASKED_MAX = 64


def stall_error(
    stalled: Stalled, dataset: Dataset, node_id: str, trouble: Trouble
) -> DataplaneError:
    """The error of the store, if the next slab lacks blocks that it does not give; else a
    DataStallError that names the stage.
    """
    waited_s, shard = stalled.waited_s, None
    if len(stalled.missing):
        shards = dict.fromkeys(dataset.manifest.block_shard[stalled.missing].tolist())
        urls = [dataset.manifest.shards[number].url for number in shards]
        shard = urls[0]
        for url in urls[:_URLS_ASKED_MAX]:
            error = trouble(url)
            if error is not None:
                return type(error)(
                    f"no batch for {waited_s:.0f} s, since {url} cannot be read: {error} "
                    f"(node {node_id}). Mend the store, or raise stall_timeout_s",
                    **{**error.nouns, "shard": url, "node": node_id},
                )
    return DataStallError(
        f"no batch for {waited_s:.0f} s: the slab is {stalled.stage}"
        + (f", first of {shard}" if shard else "")
        + f" (node {node_id}); look at the store's health, or raise stall_timeout_s",
        stage=stalled.stage,
        shard=shard,
        node=node_id,
    )
