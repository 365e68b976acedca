"""An image step as a contributor might add it, as a file of dataplane/transforms/steps. Its C code
is in random_solarize.c.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
from msgspec import Struct

from dataplane.transforms.steps.kind import AnyStep, Bytes, Floats, StepGroup, StepKind
from dataplane.transforms.steps.parameters import numbers


class RandomSolarize(Struct, frozen=True):
    """Inverts all values from `threshold` on, of 0 to 255, in the share `p` of all images."""

    threshold: float
    p: float = 0.5


def _checked(step: RandomSolarize, where: str) -> RandomSolarize:
    return RandomSolarize(*numbers([step.threshold, step.p], 2, "threshold and p", where))


def _faults(step: RandomSolarize, steps: tuple[AnyStep, ...]) -> Iterator[str]:
    del steps
    if not 0 <= step.p <= 1:
        yield f"RandomSolarize's p is {step.p}: 0 to 1"


def _change(step: RandomSolarize, pixels: Bytes, drawn: Floats) -> None:
    if drawn[0] < step.p:
        np.subtract(255, pixels, out=pixels, where=pixels >= step.threshold)


STEP: Final = StepKind(
    step=RandomSolarize,
    group=StepGroup.PIXELS,
    checked=_checked,
    faults=_faults,
    draws=("changed if it is below p",),
    change=_change,
    in_c=True,
)
