"""Raise one error for every private name that this torch lacks."""

from __future__ import annotations

import inspect
from typing import Final

import torch

from dataplane.model.errors import VersionMismatch

TESTED: Final = "2.6 to 2.15"
"""The versions of torch that the tests have run with."""


def require(owner: object, *names: str) -> None:
    """Check that a module, class or object of torch's has these attributes.

    Raises:  VersionMismatch: an attribute is missing; says which, and what to install.
    """
    for name in names:
        if not hasattr(owner, name):
            raise VersionMismatch(
                f"this torch ({torch.__version__}) has no {_path(owner)}.{name}, which dataplane's "
                f"DataLoader needs: install torch {TESTED}, or a newer dataplane-loader",
                expected=f"torch {TESTED}",
                found=f"torch {torch.__version__}",
            )


def _path(owner: object) -> str:
    """Return the dotted name of an object, as in torch's source."""
    if inspect.ismodule(owner):
        return owner.__name__
    kind = owner if isinstance(owner, type) else type(owner)
    of_torch = (each for each in kind.__mro__ if each.__module__.partition(".")[0] == "torch")
    found = next(of_torch, kind)
    return f"{found.__module__}.{found.__qualname__}"
