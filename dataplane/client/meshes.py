"""Read a process's ranks from a DeviceMesh of torch, or from the frameworks that it has imported.

This module imports no framework, since an import takes seconds and may initialise the framework.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any, Final, Protocol

from dataplane.model.errors import ConfigError, DataplaneError
from dataplane.model.records import Topology

# These names of axes are used by torch's tutorials, torchtitan, Accelerate, Lightning, DeepSpeed,
# transformers and NeMo Automodel.
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
"""The two axes that together are torchtitan's batch axis."""


class Mesh(Protocol):
    """The part of torch.distributed.device_mesh.DeviceMesh that is read here."""

    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None:
        """The names of the axes."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of ranks along each axis."""

    def get_coordinate(self) -> Sequence[int] | None:
        """Return the place of this process along each axis; None if it is not in the mesh."""


def mesh_topology(
    mesh: Mesh,
    batch_axes: Sequence[str | int] | None,
    *,
    rank: int,
    world_size: int,
    whole: Mesh | None = None,
) -> Topology:
    """Return the topology of the process with this `rank`. Several batch axes are combined in the
    order of the mesh, where the last axis varies fastest. `whole` is the mesh from which `mesh` was
    cut.

    Raises:  ConfigError: the names do not say which axes are batch axes (a wrong guess would train
    on wrong samples unnoticed); or some batch axes are missing; or the process is not in the mesh.
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
    """Return whether `given` can be read as a mesh."""
    return all(hasattr(given, name) for name in ("mesh_dim_names", "shape", "get_coordinate"))


def _names(mesh: Mesh) -> tuple[str, ...]:
    return tuple(mesh.mesh_dim_names or (f"axis {axis}" for axis in range(len(mesh.shape))))


def _shown(mesh: Mesh) -> str:
    axes = zip(_names(mesh), mesh.shape, strict=True)
    return "DeviceMesh(" + ", ".join(f"{name}={size}" for name, size in axes) + ")"


def _batch_axes(mesh: Mesh, names: tuple[str, ...], given: Sequence[str | int] | None) -> list[int]:
    """Return the numbers of the batch axes, in the order of the mesh."""
    if given is None:
        known = BATCH_AXES | SEQUENCE_AXES | STAGE_AXES | OTHER_AXES
        for axis, name in enumerate(names):
            if mesh.shape[axis] > 1 and name not in known:
                raise ConfigError(
                    f"{_shown(mesh)}: the name {name!r} does not say whether ranks along this axis "
                    "read different batches. Pass the axes along which batches differ, as in "
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
                f"batch_axes={list(given)!r:.80}: {one!r:.80} is not an axis of {_shown(mesh)}",
                field="batch_axes",
            )
        chosen.add(place)
    return sorted(chosen)


def _check_whole(
    mesh: Mesh, names: tuple[str, ...], chosen: list[int], world_size: int, whole: Mesh | None
) -> None:
    """Refuse a mesh that is, or may be, part of a larger mesh and lacks one of its batch axes:
    ranks along the missing axis would read equal batches.
    """
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
    """Return why a mesh that divides the whole world may not be the mesh for batches, since a
    framework such as torchtitan makes several; "" if there is no doubt.
    """
    if "fsdp" in names:  # the axis "fsdp" combines dp_shard and cp
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
    """Combine axes, given as (coordinate, size), to one axis. Return its coordinate and size."""
    rank, joined = 0, 1
    for coordinate, size in axes:
        rank, joined = rank * size + coordinate, joined * size
    return rank, joined


# -- frameworks --------------------------------------------------------------------------------
#
# Read a process's ranks from the frameworks that it uses.
#
# Only modules that the process has already imported are examined. Only getters are called, which
# neither initialise a framework nor communicate.

Modules = Mapping[str, ModuleType]

_DISTRIBUTED = "torch.distributed"


def from_frameworks(modules: Modules) -> Topology | None:
    """Return the topology of the first initialised framework, without local ranks; None if no
    framework is initialised. `modules` is sys.modules.

    Raises:  ConfigError: a framework fails to answer, or its answer is inconsistent.
    """
    for name, read in READERS:
        try:
            found = read(modules)
        except DataplaneError:
            raise
        except Exception as error:
            raise ConfigError(
                f"{name} is initialised, but does not give the rank of this process "
                f"({type(error).__name__}: {error}): pass dp_rank= and dp_size=",
                field="topology",
            ) from error
        if found is not None:
            return found
    return None


def ranks_of(modules: Modules) -> tuple[int, int] | None:
    """Return the rank and world size of torch.distributed; None if it is not initialised."""
    group = _group(modules)
    return None if group is None else (int(group.get_rank()), int(group.get_world_size()))


def _group(modules: Modules) -> Any:
    group: Any = modules.get(_DISTRIBUTED)
    return group if group is not None and group.is_available() and group.is_initialized() else None


def _megatron(modules: Modules) -> Topology | None:
    """Read the topology from Megatron.

    Source:  megatron/core/parallel_state.py, 0.6 to 0.16.
    """
    state: Any = modules.get("megatron.core.parallel_state")
    ranks = ranks_of(modules)
    if state is None or ranks is None or not state.model_parallel_is_initialized():
        return None
    dp, tp = state.get_data_parallel_world_size(), state.get_tensor_model_parallel_world_size()
    cp, pp = state.get_context_parallel_world_size(), state.get_pipeline_model_parallel_world_size()
    return Topology(
        state.get_data_parallel_rank(),
        dp,
        *ranks,
        pp_rank=state.get_pipeline_model_parallel_rank(),
        pp_size=pp,
        cp_rank=state.get_context_parallel_rank(),
        cp_size=cp,
        source=f"Megatron-Core: dp={dp} tp={tp} cp={cp} pp={pp}",
    )


def _deepspeed(modules: Modules) -> Topology | None:
    """Read the topology from DeepSpeed.

    Without one of the layouts below, all ranks are data-parallel, and `_distributed` reads the
    topology. The functions in groups.py are not called, since some of them create a process group.

    Sources:  deepspeed/utils/groups.py (mpu, mesh_device), runtime/pipe/topology.py
    (PipelineParallelGrid), runtime/sequence_parallel/parallel_state_sp.py, 0.14 to 0.19.
    """
    groups: Any = modules.get("deepspeed.utils.groups")
    ranks = ranks_of(modules)
    if groups is None or ranks is None:
        return None
    mesh = getattr(groups, "mesh_device", None)
    if mesh is not None:
        found = mesh_topology(mesh, None, rank=ranks[0], world_size=ranks[1])
        return replace(found, source=f"DeepSpeed: {found.source}")
    mpu = getattr(groups, "mpu", None)
    ulysses: Any = modules.get("deepspeed.runtime.sequence_parallel.parallel_state_sp")
    if mpu is not None and not hasattr(mpu, "initialize_sequence_parallel"):
        return _of_mpu(mpu, ranks)
    if ulysses is not None and _is_started(ulysses):
        return _of_ulysses(ulysses, ranks)
    return None


def _of_mpu(mpu: Any, ranks: tuple[int, int]) -> Topology:
    """Read a model-parallel unit: Megatron's, or the grid of a pipeline."""
    dp = mpu.get_data_parallel_world_size()
    stage, stages = 0, 1
    for name in ("pipe_parallel", "pipeline_model_parallel"):
        if hasattr(mpu, f"get_{name}_world_size"):
            stage = getattr(mpu, f"get_{name}_rank")()
            stages = getattr(mpu, f"get_{name}_world_size")()
            break
    return Topology(
        mpu.get_data_parallel_rank(),
        dp,
        *ranks,
        pp_rank=stage,
        pp_size=stages,
        source=f"DeepSpeed: mpu {type(mpu).__name__}, dp={dp} pp={stages}",
    )


