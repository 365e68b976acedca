"""Normalize: a mean and a standard deviation for each colour."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from dataplane.model.records import ImageSpec
from dataplane.transforms.steps.kind import AnyStep, SpecFields, StepGroup, StepKind
from dataplane.transforms.steps.parameters import numbers
from dataplane.transforms.steps.to_dtype import ToDtype
from dataplane.transforms.view import COLOURS, PixelView


class Normalize(Struct, frozen=True):
    """Computes (value - mean) / std for values from 0 to 1. Red, green and blue each have a mean
    and a std. The result is float32, unless ToDtype sets another dtype.
    """

    mean: Sequence[float]
    std: Sequence[float]


def _checked(step: Normalize, where: str) -> Normalize:
    return Normalize(
        numbers(step.mean, COLOURS, "mean", where), numbers(step.std, COLOURS, "std", where)
    )


def _faults(step: Normalize, steps: tuple[AnyStep, ...]) -> Iterator[str]:
    if ToDtype("uint8") in steps:
        yield "Normalize gives fractions, which ToDtype('uint8') cannot hold"
    if not all(value > 0 for value in step.std):
        yield f"Normalize's std is {step.std}: each must be above 0"
    if not len(step.mean) == len(step.std) == COLOURS:
        yield "Normalize needs a mean and a std for each of three colours"


def _view(step: Normalize, view: PixelView) -> PixelView:
    return replace(view, mean=tuple(step.mean), std=tuple(step.std))


def _write(step: Normalize, image: ImageSpec) -> ImageSpec:
    return replace(image, mean=tuple(step.mean), std=tuple(step.std))


def _read(image: ImageSpec) -> Normalize | None:
    return Normalize(image.mean, image.std) if image.mean or image.std else None


STEP: Final = StepKind(
    step=Normalize,
    group=StepGroup.FORM,
    checked=_checked,
    faults=_faults,
    fields=SpecFields(_write, _read),
    view=_view,
    implies=(ToDtype("float32"),),
)
