"""The entered DeviceMesh, the mesh from which a mesh was cut, and the store behind
torch.distributed's default process group.
"""

from __future__ import annotations

from typing import Any

import torch.distributed


def current_mesh() -> Any:
    """Return the mesh of the innermost `with mesh:` of this thread, or None.

    Source:  torch.distributed.device_mesh._mesh_resources.mesh_stack, torch 2.6 to 2.13. Without
    it, as in a torch without distributed, no mesh is entered.
    """
    module = getattr(torch.distributed, "device_mesh", None)
    entered = getattr(getattr(module, "_mesh_resources", None), "mesh_stack", None)
    return entered[-1] if entered else None


def whole_mesh(mesh: Any) -> Any:
    """Return the mesh from which `mesh` was cut; None if it is whole, or if torch cannot tell."""
    of_mesh = getattr(mesh, "_get_root_mesh", None)
    if of_mesh is None:
        module = getattr(torch.distributed, "device_mesh", None)
        resources = getattr(module, "_mesh_resources", None)
        of_resources = getattr(resources, "get_root_mesh", None)
        found = None if of_resources is None else of_resources(mesh)
    else:
        found = of_mesh()
    return None if found is mesh else found


def default_store() -> Any:
    """torch.distributed.distributed_c10d._get_default_store: the key-value store that all ranks of
    the default group used to find each other. Every rank has it, however the group was created.

    Raises:  ValueError: there is no group.  AttributeError: this torch has no such function; treat
    it like a group without a store.
    """
    return torch.distributed.distributed_c10d._get_default_store()
