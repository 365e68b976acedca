"""In Pillow and numpy what csrc/resize.c, csrc/view.c and csrc/form.c do: the crop of a decoded
image, resized, turned, mirrored, and in the form of a view.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from dataplane.transforms import pixels_pillow
from dataplane.transforms.image_steps import PixelChange
from dataplane.transforms.pixels import _Crop
from dataplane.transforms.pixels_pillow import Bytes, StoredPixels
from dataplane.transforms.view import PixelView

_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_TRANSPOSING = 5


def render(
    images: NDArray[np.int64],
    boxes: NDArray[np.float64],
    flips: Bytes,
    view: PixelView,
    out: Bytes,
    *,
    may_reduce: bool = False,
    changes: Sequence[PixelChange] = (),
) -> None:
    """Do in Pillow and numpy what `pixels.render` does."""
    for row, box in enumerate(boxes):
        shrink = _Crop(box, is_flipped=False, may_reduce=may_reduce).shrink(view)
        with pixels_pillow.opened(images, row) as (image, orientation):
            decoded = pixels_pillow.decode(image, orientation, shrink)
        crop = resized(decoded, box, view.height, view.width)
        crop = crop[:, ::-1].copy() if flips[row] else crop.copy()
        for change in changes:
            assert change.kind.change is not None
            change.kind.change(change.step, crop, change.drawn[row])
        out.reshape(len(images), view.bytes)[row] = delivered(crop, view)


def resized(decoded: StoredPixels, box: NDArray[np.float64], height: int, width: int) -> Bytes:
    """The pixels in the box of an upright image.

    Shapes:  box: float64[4] = top, left, height, width.   result: uint8[height, width, 3].
    """
    image = decoded.pixels
    if decoded.orientation in _TURNS:
        image = image.transpose(_TURNS[decoded.orientation])
    top, left, down, right = _box_reduced(box, decoded).tolist()
    # Pillow allows no box that leaves the image by a rounding error.
    edges = (
        max(left, 0.0), max(top, 0.0),
        min(left + right, float(image.width)), min(top + down, float(image.height)),
    )  # fmt: skip
    return np.asarray(image.resize((width, height), Image.Resampling.BILINEAR, edges))


def _box_reduced(box: NDArray[np.float64], decoded: StoredPixels) -> NDArray[np.float64]:
    """Return the place of a box in the decoded, upright pixels.

    If a side is not a multiple of `shrink`, the last decoded row or column is only partly within
    the image. In a mirrored image, this last stored row or column is the first one seen.
    """
    shrink, orientation = decoded.shrink, decoded.orientation
    surplus = [-(-side // shrink) - side / shrink for side in (decoded.height, decoded.width)]
    before = [
        surplus[0] if orientation in {3, 4, 6, 7} else 0.0,
        surplus[1] if orientation in {2, 3, 7, 8} else 0.0,
    ]
    if orientation >= _TRANSPOSING:
        before.reverse()
    moved: NDArray[np.float64] = box / shrink + np.array([*before, 0.0, 0.0])
    return moved


def delivered(pixels: NDArray[np.uint8], view: PixelView) -> Bytes:
    """Convert pixels to the form of the view.

    Shapes:  pixels: uint8[height, width, 3].   result: uint8[view.bytes].
    """
    values: NDArray[np.generic] = pixels
    if view.dtype != "uint8":
        scale, bias = view.factors()
        floats = values.astype(np.float32) * scale + bias
        if view.dtype == "bfloat16":
            bits = floats.view(np.uint32)
            # Rounds to nearest, ties to even.
            values = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
        else:
            values = floats.astype(view.dtype)
    if view.layout == "CHW":
        values = values.transpose(2, 0, 1)
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)
