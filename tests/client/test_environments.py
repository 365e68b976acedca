"""What launchers tell their processes: the variables as their documents and sources name them."""

from __future__ import annotations

from types import ModuleType

import pytest

from dataplane.client import topology
from dataplane.client.topology import ALONE, find_topology, from_environment
from dataplane.model.errors import ConfigError
from dataplane.model.records import Topology

# docs.pytorch.org/docs/stable/elastic/run.html, "Environment Variables"
TORCHRUN = {
    "LOCAL_RANK": "3", "RANK": "11", "GROUP_RANK": "1", "ROLE_RANK": "11", "ROLE_NAME": "default",
    "LOCAL_WORLD_SIZE": "8", "WORLD_SIZE": "16", "ROLE_WORLD_SIZE": "16", "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "gpu-0", "MASTER_PORT": "29500", "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_RUN_ID": "run7",
}  # fmt: skip
# srun(1), "OUTPUT ENVIRONMENT VARIABLES": task 5 of `srun -N 2 --ntasks-per-node=4`
SLURM = {
    "SLURM_JOB_ID": "4242", "SLURM_STEP_ID": "0", "SLURM_NNODES": "2", "SLURM_NODEID": "1",
    "SLURM_NTASKS": "8", "SLURM_NPROCS": "8", "SLURM_PROCID": "5", "SLURM_LOCALID": "1",
    "SLURM_TASKS_PER_NODE": "4(x2)", "SLURM_STEP_NODELIST": "gpu[0-1]",
    "SLURM_STEP_NUM_TASKS": "8", "SLURM_GTIDS": "4,5,6,7",
}  # fmt: skip
# docs.open-mpi.org, "Environment variables set by mpirun"
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_RANK": "6", "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2", "OMPI_UNIVERSE_SIZE": "8", "OMPI_COMM_WORLD_NODE_RANK": "2",
    "PMIX_NAMESPACE": "prterun-gpu-0-1@1", "PMIX_RANK": "6",
}  # fmt: skip
# horovod/runner/gloo_run.py, create_slot_env_vars()
HOROVOD = {
    "HOROVOD_HOSTNAME": "gpu-1", "HOROVOD_RANK": "5", "HOROVOD_SIZE": "8",
    "HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "4", "HOROVOD_CROSS_RANK": "1",
    "HOROVOD_CROSS_SIZE": "2", "HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo",
}  # fmt: skip
KUBERNETES = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}
# kubeflow/training-operator, pkg/controller.v1/pytorch/envvar.go: the second of three workers
PYTORCH_JOB = KUBERNETES | {
    "PYTHONUNBUFFERED": "0", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456",
    "WORLD_SIZE": "4", "RANK": "2", "PET_NNODES": "4", "PET_NODE_RANK": "2",
    "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "job-master-0", "PET_MASTER_PORT": "23456",
}  # fmt: skip
# volcano-sh/volcano: the pytorch plugin (pkg/controllers/job/plugins/distributed-framework/pytorch)
# and the env and svc plugins, which name a task's index and hosts
VOLCANO = KUBERNETES | {
    "MASTER_ADDR": "job-master-0.job", "MASTER_PORT": "23456", "WORLD_SIZE": "3", "RANK": "2",
    "VK_TASK_INDEX": "1", "VC_TASK_INDEX": "1", "VC_WORKER_HOSTS": "job-worker-0.job,job-worker-1.job",
    "VC_WORKER_NUM": "2", "VC_MASTER_HOSTS": "job-master-0.job", "VC_MASTER_NUM": "1",
}  # fmt: skip
# kubernetes-sigs/jobset: its Jobs are Indexed, and manifests set MASTER_ADDR and MASTER_PORT
JOB_SET = KUBERNETES | {
    "JOB_COMPLETION_INDEX": "3", "MASTER_ADDR": "pytorch-workers-0-0.pytorch",
    "MASTER_PORT": "3389",
}  # fmt: skip
# kubeflow/trainer, pkg/runtime/framework/plugins/torch: torchrun's arguments in a JobSet's pods
TRAIN_JOB = JOB_SET | {
    "PET_NNODES": "4", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": "3",
    "PET_MASTER_ADDR": "job-node-0-0.job", "PET_MASTER_PORT": "29400",
}  # fmt: skip


