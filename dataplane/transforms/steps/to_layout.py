"""ToLayout: the order of an image's dimensions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from dataplane.model.records import ImageSpec
from dataplane.transforms.steps.kind import AnyStep, SpecFields, StepGroup, StepKind
from dataplane.transforms.steps.parameters import word
from dataplane.transforms.view import LAYOUTS, PixelView


class ToLayout(Struct, frozen=True):
    """Sets the layout: [B, height, width, 3] ("HWC", the default) or [B, 3, height, width]
    ("CHW").
    """

    layout: str


def _faults(step: ToLayout, steps: tuple[AnyStep, ...]) -> Iterator[str]:
    del steps
    if step.layout not in LAYOUTS:
        yield f"layout {step.layout!r} is unknown: choose one of {', '.join(LAYOUTS)}"


def _view(step: ToLayout, view: PixelView) -> PixelView:
    return replace(view, layout=step.layout)


def _write(step: ToLayout, image: ImageSpec) -> ImageSpec:
    return replace(image, layout=step.layout)


STEP: Final = StepKind(
    step=ToLayout,
    group=StepGroup.FORM,
    checked=lambda step, where: ToLayout(word(step.layout, LAYOUTS, where)),
    faults=_faults,
    fields=SpecFields(_write, lambda image: ToLayout(image.layout)),
    view=_view,
)
