"""The declarations that each step's file makes: its group, its parameters, its draws, its code.

The group of a step says which code it has:

RESIZE, CUT, MIRROR   `place` computes which part of each image becomes the result
PIXELS                `change` or, with `in_c`, a C function changes resized pixels in place
FORM                  `view` sets dtype, factors or layout
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from dataplane.model.records import ImageSpec
from dataplane.transforms.view import PixelView

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float64]
AnyStep = Any  # one of the classes that the registry lists
Values = TypeVar("Values")


class StepGroup(enum.IntEnum):
    """Groups of steps, in the order in which they run. A list has at most one step of each group,
    except for PIXELS, which run in the order of the list, and FORM, whose order has no effect.
    """

    RESIZE = 0
    CUT = 1
    MIRROR = 2
    PIXELS = 3
    FORM = 4


class Crops(Struct, frozen=True, eq=False):
    """The part of each image that becomes the result.

    Shapes:  whole: float64[n, 2], height and width of each image, upright.
             resized: float64[n, 2], the size to which the whole image is resized.
             boxes: float64[n, 4]: top, left, height and width of the part, in pixels of the image.
             flips: uint8[n], 1 for a mirrored image.
    """

    whole: Floats
    resized: Floats
    boxes: Floats
    flips: Bytes


class SpecFields(Struct, Generic[Values], frozen=True):
    """How a step is stored in fields of an `ImageSpec`. Saved digests cover these fields, so they
    never change. New steps have no fields: they are stored in `ImageSpec.steps`.
    """

    write: Callable[[Values, ImageSpec], ImageSpec]
    read: Callable[[ImageSpec], Values | None]


def _no_faults(step: object, steps: tuple[AnyStep, ...]) -> Iterator[str]:
    del step, steps
    yield from ()


class StepKind(Struct, Generic[Values], frozen=True, kw_only=True):
    """The declarations of a step's file.

    checked       returns the step with normalised parameters; raises ConfigError, whose text starts
                  with the given place
    faults        says what is wrong with the step among the given steps; nodes check this again
    draws         the meaning of each number that the step draws for a sample, uniform in [0, 1)
    size          height and width of the results, None if the step does not fix them
    read_numbers  the inverse of `numbers_of`; by default each field is one number
    implies       steps to add if the list has none of their type
    is_first      whether no step may come before this one
    reduces       whether JPEGs may be decoded at a reduced size, unless the job says otherwise
    """

    step: type[Values]
    group: StepGroup
    checked: Callable[[Values, str], Values]
    faults: Callable[[Values, tuple[AnyStep, ...]], Iterator[str]] = _no_faults
    draws: tuple[str, ...] = ()
    fields: SpecFields[Values] | None = None
    size: Callable[[Values], tuple[int, int] | None] | None = None
    place: Callable[[Values, Crops, Floats], Crops] | None = None
    change: Callable[[Values, Bytes, Floats], None] | None = None
    in_c: bool = False
    view: Callable[[Values, PixelView], PixelView] | None = None
    read_numbers: Callable[[tuple[float, ...]], Values] | None = None
    implies: tuple[AnyStep, ...] = ()
    is_first: bool = False
    reduces: bool = False

    @property
    def name(self) -> str:
        """The name that users know; the key of its draws contains it."""
        return self.step.__name__

    def of_numbers(self, numbers: tuple[float, ...]) -> Values:
        """Invert `numbers_of`."""
        return self.step(*numbers) if self.read_numbers is None else self.read_numbers(numbers)

    @property
    def c_function(self) -> str:
        """The name of its C function, "" if it has none."""
        return f"change_{self.name}" if self.in_c else ""


def numbers_of(step: AnyStep) -> tuple[float, ...]:
    """Return the parameters of a step, field by field, as saved specs and C code contain them."""
    found: list[float] = []
    for name in step.__struct_fields__:
        value = getattr(step, name)
        found += map(float, value) if isinstance(value, tuple) else [float(value)]
    return tuple(found)
