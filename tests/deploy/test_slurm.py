"""The scripts of deploy/slurm under a real slurmctld and slurmd of this machine.

pytest -m slow tests/deploy/test_slurm.py
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dataplane_torch import DataLoader
from fleet import Service

from dataplane.rpc import local
from dataplane.rpc.address import served_name

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "deploy" / "slurm"
TRAIN = ROOT / "deploy" / "examples" / "train.py"
SMALL = {"DATAPLANE_BLOCK_ARENA_BYTES": "16MiB", "DATAPLANE_WORKER_COUNT": "1"}
DEADLINE_S = 120
DAEMONS = ("munged", "slurmctld", "slurmd")
BATCH = 12

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.geteuid() != 0 or not all(map(shutil.which, DAEMONS)),
        reason="needs root, and Debian's slurmctld, slurmd, slurm-client and munge",
    ),
]

CONF = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
SlurmctldPort={controller}
SlurmdPort={daemon}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=30
SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=100000
Prolog={folder}/prolog.sh
Epilog={folder}/epilog.sh
NodeName={host} NodeAddr=127.0.0.1 CPUs=8 RealMemory=4000 State=UNKNOWN
PartitionName=low Nodes={host} Default=YES PriorityTier=1 GraceTime=60 PreemptMode=REQUEUE
PartitionName=high Nodes={host} PriorityTier=10 PreemptMode=OFF
"""
# A stand-in for systemd: it starts and stops the command of the unit, for one user.
SYSTEMCTL = """#!/bin/bash
exec >> {folder}/systemctl.log 2>&1
echo "$1 $3"
export {environ}
exec 9> {folder}/node.lock
if [ "$1" = stop ]; then
  [ -e {folder}/node.pid ] && kill "$(cat {folder}/node.pid)"
  exit 0
fi
[ -e {folder}/node.pid ] && kill -0 "$(cat {folder}/node.pid)" && exit 0
setsid {python} -m dataplane serve --node 9>&- < /dev/null &
echo $! > {folder}/node.pid
"""


class Cluster:
    """One host's Slurm, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environ = {**os.environ, **SMALL, "SLURM_CONF": str(folder / "slurm.conf")}
        self.environ["PATH"] = f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.environ |= {"OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
        self.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
        self.environ["TRAIN"] = str(TRAIN)

    def run(self, *command: str) -> str:
        done = subprocess.run(
            command, env=self.environ, cwd=self.folder, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr + self.log()
        return done.stdout.strip()

    def sbatch(self, script: str, *options: str, arguments: list[str]) -> str:
        """Submit one of our scripts, with options for this small machine; the job's id."""
        path = str(SCRIPTS / script)
        given = self.run(
            "sbatch", "--parsable", "--output=job-%A_%a.log", *options, path, *arguments
        )
        return given.partition(";")[0]

    def state(self, job: str) -> str:
        return self.run("squeue", "--noheader", "--states=all", "--format=%T", "--job", job)

    def log(self) -> str:
        files = [*self.folder.glob("*.log"), *self.folder.glob("job-*")]
        return "\n".join(f"== {path.name}\n{path.read_text()[-6000:]}" for path in files)

    def wait_for(self, what: str, is_so) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not is_so():
            assert time.monotonic() < deadline, f"not {what}: {self.log()}"
            threading.Event().wait(0.2)


@contextlib.contextmanager
def daemon(
    folder: Path, environ: dict[str, str], *command: str
) -> Iterator[subprocess.Popen[bytes]]:
    with (folder / f"{command[0]}.log").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env=environ, start_new_session=True
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        process.kill()
        process.wait()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    folder = tmp_path
    for name in ("munge", "state", "spool"):
        (folder / name).mkdir()
    key = folder / "munge" / "key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    made = Cluster(folder)
    with (
        socket.create_server(("127.0.0.1", 0)) as first,
        socket.create_server(("127.0.0.1", 0)) as second,
    ):
        ports = [sock.getsockname()[1] for sock in (first, second)]
    conf = CONF.format(
        host=socket.gethostname(), folder=folder, controller=ports[0], daemon=ports[1]
    )
    (folder / "slurm.conf").write_text(conf)
    for name in ("prolog.sh", "epilog.sh"):
        text = (SCRIPTS / name).read_text().replace("PATH=", f"PATH={folder}:")
        text = text.replace("\nPATH", f"\nexport SLURM_CONF={folder}/slurm.conf\nPATH")
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    munge = [
        "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge/socket",
        f"--pid-file={folder}/munge/pid", f"--log-file={folder}/munge/log",
        f"--seed-file={folder}/munge/seed",
    ]  # fmt: skip
    with contextlib.ExitStack() as stack:
        stack.enter_context(daemon(folder, made.environ, *munge))
        made.wait_for("munge", (folder / "munge" / "socket").exists)
        stack.enter_context(daemon(folder, made.environ, "slurmctld", "-D", "-v"))
        stack.enter_context(daemon(folder, made.environ, "slurmd", "-D", "-v"))
        made.wait_for(
            "idle", lambda: set(made.run("sinfo", "--noheader", "--format=%T").split()) == {"idle"}
        )
        yield made
        jobs = made.run("squeue", "--noheader", "--format=%A").split()
        if jobs:
            made.run("scancel", *jobs)
        made.wait_for("empty", lambda: made.run("squeue", "--noheader") == "")