def _is_started(ulysses: Any) -> bool:
    try:
        ulysses.get_sequence_parallel_group()
    except AssertionError:  # there is no sequence-parallel group
        return False
    return True


def _of_ulysses(ulysses: Any, ranks: tuple[int, int]) -> Topology:
    """Read Ulysses' topology, in which the ranks of one sequence are consecutive."""
    sp = ulysses.get_sequence_parallel_world_size()
    return Topology(
        ranks[0] // sp,
        ranks[1] // sp,
        *ranks,
        cp_rank=ulysses.get_sequence_parallel_rank(),
        cp_size=sp,
        source=f"DeepSpeed: dp={ranks[1] // sp} sp={sp}",
    )


def _accelerate(modules: Modules) -> Topology | None:
    """Read the topology from Accelerate, whose mesh has the axes dp_replicate, dp_shard, cp, sp, tp
    in this order, where the last axis varies fastest.

    Sources:  accelerate/state.py and parallelism_config.py.
    """
    module: Any = modules.get("accelerate.state")
    if module is None or not module.is_initialized():
        return None
    state = module.AcceleratorState()
    rank, size = int(state.process_index), int(state.num_processes)
    parallel = getattr(state, "parallelism_config", None)
    tp = cp = 1
    if parallel is not None and size > 1:
        tp, cp = parallel.tp_size, parallel.cp_size * getattr(parallel, "sp_size", 1)
    within = tp * cp
    if size % within:
        raise ConfigError(
            f"Accelerate: {size} processes are not a multiple of tp={tp} times cp and sp={cp}, "
            "as its ParallelismConfig says",
            field="parallelism_config",
        )
    dp = size // within
    return Topology(
        rank // within,
        dp,
        rank,
        size,
        int(state.local_process_index),
        cp_rank=rank // tp % cp,
        cp_size=cp,
        source=f"Accelerate: dp={dp} cp={cp} tp={tp}",
    )


def _horovod(modules: Modules) -> Topology | None:
    """Read the topology from Horovod.   Source:  horovod/common/basics.py."""
    horovod: Any = modules.get("horovod.torch")
    if horovod is None or not horovod.is_initialized():
        return None
    rank, size = horovod.rank(), horovod.size()
    place = (rank, size, rank, size, horovod.local_rank(), horovod.local_size())
    return Topology(*place, source=f"Horovod: rank {rank} of {size}")


def _distributed(modules: Modules) -> Topology | None:
    ranks = ranks_of(modules)
    if ranks is None:
        return None
    return Topology(*ranks, *ranks, source=f"torch.distributed: rank {ranks[0]} of {ranks[1]}")


READERS: Final[tuple[tuple[str, Callable[[Modules], Topology | None]], ...]] = (
    ("Megatron-Core", _megatron),
    ("DeepSpeed", _deepspeed),
    ("Accelerate", _accelerate),
    ("Horovod", _horovod),
    ("torch.distributed", _distributed),
)
