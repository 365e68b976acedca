"""Which part of each image is kept, and which images are mirrored: pure, and alike everywhere.

All that is random comes from the key of a sample and of what it is drawn for (`draw_keys`), which
depends on nothing but seed, epoch and the sample: not on ranks, workers or batches. docs/images.md
writes it down. Logarithms and powers are made of sums and products, because those of libraries
differ in the last bit from machine to machine, and a box would with them.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from dataplane.errors import ImageError
from dataplane.model import Cut, ImageSpec
from dataplane.plan.permute import Words, extended, sample_keys

Floats = NDArray[np.float64]
Sizes = NDArray[np.int32]

CROP = "RandomResizedCrop"
FLIP = "RandomHorizontalFlip"
_TRIES = 10
_HALVINGS = 10
_TERMS = 12


def draw_keys(
    image: ImageSpec,
    what: str,
    seed: int,
    epoch: int,
    shards: NDArray[np.integer],
    rows: NDArray[np.integer],
) -> Words:
    """The key of each sample for a transform of a column: "jpg/RandomResizedCrop".

    Shapes:  shards, rows: integer[n], the sample ids.   result: uint64[n].
    """
    return sample_keys(seed, epoch, shards, rows, f"{image.column}/{what}")


def uniform(keys: Words, count: int) -> Floats:
    """`count` numbers a key, each of them in [0, 1): number i from the key extended by i.

    Shapes:  keys: uint64[n].   result: float64[n, count].
    """
    places = np.broadcast_to(np.arange(count), (len(keys), count))
    return (extended(keys[:, None], places) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def flips(image: ImageSpec, keys: Words) -> NDArray[np.uint8]:
    """1 for every image that is mirrored.

    Shapes:  keys: uint64[n].   result: uint8[n].
    """
    return (uniform(keys, 1)[:, 0] < image.flip).astype(np.uint8)


def boxes(image: ImageSpec, sizes: Sizes, keys: Words) -> Floats:
    """The part of each image that becomes all of the result.

    Shapes:  sizes: int32[n, 2], height and width.   keys: uint64[n], looked at by a random cut.
             result: float64[n, 4]: top, left, height, width, in pixels of the image.
    Raises:  ImageError: an image is smaller than a CenterCrop without a Resize; row is its place.
    """
    whole = sizes.astype(np.float64)
    if image.cut is Cut.RANDOM:
        return _random(image, whole, keys)
    if image.cut is Cut.CENTER:
        return _centred(image, whole)
    return np.concatenate([np.zeros_like(whole), whole], axis=1)


def _centred(image: ImageSpec, whole: Floats) -> Floats:
    """Source:  torchvision.transforms.v2.functional: resize (of one int: the long side is rounded
    down) and center_crop (the corner is rounded to even).
    """
    kept = np.array([image.height, image.width], np.float64)
    resized = whole
    if len(image.resize) == 1:
        short = whole.min(axis=1, keepdims=True)
        resized = np.floor(image.resize[0] * whole / short)
    elif image.resize:
        resized = np.broadcast_to(np.array(image.resize, np.float64), whole.shape)
    small = np.flatnonzero((resized < kept).any(axis=1))
    if len(small):
        height, width = whole[small[0]].astype(int).tolist()
        raise ImageError(
            f"an image of {height} x {width} pixels is smaller than CenterCrop(({image.height}, "
            f"{image.width})): put a Resize before it",
            row=int(small[0]),
        )
    scale = whole / resized
    return np.concatenate([np.rint((resized - kept) / 2) * scale, kept * scale], axis=1)


def _random(image: ImageSpec, whole: Floats, keys: Words) -> Floats:
    """Source:  torchvision.transforms.RandomResizedCrop.get_params: the first of ten tries that
    fits, else the largest part in the middle whose ratio is allowed.
    """
    (least, most), (low, high) = image.scale, image.ratio
    drawn = uniform(keys, 2 * _TRIES + 2)
    area = whole.prod(axis=1)[:, None] * (least + drawn[:, :_TRIES] * (most - least))
    ratio = low * power(high / low, drawn[:, _TRIES : 2 * _TRIES])
    wide, tall = np.rint(np.sqrt(area * ratio)), np.rint(np.sqrt(area / ratio))
    fits = (wide > 0) & (wide <= whole[:, 1:]) & (tall > 0) & (tall <= whole[:, :1])
    first = fits.argmax(axis=1)[:, None]
    kept = np.concatenate(
        [np.take_along_axis(sides, first, axis=1) for sides in (tall, wide)], axis=1
    )
    corner = np.floor(drawn[:, 2 * _TRIES :] * (whole - kept + 1))
    middle = _largest(whole, low, high)
    found = fits.any(axis=1, keepdims=True)
    return np.concatenate(
        [np.where(found, corner, (whole - middle) // 2), np.where(found, kept, middle)], axis=1
    )


def _largest(whole: Floats, low: float, high: float) -> Floats:
    """The largest part of each image whose width by height is allowed.

    Shapes:  whole, result: float64[n, 2], height and width.
    """
    height, width = whole.T
    ratio = width / height
    tall = np.where(ratio < low, np.rint(width / low), height)
    wide = np.where(ratio > high, np.rint(height * high), width)
    kept: Floats = np.stack([np.minimum(tall, height), np.minimum(wide, width)], axis=1)
    return kept.clip(min=1)


def power(base: float, exponents: Floats) -> Floats:
    """`base` to each power, with sums and products alone.

    Shapes:  exponents, result: float64[...].
    """
    return _exponential(exponents * logarithm(base))


def logarithm(value: float) -> float:
    """The natural logarithm, with sums and products alone."""
    fraction, doublings = math.frexp(value)
    return _atanh_series(fraction) + doublings * -_atanh_series(0.5)


def _atanh_series(value: float) -> float:
    """The logarithm of a value in [1/2, 1]."""
    step = (value - 1) / (value + 1)
    total, term = 0.0, step
    for odd in range(1, 4 * _TERMS, 2):
        total += term / odd
        term *= step * step
    return 2 * total


def _exponential(values: Floats) -> Floats:
    small = values / (1 << _HALVINGS)
    total: Floats = np.ones_like(small)
    for term in range(_TERMS, 0, -1):
        total = 1 + small * total / term
    for _ in range(_HALVINGS):
        total = total * total
    return total
