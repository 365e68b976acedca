"""Does our own Huffman decoder pay off? Compares libjpeg-turbo's cropping with ours.

    python benchmarks/cropping.py FOLDER [--libjpeg PATH ...]

The photographs of a folder are scaled to ImageNet's usual size and cropped (random resized crops to
224) in several ways: by libjpeg-turbo with jpeg_crop_scanline and jpeg_skip_scanlines, which
TurboJPEG 3's tj3SetCroppingRegion calls, and OpenCV's resize; by our decoder at full size, without
and with restart indexes; and by our decoder with its default settings. `--libjpeg` names libraries
of ABI 62, such as the one in Pillow's wheel; the platform's is always measured. All ways take turns
in rounds, and the best round of each counts.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
from pixels import SIDE, VIEW, Crops, Photographs, random_boxes

from dataplane.transforms import pixels
from dataplane.transforms.pixels_library import maker

ROUNDS = 7
SOURCE = r"""
#include <stdio.h>
#include <jpeglib.h>
int crop(const unsigned char *bytes, unsigned long length, unsigned top, unsigned left,
         unsigned height, unsigned width, unsigned char *out, unsigned *from)
{
    struct jpeg_decompress_struct info;
    struct jpeg_error_mgr errors;
    info.err = jpeg_std_error(&errors);
    jpeg_create_decompress(&info);
    jpeg_mem_src(&info, bytes, length);
    jpeg_read_header(&info, TRUE);
    info.out_color_space = JCS_RGB;
    jpeg_start_decompress(&info);
    JDIMENSION x = left, w = width;
    jpeg_crop_scanline(&info, &x, &w);
    if (top)
        jpeg_skip_scanlines(&info, top);
    for (unsigned row = 0; row < height; row++) {
        unsigned char *line = out + (size_t)row * w * 3;
        jpeg_read_scanlines(&info, &line, 1);
    }
    from[0] = left - x;
    from[1] = w;
    jpeg_abort_decompress(&info);
    jpeg_destroy_decompress(&info);
    return 0;
}
"""


def _cropper(folder: Path, name: str, link: list[str]) -> ctypes.CDLL:
    source, path = folder / "crop.c", folder / f"{name}.so"
    source.write_text(SOURCE)
    command = ["cc", "-O3", "-fPIC", "-shared", "-o", str(path), str(source), *link]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(path), mode=os.RTLD_LOCAL | os.RTLD_DEEPBIND)


def _by_cropping(photographs: Photographs, library: ctypes.CDLL) -> Callable[[Crops], None]:
    room = np.empty(int(photographs.sizes.prod(1).max()) * 3 + (1 << 16), np.uint8)
    out, place = np.empty((SIDE, SIDE, 3), np.uint8), (ctypes.c_uint * 2)()

    def make(boxes: Crops) -> None:
        for image, box in zip(photographs.encoded, boxes.astype(int).tolist(), strict=True):
            top, left, height, width = box
            library.crop(
                image, ctypes.c_ulong(len(image)), top, left, height, width,
                ctypes.c_void_p(room.ctypes.data), place,
            )  # fmt: skip
            start, stride = place
            rows = room[: height * stride * 3].reshape(height, stride, 3)
            part = rows[:, start : start + width]
            cv2.resize(part, (SIDE, SIDE), dst=out, interpolation=cv2.INTER_LINEAR)

    return make


def _by_us(
    photographs: Photographs, *, again: bool = False, may_reduce: bool = False
) -> Callable[[Crops], None]:
    count = len(photographs.encoded)
    images = [np.frombuffer(image, np.uint8) for image in photographs.encoded]
    kept = [np.zeros(len(image) // 16 // 8 * 8, np.uint8) for image in images]
    places, restart_indexes = (
        np.array([(one.ctypes.data, one.nbytes) for one in some], np.int64)
        for some in (images, kept)
    )
    flips, out = np.zeros(count, np.uint8), np.empty(count * VIEW.bytes, np.uint8)

    def make(boxes: Crops) -> None:
        _ = images, kept
        told = restart_indexes if again else None
        pixels.render(places, boxes, flips, VIEW, out, restart_indexes=told, may_reduce=may_reduce)

    return make


def main() -> int:
    """Print one line for each way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folder", type=Path, help="of photographs, JPEG")
    parser.add_argument("--libjpeg", type=Path, nargs="*", default=[], help="other libraries")
    given = parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    cv2.setNumThreads(1)
    photographs = Photographs(given.folder)
    with tempfile.TemporaryDirectory() as folder:
        makers: dict[str, Callable[[Crops], None]] = {
            "whole images (simplejpeg)": photographs.by_simplejpeg
        }
        linked = {"the platform's libjpeg": ["-ljpeg"]}
        linked |= {path.name: [str(path), f"-Wl,-rpath,{path.parent}"] for path in given.libjpeg}
        for at, (name, link) in enumerate(linked.items()):
            library = _cropper(Path(folder), str(at), link)
            makers[f"its own cropping, {name}"] = _by_cropping(photographs, library)
        makers["ours, exact"] = _by_us(photographs)
        makers["ours, exact, again"] = _by_us(photographs, again=True)
        makers["ours"] = _by_us(photographs, may_reduce=True)
        makers["ours, again"] = _by_us(photographs, again=True, may_reduce=True)
        best = dict.fromkeys(makers, float("inf"))
        boxes = random_boxes(np.random.default_rng(0), photographs.sizes)
        for _ in range(ROUNDS):
            for name, make in makers.items():
                began = time.thread_time()
                make(boxes)
                best[name] = min(best[name], time.thread_time() - began)
    sys.stdout.write(f"{len(photographs.encoded)} photographs; ours by {maker()}\n")
    for name, seconds in best.items():
        rate = len(photographs.encoded) / seconds
        sys.stdout.write(f"{name}: {rate:.0f} images/s a core, {1e6 / rate:.0f} us\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
