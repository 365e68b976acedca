"""How many JPEG crops per second does one core make, with which library?

    python benchmarks/pixels.py FOLDER [--json]

Photographs of the folder that are larger than ImageNet's usual 500 x 375 are first scaled to that
size, at a quality of 95. All libraries make the same crops in turns, so that other load slows all
of them; the best round of each counts. Exit status 1: ours missed its bar, a multiple of the rate
of simplejpeg (libjpeg-turbo, whole images) with OpenCV's resize. "Ours, again" are crops of images
that were cropped before, as in later epochs of a dataset that stays in memory.

Training uses random resized crops to 224. Evaluation uses a resize and a center crop: to 256 and
224, for which these photographs are too small to be decoded at a reduced size, and to 128 and 112.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import cv2
import numpy as np
import simplejpeg  # type: ignore[import-untyped]
from numpy.typing import NDArray
from PIL import Image

from dataplane.transforms import pixels
from dataplane.transforms.pixels_library import maker
from dataplane.transforms.view import PixelView

ROUNDS = 9
SIDE = 224
LONG_SIDE, PIXELS_USUAL = 500, 500 * 375
QUALITY = 95
SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
ATTEMPTS = 10
BARS = {"ours": 1.4, "ours, again": 1.9}
RESTART_INDEX_PARTS = 16
VIEW = PixelView(SIDE, SIDE, "HWC", "uint8", None, None)
HALF_VIEW = PixelView(SIDE // 2, SIDE // 2, "HWC", "uint8", None, None)

Crops = NDArray[np.float64]
Maker = Callable[[Crops], None]


class Photographs:
    """The photographs, and the ways to crop all of them."""

    def __init__(self, folder: Path) -> None:
        self.encoded = [_usual(path.read_bytes()) for path in sorted(folder.iterdir())]
        self._memory = [np.frombuffer(image, np.uint8) for image in self.encoded]
        self._places = _places(self._memory)
        self._kept = [
            np.zeros(len(image) // RESTART_INDEX_PARTS // 8 * 8, np.uint8) for image in self.encoded
        ]
        self._restart_indexes = _places(self._kept)
        self.sizes = pixels.sizes(self._places)
        self._centres = centred_boxes(self.sizes)
        self._flips = np.zeros(len(self.encoded), np.uint8)
        self._out = np.zeros((len(self.encoded), SIDE, SIDE, 3), np.uint8)

    def by_simplejpeg(self, boxes: Crops) -> None:
        """Whole images, resized by OpenCV, without antialiasing."""
        for row, image in enumerate(self.encoded):
            top, left, height, width = boxes[row].astype(int).tolist()
            whole = simplejpeg.decode_jpeg(image, fastdct=False, fastupsample=False)
            part = whole[top : top + height, left : left + width]
            cv2.resize(part, (SIDE, SIDE), dst=self._out[row], interpolation=cv2.INTER_LINEAR)

    def by_pillow(self, boxes: Crops) -> None:
        """Whole images, resized with antialiasing."""
        for row, image in enumerate(self.encoded):
            top, left, height, width = boxes[row].tolist()
            with Image.open(io.BytesIO(image)) as opened:
                part = opened.convert("RGB").resize(
                    (SIDE, SIDE), Image.Resampling.BILINEAR, (left, top, left + width, top + height)
                )
                self._out[row] = np.asarray(part)

    def by_us(self, boxes: Crops) -> None:
        out = self._out.reshape(-1)
        pixels.render(self._places, boxes, self._flips, VIEW, out, may_reduce=True)

    def by_us_again(self, boxes: Crops) -> None:
        out = self._out.reshape(-1)
        pixels.render(
            self._places,
            boxes,
            self._flips,
            VIEW,
            out,
            restart_indexes=self._restart_indexes,
            may_reduce=True,
        )

    def evaluation_by_pillow(self, _boxes: Crops) -> None:
        """The steps of torchvision."""
        self.by_pillow(self._centres)

    def evaluation(self, _boxes: Crops) -> None:
        out = self._out.reshape(-1)
        pixels.render(self._places, self._centres, self._flips, VIEW, out)

    def small_evaluation(self, _boxes: Crops) -> None:
        self._evaluate_small(may_reduce=False)

    def fast_small_evaluation(self, _boxes: Crops) -> None:
        self._evaluate_small(may_reduce=True)

    def _evaluate_small(self, *, may_reduce: bool) -> None:
        out = self._out.reshape(-1)[: len(self.encoded) * HALF_VIEW.bytes]
        pixels.render(
            self._places, self._centres, self._flips, HALF_VIEW, out, may_reduce=may_reduce
        )


def centred_boxes(sizes: NDArray[np.int32]) -> Crops:
    """The middle of a resize to 256, or to 128.   Shapes:  result: float64[n, 4]."""
    whole = sizes.astype(np.float64)
    kept = whole.min(1, keepdims=True) * SIDE / 256
    return np.concatenate([(whole - kept) / 2, np.repeat(kept, 2, axis=1)], axis=1)


def _places(memory: Sequence[NDArray[np.uint8]]) -> pixels.Ints:
    return np.array([(each.ctypes.data, each.nbytes) for each in memory], np.int64)


def _usual(image: bytes) -> bytes:
    with Image.open(io.BytesIO(image)) as opened:
        if opened.width * opened.height <= PIXELS_USUAL:
            return image
        shrunk = opened.convert("RGB")
        shrunk.thumbnail((LONG_SIDE, LONG_SIDE))
        file = io.BytesIO()
        shrunk.save(file, "JPEG", quality=QUALITY)
        return file.getvalue()


def random_boxes(random: np.random.Generator, sizes: NDArray[np.int32]) -> Crops:
    """Boxes as RandomResizedCrop draws them.   Shapes:  result: float64[n, 4], whole numbers."""
    whole = sizes.astype(np.float64)
    parts = whole.copy()
    for _ in range(ATTEMPTS):
        area = random.uniform(SCALE[0], SCALE[1], len(whole)) * whole.prod(1)
        ratio = np.exp(random.uniform(np.log(RATIO[0]), np.log(RATIO[1]), len(whole)))
        drawn = np.stack([np.sqrt(area / ratio), np.sqrt(area * ratio)], 1).round()
        fits = ((drawn <= whole) & (drawn > 0)).all(1) & (parts == whole).all(1)
        parts[fits] = drawn[fits]
    corners = np.floor(random.uniform(0, 1, whole.shape) * (whole - parts + 1))
    return np.concatenate([corners, parts], 1)


def measure(photographs: Photographs) -> dict[str, float]:
    """Images/s of one core, by name."""
    makers: dict[str, Maker] = {
        "simplejpeg and OpenCV": photographs.by_simplejpeg,
        "Pillow": photographs.by_pillow,
        "ours": photographs.by_us,
        "ours, again": photographs.by_us_again,
        "evaluation to 224, Pillow": photographs.evaluation_by_pillow,
        "evaluation to 224": photographs.evaluation,
        "evaluation to 112": photographs.small_evaluation,
        "evaluation to 112, fast": photographs.fast_small_evaluation,
    }
    random = np.random.default_rng(0)
    best = dict.fromkeys(makers, float("inf"))
    boxes = [random_boxes(random, photographs.sizes) for _ in range(3)]
    for _ in range(ROUNDS):
        for name, make in makers.items():
            began = time.thread_time()
            for crops in boxes:
                make(crops)
            best[name] = min(best[name], time.thread_time() - began)
    return {name: len(photographs.encoded) * len(boxes) / s for name, s in best.items()}


def main() -> int:
    """Run the command. Exit status 1: a bar was missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folder", type=Path, help="of photographs, JPEG")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    cv2.setNumThreads(1)
    photographs = Photographs(given.folder)
    found = measure(photographs)
    base = found["simplejpeg and OpenCV"]
    if given.json:
        print(json.dumps(found))
    else:
        size = sum(len(image) for image in photographs.encoded) / len(photographs.encoded)
        height, width = photographs.sizes.mean(0)
        print(
            f"{len(photographs.encoded)} photographs, {height:.0f} x {width:.0f} pixels and "
            f"{size / 1e3:.0f} KB in the mean, to {SIDE} x {SIDE}; ours by {maker()}"
        )
        for name, rate in found.items():
            print(f"{name}: {rate:.0f} images/s a core, {rate / base:.2f} times simplejpeg's")
    return int(any(found[name] < bar * base for name, bar in BARS.items()))


if __name__ == "__main__":
    sys.exit(main())
