"""The list of all image steps. A new step needs no change in any other module."""

from __future__ import annotations

from typing import Final

from dataplane.transforms.steps import (
    center_crop,
    normalize,
    random_horizontal_flip,
    random_resized_crop,
    resize,
    to_dtype,
    to_layout,
)
from dataplane.transforms.steps.center_crop import CenterCrop
from dataplane.transforms.steps.kind import AnyStep, StepKind
from dataplane.transforms.steps.normalize import Normalize
from dataplane.transforms.steps.random_horizontal_flip import RandomHorizontalFlip
from dataplane.transforms.steps.random_resized_crop import RandomResizedCrop
from dataplane.transforms.steps.resize import Resize
from dataplane.transforms.steps.to_dtype import ToDtype
from dataplane.transforms.steps.to_layout import ToLayout

__all__ = [
    "CenterCrop",
    "Normalize",
    "RandomHorizontalFlip",
    "RandomResizedCrop",
    "Resize",
    "ToDtype",
    "ToLayout",
]

Transform = (
    Resize | CenterCrop | RandomResizedCrop | RandomHorizontalFlip | ToDtype | Normalize | ToLayout
)
STEPS: Final[tuple[StepKind[AnyStep], ...]] = (
    resize.STEP,
    center_crop.STEP,
    random_resized_crop.STEP,
    random_horizontal_flip.STEP,
    to_dtype.STEP,
    normalize.STEP,
    to_layout.STEP,
)
