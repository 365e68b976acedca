"""Names of number types, in any form that users pass: "float16", torch.float16, np.float16."""

from __future__ import annotations


def dtype_name(given: object) -> str:
    """The name that numpy and torch share; does not import torch."""
    if isinstance(given, str):
        return given.removeprefix("torch.")
    for name in ("name", "__name__"):  # of numpy's dtypes, and of its classes
        found = getattr(given, name, None)
        if isinstance(found, str):
            return found
    return str(given).removeprefix("torch.")
