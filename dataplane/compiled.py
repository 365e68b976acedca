"""Our own libraries in C, through ctypes: loaded only if they were made from the sources here."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

SHARED = "compiler.h"
"""The header in the folder above, which all C files include."""
INSTALL_AGAIN = "install a C compiler, then reinstall Dataplane"

Signature = tuple[type | None, tuple[type, ...]]
"""The type that a function returns, and the types of its arguments."""


class Compiled(Struct, frozen=True):
    """A library, or why there is none."""

    library: ctypes.CDLL | None
    missing: str = ""

    def __str__(self) -> str:
        return f"numpy ({self.missing})" if self.library is None else "the compiled kernel"


def load(
    path: Path, sources: Path, crc_function: str, signatures: Mapping[str, Signature]
) -> Compiled:
    """Load a library, if it exists and `crc_function` returns the checksum of these sources: a C
    file with its header, or all C files in a folder.
    """
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
        name = f"{sources.name}/" if sources.is_dir() else sources.name
        return Compiled(None, f"{path.name} was compiled from a different {name}")
    return Compiled(library)


def sources_of(sources: Path) -> tuple[Path, ...]:
    """All files that a library is made from, in the order of the checksum."""
    if sources.is_dir():
        folder, own = sources, sorted(sources.rglob("*.[ch]"))
    else:
        folder, own = sources.parent, [sources, sources.with_suffix(".h")]
    return (folder.parent / SHARED, *own)


def crc_of(sources: Path) -> int:
    """The checksum that a library made from these sources returns."""
    return zlib.crc32(b"".join(source.read_bytes() for source in sources_of(sources)))
