"""The wheels work on a machine that has neither a compiler nor libjpeg-turbo's headers: the loader's
alone, which says how to install the benchmark, and both. The loader's wheel for machines of another
kind has libraries for those.
"""

from __future__ import annotations

import io
import json
import os
import platform
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile
from kernels import without

from dataplane.base.build_kernels import LIBRARIES
from dataplane.transforms.pixels_library import maker

ROOT = Path(__file__).resolve().parents[1]
MADE = """
import hashlib, json, pathlib, sys
import numpy as np
from dataplane.formats.parquet_footers import facts_library
from dataplane.worker.kernel import kernel
from dataplane.plan.loops import loops
from dataplane.transforms import pixels
from dataplane.transforms.pixels_library import maker
from dataplane.transforms.view import PixelView

image = np.frombuffer(pathlib.Path(sys.argv[1]).read_bytes(), np.uint8)
out = np.zeros(24 * 32 * 3, np.uint8)
view = PixelView(24, 32, "HWC", "uint8", None, None)
box = np.array([[3.0, 5, 40, 60]])
places = np.array([[image.ctypes.data, image.nbytes]])
pixels.render(places, box, np.zeros(1, np.uint8), view, out)
mapped = {line.split()[-1] for line in open("/proc/self/maps") if "libjpeg" in line}
print(json.dumps({
    "name": maker().name,
    "missing": maker().missing,
    "libraries": [library()._name for library in (kernel, loops, facts_library)],
    "module": pixels.__file__,
    "mapped": sorted(mapped),
    "pixels": hashlib.sha256(out.tobytes()).hexdigest(),
}))
"""


SMALL_RUN = (
    "--scenario", "tokens/local", "--peers", "none", "--scale", "0.02", "--rounds", "1",
    "--window", "0.2", "--json",
)  # fmt: skip


def _made(python: str | Path, image: Path, **environ: str) -> dict[str, object]:
    ran = subprocess.run(
        [python, "-P", "-c", MADE, image],
        cwd=image.parent, env=os.environ | environ, check=True, capture_output=True, text=True,
    )  # fmt: skip
    found: dict[str, object] = json.loads(ran.stdout)
    return found


class Environment:
    """A fresh virtual environment with the packages of ours, but for our own distributions."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder / "venv", with_pip=False)
        self.bin = folder / "venv" / "bin"
        self.cache = folder / "cache"
        where = {"base": str(folder / "venv"), "platbase": str(folder / "venv")}
        self.packages = Path(sysconfig.get_path("purelib", "venv", where))
        others = folder / "others"
        others.mkdir()
        for package in Path(sysconfig.get_path("purelib")).iterdir():
            if "dataplane" not in package.name:
                (others / package.name).symlink_to(package)
        (self.packages / "others.pth").write_text(f"{others}\n")

    def install(self, wheel: Path) -> None:
        subprocess.run(
            [sys.executable, "-m", "pip", "--python", self.bin / "python", "install", "-q",
             "--no-deps", "--no-index", wheel],
            check=True, capture_output=True,
        )  # fmt: skip

    def bench(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.bin / "dataplane", "bench", *arguments],
            env={"PATH": str(self.bin), "XDG_CACHE_HOME": str(self.cache), "HOME": str(self.cache)},
            cwd=self.bin, capture_output=True, text=True, check=False,
        )  # fmt: skip


def _needs(library: ELFFile) -> tuple[set[str], set[str]]:
    """Which libraries this needs, and which functions of those."""
    tags = library.get_section_by_name(".dynamic").iter_tags("DT_NEEDED")
    symbols = library.get_section_by_name(".dynsym").iter_symbols()
    undefined = {one.name for one in symbols if one["st_shndx"] == "SHN_UNDEF" and one.name}
    return {tag.needed for tag in tags}, undefined


def _check_libraries(wheel: Path, machine: str) -> None:
    with zipfile.ZipFile(wheel) as content:
        assert "Independent JPEG Group" in content.read(
            "dataplane/transforms/libjpeg.LICENSE"
        ).decode(errors="replace")
        assert not any("bench" in name for name in content.namelist())
        libraries = {
            Path(name).name: ELFFile(io.BytesIO(content.read(name)))
            for name in content.namelist()
            if ".so" in name
        }
    assert {library["e_machine"] for library in libraries.values()} == {machine}
    (libjpeg,) = (name for name in libraries if name.startswith("libjpeg-"))
    exported = {
        one.name for one in libraries[libjpeg].get_section_by_name(".dynsym").iter_symbols()
    }
    for library in LIBRARIES:
        needed, undefined = _needs(libraries[library.path.name])
        if library.wants is None:
            assert needed <= {"libc.so.6", "libm.so.6"}
        else:
            assert libjpeg in needed
            of_libjpeg = {name for name in undefined if name.startswith("jpeg_")}
            assert of_libjpeg
            assert of_libjpeg <= exported


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_wheels_carry_all_that_they_need(tmp_path: Path) -> None:
    from pictures import drawn, encoded

    if maker().missing:
        without(maker().missing)
    image = tmp_path / "image.jpg"
    image.write_bytes(encoded(drawn(57, 83), quality=90))
    subprocess.run(
        ["make", "wheel", f"DIST={tmp_path / 'dist'}"],
        cwd=ROOT, check=True, capture_output=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    of_bench, *wheels = sorted((tmp_path / "dist").iterdir())
    assert of_bench.name.endswith("-py3-none-any.whl")
    for wheel, machine in zip(wheels, ("EM_AARCH64", "EM_X86_64"), strict=True):
        assert "-py3-none-manylinux2014_" in wheel.name
        _check_libraries(wheel, machine)
    (wheel,) = (wheel for wheel in wheels if wheel.name.endswith(f"_{platform.machine()}.whl"))
    environment = Environment(tmp_path)
    environment.install(wheel)
    # Nothing can be found to compile with.
    found = _made(environment.bin / "python", image, PATH=str(tmp_path / "empty"))
    expected = _made(sys.executable, image)
    assert str(found["module"]).startswith(str(environment.packages))
    assert found["missing"] == ""
    assert all(name.startswith(str(environment.packages)) for name in found["libraries"])
    assert found["pixels"] == expected["pixels"]
    own, others = (str(made["name"]).split(", ", 1) for made in (found, expected))
    assert own[1] == others[1]  # libjpeg-turbo is Pillow's here, and the platform's there
    carried = [path for path in found["mapped"] if "pillow" not in path]
    assert [Path(path).parent.name for path in carried] == ["dataplane_loader.libs"]
    subprocess.run(
        [environment.bin / "python", "-P", "-c", "import dataplane_torch"], check=True, cwd=tmp_path
    )
    alone = environment.bench(*SMALL_RUN)
    assert (alone.returncode, alone.stdout) == (2, "")
    assert "pip install dataplane-bench" in alone.stderr
    environment.install(of_bench)
    ran = environment.bench(*SMALL_RUN)
    assert ran.returncode == 0, ran.stderr
    (scenario,) = json.loads(ran.stdout)["scenarios"]
    assert scenario["name"] == "tokens"
