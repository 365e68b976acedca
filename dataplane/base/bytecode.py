"""Bytecode of a node's modules, kept in a folder of its own where Python itself keeps none.

An embedded node imports some 600 modules when it starts. To compile them takes a second, and Python
does so at each start if PYTHONDONTWRITEBYTECODE is set, or if their folders can only be read.

Invariants:
1. Only this user and root can change the folder, or one above it: what lies there is run.
2. Kept bytecode is used only for the very source that it was made from: the files of a container's
   image may all have one time, and two versions of a file the same size.
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


def _package() -> str:
    return os.path.dirname(os.path.dirname(__file__))  # noqa: PTH120


def is_kept_nowhere() -> bool:
    """Whether Python would compile modules of a node at each of its starts."""
    own = os.path.join(_package(), "node", "server.py")  # noqa: PTH118
    specs = (find_spec(name) for name in ("numpy", "pyarrow"))
    sources = (own, *(spec.origin for spec in specs if spec is not None and spec.origin))
    return not all(map(_is_kept, sources))


def _is_kept(source: str) -> bool:
    kept = cache_from_source(source)
    if os.path.exists(kept):  # noqa: PTH110
        return True
    folder = os.path.dirname(kept)  # noqa: PTH120
    while not os.path.exists(folder):  # noqa: PTH110
        folder = os.path.dirname(folder)  # noqa: PTH120
    return not sys.dont_write_bytecode and os.access(folder, os.W_OK)


def own_folder(cache_dir: str) -> str:
    """The folder below `cache_dir`, made if it is not there; "" if it cannot be made, or if another
    user could change it.
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
    """Whether nobody else can put another folder in the place of one of ours."""
    is_shared = status.st_mode & _OTHERS_WRITE and not status.st_mode & stat.S_ISVTX
    return status.st_uid in {0, os.geteuid()} and not is_shared


class _ByContent(SourceFileLoader):
    """Bytecode names the sum of its source in the place of its time."""

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