@pytest.mark.parametrize(
    ("environ", "name", "expected"),
    [
        (TORCHRUN, "torchrun", Topology(11, 16, 11, 16, 3, 8)),
        (SLURM, "Slurm", Topology(5, 8, 5, 8, 1, 2)),
        (SLURM | {"SLURM_NTASKS_PER_NODE": "4"}, "Slurm", Topology(5, 8, 5, 8, 1, 4)),
        (OPEN_MPI, "Open MPI", Topology(6, 8, 6, 8, 2, 4)),
        (HOROVOD, "Horovod", Topology(5, 8, 5, 8, 1, 4)),
        (SLURM | HOROVOD, "Horovod", Topology(5, 8, 5, 8, 1, 4)),
        (PYTORCH_JOB, "PyTorchJob", Topology(2, 4, 2, 4)),
        (PYTORCH_JOB | TORCHRUN, "torchrun", Topology(11, 16, 11, 16, 3, 8)),
        (VOLCANO, "Volcano", Topology(2, 3, 2, 3)),
        (JOB_SET | {"RANK": "3", "WORLD_SIZE": "4"}, "JobSet", Topology(3, 4, 3, 4)),
        (JOB_SET | TORCHRUN, "torchrun", Topology(11, 16, 11, 16, 3, 8)),
        (TRAIN_JOB, "a JobSet of Kubeflow Trainer", Topology(3, 4, 3, 4)),
        (TRAIN_JOB | TORCHRUN, "torchrun", Topology(11, 16, 11, 16, 3, 8)),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "environment", Topology(1, 2, 1, 2)),
    ],
)
def test_the_variables_of_each_launcher_say_rank_and_size(environ, name, expected) -> None:
    found = from_environment(environ)
    assert found == expected
    assert found.source.startswith(f"{name}: ")
    assert f"={found.rank}, " in found.source
    assert find_topology(environ) == expected


def test_the_rank_of_a_pod_with_several_processes_is_refused() -> None:
    pod = PYTORCH_JOB | {"PET_NPROC_PER_NODE": "8", "WORLD_SIZE": "32"}
    with pytest.raises(
        ConfigError, match=r"RANK=2 is the number of this pod.* start them with"
    ) as e:
        from_environment(pod)
    assert e.value.variable == "RANK"
    assert from_environment(pod | TORCHRUN).rank == 11
    assert from_environment(pod | {"WORLD_SIZE": "4"}).world_size == 4
    group = ModuleType("torch.distributed")  # of processes that the pod's own one has spawned
    told = {"is_available": True, "is_initialized": True, "get_rank": 17, "get_world_size": 32}
    for name, value in told.items():
        setattr(group, name, lambda value=value: value)
    found = find_topology(pod, modules={"torch.distributed": group})
    assert (found.rank, found.dp_size, found.local_world_size) == (17, 32, 1)


def test_a_pod_without_a_rank_is_alone_and_says_so() -> None:
    assert from_environment({}) == Topology()
    assert from_environment({}).source == ALONE
    found = from_environment(JOB_SET)
    assert found == Topology()
    assert found.source == f"{ALONE} (pod 3 of a Job or JobSet, which gives it no rank)"
    # torchrun starts several processes in this pod: this one is none of them
    assert from_environment(TRAIN_JOB | {"PET_NPROC_PER_NODE": "8"}) == Topology()


FIRST = JOB_SET | {"JOB_COMPLETION_INDEX": "0"}
ONLY = {name: value for name, value in FIRST.items() if not name.startswith("MASTER")}


def test_one_of_several_pods_without_ranks_warns_once() -> None:
    topology._warn_of.cache_clear()
    for environ, said in (
        (JOB_SET, "JOB_COMPLETION_INDEX=3: this is one of several pods"),
        (FIRST, "JOB_COMPLETION_INDEX=0 and MASTER_ADDR=pytorch-workers-0-0.pytorch: this is one"),
    ):
        with pytest.warns(UserWarning, match=said):
            assert find_topology(environ).dp_size == 1
        find_topology(environ)  # warnings are errors in tests
    topology._warn_of.cache_clear()


def test_pods_that_have_ranks_or_are_alone_or_are_meant_to_be_do_not_warn() -> None:
    topology._warn_of.cache_clear()
    ranks = {"RANK": "3", "WORLD_SIZE": "4"}
    for environ in (JOB_SET | ranks, JOB_SET | TORCHRUN, TRAIN_JOB, ONLY, KUBERNETES, {}):
        find_topology(environ)
    assert find_topology(JOB_SET, dp_rank=0, dp_size=1) == Topology()
    assert find_topology(JOB_SET, explicit=Topology()) == Topology()
