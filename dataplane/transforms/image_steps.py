"""The steps that turn the encoded images of a column into pixels, and what they compute together.

An `ImageSpec` is the form in which steps are sent and saved; `steps_of` converts it to a tuple of
steps. All code that works on images uses the tuple. The steps' boxes, flips and views are combined,
so that C decodes, resizes and writes each pixel once; only steps that change pixels run after that,
one by one. Each step has its own file in steps/; this module knows none of them by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from dataplane.model.errors import ConfigError
from dataplane.model.records import Cut, Decoding, ImageSpec, StepSpec
from dataplane.transforms.steps import registry
from dataplane.transforms.steps.kind import (
    AnyStep,
    Crops,
    Floats,
    StepGroup,
    StepKind,
    numbers_of,
)
from dataplane.transforms.view import PixelView

Draw = Callable[[str, int], Floats]
"""Draws numbers for a step, by its name: float64[n, count], uniform in [0, 1)."""


class PixelChange(Struct, frozen=True, eq=False):
    """A step that changes the pixels of n images in place.

    Shapes:  numbers: float64[p], its parameters.   drawn: float64[n, d], its draws for each image.
    """

    kind: StepKind[AnyStep]
    step: AnyStep
    numbers: Floats
    drawn: Floats


class ImageSteps(Struct, frozen=True):
    """The steps of one column, in the order in which they run."""

    column: str
    size: tuple[int, int]
    steps: tuple[AnyStep, ...]
    decode: Decoding

    def crops(self, sizes: NDArray[np.int32], draw: Draw) -> Crops:
        """Compute the part of each image that becomes the result.

        Shapes:  sizes: int32[n, 2], height and width of each image, upright.
        Raises:  ImageError: a step cannot be applied to an image of this size; row is its index.
        """
        whole = sizes.astype(np.float64)
        boxes = np.concatenate([np.zeros_like(whole), whole], axis=1)
        found = Crops(whole, whole, boxes, np.zeros(len(sizes), np.uint8))
        for step in self.steps:
            kind = kind_of(step)
            if kind.place is not None:
                found = kind.place(step, found, _drawn(kind, draw, len(sizes)))
        return found

    def changes(self, count: int, draw: Draw) -> tuple[PixelChange, ...]:
        """Return the changes to the pixels of `count` images, in the order in which they run."""
        return tuple(
            PixelChange(kind, step, np.array(numbers_of(step)), _drawn(kind, draw, count))
            for step in self.steps
            if (kind := kind_of(step)).change is not None
        )

    def view(self) -> PixelView:
        """Return the size, dtype and layout of the results."""
        found = PixelView(*self.size, "HWC", "uint8", None, None)
        for step in self.steps:
            kind = kind_of(step)
            found = found if kind.view is None else kind.view(step, found)
        return found

    @property
    def is_cut(self) -> bool:
        """Whether only a part of each image is needed."""
        return any(kind_of(step).group is StepGroup.CUT for step in self.steps)

    @property
    def may_reduce(self) -> bool:
        """Whether JPEGs may be decoded at a reduced size."""
        if self.decode is Decoding.AUTO:
            return any(kind_of(step).reduces for step in self.steps)
        return self.decode is Decoding.FAST


def _drawn(kind: StepKind[AnyStep], draw: Draw, count: int) -> Floats:
    return draw(kind.name, len(kind.draws)) if kind.draws else np.empty((count, 0))


def kind_of(step: AnyStep) -> StepKind[AnyStep]:
    """Return the declarations in this step's file."""
    return kinds()[type(step)]


def kinds() -> dict[type, StepKind[AnyStep]]:
    """Return all steps by their type."""
    return {kind.step: kind for kind in registry.STEPS}


def in_order(steps: Iterable[AnyStep]) -> tuple[AnyStep, ...]:
    """Sort steps into the order in which they run. Steps that change pixels keep the given
    order.
    """
    places = {kind.step: place for place, kind in enumerate(registry.STEPS)}

    def key(step: AnyStep) -> tuple[int, int]:
        group = kind_of(step).group
        return group, 0 if group is StepGroup.PIXELS else places[type(step)]

    return tuple(sorted(steps, key=key))


def may_follow(step: type, before: Sequence[type]) -> bool:
    """Return whether this step may follow the given steps."""
    known = kinds()
    if not before:
        return True
    if known[step].is_first:
        return False
    last, group = known[before[-1]].group, known[step].group
    is_repeating = group in {StepGroup.PIXELS, StepGroup.FORM} and step not in before
    return group > last or (group == last and is_repeating)


def saved(column: str, steps: Sequence[AnyStep]) -> ImageSpec:
    """Return the spec for these steps; lists with the same meaning give equal specs. Height and
    width are 0 if no step fixes them.
    """
    image = ImageSpec(column, 0, 0, Cut.WHOLE)
    for step in in_order(_with_implied(steps)):
        kind = kind_of(step)
        if kind.size is not None:
            height, width = kind.size(step) or (0, 0)
            image = replace(image, height=height, width=width)
        if kind.fields is not None:
            image = kind.fields.write(step, image)
        else:
            later = StepSpec(kind.name, numbers_of(step))
            image = replace(image, steps=(*image.steps, later))
    return image


def _with_implied(steps: Sequence[AnyStep]) -> list[AnyStep]:
    found = list(steps)
    for step in steps:
        given = {type(each) for each in found}
        found += [each for each in kind_of(step).implies if type(each) not in given]
    return found


def steps_of(image: ImageSpec) -> ImageSteps:
    """Return the steps that a spec contains.

    Raises:  ConfigError: this version does not know one of the steps.
    """
    found = [
        step
        for kind in registry.STEPS
        if kind.fields is not None and (step := kind.fields.read(image)) is not None
    ]
    found += [_later(image.column, step) for step in image.steps]
    size = (image.height, image.width)
    return ImageSteps(image.column, size, in_order(found), image.decode)


def _later(column: str, spec: StepSpec) -> AnyStep:
    where = f"transforms of column {column!r}: {spec.name}"
    for kind in registry.STEPS:
        if kind.fields is None and kind.name == spec.name:
            try:
                return kind.checked(kind.of_numbers(spec.numbers), where)
            except (TypeError, ValueError) as fault:
                raise ConfigError(f"{where}: {fault}", field="transforms") from fault
    raise ConfigError(
        f"{where} is not a step that this version knows; run the same version everywhere",
        field="transforms",
    )
