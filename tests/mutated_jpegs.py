"""Damaged JPEGs through all code that makes pixels: no access may be out of bounds.

    python tests/mutated_jpegs.py --count 100000 [--first 0] [--seed 0]

`make sanitize` runs this with the C code built by gcc's sanitizers, which end a process at the
first access out of bounds. Mutants are numbered, and each depends only on its number and the seed:
if one ends a process, its number is printed, and `--first NUMBER --count 1` makes it again.

Sources are the photographs in $DATAPLANE_TEST_DATA/images as they are and as small ones in many
encodings, and odd_jpegs.py. Each mutant goes through `sizes` and `render`: exact, reduced, with a
restart index that is written and then read, and with that of the sound image; some through Pillow
too.
"""

from __future__ import annotations

import argparse
import collections
import io
import itertools
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from odd_jpegs import JPEGS
from pictures import pillow_maker
from PIL import Image

from dataplane.model.errors import ImageError
from dataplane.transforms.pixels import render, sizes
from dataplane.transforms.pixels_library import Maker, maker
from dataplane.transforms.view import PixelView

SLICE = 10_000
"""Mutants of one process."""
PHOTOGRAPHS = 24
PIXELS_MAX = 1 << 22
RESTART_INDEX_BYTES = 4096
VIEWS = (
    PixelView(24, 32, "HWC", "uint8", None, None),
    PixelView(17, 9, "CHW", "float32", (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)),
)
_FORMS: tuple[dict[str, object], ...] = (
    {"quality": 90, "subsampling": 0},
    {"quality": 75, "subsampling": 1},
    {"quality": 60, "subsampling": 2, "restart_marker_blocks": 3},
    {"quality": 85, "progressive": True},
    {"quality": 40, "progressive": True, "subsampling": 0, "restart_marker_rows": 1},
    {"quality": 95, "optimize": True, "restart_marker_rows": 1},
)
_SMALL_SHARE = 0.97
_PILLOW_EVERY = 20
_HEADER_BYTES = 700

Bytes = NDArray[np.uint8]
Outcomes = collections.Counter[str]


@dataclass(frozen=True, slots=True)
class Sources:
    """The originals of mutants: `small` ones nearly always, and `whole` photographs."""

    small: tuple[bytes, ...]
    whole: tuple[bytes, ...]

    @classmethod
    def of(cls, photographs: Sequence[bytes]) -> Sources:
        """With small copies of these photographs, in each encoding."""
        small = [_encoded(one, form) for one, form in itertools.product(photographs, _FORMS)]
        return cls((*JPEGS.values(), *small), tuple(photographs) or tuple(JPEGS.values()))


def _encoded(photograph: bytes, form: dict[str, object]) -> bytes:
    with Image.open(io.BytesIO(photograph)) as opened:
        opened.draft("RGB", (160, 160))
        image = opened.convert("L" if form["quality"] == 95 else "RGB")
        image.thumbnail((144, 112))
        file = io.BytesIO()
        image.save(file, "JPEG", **form)
        return file.getvalue()


def mutant(sources: Sources, seed: int, number: int) -> tuple[bytes, bytes]:
    """The mutant of this number, and the sound image that it was made of."""
    random = np.random.default_rng([seed, number])
    kind = sources.small if random.random() < _SMALL_SHARE else sources.whole
    sound = kind[int(random.integers(len(kind)))]
    image = bytearray(sound)
    for _ in range(int(random.integers(1, 5))):
        _change(image, random)
    return bytes(image), sound


def _change(image: bytearray, random: np.random.Generator) -> None:
    """One change: of a byte or a run of them, in the header half of the time; or of the length."""
    if len(image) < 4:
        return
    reach = min(len(image), _HEADER_BYTES) if random.random() < 0.5 else len(image)
    at = int(random.integers(2, max(3, reach)))
    match int(random.integers(7)):
        case 0:
            image[at] ^= 1 << int(random.integers(8))
        case 1:
            image[at] = int(random.choice([0, 1, 0x7F, 0x80, 0xD0, 0xD9, 0xFE, 0xFF]))
        case 2:
            image[at : at + 2] = random.bytes(2)
        case 3:
            image[at : at + 1] = b"\xff" + bytes([int(random.integers(0xC0, 0xFF))])
        case 4:
            del image[at : at + int(random.integers(1, 64))]
        case 5:
            start = int(random.integers(len(image)))
            image[at:at] = image[start : start + int(random.integers(1, 200))]
        case _:
            del image[int(random.integers(len(image))) :]


