"""Requests to open a job, with the options of its spec by name."""

from typing import Any

from dataplane.model.config import JobSpec
from dataplane.model.records import Topology
from dataplane.rpc.messages import DatasetSource, OpenJob


def opening(
    source: DatasetSource | str,
    place: Topology | None = None,
    *,
    job: str = "j",
    launch: str = "i",
    member: str = "m",
    **given: Any,
) -> OpenJob:
    source = source if isinstance(source, DatasetSource) else DatasetSource((source,))
    own = {name: given.pop(name) for name in OpenJob.__struct_fields__ if name in given}
    spec = JobSpec("", **{"lanes": 0, "window": 0} | given)
    return OpenJob(job, launch, member, source, place or Topology(), spec, **own)
