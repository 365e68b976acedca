"""The form of every image of a column: its size, layout and numbers. Pure."""

from __future__ import annotations

from typing import Final

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from dataplane.model.errors import ConfigError

LAYOUTS: Final = ("HWC", "CHW")
DTYPES: Final = {"uint8": 1, "float16": 2, "bfloat16": 2, "float32": 4}
COLOURS: Final = 3
_SIDE_MAX = 1 << 15


class PixelView(Struct, frozen=True):
    """The form of every image of a column.

    `layout` is HWC or CHW; `dtype` is uint8, float16, bfloat16 or float32. `mean` and `std` refer
    to values in 0..1, as in torchvision's Normalize; without them, uint8 is 0..255 and floats are
    0..1.

    Raises:  ConfigError: an unknown layout or dtype, an invalid size, or a dtype that cannot hold
    the values.
    """

    height: int
    width: int
    layout: str
    dtype: str
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise ConfigError(
                f"layout={self.layout!r} is unknown: choose one of {', '.join(LAYOUTS)}"
            )
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype={self.dtype!r} is unknown: choose one of {', '.join(DTYPES)}")
        if not (1 <= self.height <= _SIDE_MAX and 1 <= self.width <= _SIDE_MAX):
            raise ConfigError(
                f"an image of {self.height} x {self.width} pixels: a side has 1 to {_SIDE_MAX}"
            )
        if self.dtype == "uint8" and (self.mean or self.std):
            raise ConfigError("uint8 cannot hold normalised values: choose a float dtype")
        if self.std and not all(self.std):
            raise ConfigError(f"std {self.std} contains a 0, by which values would be divided")

    @property
    def bytes(self) -> int:
        """The size of one image."""
        return self.height * self.width * COLOURS * DTYPES[self.dtype]

    def factors(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return (factors, offsets): each pixel value of 0..255 is multiplied by a factor, and an
        offset is added.

        Shapes:  results: float32[3].
        """
        mean = np.array(self.mean or (0.0,) * COLOURS)
        std = np.array(self.std or (1.0,) * COLOURS)
        return (1 / (255 * std)).astype(np.float32), (-mean / std).astype(np.float32)
