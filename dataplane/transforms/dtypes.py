"""Names of number types, however a user says them: "float16", torch.float16, np.float16."""

from __future__ import annotations


def dtype_name(given: object) -> str:
    """What numpy and torch both call it; torch is not imported for it."""
    if isinstance(given, str):
        return given.removeprefix("torch.")
    for name in ("name", "__name__"):  # of numpy's dtypes, and of its classes
        found = getattr(given, name, None)
        if isinstance(found, str):
            return found
    return str(given).removeprefix("torch.")
