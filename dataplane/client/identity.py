"""Names that every rank of a run computes independently: run, incarnation, job.

A *run* of several ranks keeps its id over restarts if its launcher provides an id. A single rank is
a run of its own, since unrelated processes may have the same environment, for example processes
that a batch script starts side by side; only torchrun distinguishes these. An *incarnation* is one
launch of the run: equal on all ranks, and new after every restart if the launcher shows restarts.
Without a launcher's environment, ranks belong together if the same process started them; a
rendezvous by user and dataset would merge independent launches. This module reads /proc, so it
needs Linux.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from dataplane.client.topology import LAUNCHERS
from dataplane.model.redact import unsigned

_ANCESTORS_MAX = 16
_OF_NODES = ("AWS_", "AZURE_", "GOOGLE_", "DATAPLANE_")
_RANKS = frozenset(launcher.rank.encode() for launcher in LAUNCHERS)


class Launch(Struct, frozen=True):
    """The names of a launch. `shared` is true if other ranks have the same ids."""

    run_id: str
    incarnation: str
    shared: bool


def launch_identity(environ: Mapping[str, str], world_size: int = 1, token: str = "") -> Launch:
    """Return the run and the launch that this process belongs to. `token` is a random name that all
    ranks of this launch agreed on, if they have a process group, since launchers may repeat their
    ids. Without an id of the run, ranks of one host belong together if the same process started
    them.
    """
    run_id = _run_id(environ, world_size)
    if run_id is None and token and world_size > 1:
        run_id = f"group-{short_hash(token)}"
    if run_id is None and world_size > 1:
        run_id = f"siblings-{short_hash(str(world_size), *_starter())}"
    if run_id is None:
        alone = _this_process()
        return Launch(alone, short_hash(alone, token) if token else alone, shared=False)
    signs = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")
    told = [f"{name}={environ[name]}" for name in signs if environ.get(name)]
    told += [*_torchrun_folder(environ), *([token] if token else [])]
    return Launch(run_id, short_hash(run_id, *told), shared=True)


def node_name(launch: Launch, sharing: str = "") -> str:
    """Return the name of the node that the ranks of one host share. It is derived from the first
    launch of the run that this process knew, so that loaders made before and after the ranks agreed
    on a token share a node. Jobs of one sharing group use one node, whatever launched them.

    A node has the credentials, settings and import path of the process that started it. So single
    ranks share a node only if these are equal.
    """
    if sharing:
        return f"sharing {sharing}"
    name = f"{launch.run_id} {_first.setdefault(launch.run_id, launch.incarnation)}"
    if launch.shared:
        return name
    own = sorted(entry for entry in os.environ.items() if entry[0].startswith(_OF_NODES))
    entries = json.dumps([*own, *(("sys.path", folder) for folder in sys.path)]).encode()
    return f"{name} {hashlib.blake2b(entries, digest_size=8, key=_secret()).hexdigest()}"


_first: dict[str, str] = {}


@functools.cache
def _secret() -> bytes:
    """Return a secret of this process, which later forked children inherit."""
    return os.urandom(32)


def _torchrun_folder(environ: Mapping[str, str]) -> list[str]:
    """Return the temporary folder of this launch, known to all ranks if all are on one host. It
    distinguishes two launches with the same port.

    Source:  TORCHELASTIC_ERROR_FILE: FOLDER/RUN_RANDOM/attempt_N/LOCAL_RANK/error.json.
    """
    error_file = environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file and environ.get("LOCAL_WORLD_SIZE") == environ.get("WORLD_SIZE"):
        return [str(folder) for folder in Path(error_file).parents[2:3]]
    return []


def _run_id(environ: Mapping[str, str], world_size: int) -> str | None:
    ranked = world_size > 1 or ("RANK" in environ and "WORLD_SIZE" in environ)
    elastic = environ.get("TORCHELASTIC_RUN_ID", "none")
    if ranked and elastic != "none":
        own = () if world_size > 1 else map(short_hash, _torchrun_folder(environ))
        return "-".join(("elastic", elastic, *own))
    if world_size < 2:
        return None
    if "SLURM_JOB_ID" in environ:
        # Include the step: a second srun in the same Slurm job is another run, while torchrun under
        # srun has the same step on all nodes.
        return f"slurm-{environ['SLURM_JOB_ID']}.{environ.get('SLURM_STEP_ID', '')}"
    if environ.get("MASTER_PORT"):
        return f"master-{environ.get('MASTER_ADDR', '')}:{environ['MASTER_PORT']}"
    if "JSM_NAMESPACE_RANK" in environ and "LSB_JOBID" in environ:
        step = (environ.get(name, "") for name in ("LSB_JOBINDEX", "PMIX_NAMESPACE"))
        return ".".join((f"lsf-{environ['LSB_JOBID']}", *step))
    if environ.get("PALS_APID"):
        return f"pals-{environ['PALS_APID']}"
    if "OMPI_COMM_WORLD_RANK" in environ or "PMI_RANK" in environ:
        for name in ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID"):
            if environ.get(name):
                return f"mpi-{environ[name]}"
    return None


@functools.cache
def _this_process() -> str:
    """Return a name of this process, computed once, so that children forked later belong to the
    same run.
    """
    _, started = _parent_and_start(os.getpid())
    return f"process-{short_hash(str(os.getpid()), started, _namespace())}"


@functools.cache
def _starter() -> tuple[str, ...]:
    """Return the process that started the ranks: the nearest ancestor without a rank in its
    environment (a shell between launcher and rank has one). Computed once, since parents may end.
    """
    pid, started = os.getppid(), ""
    for _ in range(_ANCESTORS_MAX):
        try:
            parent, started = _parent_and_start(pid)
            environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:  # the process belongs to another user, or has ended
            break
        if not parent or _RANKS.isdisjoint(entry.partition(b"=")[0] for entry in environ):
            break
        pid = parent
    return str(pid), started, _namespace()


def _parent_and_start(pid: int) -> tuple[int, str]:
    """Return a process's parent and start time. A reused process id has another start time."""
    # Return fields 4 and 22. Split behind the last parenthesis, since field 2, the name in
    # parentheses, may contain any characters.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[1]), fields[19]


def _namespace() -> str:
    return str(Path("/proc/self/ns/pid").readlink())


_counters: dict[tuple[str, str], Iterator[int]] = {}


def job_id(launch: Launch, urls: Sequence[str], name: str | None) -> str:
    """Return the id of the job of the next loader over these urls. It is equal on all ranks, since
    they make their loaders in the same order, and different from that of the previous loader. A
    `name` identifies the job instead: the order does not matter then, and a later launch with the
    same name continues the job.
    """
    if name is not None:
        return name
    content = short_hash(*map(unsigned, urls))
    counter = _counters.setdefault((launch.run_id, content), itertools.count())
    return f"{launch.run_id}/{content}-{next(counter)}"


def short_hash(*parts: str) -> str:
    """Hash the parts to 16 hex digits."""
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=8).hexdigest()
