"""JobSpec: what every member of a job agrees on. NodeConfig: what one process was told."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass

from dataplane.model import End, ImageSpec, ListPolicy, StackSpec

# The build reads the version here; clients, nodes and coordinators of one service must be equal.
VERSION = "0.1.0"
PROTOCOL_VERSION = 1


@dataclass(frozen=True, slots=True)
class JobSpec:
    """All that decides which samples, in what order, in what form. Compared at every join.

    `fingerprint` is the manifest's; `columns` are leaf columns in batch order; `ragged` names the
    list columns that arrive as values and offsets; `fill_null` replaces nulls, per column;
    `transforms` say which columns are images, and what becomes of them; `stack` which columns come
    as one.
    """

    fingerprint: str
    seed: int = 0
    shuffle: bool = False
    lanes: int = 1
    window: int = 1
    global_batch: int = 1
    end: End = End.RAGGED
    columns: tuple[str, ...] = ()
    lists: ListPolicy = ListPolicy.PADDED
    fill_null: tuple[tuple[str, float], ...] = ()
    transforms: tuple[ImageSpec, ...] = ()
    stack: tuple[StackSpec, ...] = ()

    def digest(self) -> str:
        """32 hex digits over everything but `global_batch`.

        The cursor counts samples, so a run may be resumed with another global batch; every other
        difference would change what the remaining samples are, or how they look. A job without
        transforms or stacks has the digest that it had before there were any.
        """
        fields = dataclasses.asdict(self)
        del fields["global_batch"]
        for later in ("transforms", "stack"):
            if not fields[later]:
                del fields[later]
        canonical = json.dumps(fields, sort_keys=True, separators=(",", ":"))
        return hashlib.blake2b(canonical.encode(), digest_size=16).hexdigest()

    def differences(self, other: JobSpec) -> tuple[tuple[str, str, str], ...]:
        """(field, mine, other's) for every field that differs; of transforms, what differs."""
        found = {
            field.name: (getattr(self, field.name), getattr(other, field.name))
            for field in dataclasses.fields(self)
        }
        return tuple(
            (name, _images_shown(mine, others), _images_shown(others, mine))
            if name == "transforms"
            else (name, str(mine), str(others))
            for name, (mine, others) in found.items()
            if mine != others
        )


def _images_shown(images: tuple[ImageSpec, ...], others: tuple[ImageSpec, ...]) -> str:
    """What is not equal in the others: "jpg: flip=0.5, dtype=float32"."""
    by_column = {image.column: image for image in others}
    shown = []
    for image in images:
        other = by_column.get(image.column)
        fields = [
            f"{name}={value}"
            for name, value in dataclasses.asdict(image).items()
            if name != "column" and (other is None or value != getattr(other, name))
        ]
        shown += [f"{image.column}: {', '.join(fields)}"] if fields else []
    return "; ".join(shown) or "none"


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """One cache node. Budgets are hard, in bytes; times are in seconds. There are `worker_count`
    workers, and up to `worker_count_max` where more of them help.
    """

    socket_name: str
    cache_dir: str
    block_arena_bytes: int
    delivery_bytes_per_rank: int
    slab_bytes: int
    worker_count: int
    fetch_count: int
    fetch_timeout_s: float
    stall_timeout_s: float
    lease_s: float
    coordinator: str = ""
    embedded: bool = False
    linger_s: float = 2.0
    worker_count_max: int = 0
