"""Find the ranks of this process.

Sources, in this order: an explicit topology; a DeviceMesh; the frameworks that the process uses
(meshes.py); the environment of its launcher. Without any of these, the process is a single rank.
The topology's `source` names the source that was used.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Final

from msgspec import Struct

from dataplane.base.units import whole
from dataplane.client.meshes import Mesh, Modules, from_frameworks, mesh_topology, ranks_of
from dataplane.model.errors import ConfigError
from dataplane.model.records import Topology

# -- environments ------------------------------------------------------------------------------
#
# Read the ranks of this process from its launcher's environment variables.

LIMIT: Final = 1 << 31
ALONE: Final = "no launcher: a single process"


class Launcher(Struct, frozen=True):
    """The environment variables of one launcher. The value of a `local_size` variable may have
    several numbers, in Slurm's notation.

    Sources:  torchrun: "Environment Variables" of docs.pytorch.org/docs/stable/elastic/run.html;
    also set for each pod by Kubeflow's PyTorchJob (pkg/controller.v1/pytorch/envvar.go) and
    Volcano's pytorch plugin (docs/user-guide/how_to_use_pytorch_plugin.md).
    Horovod: horovod/runner/gloo_run.py.  Slurm: "OUTPUT ENVIRONMENT VARIABLES" of srun(1).
    Open MPI: "Environment variables" of docs.open-mpi.org, and PMI: MPICH's Hydra and Intel MPI.
    PALS, mpiexec of PBS on HPE Cray: mpiexec(1). jsrun of LSF: "Job step environment" of jsrun(1).
    Kubeflow Trainer: its torch plugin sets torchrun's own PET_ variables in the pods of a JobSet.
    """

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: tuple[str, ...]


# MPI and PMI come last: processes started by other launchers often inherit variables of MPI or PMI.
LAUNCHERS: Final = (
    Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", ("LOCAL_WORLD_SIZE",)),
    Launcher(
        "Horovod",
        "HOROVOD_RANK",
        "HOROVOD_SIZE",
        "HOROVOD_LOCAL_RANK",
        ("HOROVOD_LOCAL_SIZE",),
    ),
    Launcher(
        "Slurm",
        "SLURM_PROCID",
        "SLURM_NTASKS",
        "SLURM_LOCALID",
        ("SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
    ),
    Launcher(
        "jsrun of LSF",
        "JSM_NAMESPACE_RANK",
        "JSM_NAMESPACE_SIZE",
        "JSM_NAMESPACE_LOCAL_RANK",
        ("JSM_NAMESPACE_LOCAL_SIZE",),
    ),
    Launcher("PALS of PBS", "PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", ("PALS_LOCAL_SIZE",)),
    Launcher(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    Launcher("PMI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", ("MPI_LOCALNRANKS",)),
)
_OF_TRAINER = Launcher("a JobSet of Kubeflow Trainer", "PET_NODE_RANK", "PET_NNODES", "", ())


def from_environment(environ: Mapping[str, str]) -> Topology:
    """Return the topology in the launcher's variables; a single rank without a launcher.

    A shell inside a Slurm allocation has a size but no rank. It was not launched as a rank, so it
    is a single rank.

    Raises:  ConfigError: a rank without a size, invalid or contradictory numbers, or a rank that
    counts pods instead of processes.
    """
    _refuse_pod_rank(environ)
    for launcher in LAUNCHERS:
        if launcher.rank in environ and not _is_batch_script(environ, launcher):
            return _launched(environ, launcher)
    if environ.get("PET_NPROC_PER_NODE") == "1" and _OF_TRAINER.rank in environ:
        return _launched(environ, _OF_TRAINER)
    index = environ.get("JOB_COMPLETION_INDEX")
    if index is None:
        return Topology(source=ALONE)
    return Topology(source=f"{ALONE} (pod {index} of a Job or JobSet, which gives it no rank)")


def several_pods(environ: Mapping[str, str]) -> str:
    """Return the variable that shows that a process without a rank is in one of several pods of a
    Job or JobSet; "" if there is no such variable. An index of 0 alone is not enough, since a
    single pod has it too; but manifests name a master's address only for several pods.
    """
    index, master = environ.get("JOB_COMPLETION_INDEX", ""), environ.get("MASTER_ADDR", "")
    if index.isdecimal() and int(index):
        return f"JOB_COMPLETION_INDEX={index}"
    return f"JOB_COMPLETION_INDEX=0 and MASTER_ADDR={master}" if index == "0" and master else ""


def _refuse_pod_rank(environ: Mapping[str, str]) -> None:
    """Refuse the variables that PyTorchJob sets in a pod of several processes, where RANK counts
    pods and WORLD_SIZE counts processes. These variables are meant for torchrun, which replaces
    both, and sets LOCAL_RANK.
    """
    names = ("RANK", "WORLD_SIZE", "PET_NNODES", "PET_NPROC_PER_NODE")
    if "LOCAL_RANK" in environ or not all(environ.get(name, "").isdecimal() for name in names):
        return
    rank, size, pods, pod_size = (int(environ[name]) for name in names)
    if pod_size > 1 and size == pods * pod_size and environ.get("PET_NODE_RANK") == str(rank):
        raise ConfigError(
            f"RANK={rank} is the number of this pod, and WORLD_SIZE={size} counts the processes of "
            f"{pods} pods with PET_NPROC_PER_NODE={pod_size} each: start them with torchrun, or "
            "pass dp_rank= and dp_size=",
            variable="RANK",
        )


def _is_batch_script(environ: Mapping[str, str], launcher: Launcher) -> bool:
    """Return whether this process runs the script of an sbatch job itself. Its variables claim rank
    0 of all tasks, but only processes started by srun are tasks.
    """
    in_script = environ.get("ENVIRONMENT") == "BATCH" and "SLURM_STEP_ID" not in environ
    return launcher.name == "Slurm" and in_script


def _launched(environ: Mapping[str, str], launcher: Launcher) -> Topology:
    if launcher.size not in environ:
        raise ConfigError(
            f"{launcher.rank} is set but {launcher.size} is not: {launcher.name} sets both; set "
            "both, or unset both to run as a single process",
            variable=launcher.size,
        )
    rank, size = (_number(environ, name) for name in (launcher.rank, launcher.size))
    if not 0 <= rank < size:
        raise ConfigError(
            f"{launcher.rank}={rank} is not in 0..{size - 1}, as {launcher.size}={size} says",
            variable=launcher.rank,
            expected=f"0..{size - 1}",
            found=rank,
        )
    local_rank = _number(environ, launcher.local_rank) if launcher.local_rank in environ else 0
    named = next((name for name in launcher.local_size if name in environ), None)
    # Slurm writes "4(x2),3" for two nodes with four tasks and one node with three tasks, and does
    # not say which of the nodes this is. Take the smallest consistent number, which is enough.
    text = "" if named is None else environ[named]
    local_size = int(text) if text.isdecimal() else local_rank + 1
    if named is not None and not text.isdecimal() and launcher.name != "Slurm":
        _number(environ, named)
    if local_rank >= local_size:
        raise ConfigError(
            f"{launcher.local_rank}={local_rank} is not in 0..{local_size - 1}, as "
            f"{named}={local_size} says",
            variable=launcher.local_rank,
            expected=f"0..{local_size - 1}",
            found=local_rank,
        )
    source = f"{_named(environ, launcher)}: {launcher.rank}={rank}, {launcher.size}={size}"
    return Topology(rank, size, rank, size, local_rank, local_size, source=source)


def _named(environ: Mapping[str, str], launcher: Launcher) -> str:
    """Return the name of the launcher that set these variables: several set RANK and WORLD_SIZE."""
    if launcher.rank != "RANK" or "TORCHELASTIC_RUN_ID" in environ or "LOCAL_RANK" in environ:
        return launcher.name
    if "VC_TASK_INDEX" in environ or "VK_TASK_INDEX" in environ:
        return "Volcano"
    if "JOB_COMPLETION_INDEX" in environ:
        return "JobSet"
    if "KUBERNETES_SERVICE_HOST" in environ:
        return "PyTorchJob"
    return "environment"


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ[name].strip()
    if not (text.isascii() and text.isdecimal()) or int(text) >= LIMIT:
        raise ConfigError(
            f"{name}={environ[name]!r} is not a number of processes",
            variable=name,
            found=environ[name],
        )
    return int(text)


class MeshGiven(Struct, frozen=True):
    """A mesh to read. `whole` is the mesh from which `mesh` was cut. `batch_axes` may be None."""

    mesh: Mesh
    batch_axes: Sequence[str | int] | None = None
    whole: Mesh | None = None


def find_topology(
    environ: Mapping[str, str],
    *,
    explicit: Topology | None = None,
    mesh: MeshGiven | None = None,
    modules: Modules | None = None,
    dp_rank: int | None = None,
    dp_size: int | None = None,
) -> Topology:
    """Return the topology of this process. `modules` are the modules that the process has imported.

    `dp_rank` and `dp_size` replace the values that were found, for layouts that are unknown here.

    Raises:  ConfigError: values that are not a topology; names the variable, framework or argument.
    """
    if explicit is not None:
        topology = replace(_whole(explicit), source=explicit.source or "topology=")
    else:
        topology = _found(environ, mesh, modules or {})
    if (dp_rank is None) != (dp_size is None):
        raise ConfigError("dp_rank and dp_size belong together: pass both, or neither")
    if dp_rank is not None and dp_size is not None:
        given = replace(topology, dp_rank=dp_rank, dp_size=dp_size)
        topology = replace(_whole(given), source=f"dp_rank= and dp_size=; {topology.source}")
    elif topology.source.startswith(ALONE) and (pods := several_pods(environ)):
        _warn_of(pods)
    _check(topology)
    return topology


@functools.cache
def _warn_of(pods: str) -> None:
    """Warn once in a process that its pod has no rank."""
    warnings.warn(
        f"{pods}: this is one of several pods of a Job or JobSet, but no variable gives it a rank, "
        "so it reads the whole dataset as a single process, like each of the other pods. Start the "
        "processes with torchrun, or set RANK and WORLD_SIZE in the pods. If every pod is meant to "
        "read the whole dataset, pass dp_rank=0, dp_size=1",
        stacklevel=4,
    )


def _found(environ: Mapping[str, str], mesh: MeshGiven | None, modules: Modules) -> Topology:
    topology: Topology | None
    if mesh is not None:
        rank, size = ranks_of(modules) or (0, 1)
        topology = mesh_topology(
            mesh.mesh, mesh.batch_axes, rank=rank, world_size=size, whole=mesh.whole
        )
    else:
        topology = from_frameworks(modules)
    if topology is None:
        return from_environment(environ)
    if topology.local_world_size > 1:
        return topology
    launched = Topology()
    with contextlib.suppress(ConfigError):  # use the framework's answer alone
        launched = from_environment(environ)
    if launched.world_size != topology.world_size:
        return replace(topology, local_world_size=topology.local_rank + 1)
    local = launched.local_rank, launched.local_world_size
    return replace(topology, local_rank=local[0], local_world_size=local[1])


def _whole(given: Topology) -> Topology:
    """Return the same topology as plain ints, since ranks may be numpy integers."""
    names = [field.name for field in fields(given) if field.name != "source"]
    numbers = {name: whole(getattr(given, name)) for name in names}
    for name, number in numbers.items():
        if number is None:
            raise ConfigError(f"{name} is {getattr(given, name)!r:.80}: not a number", field=name)
    plain: dict[str, Any] = {name: number or 0 for name, number in numbers.items()}
    return replace(given, **plain)


def _check(topology: Topology) -> None:
    places = (
        ("dp_rank", topology.dp_rank, "dp_size", topology.dp_size),
        ("rank", topology.rank, "world_size", topology.world_size),
        ("local_rank", topology.local_rank, "local_world_size", topology.local_world_size),
        ("pp_rank", topology.pp_rank, "pp_size", topology.pp_size),
        ("cp_rank", topology.cp_rank, "cp_size", topology.cp_size),
    )
    for name, rank, size_name, size in places:
        if not 1 <= size < LIMIT:
            raise ConfigError(
                f"{size_name} is {size}: there must be 1 or more (from {topology.source})",
                field=size_name,
            )
        if not 0 <= rank < size:
            raise ConfigError(
                f"{name} {rank} is not in 0..{size - 1}: it counts from 0 to {size_name} - 1 "
                f"(from {topology.source})",
                field=name,
            )
