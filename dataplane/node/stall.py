"""Why a rank gets no batch: the error for one that has waited as long as it may."""

from __future__ import annotations

from dataplane.errors import DataplaneError, DataStallError
from dataplane.node.fetch import Fetcher
from dataplane.node.shared import SharedSlabs
from dataplane.node.work import Phase, StreamState

_URLS_ASKED_MAX = 64


def stall_error(
    stream: StreamState, waited_s: float, node_id: str, fetcher: Fetcher, shared: SharedSlabs
) -> DataplaneError:
    """The error of the store, if the next slab lacks blocks that it does not give; else a
    DataStallError that names the stage.
    """
    stage, shard = "plan", None
    if stream.works:
        work = stream.works[0]
        stage = work.phase.value
        if work.missing:
            urls = sorted({work.dataset.url(index) for index in work.missing})
            for url in urls[:_URLS_ASKED_MAX]:
                trouble = fetcher.trouble(url)
                if trouble is not None:
                    return type(trouble)(
                        f"no batch for {waited_s:.0f} s, since {url} cannot be read: {trouble} "
                        f"(node {node_id}). Mend the store, or raise stall_timeout_s",
                        **{**trouble.nouns, "shard": url, "node": node_id},
                    )
            shard = work.dataset.url(min(work.missing))
        elif work.phase is Phase.WAITING:
            stage = "waiting for room in the delivery arena"
            if shared.find(work) is not None:
                stage = "being made for another job of its group"
    return DataStallError(
        f"no batch for {waited_s:.0f} s: the slab is {stage}"
        + (f", first of {shard}" if shard else "")
        + f" (node {node_id}); look at the store's health, or raise stall_timeout_s",
        stage=stage,
        shard=shard,
        node=node_id,
    )
