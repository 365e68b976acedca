"""ToDtype: the dtype of pixels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from dataplane.model.records import ImageSpec
from dataplane.transforms.dtypes import dtype_name
from dataplane.transforms.steps.kind import AnyStep, SpecFields, StepGroup, StepKind
from dataplane.transforms.steps.parameters import word
from dataplane.transforms.view import DTYPES, PixelView


class ToDtype(Struct, frozen=True):
    """Sets the dtype, given as a name or as torch's dtype. uint8 values are 0 to 255; floats are 0
    to 1.
    """

    dtype: object


def _checked(step: ToDtype, where: str) -> ToDtype:
    return ToDtype(word(dtype_name(step.dtype), [*DTYPES], where))


def _faults(step: ToDtype, steps: tuple[AnyStep, ...]) -> Iterator[str]:
    del steps
    if step.dtype not in DTYPES:
        yield f"dtype {step.dtype!r} is unknown: choose one of {', '.join(DTYPES)}"


def _view(step: ToDtype, view: PixelView) -> PixelView:
    return replace(view, dtype=str(step.dtype))


def _write(step: ToDtype, image: ImageSpec) -> ImageSpec:
    return replace(image, dtype=str(step.dtype))


STEP: Final = StepKind(
    step=ToDtype,
    group=StepGroup.FORM,
    checked=_checked,
    faults=_faults,
    fields=SpecFields(_write, lambda image: ToDtype(image.dtype)),
    view=_view,
)
