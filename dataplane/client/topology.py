"""Finds the place of this process among the ranks of its run.

Sources, in this order: an explicit topology; torch.distributed, whose values the caller passes; the
environment of torchrun, Slurm, Open MPI or a PMI launcher. Without any, the process is a single
rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from dataplane.errors import ConfigError
from dataplane.model import Topology
from dataplane.units import whole

_LIMIT = 1 << 31


@dataclass(frozen=True, slots=True)
class Launcher:
    """The variables of one launcher. `local_size` may be several numbers, as Slurm writes it."""

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: tuple[str, ...]


# MPI and PMI come last: processes started by the other launchers often inherit their variables.
LAUNCHERS = (
    Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", ("LOCAL_WORLD_SIZE",)),
    Launcher(
        "Slurm",
        "SLURM_PROCID",
        "SLURM_NTASKS",
        "SLURM_LOCALID",
        ("SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
    ),
    Launcher(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    Launcher("PMI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", ("MPI_LOCALNRANKS",)),
)


def find_topology(
    environ: Mapping[str, str],
    *,
    explicit: Topology | None = None,
    distributed: tuple[int, int] | None = None,
    dp_rank: int | None = None,
    dp_size: int | None = None,
) -> Topology:
    """The topology of this process. `distributed` is torch.distributed's (rank, world size).

    `dp_rank` and `dp_size` are for loops with tensor or pipeline parallelism, where they are not
    the process's own rank and the world's size.

    Raises:  ConfigError: values that are not a topology; names the variable or argument.
    """
    if explicit is not None:
        found = _whole(explicit)
    elif distributed is not None:
        launched = from_environment(environ)
        local = launched if launched.world_size == distributed[1] else Topology()
        found = replace(
            local,
            rank=distributed[0],
            world_size=distributed[1],
            dp_rank=distributed[0],
            dp_size=distributed[1],
        )
    else:
        found = from_environment(environ)
    if (dp_rank is None) != (dp_size is None):
        raise ConfigError("dp_rank and dp_size belong together: pass both, or neither")
    if dp_rank is not None and dp_size is not None:
        found = _whole(replace(found, dp_rank=dp_rank, dp_size=dp_size))
    _check(found)
    return found


def from_environment(environ: Mapping[str, str]) -> Topology:
    """The topology in the launcher's variables; a single rank without a launcher.

    A shell inside a Slurm allocation has the size but no rank: it was not launched as a rank, so it
    is a single rank.

    Raises:  ConfigError: a rank without a size, invalid numbers, or contradictory ones.
    """
    for launcher in LAUNCHERS:
        if launcher.rank in environ and not _is_batch_script(environ, launcher):
            return _launched(environ, launcher)
    return Topology()


def _is_batch_script(environ: Mapping[str, str], launcher: Launcher) -> bool:
    """Whether this is the script of an sbatch job itself: it has rank 0 of all tasks of the job,
    which is true only of what srun starts.
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
    # Slurm writes "4(x2),3": two nodes with four tasks and one with three. Which of them this node
    # is cannot be known and does not matter: take the smallest consistent number.
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
    return Topology(rank, size, rank, size, local_rank, local_size)


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ[name].strip()
    if not (text.isascii() and text.isdecimal()) or int(text) >= _LIMIT:
        raise ConfigError(
            f"{name}={environ[name]!r} is not a number of processes",
            variable=name,
            found=environ[name],
        )
    return int(text)


def _whole(given: Topology) -> Topology:
    """The same as plain ints, since ranks may be numpy integers."""
    numbers = {name: whole(value) for name, value in asdict(given).items()}
    for name, number in numbers.items():
        if number is None:
            raise ConfigError(f"{name} is {getattr(given, name)!r:.80}: not a number", field=name)
    return replace(given, **{name: number or 0 for name, number in numbers.items()})


def _check(found: Topology) -> None:
    places = (
        ("dp_rank", found.dp_rank, "dp_size", found.dp_size),
        ("rank", found.rank, "world_size", found.world_size),
        ("local_rank", found.local_rank, "local_world_size", found.local_world_size),
    )
    for name, rank, size_name, size in places:
        if not 1 <= size < _LIMIT:
            raise ConfigError(f"{size_name} is {size}: there must be 1 or more", field=size_name)
        if not 0 <= rank < size:
            raise ConfigError(
                f"{name} {rank} is not in 0..{size - 1}: it counts from 0 to {size_name} - 1",
                field=name,
            )
