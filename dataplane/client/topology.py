"""Finds the place of this process among the ranks of its run.

Sources, in this order: an explicit topology; a DeviceMesh; the frameworks that the process uses
(frameworks.py); the environment of its launcher (environments.py). Without any, the process is a
single rank. The topology says which source won.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from msgspec import Struct

from dataplane.client.environments import ALONE, LIMIT, from_environment, several_pods
from dataplane.client.frameworks import Modules, from_frameworks, ranks_of
from dataplane.client.meshes import Mesh, mesh_topology
from dataplane.errors import ConfigError
from dataplane.model import Topology
from dataplane.units import whole


class MeshGiven(Struct, frozen=True):
    """A mesh to read; `whole` is the one that it was cut from. `batch_axes` may be None."""

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
    """The topology of this process. `modules` are those that it has imported.

    `dp_rank` and `dp_size` replace those that were found, for layouts that nothing here knows.

    Raises:  ConfigError: values that are not a topology; names the variable, framework or argument.
    """
    if explicit is not None:
        found = replace(_whole(explicit), source=explicit.source or "topology=")
    else:
        found = _found(environ, mesh, modules or {})
    if (dp_rank is None) != (dp_size is None):
        raise ConfigError("dp_rank and dp_size belong together: pass both, or neither")
    if dp_rank is not None and dp_size is not None:
        given = replace(found, dp_rank=dp_rank, dp_size=dp_size)
        found = replace(_whole(given), source=f"dp_rank= and dp_size=; {found.source}")
    elif found.source.startswith(ALONE) and (pods := several_pods(environ)):
        _warn_of(pods)
    _check(found)
    return found


@functools.cache
def _warn_of(pods: str) -> None:
    """Once in a process."""
    warnings.warn(
        f"{pods}: this is one of several pods of a Job or JobSet, and nothing gives it a rank. So "
        "it reads the whole dataset as a single process, and so does each of the others. Start the "
        "processes with torchrun, or set RANK and WORLD_SIZE in the pods. If every pod is meant to "
        "read all of it, pass dp_rank=0, dp_size=1",
        stacklevel=4,
    )


def _found(environ: Mapping[str, str], mesh: MeshGiven | None, modules: Modules) -> Topology:
    found: Topology | None
    if mesh is not None:
        rank, size = ranks_of(modules) or (0, 1)
        found = mesh_topology(
            mesh.mesh, mesh.batch_axes, rank=rank, world_size=size, whole=mesh.whole
        )
    else:
        found = from_frameworks(modules)
    if found is None:
        return from_environment(environ)
    if found.local_world_size > 1:
        return found
    launched = Topology()
    with contextlib.suppress(ConfigError):  # the framework knows more
        launched = from_environment(environ)
    if launched.world_size != found.world_size:
        return replace(found, local_world_size=found.local_rank + 1)
    local = launched.local_rank, launched.local_world_size
    return replace(found, local_rank=local[0], local_world_size=local[1])


def _whole(given: Topology) -> Topology:
    """The same as plain ints, since ranks may be numpy integers."""
    names = [each.name for each in fields(given) if each.name != "source"]
    numbers = {name: whole(getattr(given, name)) for name in names}
    for name, number in numbers.items():
        if number is None:
            raise ConfigError(f"{name} is {getattr(given, name)!r:.80}: not a number", field=name)
    plain: dict[str, Any] = {name: number or 0 for name, number in numbers.items()}
    return replace(given, **plain)


def _check(found: Topology) -> None:
    places = (
        ("dp_rank", found.dp_rank, "dp_size", found.dp_size),
        ("rank", found.rank, "world_size", found.world_size),
        ("local_rank", found.local_rank, "local_world_size", found.local_world_size),
        ("pp_rank", found.pp_rank, "pp_size", found.pp_size),
        ("cp_rank", found.cp_rank, "cp_size", found.cp_size),
    )
    for name, rank, size_name, size in places:
        if not 1 <= size < LIMIT:
            raise ConfigError(
                f"{size_name} is {size}: there must be 1 or more (from {found.source})",
                field=size_name,
            )
        if not 0 <= rank < size:
            raise ConfigError(
                f"{name} {rank} is not in 0..{size - 1}: it counts from 0 to {size_name} - 1 "
                f"(from {found.source})",
                field=name,
            )
