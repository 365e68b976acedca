"""Compiles the C sources when the project is installed or built: a build hook of hatchling.

Nothing imports this module but hatchling, `make setup` and tests. A machine without a C compiler
gets the one that PyPI's ziglang contains. Where the headers of libjpeg-turbo are missing,
libpixels.so is compiled without it, and Pillow decodes JPEGs.
"""

# Do not add `from __future__ import annotations`: hatchling does not import this file as a module,
# and without a module dataclasses cannot resolve annotations that are strings.
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hatchling.builders.config import BuilderConfig
from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# -ffp-contract=off forbids fused multiply-add, which rounds differently: results must not depend on
# the CPU.
_FLAGS = (
    *("-std=c11", "-O3", "-ffp-contract=off", "-fPIC", "-shared", "-fvisibility=hidden"),
    *("-Wall", "-Wextra"),
)
ZIG = "ziglang==0.17.1"
# Without -mcpu, zig compiles for the processor of the build machine, and older processors could not
# run the result.
_ZIG_CC = (sys.executable, "-m", "ziglang", "cc", "-mcpu=baseline")


@dataclass(frozen=True, slots=True)
class Package:
    """A library of the platform: pkg-config's name, its header, its linker flag, the macro that
    compiles our code without it, and what to install; the library and its licence in a wheel of
    Pillow.
    """

    name: str
    header: str
    link: str
    without: str
    install: str
    in_pillow: str
    licence_in_pillow: str


@dataclass(frozen=True, slots=True)
class Library:
    """One of our C libraries. `sources` is a C file with its header, or a folder of C files that
    make one library; all of them include compiler.h of the folder above. If the package that the
    library `wants` is missing, the library is compiled without the package.
    """

    sources: Path
    path: Path
    wants: Package | None = None

    def sources_in(self, root: Path) -> tuple[Path, ...]:
        """Return the source files in the order in which compiled.py computes their checksum."""
        there = root / self.sources
        if there.is_file():
            folder, own = there.parent, [there, there.with_suffix(".h")]
        else:
            folder, own = there, sorted(there.rglob("*.[ch]"))
        return (folder.parent / "compiler.h", *own)


LIBJPEG = Package(
    "libjpeg",
    "jpeglib.h",
    "-ljpeg",
    "WITHOUT_LIBJPEG",
    "the headers of libjpeg-turbo 2.0.90 or newer are missing: apt-get install libjpeg-dev "
    "(Debian, Ubuntu), dnf install libjpeg-turbo-devel (Fedora, RHEL), or conda install -c "
    "conda-forge libjpeg-turbo",
    "pillow.libs/libjpeg-*.so.62*",
    "pillow-*.dist-info/licenses/LICENSE",
)
KERNEL = Library(Path("dataplane/worker/kernel.c"), Path("dataplane/worker/libkernel.so"))
PIXELS = Library(Path("dataplane/transforms"), Path("dataplane/transforms/libpixels.so"), LIBJPEG)
LOOPS = Library(Path("dataplane/plan/loops.c"), Path("dataplane/plan/libloops.so"))
FOOTER = Library(
    Path("dataplane/formats/parquet_facts.c"), Path("dataplane/formats/libparquet_facts.so")
)
RECEIVE = Library(Path("dataplane/store/receive.c"), Path("dataplane/store/libreceive.so"))
LIBRARIES = (KERNEL, PIXELS, LOOPS, FOOTER, RECEIVE)


class NotCompiled(Exception):
    """A library could not be compiled. The message is one line: what is missing, or the compiler's
    own message.
    """


