"""Read a process's place from a DeviceMesh of torch, without importing torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, Protocol

from dataplane.errors import ConfigError
from dataplane.model import Topology

# Names in use: torch's tutorials, torchtitan, Accelerate, Lightning, DeepSpeed, transformers,
# NeMo Automodel.
BATCH_AXES: Final = frozenset(
    [
        "dp",
        "dp_replicate",
        "dp_shard",
        "dp_shard_in_ep",
        "dp_shard_mod_ep",
        "ddp",
        "fsdp",
        "hsdp",
        "data",
        "data_parallel",
        "data_replicate",
        "data_shard",
        "batch",
        "replicate",
        "shard",
    ]
)
SEQUENCE_AXES: Final = frozenset(
    ["cp", "context", "context_parallel", "sp", "sequence", "sequence_parallel", "ulysses"]
)
STAGE_AXES: Final = frozenset(["pp", "pipe", "pipeline", "pipeline_parallel", "stage"])
OTHER_AXES: Final = frozenset(
    [
        "tp",
        "tensor",
        "tensor_parallel",
        "etp",
        "ep",
        "expert",
        "expert_parallel",
        "mp",
        "model",
        "model_parallel",
    ]
)


_PARTS_OF_BATCH: Final = frozenset(["dp_replicate", "dp_shard"])
"""Together, they are the batch axis of torchtitan."""


class Mesh(Protocol):
    """The part of torch.distributed.device_mesh.DeviceMesh that is read here."""

    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None:
        """Names of the axes."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Ranks along each axis."""

    def get_coordinate(self) -> Sequence[int] | None:
        """The place of this process along each axis; None if it is not in the mesh."""


def mesh_topology(
    mesh: Mesh,
    batch_axes: Sequence[str | int] | None,
    *,
    rank: int,
    world_size: int,
    whole: Mesh | None = None,
) -> Topology:
    """Return the place of the process with this `rank`. Batch axes are joined in the order of the
    mesh: the last one counts fastest. `whole` is the mesh from which `mesh` was cut, if it was.

    Raises:  ConfigError: it cannot be known which axes are batch axes; or some are left out; or the
    process is not in the mesh.
    """
    names = _names(mesh)
    at = mesh.get_coordinate()
    if at is None:
        raise ConfigError(
            f"rank {rank} is not in {_shown(mesh)}: pass the mesh of all ranks that train, and "
            "make no loader on others",
            field="device_mesh",
        )
    chosen = _batch_axes(mesh, names, batch_axes)
    if batch_axes is None:
        _check_whole(mesh, names, chosen, world_size, whole)
    dp_rank, dp_size = _place([(at[axis], mesh.shape[axis]) for axis in chosen])
    others = [axis for axis in range(len(names)) if axis not in chosen]
    cp_rank, cp_size = _place(
        [(at[axis], mesh.shape[axis]) for axis in others if names[axis] in SEQUENCE_AXES]
    )
    pp_rank, pp_size = _place(
        [(at[axis], mesh.shape[axis]) for axis in others if names[axis] in STAGE_AXES]
    )
    joined = ", ".join(names[axis] for axis in chosen) or "none"
    return Topology(
        dp_rank,
        dp_size,
        rank,
        world_size,
        pp_rank=pp_rank,
        pp_size=pp_size,
        cp_rank=cp_rank,
        cp_size=cp_size,
        source=f"{_shown(mesh)}, batch axes: {joined}",
    )


def is_mesh(given: object) -> bool:
    """Whether this can be read as a mesh."""
    return all(hasattr(given, name) for name in ("mesh_dim_names", "shape", "get_coordinate"))


def _names(mesh: Mesh) -> tuple[str, ...]:
    return tuple(mesh.mesh_dim_names or (f"axis {axis}" for axis in range(len(mesh.shape))))


def _shown(mesh: Mesh) -> str:
    axes = zip(_names(mesh), mesh.shape, strict=True)
    return "DeviceMesh(" + ", ".join(f"{name}={size}" for name, size in axes) + ")"


def _batch_axes(mesh: Mesh, names: tuple[str, ...], given: Sequence[str | int] | None) -> list[int]:
    """The numbers of the batch axes, in the order of the mesh."""
    if given is None:
        known = BATCH_AXES | SEQUENCE_AXES | STAGE_AXES | OTHER_AXES
        for axis, name in enumerate(names):
            if mesh.shape[axis] > 1 and name not in known:
                raise ConfigError(
                    f"{_shown(mesh)}: whether ranks along {name!r} read different batches cannot "
                    "be known from its name. Pass the axes along which batches differ, as in "
                    f"batch_axes={[one for one in names if one in BATCH_AXES] or ['…']!r}",
                    field="batch_axes",
                )
        return [axis for axis, name in enumerate(names) if name in BATCH_AXES]
    if isinstance(given, str):
        given = [given]
    chosen: set[int] = set()
    for one in given:
        place: object = names.index(one) if isinstance(one, str) and one in names else one
        if not isinstance(place, int) or isinstance(place, bool) or not 0 <= place < len(names):
            raise ConfigError(
                f"batch_axes={list(given)!r:.80}: {one!r:.80} is no axis of {_shown(mesh)}",
                field="batch_axes",
            )
        chosen.add(place)
    return sorted(chosen)


def _check_whole(
    mesh: Mesh, names: tuple[str, ...], chosen: list[int], world_size: int, whole: Mesh | None
) -> None:
    """Refuse a part of a mesh that lacks a batch axis: ranks along it would read equal batches."""
    missing: list[str] = []
    size = math.prod(mesh.shape)
    why = "" if whole is None or len(whole.shape) > 1 else _doubt(names, size, world_size)
    if why:
        raise ConfigError(
            f"{_shown(mesh)} divides a mesh of one axis, {why}. Pass the mesh for batches (in "
            "torchtitan parallel_dims.get_mesh('batch')), or batch_axes=",
            field="batch_axes",
        )
    if whole is not None and not (set(names) - set(_names(whole))):
        missing = [
            name
            for name, size in zip(_names(whole), whole.shape, strict=True)
            if size > 1 and name in BATCH_AXES and name not in names
        ]
    if missing or (not chosen and size < world_size):
        lacking = f"the batch axis {missing[0]!r}" if missing else "every batch axis"
        raise ConfigError(
            f"{_shown(mesh)} is a part of a mesh that lacks {lacking}, and covers {size} of "
            f"{world_size} ranks: pass the whole mesh, or name its axes in batch_axes=",
            field="device_mesh",
        )


def _doubt(names: tuple[str, ...], size: int, world_size: int) -> str:
    """Return why a view of the world, such as one of torchtitan's several, may not be the one for
    batches; "" if it is.
    """
    if "fsdp" in names:  # dp_shard and cp
        return (
            "and its axis 'fsdp' may join ranks that read different batches with ranks that share "
            "a sequence"
        )
    parts = _PARTS_OF_BATCH.intersection(names)
    if size < world_size and len(parts) == 1:
        (other,) = _PARTS_OF_BATCH - parts
        return (
            f"and covers {size} of {world_size} ranks: the others may lie along {other!r}, which "
            "it lacks, and would read equal batches"
        )
    return ""


def _place(axes: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return the rank within axes that are joined into one, and their size; an axis is (coordinate,
    size).
    """
    rank, joined = 0, 1
    for coordinate, size in axes:
        rank, joined = rank * size + coordinate, joined * size
    return rank, joined
