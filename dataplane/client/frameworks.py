"""Read a process's place from the frameworks that it uses.

Only modules that the process has imported itself are examined, and only functions that read are
called: none of them starts a framework or communicates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any, Final

from dataplane.client.meshes import mesh_topology
from dataplane.errors import ConfigError, DataplaneError
from dataplane.model import Topology

Modules = Mapping[str, ModuleType]

_DISTRIBUTED = "torch.distributed"


def from_frameworks(modules: Modules) -> Topology | None:
    """The topology that the first framework knows, without local ranks; None if no framework is
    initialised. `modules` are those of this process: sys.modules.

    Raises:  ConfigError: a framework does not answer, or its answer makes no sense.
    """
    for name, read in READERS:
        try:
            found = read(modules)
        except DataplaneError:
            raise
        except Exception as error:
            raise ConfigError(
                f"{name} is initialised, but does not tell this process's place "
                f"({type(error).__name__}: {error}): pass dp_rank= and dp_size=",
                field="topology",
            ) from error
        if found is not None:
            return found
    return None


def ranks_of(modules: Modules) -> tuple[int, int] | None:
    """torch.distributed's rank and world size; None if it is not initialised."""
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
    """Sources:  deepspeed/utils/groups.py (mpu, mesh_device), runtime/pipe/topology.py
    (PipelineParallelGrid), runtime/sequence_parallel/parallel_state_sp.py, 0.14 to 0.19.

    Without one of these all ranks are data-parallel, as torch.distributed says. The functions of
    groups are not asked then, since they make a process group.
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
    except AssertionError:  # how it says that there is none
        return False
    return True


def _of_ulysses(ulysses: Any, ranks: tuple[int, int]) -> Topology:
    """Ranks of one sequence follow one another."""
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
    """Sources:  accelerate/state.py, and parallelism_config.py: the axes of its mesh are in the
    order dp_replicate, dp_shard, cp, sp, tp, as ranks count.
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
    """Source:  horovod/common/basics.py."""
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