class BuildKernels(BuildHookInterface[BuilderConfig]):
    """Compiles the libraries next to their sources, and adds them to a wheel.

    A wheel for other machines must have all libraries, and the licences of the packages that it
    contains. For it, `make wheel` sets PORTABLE_WHEEL to the content of Pillow's wheel for these
    machines, and _PYTHON_HOST_PLATFORM, which Python's own sysconfig reads.
    """

    def dependencies(self) -> list[str]:
        """Return the packages that pip must install for the build; hatchling calls this method."""
        return [] if has_compiler() else [ZIG]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the libraries and add them to the build; hatchling calls this for each build."""
        del version
        root = Path(self.root)
        pillow = os.environ.get("PORTABLE_WHEEL", "")
        for library in LIBRARIES:
            path = root / library.path
            try:
                lacking = compile_as_possible(library, root)
            except NotCompiled as fault:
                path.unlink(missing_ok=True)
                self.app.abort(str(fault))
            if lacking:
                (self.app.abort if pillow else self.app.display_warning)(lacking)
            if pillow and library.wants is not None:
                licence = _only(pillow, library.wants.licence_in_pillow)
                place = f"{library.path.parent}/{library.wants.name}.LICENSE"
                build_data["force_include"][licence] = place
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["artifacts"].append(str(library.path))
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform}"


def main() -> None:
    """Compile the missing libraries, and report failures on stderr. The exit status is 1 if a
    library is still missing.
    """
    root, is_missing = Path(__file__).resolve().parents[2], False
    for library in LIBRARIES:
        if not (root / library.path).exists():
            try:
                lacking = compile_as_possible(library, root)
            except NotCompiled as fault:
                is_missing, lacking = True, str(fault)
            if lacking:
                sys.stderr.write(f"{lacking}; then run make -B setup\n")
    sys.exit(is_missing)


def compile_as_possible(library: Library, root: Path) -> str:
    """Compile a library, and if that fails, compile it without the package that it wants. Return a
    warning that names the missing package, or "".

    Raises:  NotCompiled: the library could not be compiled; the message says what to install.
    """
    try:
        compile_library(library, root)
    except NotCompiled as fault:
        needed = f"{library.sources} is not compiled, and Dataplane needs it"
        if library.wants is None:
            raise NotCompiled(f"{needed}: {fault}") from fault
        try:
            compile_library(library, root, is_whole=False)
        except NotCompiled as other:
            raise NotCompiled(f"{needed}: {other}") from other
        name = library.wants.name
        return f"{library.sources} is compiled without {name}, and Pillow decodes JPEGs: {fault}"
    return ""


def has_compiler() -> bool:
    """Return whether this machine has a C compiler: `CC` or cc."""
    return bool(os.environ.get("CC") or shutil.which("cc"))


def compile_library(library: Library, root: Path, *, is_whole: bool = True) -> None:
    """Compile a library, with the package that it wants if it `is_whole`, and replace the old file
    atomically, since processes may have mapped it.

    `CC`, `CFLAGS` and `LDFLAGS` have the same meaning as for make.

    Raises:  NotCompiled: the compiler or a package is missing, or the compiler failed.
    """
    sources, path = library.sources_in(root), root / library.path
    compiler = shlex.split(os.environ.get("CC") or "cc") if has_compiler() else [*_ZIG_CC]
    package = library.wants if is_whole else None
    search, link = _flags_for(package) if package else ([], [])
    if library.wants and not is_whole:
        search = [f"-D{library.wants.without}"]
    crc = f"-DSOURCE_CRC={zlib.crc32(b''.join(source.read_bytes() for source in sources))}u"
    compiled = [source for source in sources if source.suffix == ".c"]
    fresh = path.with_suffix(f".{os.getpid()}")
    flags = [*_FLAGS, *shlex.split(os.environ.get("CFLAGS", "")), crc, *search]
    linked = [*link, "-lm", *shlex.split(os.environ.get("LDFLAGS", ""))]
    command = [*compiler, *flags, "-o", str(fresh), *map(str, compiled), *linked]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
        fresh.replace(path)
    except OSError as fault:
        raise NotCompiled(f"install a C compiler ({compiler[0]}: {fault.strerror})") from fault
    except subprocess.CalledProcessError as fault:
        raise NotCompiled(_reason(fault.stderr, package)) from fault
    finally:
        fresh.unlink(missing_ok=True)


def _flags_for(package: Package) -> tuple[list[str], list[str]]:
    """Return the flags for a package: from conda's environment, from pkg-config, or the defaults.

    Adds the folder to the library's run path if the dynamic loader does not search it. A wheel for
    other machines is linked with the library of Pillow, which runs with old versions of glibc.
    """
    if pillow := os.environ.get("PORTABLE_WHEEL"):
        return [], [_only(pillow, package.in_pillow)]
    for prefix in (os.environ.get("CONDA_PREFIX", ""), sys.base_prefix):
        if prefix and prefix not in {"/usr", "/usr/local"}:
            include, folder = Path(prefix, "include"), Path(prefix, "lib")
            if (include / package.header).is_file():
                return [f"-I{include}"], [f"-L{folder}", f"-Wl,-rpath,{folder}", package.link]
    try:
        said = [
            subprocess.run(
                ["pkg-config", what, package.name], check=True, capture_output=True, text=True
            ).stdout
            for what in ("--cflags", "--libs")
        ]
    except (OSError, subprocess.CalledProcessError):
        return [], [package.link]
    search, link = shlex.split(said[0]), shlex.split(said[1])
    folders = [flag.removeprefix("-L") for flag in link if flag.startswith("-L")]
    return search, [*link, *(f"-Wl,-rpath,{folder}" for folder in folders)]


def _only(folder: str, pattern: str) -> str:
    paths = [str(path) for path in Path(folder).glob(pattern)]
    if len(paths) != 1:
        raise NotCompiled(f"{folder} has {len(paths)} files {pattern}, instead of one")
    return paths[0]


def _reason(stderr: str, package: Package | None) -> str:
    if package is not None and any(
        word in stderr for word in (package.header, package.link, "#error")
    ):
        return package.install
    if "No module named ziglang" in stderr:
        return f"install a C compiler, or the one of PyPI: pip install {ZIG}"
    errors = [line for line in stderr.splitlines() if "error" in line]
    return (errors or stderr.splitlines() or ["the compiler failed"])[0].strip()


if __name__ == "__main__":
    main()