def pass_through(image: bytes, sound: bytes, number: int) -> Outcomes:
    """Make pixels of one mutant in all ways; count how often that worked and was refused."""
    outcomes: Outcomes = collections.Counter()
    random = np.random.default_rng(number)
    makers = [maker()] if number % _PILLOW_EVERY else [maker(), pillow_maker()]
    for by in makers:
        try:
            height, width = sizes(_placed([image]), by)[0].tolist()
        except ImageError:
            outcomes["header refused"] += 1
            # Callers of render pass a size from `sizes`; a wrong size must not do harm either.
            height, width = (int(one) for one in random.integers(1, 200, 2))
        if height * width > PIXELS_MAX:
            outcomes["too large"] += 1
            continue
        for box in _boxes(height, width, random):
            _render(image, sound, box, by, outcomes)
    return outcomes


def _boxes(height: int, width: int, random: np.random.Generator) -> list[tuple[float, ...]]:
    """The whole image, and a part of it."""
    top, left = random.random(2) * (height - 1), random.random(2)[0] * (width - 1)
    down, right = (height - top[0]) * random.random(), (width - left) * random.random()
    part = (float(top[0]), float(left), float(max(down, 1e-3)), float(max(right, 1e-3)))
    return [(0.0, 0.0, float(height), float(width)), part]


def _render(
    image: bytes, sound: bytes, box: tuple[float, ...], by: Maker, outcomes: Outcomes
) -> None:
    own, of_sound = _restart_index(), _restart_index()
    with_sound = np.array([(of_sound.ctypes.data, of_sound.nbytes)], np.int64)
    with_own = np.array([(own.ctypes.data, own.nbytes)], np.int64)
    trials: list[tuple[bytes, NDArray[np.int64] | None, bool]] = [
        (image, None, False),
        (image, None, True),
        (image, with_own, False),
        (image, with_own, False),
        (sound, with_sound, False),
        (image, with_sound, False),
    ]
    for view, (made_of, restart_index, may_reduce) in itertools.product(VIEWS, trials):
        out = np.zeros(view.bytes, np.uint8)
        try:
            render(
                _placed([made_of]), np.array([box]), np.ones(1, np.uint8), view, out, by,
                restart_index, may_reduce=may_reduce,
            )  # fmt: skip
        except ImageError:
            outcomes["refused"] += 1
        else:
            outcomes["made"] += 1


_kept: list[Bytes] = []


def _placed(images: Sequence[bytes]) -> NDArray[np.int64]:
    """The places of images in memory, each of which ends where its memory ends."""
    _kept[:] = [np.frombuffer(image, np.uint8).copy() for image in images]
    return np.array([(one.ctypes.data, one.nbytes) for one in _kept], np.int64).reshape(-1, 2)


def _restart_index() -> Bytes:
    return np.zeros(RESTART_INDEX_BYTES, np.uint8)


def sources_of(folder: Path | None) -> Sources:
    """Of the photographs in a folder, if there is one."""
    paths = sorted(folder.glob("*.JPEG"))[:PHOTOGRAPHS] if folder else []
    return Sources.of([path.read_bytes() for path in paths])


def _run_slice(first: int, count: int, seed: int, progress: Path) -> None:
    """Run in a separate process, which a fault may end."""
    if maker().missing:
        sys.exit(f"libpixels.so is not used: {maker().missing}")
    warnings.simplefilter("ignore")  # Pillow's, of tags
    data = os.environ.get("DATAPLANE_TEST_DATA")
    sources = sources_of(Path(data, "images") if data else None)
    at = np.memmap(progress, np.int64, "r+", shape=(1,))
    outcomes: Outcomes = collections.Counter()
    for number in range(first, first + count):
        at[0] = number
        outcomes += pass_through(*mutant(sources, seed, number), number)
    sys.stdout.write(" ".join(f"{what.replace(' ', '-')}={n}" for what, n in outcomes.items()))


def main() -> int:
    """Exit status 1: a process ended."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--progress", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.progress:
        _run_slice(given.first, given.count, given.seed, given.progress)
        return 0
    outcomes: Outcomes = collections.Counter()
    with tempfile.NamedTemporaryFile() as progress:
        progress.write(bytes(8))
        progress.flush()
        for first in range(given.first, given.first + given.count, SLICE):
            count = min(SLICE, given.first + given.count - first)
            command = [sys.executable, __file__, "--first", str(first), "--count", str(count)]
            command += ["--seed", str(given.seed), "--progress", progress.name]
            child = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
            if child.returncode:
                number = int(np.fromfile(progress.name, np.int64, 1)[0])
                sys.stderr.write(
                    f"mutant {number} ended a process with status {child.returncode}: see it again "
                    f"with --first {number} --count 1 --seed {given.seed}\n"
                )
                return 1
            for word in child.stdout.split():
                what, _, told = word.partition("=")
                outcomes[what] += int(told)
            told = ", ".join(f"{n} {what}" for what, n in sorted(outcomes.items()))
            sys.stderr.write(f"{first + count - given.first} mutants: {told}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
