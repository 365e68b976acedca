"""A step that chooses a part of an image: what its file in dataplane/transforms/steps would be."""

from __future__ import annotations

from typing import Final

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from dataplane.transforms.steps.kind import Crops, Floats, StepGroup, StepKind
from dataplane.transforms.steps.parameters import Size, pair


class RandomCrop(Struct, frozen=True):
    """A random part of this size, in the resolution of the image as it was resized."""

    size: Size


def _size(step: RandomCrop) -> tuple[int, int]:
    return pair(step.size, "RandomCrop")


def _place(step: RandomCrop, crops: Crops, drawn: Floats) -> Crops:
    kept = np.array(_size(step), np.float64)
    corner = np.floor(drawn * (crops.resized - kept + 1))
    scale = crops.whole / crops.resized
    return replace(crops, boxes=np.concatenate([corner * scale, kept * scale], axis=1))


STEP: Final = StepKind(
    step=RandomCrop,
    group=StepGroup.CUT,
    checked=lambda step, where: RandomCrop(pair(step.size, where)),
    draws=("top", "left"),
    size=_size,
    place=_place,
    read_numbers=lambda numbers: RandomCrop((int(numbers[0]), int(numbers[1]))),
)
