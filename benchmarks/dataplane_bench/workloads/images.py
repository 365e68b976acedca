"""Photographs of textures: JPEGs as large as ImageNet's, each in a colour that tells its label.

A label is a colour, and the texture around it has no mean of its own over any part as large as a
random resized crop. So the mean of a crop, flipped or not, gives the label away, which shows that
an image came with the label that it belongs to.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dataplane_bench.model import ColumnType, WorkloadColumn

LEVELS = (64, 96, 128, 160, 192)
"""Of each of red, green and blue: 125 colours."""
LABEL_COUNT = len(LEVELS) ** 3
QUALITY = 95
"""With which the mean file has 97 KB."""
SIZES = ((375, 500), (375, 500), (375, 500), (333, 500), (500, 375), (400, 500), (360, 480))
"""Height and width, pixels: frequent ones of ImageNet."""
COLUMNS = (
    WorkloadColumn("id", ColumnType.FIXED, "int64"),
    WorkloadColumn("label", ColumnType.FIXED, "int32"),
    WorkloadColumn("image", ColumnType.IMAGE),
)
_STEP = LEVELS[1] - LEVELS[0]
_TEXTURE_SIDE = 512
_TEXTURE_COUNT = 36
_PERIOD_MAX = 48
"""The longest wave of a texture, pixels: less than half of the shortest side of a crop."""
_LUMA, _CHROMA = 22.0, 6.0
"""Standard deviations of brightness and of each colour around it, of 255."""
_PEAK = 60
"""A texture's largest value: no pixel is cut at 0 or 255, which would move the mean."""
_GROUP_ROWS = 32


def colour_of_label(labels: NDArray[np.integer]) -> NDArray[np.uint8]:
    """Shapes:  labels: int[n].   result: uint8[n, 3], red first."""
    base = len(LEVELS)
    digits = np.stack([labels // base**2, labels // base % base, labels % base], axis=-1)
    return np.array(LEVELS, np.uint8)[digits]


def label_of_colour(mean_rgb: NDArray[np.floating]) -> NDArray[np.int32]:
    """The label with this colour, or -1 if no label has it.

    Shapes:  mean_rgb: float[n, 3], the mean colour of an image or of a crop.   result: int32[n].
    """
    base = len(LEVELS)
    digits = np.rint((np.asarray(mean_rgb) - LEVELS[0]) / _STEP).astype(np.int32)
    labels = digits[:, 0] * base**2 + digits[:, 1] * base + digits[:, 2]
    is_one = ((digits >= 0) & (digits < base)).all(axis=1)
    return np.where(is_one, labels, -1).astype(np.int32)


def write(files: Iterable[tuple[Path, NDArray[np.int64]]]) -> None:
    """Write photographs, for these ids, to each of these files."""
    random = np.random.default_rng(0)
    lumas, chromas = _textures(random, _LUMA), _textures(random, _CHROMA)
    for path, ids in files:
        labels = random.integers(0, LABEL_COUNT, len(ids), dtype=np.int32)
        colours = colour_of_label(labels).astype(np.int16)
        encoded = [_jpeg(random, lumas, chromas, colour) for colour in colours]
        table = pa.table(
            {
                "id": pa.array(ids),
                "label": pa.array(labels),
                "image": pa.array(encoded, pa.binary()),
            }
        )
        pq.write_table(
            table, path, row_group_size=_GROUP_ROWS, compression="NONE", use_dictionary=False
        )


def _jpeg(
    random: np.random.Generator,
    lumas: NDArray[np.int16],
    chromas: NDArray[np.int16],
    colour: NDArray[np.int16],
) -> bytes:
    """Shapes:  lumas, chromas: [n, side, side], periodic.   colour: [3]."""
    import simplejpeg  # type: ignore[import-untyped]

    height, width = SIZES[random.integers(len(SIZES))]
    luma = _part(random, lumas, height, width)
    red, blue = (_part(random, chromas, height, width) for _ in range(2))
    pixels = np.empty((height, width, 3), np.int16)
    np.add(luma, red, out=pixels[..., 0])
    np.subtract(luma, (red + blue) >> 1, out=pixels[..., 1])
    np.add(luma, blue, out=pixels[..., 2])
    pixels += colour
    # Cameras and ImageNet's sources use 4:2:0 and a quality near this.
    encoded: bytes = simplejpeg.encode_jpeg(
        pixels.astype(np.uint8), quality=QUALITY, colorsubsampling="420"
    )
    return encoded


def _part(
    random: np.random.Generator, textures: NDArray[np.int16], height: int, width: int
) -> NDArray[np.int16]:
    """A part of some texture, moved and mirrored: none comes twice."""
    texture = textures[random.integers(len(textures))]
    down, right = random.integers(0, _TEXTURE_SIDE, 2)
    whole = np.roll(texture, (down, right), (0, 1))[:height, :width]
    up, left = random.choice((-1, 1), 2)
    part: NDArray[np.int16] = whole[::up, ::left]
    return part


def _textures(random: np.random.Generator, deviation: float) -> NDArray[np.int16]:
    """Noise whose waves are as strong as they are long, as in photographs, up to _PERIOD_MAX;
    here it is strong and there weak, as in photographs too.

    Shapes:  result: int16[n, side, side], periodic, of mean 0 in every part.
    """
    side = _TEXTURE_SIDE
    down, right = np.fft.fftfreq(side)[:, None], np.fft.rfftfreq(side)[None, :]
    frequency = np.hypot(down, right)
    frequency[0, 0] = 1.0
    short = frequency >= 1 / _PERIOD_MAX
    textures = np.empty((_TEXTURE_COUNT, side, side), np.int16)
    for index in range(_TEXTURE_COUNT):
        fine = np.fft.rfft2(random.standard_normal((side, side))) * short / frequency
        coarse = np.fft.rfft2(random.standard_normal((side, side))) * ~short / frequency
        coarse[0, 0] = 0.0
        contrast = np.fft.irfft2(coarse, (side, side))
        contrast = np.exp(0.7 * contrast / contrast.std())
        waves = np.fft.rfft2(np.fft.irfft2(fine, (side, side)) * contrast) * short
        texture = np.fft.irfft2(waves, (side, side))
        # Some photographs are busy, others are not.
        texture *= deviation * (0.5 + index / (_TEXTURE_COUNT - 1)) / texture.std()
        peak = _PEAK * deviation / (_LUMA + _CHROMA)
        # Bent, not cut: the larger, the more, and alike on both sides, so that the mean stays 0.
        textures[index] = np.rint(peak * np.tanh(texture / peak))
    return textures
