"""RandomResizedCrop: a random part of every image, resized.

Logarithms and powers are computed from sums and products, since the results of math libraries
differ in the last bit between machines, and so would crops.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from dataplane.model.records import Cut, ImageSpec
from dataplane.transforms.steps.kind import AnyStep, Crops, Floats, SpecFields, StepGroup, StepKind
from dataplane.transforms.steps.parameters import Size, numbers, pair

_TRIES = 10
_HALVINGS = 10
_TERMS = 12


class RandomResizedCrop(Struct, frozen=True):
    """Crops a random part of every image and resizes it. The part's share of the image's area is
    within `scale`, and its width divided by its height is within `ratio`.

    Source:  torchvision.transforms.RandomResizedCrop.
    """

    size: Size
    scale: Sequence[float] = (0.08, 1.0)
    ratio: Sequence[float] = (3 / 4, 4 / 3)


def _checked(step: RandomResizedCrop, where: str) -> RandomResizedCrop:
    return RandomResizedCrop(
        pair(step.size, where),
        numbers(step.scale, 2, "scale", where),
        numbers(step.ratio, 2, "ratio", where),
    )


def _faults(step: RandomResizedCrop, steps: tuple[AnyStep, ...]) -> Iterator[str]:
    del steps
    if not _is_range(step.scale, 1.0):
        yield (
            f"RandomResizedCrop's scale is {step.scale}: it must be two shares of the area, "
            "0 < least <= most <= 1"
        )
    if not _is_range(step.ratio, math.inf):
        yield (
            f"RandomResizedCrop's ratio is {step.ratio}: it must be two ratios of width to height, "
            "0 < least <= most"
        )


def _is_range(given: Sequence[float], most: float) -> bool:
    return len(given) == 2 and 0 < given[0] <= given[1] <= most


def _place(step: RandomResizedCrop, crops: Crops, drawn: Floats) -> Crops:
    """Take the first of ten random parts that fits into the image, and if none fits, the largest
    centred part whose ratio is allowed.

    Source:  torchvision.transforms.RandomResizedCrop.get_params
    """
    whole, (least, most), (low, high) = crops.whole, step.scale, step.ratio
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
    boxes = np.concatenate(
        [np.where(found, corner, (whole - middle) // 2), np.where(found, kept, middle)], axis=1
    )
    return replace(crops, boxes=boxes)


def _largest(whole: Floats, low: float, high: float) -> Floats:
    """Return the largest part of each image whose ratio of width to height is allowed.

    Shapes:  whole, result: float64[n, 2], height and width.
    """
    height, width = whole.T
    ratio = width / height
    tall = np.where(ratio < low, np.rint(width / low), height)
    wide = np.where(ratio > high, np.rint(height * high), width)
    kept: Floats = np.stack([np.minimum(tall, height), np.minimum(wide, width)], axis=1)
    return kept.clip(min=1)


def power(base: float, exponents: Floats) -> Floats:
    """Compute `base` to each power, using only sums and products.

    Shapes:  exponents, result: float64[...].
    """
    return _exponential(exponents * logarithm(base))


def logarithm(value: float) -> float:
    """Compute the natural logarithm, using only sums and products."""
    fraction, doublings = math.frexp(value)
    return _atanh_series(fraction) + doublings * -_atanh_series(0.5)


def _atanh_series(value: float) -> float:
    """Compute the logarithm of a value in [1/2, 1]."""
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


def _write(step: RandomResizedCrop, image: ImageSpec) -> ImageSpec:
    return replace(image, cut=Cut.RANDOM, scale=tuple(step.scale), ratio=tuple(step.ratio))


def _read(image: ImageSpec) -> RandomResizedCrop | None:
    if image.cut is not Cut.RANDOM:
        return None
    return RandomResizedCrop((image.height, image.width), image.scale, image.ratio)


STEP: Final = StepKind(
    step=RandomResizedCrop,
    group=StepGroup.CUT,
    checked=_checked,
    faults=_faults,
    draws=(
        *(f"share of the area, try {one}" for one in range(_TRIES)),
        *(f"width by height, try {one}" for one in range(_TRIES)),
        *("top", "left"),
    ),
    fields=SpecFields(_write, _read),
    size=lambda step: pair(step.size, "RandomResizedCrop"),
    place=_place,
    is_first=True,
    reduces=True,
)