def recorded(folder: Path, name: str = "ids") -> dict[int, list[int]]:
    """The ids of each step, of all ranks together; a step that was made twice has them twice."""
    steps: dict[int, list[int]] = {}
    for path in folder.glob(f"{name}-*"):
        for line in path.read_text().splitlines():
            step, _, ids = line.partition(" ")
            steps.setdefault(int(step), []).extend(json.loads(ids))
    return {step: sorted(ids) for step, ids in steps.items()}


def expected(url: str, steps: int) -> dict[int, list[int]]:
    made: list[list[int]] = []
    with DataLoader(url, global_batch_size=BATCH, shuffle=True, seed=7) as whole:
        while len(made) < steps:
            made += [sorted(batch["id"].tolist()) for batch in whole]
    return dict(enumerate(made[:steps], 1))


@pytest.fixture
def url(tmp_path: Path) -> str:
    pq.write_table(pa.table({"id": range(300)}), tmp_path / "rows.parquet", row_group_size=50)
    return str(tmp_path / "rows.parquet")


def test_a_job_with_its_own_service_is_preempted_queued_again_and_goes_on(cluster, url):
    folder = cluster.folder
    arguments = [
        url, "--checkpoints", str(folder / "checkpoints"), "--record", str(folder / "ids"),
        "--global-batch", str(BATCH), "--every", "100000", "--steps",
    ]  # fmt: skip
    small = ("--nodes=1", "--ntasks-per-node=2", "--gpus-per-node=0", "--time=60")
    job = cluster.sbatch("train.sbatch", *small, arguments=[*arguments, "3000"])
    cluster.wait_for("training", lambda: len(recorded(folder)) > 20)
    # It takes the whole host, so the other job has to end.
    cluster.sbatch("train.sbatch", *small, "--partition=high", "--no-requeue", arguments=["/none"])
    cluster.wait_for("saved", (folder / "checkpoints" / "last").exists)
    saved = int((folder / "checkpoints" / "last").read_text().partition("-")[2])
    assert 20 < saved < 3000
    cluster.wait_for("ended", lambda: cluster.state(job) in ("COMPLETED", "FAILED"))
    assert cluster.state(job) == "COMPLETED", cluster.log()
    assert f"resumed step={saved} ranks=2" in cluster.log()
    assert recorded(folder) == expected(url, 3000)


def test_an_array_shares_the_users_node_which_prolog_starts_and_epilog_stops(
    cluster, url, tmp_path
):
    folder = cluster.folder
    with Service(
        "--coordinator",
        "--listen",
        "127.0.0.1:0",
        environ={"DATAPLANE_STATE_DIR": str(folder / "c")},
    ) as coordinator:
        node = {
            **SMALL, "DATAPLANE_JOIN": coordinator.address,
            "DATAPLANE_STATE_DIR": str(folder / "c"), "HOME": str(folder),
        }  # fmt: skip
        text = SYSTEMCTL.format(
            folder=folder,
            python=sys.executable,
            environ=" ".join(f"{k}={v}" for k, v in node.items()),
        )
        (folder / "systemctl").write_text(text)
        (folder / "systemctl").chmod(0o755)
        cluster.environ |= {"DATAPLANE_SERVICE": coordinator.address, "RUNS": str(folder / "runs")}
        arguments = [
            url, "--global-batch", str(BATCH), "--steps", "60", "--record", str(folder / "ids"),
        ]  # fmt: skip
        job = cluster.sbatch("array.sbatch", "--gpus=0", "--array=0-1", arguments=arguments)
        cluster.wait_for("over", lambda: set(cluster.state(job).split()) <= {"COMPLETED", "FAILED"})
        assert cluster.state(job).split() == ["COMPLETED"] * 2, cluster.log()
        twice = {step: sorted(ids * 2) for step, ids in expected(url, 60).items()}
        assert recorded(folder) == twice
        lines = (folder / "systemctl.log").read_text()
        assert lines.count("start dataplane-node@root") >= 2
        assert lines.count("ready: node") == 1
        pid = int((folder / "node.pid").read_text())
        cluster.wait_for("stopped", lambda: not psutil.pid_exists(pid))
        assert served_name(os.getuid(), coordinator.address)
        assert local.holder_of(served_name(os.getuid(), coordinator.address)) is None
