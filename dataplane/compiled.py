"""Our own libraries in C, through ctypes: loaded only if they were made from the sources here."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

INSTALL_AGAIN = "install a C compiler, then Dataplane once more"

Signature = tuple[type | None, tuple[type, ...]]
"""What a function gives, and what it takes."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """A library, or why there is none."""

    library: ctypes.CDLL | None
    missing: str = ""

    def __str__(self) -> str:
        return f"numpy ({self.missing})" if self.library is None else "the compiled kernel"


def load(
    path: Path, sources: Sequence[Path], crc_function: str, signatures: Mapping[str, Signature]
) -> Compiled:
    """A library, if it is there and `crc_function` says that it was made from these sources."""
    if not path.exists():
        return Compiled(None, f"{path.name} could not be compiled when Dataplane was installed")
    try:
        library = ctypes.CDLL(str(path))
        crc = getattr(library, crc_function)
        crc.restype = ctypes.c_uint32
        made_from = crc()
        for name, (result, arguments) in signatures.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as fault:
        return Compiled(None, f"{path.name} cannot be loaded: {fault}")
    if made_from != crc_of(sources):
        names = sources[0].name if len(sources) == 1 else f"{sources[0].parent.name}/"
        return Compiled(None, f"{path.name} was made from another {names}")
    return Compiled(library)


def crc_of(sources: Sequence[Path]) -> int:
    """What a library that was made from these sources says."""
    return zlib.crc32(b"".join(source.read_bytes() for source in sources))
