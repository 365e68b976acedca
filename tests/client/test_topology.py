"""Ranks as launchers pass them, and the names that all ranks derive from them."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from dataclasses import dataclass
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.client import topology
from dataplane.client.identity import job_id, launch_identity, node_name
from dataplane.client.meshes import BATCH_AXES, OTHER_AXES, SEQUENCE_AXES, STAGE_AXES, mesh_topology
from dataplane.client.topology import ALONE, find_topology, from_environment
from dataplane.model.errors import ConfigError
from dataplane.model.records import Topology

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}


def test_slurm_writes_uneven_nodes_in_its_own_way() -> None:
    environ = {"SLURM_PROCID": "6", "SLURM_NTASKS": "7", "SLURM_LOCALID": "2"}
    found = from_environment(environ | {"SLURM_TASKS_PER_NODE": "4,3"})
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == (6, 7, 2, 3)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"SLURM_NTASKS": "8", "SLURM_JOB_ID": "1"},
        {"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "ENVIRONMENT": "BATCH"},
    ],
    ids=["plain", "salloc shell", "sbatch script"],
)
def test_a_process_that_was_not_launched_as_a_rank_has_the_default_topology(environ) -> None:
    assert from_environment(environ) == Topology()


@pytest.mark.parametrize(
    ("environ", "variable"),
    [
        ({"RANK": "0"}, "WORLD_SIZE"),
        ({"RANK": "two", "WORLD_SIZE": "4"}, "RANK"),
        ({"RANK": "-1", "WORLD_SIZE": "4"}, "RANK"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, "RANK"),
        ({"RANK": "0", "WORLD_SIZE": ""}, "WORLD_SIZE"),
        ({"RANK": "0", "WORLD_SIZE": "99999999999"}, "WORLD_SIZE"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "x"}, "LOCAL_RANK"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "1"}, "LOCAL_RANK"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "some"}, "LOCAL_WORLD_SIZE"),
        ({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_RANK"),
    ],
)
def test_garbled_environments_are_refused_by_the_variables_name(environ, variable) -> None:
    with pytest.raises(ConfigError, match=variable) as caught:
        from_environment(environ)
    assert caught.value.variable == variable


@given(st.dictionaries(st.sampled_from(sorted(TORCHRUN)), st.text(max_size=4)))
def test_any_environment_gives_a_valid_topology_or_our_error(environ) -> None:
    try:
        found = from_environment(environ)
    except ConfigError:
        return
    assert 0 <= found.rank < found.world_size
    assert 0 <= found.local_rank < found.local_world_size


def test_explicit_settings_override_detected_ones() -> None:
    mine = Topology(1, 2, 1, 2)
    assert find_topology(TORCHRUN, explicit=mine) == mine


def test_tensor_parallel_loops_pass_their_data_parallel_rank() -> None:
    found = find_topology(TORCHRUN, dp_rank=2, dp_size=4)
    assert (found.dp_rank, found.dp_size, found.rank, found.world_size) == (2, 4, 5, 8)
    with pytest.raises(ConfigError, match="belong together"):
        find_topology(TORCHRUN, dp_rank=2)
    with pytest.raises(ConfigError, match="dp_rank 4"):
        find_topology(TORCHRUN, dp_rank=4, dp_size=4)
    with pytest.raises(ConfigError, match="dp_size"):
        find_topology(TORCHRUN, dp_rank=0, dp_size=0)


def test_ranks_of_one_launch_agree_and_a_restart_is_another() -> None:
    elastic = {"TORCHELASTIC_RUN_ID": "run7", "TORCHELASTIC_RESTART_COUNT": "0", "MASTER_PORT": "1"}
    zero = launch_identity({**TORCHRUN, **elastic, "RANK": "0"})
    five = launch_identity({**TORCHRUN, **elastic, "RANK": "5", "LOCAL_RANK": "3"})
    assert zero == five
    assert zero.shared
    again = launch_identity({**TORCHRUN, **elastic, "TORCHELASTIC_RESTART_COUNT": "1"})
    assert again.run_id == zero.run_id
    assert again.incarnation != zero.incarnation


def test_two_launches_on_one_host_and_port_are_told_apart() -> None:
    static = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "29500", "RANK": "0"}

    def launched(folder: str, rank: int):
        error_file = f"/tmp/{folder}/none_{folder}/attempt_0/{rank}/error.json"
        environ = static | {"RANK": str(rank), "TORCHELASTIC_ERROR_FILE": error_file}
        return launch_identity(environ, 2)

    assert launched("a", 0) == launched("a", 1)
    assert launched("a", 0).run_id == launched("b", 0).run_id
    assert launched("a", 0).incarnation != launched("b", 0).incarnation


def test_tokens_distinguish_launches_and_all_of_them_use_the_same_node() -> None:
    static = {"WORLD_SIZE": "2", "MASTER_PORT": "29501", "RANK": "0"}
    before = launch_identity(static, 2)
    first, second = (launch_identity(static, 2, token) for token in ("t1", "t2"))
    assert first == launch_identity(static | {"RANK": "1"}, 2, "t1")
    assert len({one.incarnation for one in (before, first, second)}) == 3
    assert {one.run_id for one in (before, first, second)} == {before.run_id}
    assert node_name(before) == node_name(first)
    assert node_name(before) == f"{before.run_id} {before.incarnation}"


def test_ranks_without_a_launcher_are_one_run_by_their_token() -> None:
    launch = launch_identity({}, 2, "t1")
    assert launch.shared
    assert launch == launch_identity({}, 2, "t1")
    assert launch.run_id != launch_identity({}, 2, "t2").run_id
    assert not launch_identity({}, 1, "t1").shared


@pytest.mark.parametrize(
    ("environ", "run_id"),
    [
        (
            {"SLURM_JOB_ID": "42", "SLURM_STEP_ID": "3", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"},
            "slurm-42.3",
        ),
        ({**TORCHRUN, "SLURM_JOB_ID": "42", "TORCHELASTIC_RUN_ID": "none"}, "slurm-42."),
        (
            {**TORCHRUN, "MASTER_ADDR": "h", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none"},
            "master-h:29500",
        ),
        ({"OMPI_COMM_WORLD_RANK": "0", "PMIX_NAMESPACE": "p.1"}, "mpi-p.1"),
        (
            {
                "JSM_NAMESPACE_RANK": "0",
                "LSB_JOBID": "7",
                "LSB_JOBINDEX": "2",
                "PMIX_NAMESPACE": "1",
            },
            "lsf-7.2.1",
        ),
        (
            {"PALS_RANKID": "0", "PMI_RANK": "0", "PALS_APID": "a-1", "PBS_JOBID": "7.head"},
            "pals-a-1",
        ),
    ],
)
def test_every_launcher_gives_a_run_id(environ, run_id) -> None:
    assert launch_identity(environ, 2).run_id == run_id


def test_a_slurm_requeue_is_another_launch_of_the_same_run() -> None:
    slurm = {"SLURM_JOB_ID": "42", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"}
    first, second = (
        launch_identity({**slurm, "SLURM_RESTART_COUNT": count}, 2) for count in ("0", "1")
    )
    assert first.run_id == second.run_id
    assert first.incarnation != second.incarnation


def test_processes_without_a_launcher_are_runs_of_their_own_and_children_by_fork_are_not() -> None:
    mine = launch_identity({})
    assert not mine.shared
    code = "from dataplane.client.identity import launch_identity as f; import sys; sys.stdout.write(f({}).run_id)"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout
    assert other.stdout != mine.run_id
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.write(writer, launch_identity({}).run_id.encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 100).decode() == mine.run_id
    os.close(reader)
    os.close(writer)


SAYS_ITS_RUN = """
import os, sys
from dataplane.client.identity import launch_identity
sys.stdout.write(launch_identity(os.environ, int(sys.argv[1])).run_id)
"""
WRAPPED = ("sh", "-c", '"$@"; true', "sh")


def run_of_a_rank(size: int, rank: str = "", within: tuple[str, ...] = (), **launcher: str) -> str:
    """The run of a rank that this process starts, with `rank` in its environment."""
    environ = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME")}
    return subprocess.check_output(
        [*within, sys.executable, "-c", SAYS_ITS_RUN, str(size)],
        env=environ | launcher | ({"RANK": rank} if rank else {}),
        text=True,
    )


SBATCH = {
    "SLURM_JOB_ID": "42", "SLURM_PROCID": "0", "SLURM_NTASKS": "1", "ENVIRONMENT": "BATCH"
}  # fmt: skip


@pytest.mark.parametrize("launcher", [
    SBATCH,
    {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "PMIX_NAMESPACE": "p.1"},
])  # fmt: skip
def test_single_ranks_with_the_same_variables_are_two_runs(launcher) -> None:
    first, second = (run_of_a_rank(1, **launcher) for _ in range(2))
    assert first.startswith("process-")
    assert first != second


def test_a_single_rank_of_torchrun_is_one_run_over_restarts_and_not_that_of_another_torchrun():
    def run_of(folder: str, attempt: int) -> str:
        error_file = f"/tmp/x/100_{folder}/attempt_{attempt}/0/error.json"
        return launch_identity({
            "RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "100",
            "TORCHELASTIC_ERROR_FILE": error_file,
        }, 1).run_id  # fmt: skip

    assert run_of("a", 0) == run_of("a", 1) != run_of("b", 0)


def test_ranks_that_one_process_starts_are_one_run_without_a_launcher() -> None:
    mine = run_of_a_rank(2)
    assert mine.startswith("siblings-")
    assert run_of_a_rank(2, rank="0") == run_of_a_rank(2, rank="1", within=WRAPPED) == mine
    assert run_of_a_rank(3) != mine
    assert run_of_a_rank(2, within=WRAPPED) != mine  # that shell looks like a launcher
    assert run_of_a_rank(1) != mine


def test_two_loaders_over_the_same_urls_are_two_jobs_that_all_ranks_name_alike() -> None:
    launch = launch_identity({**TORCHRUN, "TORCHELASTIC_RUN_ID": "jobs-of-one-test"})
    first, second = (job_id(launch, ["s3://b/x"], None) for _ in range(2))
    assert first != second
    assert job_id(launch, ["s3://b/y"], None).endswith("-0")
    assert job_id(launch, ["s3://b/x"], "mine") == job_id(launch, ["s3://b/y"], "mine")


def test_a_process_has_a_node_for_each_set_of_credentials_and_a_launch_has_one(monkeypatch) -> None:
    alone, shared = launch_identity({}), launch_identity({"TORCHELASTIC_RUN_ID": "r"}, 2)
    names = []
    for secret in ("first", "second", "first", "\udcff"):
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
        names.append(node_name(alone))
        assert secret not in names[-1]
        assert node_name(shared) == f"{shared.run_id} {shared.incarnation}"
    assert names[0] == names[2]
    assert len(set(names)) == 3


@dataclass(frozen=True)
class AMesh:
    """The attributes of torch's mesh that we read; test_layouts.py reads torch's own."""

    mesh_dim_names: tuple[str, ...] | None
    shape: tuple[int, ...]
    coordinate: tuple[int, ...] | None

    def get_coordinate(self):
        return self.coordinate


def place(names, shape, at, axes=None, *, size=None, whole=None):
    mesh = AMesh(names and tuple(names.split()), shape, at)
    count = 1
    for extent in shape:
        count *= extent
    found = mesh_topology(mesh, axes, rank=7, world_size=size or count, whole=whole)
    assert (found.rank, found.world_size) == (7, size or count)
    return found


def test_batch_axes_are_joined_and_others_left_out() -> None:
    found = place("pp dp_replicate dp_shard cp tp", (2, 2, 3, 2, 4), (1, 1, 2, 0, 3))
    assert (found.dp_rank, found.dp_size) == (5, 6)
    assert (found.pp_rank, found.pp_size, found.cp_rank, found.cp_size) == (1, 2, 0, 2)
    assert found.source == (
        "DeviceMesh(pp=2, dp_replicate=2, dp_shard=3, cp=2, tp=4), "
        "batch axes: dp_replicate, dp_shard"
    )
    assert place("tp", (4,), (2,)).dp_size == 1
    assert place("dp", (4,), (2,), size=8).dp_size == 4


@given(st.data())
def test_every_batch_rank_occurs_once_for_each_place_along_the_other_axes(data) -> None:
    pool = sorted(BATCH_AXES | SEQUENCE_AXES | STAGE_AXES | OTHER_AXES)
    names = data.draw(st.lists(st.sampled_from(pool), min_size=1, max_size=4, unique=True))
    shape = tuple(data.draw(st.integers(1, 3)) for _ in names)
    seen = [place(" ".join(names), shape, at) for at in itertools.product(*map(range, shape))]
    size = seen[0].dp_size
    counts = [sum(one.dp_rank == rank for one in seen) for rank in range(size)]
    assert counts == [len(seen) // size] * size


@pytest.mark.parametrize("name", ["fsdp_cp", "dp_cp", "dp_shard_cp", "x", "loss"])
def test_a_name_that_may_be_either_is_refused_with_what_to_pass(name) -> None:
    with pytest.raises(ConfigError, match=rf"{name}=2.*batch_axes=\['dp_replicate'\]") as caught:
        place(f"dp_replicate {name}", (2, 2), (0, 0))
    assert caught.value.field == "batch_axes"
    assert place(f"dp_replicate {name}", (2, 1), (1, 0)).dp_size == 2  # nobody lies along it
    found = place(f"dp_replicate {name}", (2, 2), (1, 1), ["dp_replicate", name])
    assert (found.dp_rank, found.dp_size) == (3, 4)


def test_axes_without_names_have_numbers() -> None:
    with pytest.raises(ConfigError, match="axis 0"):
        place(None, (2, 2), (0, 1))
    assert place(None, (2, 2), (0, 1), [1]).dp_rank == 1
    assert place(None, (2, 2), (1, 0), ["axis 0"]).dp_rank == 1
    assert place("dp tp", (2, 2), (1, 0), "dp").dp_rank == 1
    for wrong in (["pp"], [2], [-1], [True], [1.0]):
        with pytest.raises(ConfigError, match="is not an axis of DeviceMesh"):
            place("dp tp", (2, 2), (1, 0), wrong)


def test_a_part_of_a_mesh_that_lacks_a_batch_axis_is_refused() -> None:
    whole = AMesh(("dp_replicate", "dp_shard", "tp"), (2, 2, 2), (0, 1, 0))
    with pytest.raises(ConfigError, match="lacks the batch axis 'dp_replicate'"):
        place("dp_shard tp", (2, 2), (1, 0), size=8, whole=whole)
    with pytest.raises(ConfigError, match=r"lacks every batch axis, and covers 2 of 8 ranks"):
        place("tp", (2,), (1,), size=8)
    assert place("dp_shard", (2,), (1,), ["dp_shard"], size=8, whole=whole).dp_size == 2
    # flattened: its name is not one of the whole mesh's
    assert place("dp", (4,), (3,), size=8, whole=whole).dp_size == 4
    with pytest.raises(ConfigError, match="rank 7 is not in DeviceMesh"):
        place("dp", (4,), None, size=8)


# docs.pytorch.org/docs/stable/elastic/run.html, "Environment Variables"
TORCHRUN_ENVIRONMENT = {
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
# IBM Job Step Manager: "Environment variables of job steps"
JSRUN = {
    "LSB_JOBID": "1234", "LSB_JOBINDEX": "0", "JSM_NAMESPACE_RANK": "5",
    "JSM_NAMESPACE_SIZE": "12", "JSM_NAMESPACE_LOCAL_RANK": "5", "JSM_NAMESPACE_LOCAL_SIZE": "6",
    "PMIX_NAMESPACE": "2", "PMIX_RANK": "5",
}  # fmt: skip
# HPE's Parallel Application Launch Service: mpiexec(1); with it, Cray MPICH sets those of PMI
PALS = {
    "PBS_JOBID": "77.head", "PALS_APID": "4fa1-77", "PALS_RANKID": "6", "PALS_NODEID": "1",
    "PALS_LOCAL_RANKID": "2", "PALS_LOCAL_SIZE": "4", "PMI_RANK": "6", "PMI_SIZE": "8",
    "PMI_LOCAL_RANK": "2", "PMI_LOCAL_SIZE": "4",
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
        (TORCHRUN_ENVIRONMENT, "torchrun", Topology(11, 16, 11, 16, 3, 8)),
        (SLURM, "Slurm", Topology(5, 8, 5, 8, 1, 2)),
        (SLURM | {"SLURM_NTASKS_PER_NODE": "4"}, "Slurm", Topology(5, 8, 5, 8, 1, 4)),
        (OPEN_MPI, "Open MPI", Topology(6, 8, 6, 8, 2, 4)),
        (JSRUN, "jsrun of LSF", Topology(5, 12, 5, 12, 5, 6)),
        (JSRUN | OPEN_MPI, "jsrun of LSF", Topology(5, 12, 5, 12, 5, 6)),
        (PALS, "PALS of PBS", Topology(6, 8, 6, 8, 2, 4)),
        (HOROVOD, "Horovod", Topology(5, 8, 5, 8, 1, 4)),
        (SLURM | HOROVOD, "Horovod", Topology(5, 8, 5, 8, 1, 4)),
        (SLURM | TORCHRUN_ENVIRONMENT, "torchrun", Topology(11, 16, 11, 16, 3, 8)),
        (PYTORCH_JOB, "PyTorchJob", Topology(2, 4, 2, 4)),
        (PYTORCH_JOB | TORCHRUN_ENVIRONMENT, "torchrun", Topology(11, 16, 11, 16, 3, 8)),
        (VOLCANO, "Volcano", Topology(2, 3, 2, 3)),
        (JOB_SET | {"RANK": "3", "WORLD_SIZE": "4"}, "JobSet", Topology(3, 4, 3, 4)),
        (JOB_SET | TORCHRUN_ENVIRONMENT, "torchrun", Topology(11, 16, 11, 16, 3, 8)),
        (TRAIN_JOB, "a JobSet of Kubeflow Trainer", Topology(3, 4, 3, 4)),
        (TRAIN_JOB | TORCHRUN_ENVIRONMENT, "torchrun", Topology(11, 16, 11, 16, 3, 8)),
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
    assert from_environment(pod | TORCHRUN_ENVIRONMENT).rank == 11
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
    for environ in (
        JOB_SET | ranks,
        JOB_SET | TORCHRUN_ENVIRONMENT,
        TRAIN_JOB,
        ONLY,
        KUBERNETES,
        {},
    ):
        find_topology(environ)
    assert find_topology(JOB_SET, dp_rank=0, dp_size=1) == Topology()
    assert find_topology(JOB_SET, explicit=Topology()) == Topology()
