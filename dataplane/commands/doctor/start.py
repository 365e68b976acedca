"""Explain the time until the first batch, stage by stage. Pure."""

from __future__ import annotations

from dataplane.client.first_batch import FirstBatch

_MEANINGS = {
    "node": "the node started, or was found",
    "connect": "messages, and memory shared with the node",
    "index": "shards were listed and indexed",
    "plan": "columns and memory were planned",
    "fetch": "the first blocks were read from storage",
    "decode": "they were decoded",
    "room": "for a free slot",
    "queue": "for a free worker",
    "assemble": "the first batches were made",
    "hand over": "their rows were planned, and the slab was handed over",
}
_ADVICE = {
    "node": "run `dataplane serve` on this host and pass service=: that node has started already",
    "connect": "a host that is less busy, since this stage does almost nothing by itself",
    "index": "run `dataplane index URL -o FILE` once, and pass that file in place of the URL",
    "plan": "columns=[…]: choose only columns that the trainer needs, since each one is planned",
    "fetch": "fewer lanes or a smaller window, since a first shuffled batch needs a block of each "
    "open window; or smaller blocks, or a store closer to this host",
    "decode": "smaller blocks (row groups), or shards that need no decoding (uncompressed Arrow)",
    "room": "delivery_bytes_per_rank: a larger one has free slots sooner",
    "queue": "worker_count: more workers, or `dataplane serve`, whose workers have started already",
    "assemble": "more workers, or smaller batches or images: the first slab is one batch",
    "hand over": "fewer jobs on this node: planning one batch and its messages take milliseconds",
}


def rows(first: FirstBatch) -> list[tuple[str, str, str]]:
    """A table: stage, time, meaning. Empty if there was no batch."""
    if not first.total_s:
        return []
    told = [("first batch", f"{first.total_s * 1e3:,.0f} ms", "from a new loader, divided into")]
    for stage, seconds in _named(first).items():
        told.append((f"  {stage}", f"{seconds * 1e3:,.0f} ms", _MEANINGS[stage]))
    return told


def advice(first: FirstBatch) -> str:
    """One sentence about the longest stage; "" if there was no batch."""
    if not first.total_s:
        return ""
    named = _named(first)
    stage = max(named, key=lambda one: named[one])
    share = named[stage] / first.total_s
    return (
        f"The first batch waited most for {stage} ({share:.0%}). To shorten it: {_ADVICE[stage]}."
    )


def as_json(first: FirstBatch) -> dict[str, object]:
    """Seconds by stage, and the advice."""
    return {"total_s": first.total_s, "stages_s": first.stages(), "advice": advice(first)}


def _named(first: FirstBatch) -> dict[str, float]:
    return {name.replace("_", " "): seconds for name, seconds in first.stages().items()}
