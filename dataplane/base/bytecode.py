"""Keep the bytecode of a node's modules where Python itself keeps none.

An embedded node imports about 600 modules when it starts. Compiling them takes a second, and Python
does it at each start if PYTHONDONTWRITEBYTECODE is set, or if the modules' folders are read-only.
One folder holds the bytecode of all modules, since Python has only one setting for that. It takes
12 MB, and the first start that fills it takes 0.3 s longer.

Invariants:
1. Only this user and root can change the folder or its parents: bytecode in it is executed.
2. Bytecode is used only for exactly the source that it was made from. A source is identified by its
   checksum, since all files of a container image may have the same time, and two versions of a file
   the same size.
"""

from __future__ import annotations

import os
import stat
import sys
import zlib
from importlib.machinery import (
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    SourceFileLoader,
)
from importlib.util import cache_from_source, find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_NAME = "bytecode"
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def is_kept_nowhere() -> bool:
    """Return whether Python would compile modules of a node at each of its starts."""
    package = os.path.dirname(os.path.dirname(__file__))  # noqa: PTH120
    own = os.path.join(package, "node", "server.py")  # noqa: PTH118
    specs = (find_spec(name) for name in ("numpy", "pyarrow"))
    sources = (own, *(spec.origin for spec in specs if spec is not None and spec.origin))
    return not all(map(_is_kept, sources))


def _is_kept(source: str) -> bool:
    kept = cache_from_source(source)
    if os.path.exists(kept):  # noqa: PTH110
        return True
    # A node imports this module first, and other modules only after `keep_in`.
    from dataplane.base.machine import may_create_in

    return not sys.dont_write_bytecode and may_create_in(os.path.dirname(kept))  # noqa: PTH120


def own_folder(cache_dir: str) -> str:
    """Return the bytecode folder below `cache_dir`, which is created if it is missing; "" if that
    is not possible, or if another user could change it.
    """
    folder = os.path.join(os.path.realpath(cache_dir), _NAME)  # noqa: PTH118
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)  # noqa: PTH103
        status, above = os.lstat(folder), os.path.dirname(folder)  # noqa: PTH120
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            return ""
        if status.st_mode & _OTHERS_WRITE:
            return ""
        while _is_safe(os.lstat(above)):
            if above == os.path.dirname(above):  # noqa: PTH120
                return folder
            above = os.path.dirname(above)  # noqa: PTH120
    except OSError:
        pass
    return ""


def _is_safe(status: os.stat_result) -> bool:
    """Return whether only this user and root can replace or change this folder."""
    is_shared = status.st_mode & _OTHERS_WRITE and not status.st_mode & stat.S_ISVTX
    return status.st_uid in {0, os.geteuid()} and not is_shared


class _ByContent(SourceFileLoader):
    """Loads modules whose bytecode records the checksum of the source instead of its time."""

    def path_stats(self, path: str) -> Mapping[str, int]:
        source = self.get_data(path)
        return {"mtime": zlib.crc32(source), "size": len(source)}


def keep_in(folder: str) -> None:
    """Keep the bytecode of all modules that this process and its forks import from now on."""
    sys.pycache_prefix = folder
    sys.dont_write_bytecode = False
    loaders = (ExtensionFileLoader, EXTENSION_SUFFIXES), (_ByContent, SOURCE_SUFFIXES)
    sys.path_hooks.insert(0, FileFinder.path_hook(*loaders))
    sys.path_importer_cache.clear()
