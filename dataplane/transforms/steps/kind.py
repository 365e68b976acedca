"""What the file of a step declares: where it may stand, its parameters, its draws, what it does.

A step belongs to one group. What it does follows from that:

RESIZE, CUT, MIRROR   `place`: where the pixels of the result come from. The C and the Python that
                      decode and resize both take the crops that come of it.
PIXELS                `change`: the resized pixels, in place; in C too if `in_c`
FORM                  `view`: the numbers that pixels become, and how they lie, for C and Python
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from dataplane.model import ImageSpec
from dataplane.transforms.view import PixelView

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float64]
AnyStep = Any  # one of the dataclasses that the registry lists
Values = TypeVar("Values")


class StepGroup(enum.IntEnum):
    """What a step does, in the order in which that is done. A list has one step of a group at most,
    but any number of PIXELS, which are done in the list's order, and of FORM, whose order says
    nothing.
    """

    RESIZE = 0
    CUT = 1
    MIRROR = 2
    PIXELS = 3
    FORM = 4


@dataclass(frozen=True, slots=True, eq=False)
class Crops:
    """Where the pixels of some images come from.

    Shapes:  whole, resized: float64[n, 2], height and width of each image as it is seen, and of
             what all of it becomes.   boxes: float64[n, 4]: top, left, height, width of the part
             that becomes the result, in pixels of the image.   flips: uint8[n], 1: mirrored.
    """

    whole: Floats
    resized: Floats
    boxes: Floats
    flips: Bytes


@dataclass(frozen=True, slots=True)
class SpecFields(Generic[Values]):
    """The fields of an `ImageSpec` that a step is saved in. They are part of saved digests, so
    they stay as they are; a new step has none, and stands in `ImageSpec.steps`.
    """

    write: Callable[[Values, ImageSpec], ImageSpec]
    read: Callable[[ImageSpec], Values | None]


def _no_faults(step: object, steps: tuple[AnyStep, ...]) -> Iterator[str]:
    del step, steps
    yield from ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepKind(Generic[Values]):
    """One step, as its file declares it.

    checked    its parameters in one form each; the text says where, for errors that it raises
    faults     what is wrong with it among these steps, whoever asks for it
    draws      what each number means that it draws for a sample, uniform in [0, 1)
    size       height and width of the results, if it says so
    read_numbers  the step of the numbers of `numbers_of`, if its fields are not one number each
    implies    steps that a list has with it, unless it has one of their type
    is_first   whether no other step may come before it
    reduces    whether JPEGs may be decoded at a reduced size for it, unless a job says otherwise
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
        """What users call it; part of the key of its draws."""
        return self.step.__name__

    def of_numbers(self, numbers: tuple[float, ...]) -> Values:
        """The step that has these numbers, as `numbers_of` gives them."""
        return self.step(*numbers) if self.read_numbers is None else self.read_numbers(numbers)

    @property
    def c_function(self) -> str:
        """What its C file defines; "" if it has none."""
        return f"change_{self.name}" if self.in_c else ""


def numbers_of(step: AnyStep) -> tuple[float, ...]:
    """The parameters of a step that has no fields of its own, as its C and a saved spec have them:
    each field in turn, a number or several.
    """
    found: list[float] = []
    for each in dataclasses.fields(step):
        value = getattr(step, each.name)
        found += map(float, value) if isinstance(value, tuple) else [float(value)]
    return tuple(found)
