"""RandomHorizontalFlip: mirrors a share of all images left-right."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from dataplane.model.records import ImageSpec
from dataplane.transforms.steps.kind import AnyStep, Crops, Floats, SpecFields, StepGroup, StepKind
from dataplane.transforms.steps.parameters import numbers


class RandomHorizontalFlip(Struct, frozen=True):
    """Mirrors an image with probability `p`."""

    p: float = 0.5


def _checked(step: RandomHorizontalFlip, where: str) -> RandomHorizontalFlip:
    return RandomHorizontalFlip(*numbers([step.p], 1, "p", where))


def _faults(step: RandomHorizontalFlip, steps: tuple[AnyStep, ...]) -> Iterator[str]:
    del steps
    if not 0 <= step.p <= 1:
        yield f"RandomHorizontalFlip's p is {step.p}: it must be 0 to 1"


def _place(step: RandomHorizontalFlip, crops: Crops, drawn: Floats) -> Crops:
    return replace(crops, flips=(drawn[:, 0] < step.p).astype(np.uint8))


def _write(step: RandomHorizontalFlip, image: ImageSpec) -> ImageSpec:
    return replace(image, flip=step.p)


def _read(image: ImageSpec) -> RandomHorizontalFlip | None:
    return RandomHorizontalFlip(image.flip) if image.flip else None


STEP: Final = StepKind(
    step=RandomHorizontalFlip,
    group=StepGroup.MIRROR,
    checked=_checked,
    faults=_faults,
    draws=("mirrored if it is below p",),
    fields=SpecFields(_write, _read),
    place=_place,
)
