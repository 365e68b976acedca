"""Load our own C libraries with ctypes, and only if they were compiled from the present sources.

They speed up a few loops, do not use Python's C API, and so work with every version of Python.
Numbers are little-endian in files and messages, and the C code reads them as they are: big-endian
processors are not supported.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Mapping
from pathlib import Path

from dataplane.model.errors import ConfigError

SHARED = "compiler.h"
"""The header in the folder above, which all C files include."""
_INSTALL_AGAIN = (
    "install Dataplane again, from a wheel, or from its sources with pip install or make -B setup, "
    "which compile it"
)

Signature = tuple[type | None, tuple[type, ...]]
"""The type that a function returns, and the types of its arguments."""


def load(
    path: Path, sources: Path, crc_function: str, signatures: Mapping[str, Signature]
) -> ctypes.CDLL:
    """Load a library whose `crc_function` returns the checksum of its sources: a C file with its
    header, or all C files in a folder.

    Raises:  ConfigError: the library is missing, was compiled from other sources, or cannot be
    loaded; the message says how to install it.
    """
    if not path.exists():
        raise _unusable(path, f"{path} is missing, since it could not be compiled")
    try:
        library = ctypes.CDLL(str(path))
        crc = getattr(library, crc_function)
        crc.restype = ctypes.c_uint32
        made_from = crc()
        for name, (result, arguments) in signatures.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as fault:
        raise _unusable(path, f"{path.name} cannot be loaded: {fault}") from fault
    if made_from != crc_of(sources):
        name = f"{sources.name}/" if sources.is_dir() else sources.name
        raise _unusable(path, f"{path} was compiled from a different {name}")
    return library


def _unusable(path: Path, why: str) -> ConfigError:
    return ConfigError(f"{why}: {_INSTALL_AGAIN}", path=str(path))


def sources_of(sources: Path) -> tuple[Path, ...]:
    """Return all files that a library is compiled from, in the order of the checksum."""
    if sources.is_dir():
        folder, own = sources, sorted(sources.rglob("*.[ch]"))
    else:
        folder, own = sources.parent, [sources, sources.with_suffix(".h")]
    return (folder.parent / SHARED, *own)


def crc_of(sources: Path) -> int:
    """Compute the checksum that a library compiled from these sources returns."""
    return zlib.crc32(b"".join(source.read_bytes() for source in sources_of(sources)))
