"""A wheel makes images in C on a machine that has neither a compiler nor libjpeg-turbo's headers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from kernels import without

from dataplane.transforms.pixels_library import maker

ROOT = Path(__file__).resolve().parents[1]
MADE = """
import hashlib, json, pathlib, sys
import numpy as np
from dataplane.formats.parquet_facts import reader
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
    "libraries": [library()._name for library in (kernel, loops, reader)],
    "module": pixels.__file__,
    "mapped": sorted(mapped),
    "pixels": hashlib.sha256(out.tobytes()).hexdigest(),
}))
"""


def _made(image: Path, **environ: str) -> dict[str, object]:
    ran = subprocess.run(
        [sys.executable, "-c", MADE, image],
        cwd=image.parent, env=os.environ | environ, check=True, capture_output=True, text=True,
    )  # fmt: skip
    found: dict[str, object] = json.loads(ran.stdout)
    return found


@pytest.mark.slow
def test_a_wheel_carries_all_image_libraries(tmp_path: Path) -> None:
    from pictures import drawn, encoded

    if maker().library is None:
        without(maker().missing)
    image = tmp_path / "image.jpg"
    image.write_bytes(encoded(drawn(57, 83), quality=90))
    subprocess.run(
        ["make", "wheel", f"DIST={tmp_path / 'dist'}"],
        cwd=ROOT, check=True, capture_output=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    (wheel,) = (tmp_path / "dist").iterdir()
    assert "-py3-none-manylinux_" in wheel.name
    with zipfile.ZipFile(wheel) as content:
        assert "Independent JPEG Group" in content.read(
            "dataplane/transforms/libjpeg.LICENSE"
        ).decode(errors="replace")
    target = tmp_path / "installed"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target",
         target, wheel],
        check=True, capture_output=True,
    )  # fmt: skip
    # Nothing can be found to compile with, and this installation comes before the editable one.
    found = _made(image, PYTHONPATH=str(target), PATH=str(tmp_path / "empty"))
    expected = _made(image)
    assert str(found["module"]).startswith(str(target))
    assert found["missing"] == ""
    assert all(name.startswith(str(target)) for name in found["libraries"])
    assert (found["name"], found["pixels"]) == (expected["name"], expected["pixels"])
    carried = [path for path in found["mapped"] if "pillow" not in path]
    assert [Path(path).parent.name for path in carried] == ["dataplane_loader.libs"]
