"""Compiles what is in C when the project is installed or built: a build hook of hatchling.

Nothing imports this module but hatchling and tests. Where there is no C compiler the build goes on
without the libraries: numpy sorts and gathers, and images are made by Pillow.
"""

# No annotations from __future__: hatchling runs this file as no module, where a dataclass cannot
# look up annotations that are text.
import os
import shlex
import subprocess
import sysconfig
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hatchling.builders.config import BuilderConfig
from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_FLAGS = ("-std=c11", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra")


@dataclass(frozen=True, slots=True)
class Library:
    """`sources` is a C file, or a folder of them and of their headers; `instead` takes its place
    where it cannot be compiled.
    """

    sources: Path
    path: Path
    instead: str

    def sources_in(self, root: Path) -> tuple[Path, ...]:
        """In the order in which the modules that load a library sum them up."""
        there = root / self.sources
        if there.is_file():
            return (there,)
        return tuple(sorted(path for path in there.iterdir() if path.suffix in {".c", ".h"}))


KERNEL = Library(Path("dataplane/node/kernel.c"), Path("dataplane/node/libkernel.so"), "numpy")
PIXELS = Library(
    Path("dataplane/transforms/csrc"), Path("dataplane/transforms/libpixels.so"), "Pillow"
)
LOOPS = Library(Path("dataplane/plan/loops.c"), Path("dataplane/plan/libloops.so"), "numpy")
LIBRARIES = (KERNEL, PIXELS, LOOPS)


class BuildKernels(BuildHookInterface[BuilderConfig]):
    """Beside their sources for an editable installation, and from there into a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """As hatchling calls it before each build."""
        del version
        root = Path(self.root)
        for library in LIBRARIES:
            path = root / library.path
            try:
                compile_library(library.sources_in(root), path)
            except (OSError, subprocess.CalledProcessError) as fault:
                path.unlink(missing_ok=True)
                said = getattr(fault, "stderr", None) or fault
                told = f"{library.sources} is not compiled, {library.instead} takes its place"
                self.app.display_warning(f"{told}: {said}")
                continue
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["artifacts"].append(str(library.path))
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform}"


def compile_library(sources: Sequence[Path], library: Path) -> None:
    """Put a new library in the place of an old one, which processes may have mapped.

    `CC` and `CFLAGS` mean what they mean to make.

    Raises:  OSError: there is no such compiler.  CalledProcessError: it failed, and says why.
    """
    compiler = shlex.split(os.environ.get("CC", "cc"))
    flags = [*_FLAGS, *shlex.split(os.environ.get("CFLAGS", ""))]
    crc = f"-DSOURCE_CRC={zlib.crc32(b''.join(path.read_bytes() for path in sources))}u"
    compiled = [path for path in sources if path.suffix == ".c"]
    fresh = library.with_suffix(f".{os.getpid()}")
    try:
        subprocess.run(
            [*compiler, *flags, crc, "-o", fresh, *compiled, "-lm"],
            check=True,
            capture_output=True,
            text=True,
        )
        fresh.replace(library)
    finally:
        fresh.unlink(missing_ok=True)
