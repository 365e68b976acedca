"""Resize: scales the whole image to a size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from dataplane.base.units import whole
from dataplane.model.records import ImageSpec
from dataplane.transforms.steps.kind import AnyStep, Crops, Floats, SpecFields, StepGroup, StepKind
from dataplane.transforms.steps.parameters import Size, pair, sides_fault

SIDES = 2
KEEPS_RATIO: Final = (
    "Resize(int) keeps the ratio of each image: pass Resize((height, width)), or add a CenterCrop "
    "after it"
)


class Resize(Struct, frozen=True):
    """Resizes to (height, width). With an int, the shorter side gets this length; a CenterCrop must
    follow, since all images of a batch must have the same size.
    """

    size: Size


def sides(step: Resize) -> tuple[int, ...]:
    """Return the shorter side, or height and width."""
    return (step.size,) if isinstance(step.size, int) else tuple(step.size)


def _checked(step: Resize, where: str) -> Resize:
    side = whole(step.size)
    return Resize(pair(step.size, where) if side is None else side)


def _faults(step: Resize, steps: tuple[AnyStep, ...]) -> Iterator[str]:
    del steps
    found = sides(step)
    if len(found) > SIDES:
        yield f"resize is {found}: it must be empty, the shorter side, or height and width"
    if fault := sides_fault(found):
        yield fault


def _size(step: Resize) -> tuple[int, int] | None:
    match sides(step):
        case (height, width):
            return height, width
    return None


def _place(step: Resize, crops: Crops, drawn: Floats) -> Crops:
    """Scale the whole image. With one int, the longer side is rounded down.

    Source:  torchvision.transforms.v2.functional.resize
    """
    del drawn
    size = _size(step)
    if size is None:
        short = crops.whole.min(axis=1, keepdims=True)
        return replace(crops, resized=np.floor(sides(step)[0] * crops.whole / short))
    resized = np.broadcast_to(np.array(size, np.float64), crops.whole.shape)
    return replace(crops, resized=resized)


def _write(step: Resize, image: ImageSpec) -> ImageSpec:
    return replace(image, resize=sides(step))


def _read(image: ImageSpec) -> Resize | None:
    if not image.resize:
        return None
    return Resize(image.resize[0] if len(image.resize) == 1 else image.resize)


STEP: Final = StepKind(
    step=Resize,
    group=StepGroup.RESIZE,
    checked=_checked,
    faults=_faults,
    fields=SpecFields(_write, _read),
    size=_size,
    place=_place,
)
