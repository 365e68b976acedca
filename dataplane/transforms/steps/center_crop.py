"""CenterCrop: the middle of every image."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from dataplane.model.errors import ImageError
from dataplane.model.records import Cut, ImageSpec
from dataplane.transforms.steps.kind import AnyStep, Crops, Floats, SpecFields, StepGroup, StepKind
from dataplane.transforms.steps.parameters import Size, pair
from dataplane.transforms.steps.resize import SIDES, Resize, sides


class CenterCrop(Struct, frozen=True):
    """Crops the middle of every image. An int is both height and width."""

    size: Size


def _size(step: CenterCrop) -> tuple[int, int]:
    return pair(step.size, "CenterCrop")


def _faults(step: CenterCrop, steps: tuple[AnyStep, ...]) -> Iterator[str]:
    kept = _size(step)
    for each in steps:
        if isinstance(each, Resize):
            found = sides(each)
            left = found * SIDES if len(found) == 1 else found
            if any(side > room for side, room in zip(kept, left, strict=False)):
                yield f"CenterCrop{kept} is larger than the result of Resize{found}"


def _place(step: CenterCrop, crops: Crops, drawn: Floats) -> Crops:
    """Take the middle of each image.

    Source:  torchvision.transforms.v2.functional.center_crop: the corner is rounded to even.

    Raises:  ImageError: an image is smaller than the crop; row is its index.
    """
    del drawn
    kept = np.array(_size(step), np.float64)
    small = np.flatnonzero((crops.resized < kept).any(axis=1))
    if len(small):
        height, width = crops.whole[small[0]].astype(int).tolist()
        raise ImageError(
            f"an image of {height} x {width} pixels is smaller than CenterCrop({_size(step)}): put "
            "a Resize before it",
            row=int(small[0]),
        )
    scale = crops.whole / crops.resized
    corner = np.rint((crops.resized - kept) / 2)
    return replace(crops, boxes=np.concatenate([corner * scale, kept * scale], axis=1))


def _write(step: CenterCrop, image: ImageSpec) -> ImageSpec:
    del step
    return replace(image, cut=Cut.CENTER)


def _read(image: ImageSpec) -> CenterCrop | None:
    return CenterCrop((image.height, image.width)) if image.cut is Cut.CENTER else None


STEP: Final = StepKind(
    step=CenterCrop,
    group=StepGroup.CUT,
    checked=lambda step, where: CenterCrop(pair(step.size, where)),
    faults=_faults,
    fields=SpecFields(_write, _read),
    size=_size,
    place=_place,
)
