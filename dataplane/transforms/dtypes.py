"""Names of number types, in any form that users pass: "float16", torch.float16, np.float16."""

from __future__ import annotations

DTYPES = (
    *("float32", "float16", "float64", "int8", "int16", "int32", "int64"),
    *("uint8", "uint16", "uint32", "uint64"),
)
"""The types to which columns of numbers can be converted."""


def dtype_name(given: object) -> str:
    """Return the name that numpy and torch share for a type. Does not import torch."""
    if isinstance(given, str):
        return given.removeprefix("torch.")
    for name in ("name", "__name__"):  # numpy's dtypes have a name, its classes a __name__
        found = getattr(given, name, None)
        if isinstance(found, str):
            return found
    return str(given).removeprefix("torch.")
