"""Find this process's ranks: from a mesh, the frameworks that it has imported, or its launcher."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from dataplane.client.meshes import is_mesh
from dataplane.client.topology import MeshGiven, find_topology
from dataplane.model.errors import ConfigError
from dataplane.model.records import Topology
from dataplane_torch.options import UrlOptions
from dataplane_torch.torch_private.distributed import current_mesh, whole_mesh


def auto(device_mesh: object, batch_axes: Sequence[str | int] | None) -> Topology:
    """Implement `Topology.auto`, whose docstring describes it."""
    return find_topology(os.environ, mesh=_mesh_given(device_mesh, batch_axes), modules=sys.modules)


def topology_of(options: UrlOptions) -> Topology:
    """Return the topology for a loader's options.

    Raises:  ConfigError: as `auto`, or options contradict each other.
    """
    explicit, mesh = options["topology"], options["device_mesh"]
    if explicit is not None and mesh is not None:
        raise ConfigError("topology= and device_mesh= both say where this rank is: pass one")
    if explicit is not None and not isinstance(explicit, Topology):
        raise ConfigError(
            f"topology={explicit!r:.80}: pass a dataplane_torch.Topology", field="topology"
        )
    return find_topology(
        os.environ,
        explicit=explicit,
        mesh=None if explicit else _mesh_given(mesh, options["batch_axes"]),
        modules=sys.modules,
        dp_rank=options["dp_rank"],
        dp_size=options["dp_size"],
    )


def _mesh_given(device_mesh: object, batch_axes: Sequence[str | int] | None) -> MeshGiven | None:
    mesh = device_mesh if device_mesh is not None else current_mesh()
    if mesh is None:
        if batch_axes is not None:
            raise ConfigError(
                f"batch_axes={batch_axes!r:.80} without a mesh: pass device_mesh=",
                field="batch_axes",
            )
        return None
    if not is_mesh(mesh):
        raise ConfigError(
            f"device_mesh={mesh!r:.80}: pass a torch.distributed.device_mesh.DeviceMesh",
            field="device_mesh",
        )
    return MeshGiven(mesh, batch_axes, whole_mesh(mesh))  # type: ignore[arg-type]
