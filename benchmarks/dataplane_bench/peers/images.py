"""Image decoding for every loader that decodes in Python: random resized crops, half flipped.

libjpeg-turbo (simplejpeg) and OpenCV are the fastest Python libraries for it; both release
the interpreter's lock, so that threads help too. A loader with a decoder of its own uses its own.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataplane_bench.model import CROP

SCALE = (0.08, 1.0)
"""A crop's share of the image's area."""
RATIO = (3 / 4, 4 / 3)
"""A crop's width divided by its height."""
_ATTEMPTS = 10

Encoded = bytes | memoryview | NDArray[np.uint8]


def random_resized_crop_flip(encoded: Encoded, random: np.random.Generator) -> NDArray[np.uint8]:
    """Decode, take a random part, resize it to CROP x CROP, mirror every other one.

    Shapes:  result: uint8[CROP, CROP, 3], red first, contiguous.
    """
    decode, cv2 = _tools()
    image = decode(encoded, "RGB")
    top, left, height, width = crop_box(image.shape[0], image.shape[1], random)
    part = image[top : top + height, left : left + width]
    crop = cv2.resize(part, (CROP, CROP), interpolation=cv2.INTER_LINEAR)
    if random.random() < 0.5:
        crop = cv2.flip(crop, 1)
    result: NDArray[np.uint8] = crop
    return result


def crop_box(height: int, width: int, random: np.random.Generator) -> tuple[int, int, int, int]:
    """Top, left, height and width of a random crop of such an image, pixels.

    Source: torchvision.transforms.RandomResizedCrop.get_params, with its default scale and ratio.
    """
    log_low, log_high = math.log(RATIO[0]), math.log(RATIO[1])
    for _ in range(_ATTEMPTS):
        area = height * width * random.uniform(*SCALE)
        ratio = math.exp(random.uniform(log_low, log_high))
        wide, high = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < wide <= width and 0 < high <= height:
            top = int(random.random() * (height - high + 1))
            left = int(random.random() * (width - wide + 1))
            return top, left, high, wide
    # No such crop fits: take the largest central crop with an allowed ratio.
    wide = min(width, max(round(height * RATIO[1]), 1))
    high = min(height, max(round(width / RATIO[0]), 1))
    return (height - high) // 2, (width - wide) // 2, high, wide


@functools.cache
def _tools() -> tuple[Any, Any]:
    """simplejpeg's decoder and OpenCV, whose own threads would only fight for the cores."""
    import cv2
    import simplejpeg  # type: ignore[import-untyped]

    cv2.setNumThreads(1)
    return simplejpeg.decode_jpeg, cv2
