"""Images for tests: real ones, drawn ones, and the pixels that Pillow makes of them."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import structs
from numpy.typing import NDArray
from PIL import Image, ImageOps

from dataplane.transforms import pixels
from dataplane.transforms.pixels import Doubles, Ints, render
from dataplane.transforms.pixels_library import Maker, maker
from dataplane.transforms.steps.registry import CenterCrop, Resize, Transform
from dataplane.transforms.view import PixelView


def without_libjpeg(of: Maker) -> Maker:
    """The maker of an installation without libjpeg-turbo: Pillow decodes every image."""
    return structs.replace(of, missing="compiled without it")


def pillow_maker() -> Maker:
    return without_libjpeg(maker())


@dataclass(frozen=True, slots=True)
class Encoded:
    """Images in memory: the arguments of `sizes` and `render`, and the object that owns them."""

    places: Ints
    memory: tuple[NDArray[np.uint8], ...]

    @classmethod
    def of(cls, images: Sequence[bytes]) -> Encoded:
        # Each ends where its memory ends, so that valgrind and ASAN see reads beyond it.
        memory = tuple(np.frombuffer(image, np.uint8).copy() for image in images)
        places = [(each.ctypes.data, each.nbytes) for each in memory]
        return cls(np.array(places, np.int64).reshape(-1, 2), memory)


def drawn(height: int, width: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    """A smooth, slightly noisy picture, like a photograph; every mirror image of it differs."""
    random = np.random.default_rng(seed)
    down, right = np.mgrid[0:height, 0:width] / max(height, width, 2)
    channels = {"L": 1, "LA": 2, "RGB": 3, "RGBA": 4, "CMYK": 4}[mode]
    waves = [
        127 + 90 * np.sin(down * (3 + 2 * c) + right * (7 - c) + c) + 30 * down - 20 * right
        for c in range(channels)
    ]
    values = np.stack(waves, -1) + random.normal(0, 3, (height, width, channels))
    colours = values.clip(0, 255).astype(np.uint8)
    if mode == "CMYK":
        return Image.frombytes(mode, (width, height), colours.tobytes())
    return Image.fromarray(colours[..., 0] if channels == 1 else colours)


def encoded(image: Image.Image, form: str = "JPEG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def exif(orientation: int) -> bytes:
    tags = Image.Exif()
    tags[0x0112] = orientation
    return tags.tobytes()


def seen(image: bytes) -> Image.Image:
    """Turn an image as people see it, by Pillow."""
    with Image.open(io.BytesIO(image)) as opened:
        return ImageOps.exif_transpose(opened).convert("RGB")


def expected(image: bytes, box: Sequence[float], flip: bool, view: PixelView) -> NDArray[Any]:
    """Shapes:  result: uint8[height, width, 3]."""
    top, left, height, width = box
    whole = seen(image)
    part = (left, top, min(left + width, whole.width), min(top + height, whole.height))
    found = np.asarray(
        whole.resize((view.width, view.height), Image.Resampling.BILINEAR, part), np.int64
    )
    return found[:, ::-1] if flip else found


def by_torchvision(image: bytes, steps: Sequence[Transform]) -> NDArray[np.int64]:
    """Return torchvision's result for an image that Pillow decoded.

    Source:  torchvision.transforms.functional: resize, _compute_resized_image_output_size and
             center_crop; of a PIL image, resize is PIL's, bilinear, with the whole image as box.
    """
    picture = seen(image)
    for step in steps:
        if isinstance(step, Resize):
            if isinstance(step.size, int):
                short, long = sorted(picture.size)
                new = (step.size, int(step.size * long / short))
                width, height = new if picture.width <= picture.height else new[::-1]
            else:
                height, width = step.size
            picture = picture.resize((width, height), Image.Resampling.BILINEAR)
        else:
            assert isinstance(step, CenterCrop)
            size = step.size
            height, width = (size, size) if isinstance(size, int) else size
            top = round((picture.height - height) / 2.0)
            left = round((picture.width - width) / 2.0)
            picture = picture.crop((left, top, left + width, top + height))
    return np.asarray(picture, np.int64)


def sizes(images: Sequence[bytes], by: Any = None) -> NDArray[np.int32]:
    """Shapes:  result: int32[n, 2]."""
    there = Encoded.of(images)
    return pixels.sizes(there.places, by)


def made(
    images: Sequence[bytes],
    boxes: Any,
    flips: Any,
    view: PixelView,
    by: Any = None,
    *,
    may_reduce: bool = False,
) -> NDArray[np.uint8]:
    """Shapes:  result: uint8[n, view.bytes]."""
    there = Encoded.of(images)
    out = np.full((len(images), view.bytes), 0xAA, np.uint8)
    all_boxes: Doubles = np.asarray(boxes, np.float64).reshape(-1, 4)
    all_flips = np.asarray(flips, np.uint8)
    render(there.places, all_boxes, all_flips, view, out.reshape(-1), by, may_reduce=may_reduce)
    return out


def photographs(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted(folder.iterdir())]
