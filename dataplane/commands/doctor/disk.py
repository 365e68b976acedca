"""The check of the disk on which a node keeps blocks."""

from __future__ import annotations

import shutil
from pathlib import Path

from dataplane.commands import output
from dataplane.commands.doctor.checks import Check
from dataplane.config import NodeConfig
from dataplane.errors import ConfigError
from dataplane.fetcher.kept_files import KeptFiles
from dataplane.node.cache_folder import FolderTakenError, open_cache_folder


def disk(config: NodeConfig) -> list[Check]:
    """Check whether the disk can keep blocks, and has room; return nothing if no blocks are to be
    kept.
    """
    if not config.cache_bytes:
        return []
    try:
        folder = open_cache_folder(config.cache_dir, config.cache_bytes, patience_s=0.0)
    except FolderTakenError as error:
        return [Check("disk", "in use by another node", str(error))]
    except ConfigError as error:
        return [Check("disk", "cannot be used", str(error))]
    try:
        room = shutil.disk_usage(folder.path).free + _taken(folder.path)
    finally:
        folder.close()
    size = output.approximate_bytes
    found = f"{size(config.cache_bytes)} for blocks in {folder.path}, and room for {size(room)}"
    advice = "lower cache_bytes, or choose another disk with cache_dir"
    return [Check("disk", found, advice if room < config.cache_bytes else "")]


def _taken(folder: Path) -> int:
    """Return the bytes that kept blocks take."""
    return sum(sum(found.disk_bytes) for found in KeptFiles(str(folder)).scan())
