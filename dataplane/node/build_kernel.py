"""Compiles kernel.c when the project is installed or built: a build hook of hatchling.

Nothing imports this module but hatchling. Where there is no C compiler the build goes on without
the library, and the node gathers with numpy.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sysconfig
import zlib
from pathlib import Path
from typing import Any

from hatchling.builders.config import BuilderConfig
from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = Path("dataplane", "node", "kernel.c")
LIBRARY = SOURCE.with_name("libkernel.so")
_FLAGS = ("-std=c11", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra")


class BuildKernel(BuildHookInterface[BuilderConfig]):
    """Beside kernel.c for an editable installation, and from there into a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """As hatchling calls it before each build."""
        del version
        library = Path(self.root, LIBRARY)
        try:
            compile_library(Path(self.root, SOURCE), library)
        except (OSError, subprocess.CalledProcessError) as fault:
            library.unlink(missing_ok=True)
            said = getattr(fault, "stderr", None) or fault
            self.app.display_warning(f"{SOURCE} is not compiled, numpy takes its place: {said}")
            return
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["artifacts"].append(str(LIBRARY))
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"


def compile_library(source: Path, library: Path) -> None:
    """Put a new library in the place of an old one, which processes may have mapped.

    `CC` and `CFLAGS` mean what they mean to make.

    Raises:  OSError: there is no such compiler.  CalledProcessError: it failed, and says why.
    """
    compiler = shlex.split(os.environ.get("CC", "cc"))
    flags = [*_FLAGS, *shlex.split(os.environ.get("CFLAGS", ""))]
    crc = f"-DSOURCE_CRC={zlib.crc32(source.read_bytes())}u"
    fresh = library.with_suffix(f".{os.getpid()}")
    try:
        subprocess.run(
            [*compiler, *flags, crc, "-o", fresh, source],
            check=True,
            capture_output=True,
            text=True,
        )
        fresh.replace(library)
    finally:
        fresh.unlink(missing_ok=True)
