"""Ranks as launchers pass them, and the names that all ranks derive from them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.client.identity import job_id, launch_identity, node_name
from dataplane.client.topology import LAUNCHERS, find_topology, from_environment
from dataplane.model.errors import ConfigError
from dataplane.model.records import Topology

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}


def test_torchrun_is_understood() -> None:
    assert from_environment(TORCHRUN) == Topology(5, 8, 5, 8, 1, 4)


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda launcher: launcher.name)
def test_every_launcher_is_understood(launcher) -> None:
    environ = {launcher.rank: "3", launcher.size: "4", launcher.local_rank: "1"}
    for name in launcher.local_size:
        found = from_environment(environ | {name: "2"})
        assert found == Topology(3, 4, 3, 4, 1, 2)


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


def test_torchrun_inside_of_srun_counts_before_slurm() -> None:
    slurm = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0"}
    assert from_environment(TORCHRUN | slurm).rank == 5


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
    {**SBATCH, "SLURM_STEP_ID": "0"},
    {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "h", "MASTER_PORT": "29500"},
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
