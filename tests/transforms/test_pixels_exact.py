"""Deterministic transforms give what torchvision gives of PIL images, to 2 of 255, of every image."""

from __future__ import annotations

import io
import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import odd_jpegs
import pytest
import simplejpeg  # type: ignore[import-untyped]
from numpy.typing import NDArray
from pictures import Encoded, by_torchvision, drawn, encoded, exif, photographs, pillow_maker, seen
from PIL import Image

from dataplane.transforms import draws, pixels
from dataplane.transforms.image_steps import steps_of
from dataplane.transforms.images import image_spec
from dataplane.transforms.pixels_library import Maker, maker
from dataplane.transforms.steps.registry import CenterCrop, RandomResizedCrop, Resize, Transform

FOUND = maker()
MAKERS = (FOUND, pillow_maker())
FAR_MAX = 2
Steps = Sequence[Transform]
EVALUATION: Steps = (Resize(256), CenterCrop(224))
TARGETS: tuple[Steps, ...] = (
    EVALUATION,
    (Resize(232), CenterCrop(224)),
    (Resize((224, 224)),),
    (Resize((97, 131)),),
    (Resize(64), CenterCrop((64, 31))),
    (Resize((1, 1)),),
)


def by_us(
    images: Sequence[bytes], steps: Steps, by: Maker, *, may_reduce: bool = False
) -> NDArray[np.int64]:
    """Shapes:  result: int64[n, height, width, 3]."""
    spec, there = image_spec("jpg", steps), Encoded.of(images)
    keys = np.arange(len(images), dtype=np.uint64) << np.uint64(32)
    crops = steps_of(spec).crops(
        pixels.sizes(there.places, by), lambda _, count: draws.uniform(keys, count)
    )
    out = np.zeros((len(images), spec.height, spec.width, 3), np.uint8)
    pixels.render(
        there.places, crops.boxes, crops.flips, steps_of(spec).view(), out.reshape(-1), by,
        may_reduce=may_reduce,
    )  # fmt: skip
    return out.astype(np.int64)


def check(images: Sequence[bytes], targets: Sequence[Steps] = TARGETS) -> None:
    """No image spec here may reduce: that is what a job with these steps asks for."""
    for by, steps in itertools.product(MAKERS, targets):
        assert not steps_of(image_spec("jpg", steps)).may_reduce
        for number, (image, found) in enumerate(zip(images, by_us(images, steps, by), strict=True)):
            far = int(np.abs(found - by_torchvision(image, steps)).max())
            assert far <= FAR_MAX, (str(by), steps, number, seen(image).size)


def test_photographs_are_what_torchvision_makes_of_them(data_dir: Path) -> None:
    check(photographs(data_dir / "images"), (EVALUATION, (Resize((224, 224)),)))


@pytest.mark.parametrize("subsampling", ["444", "422", "420", "440", "411"])
def test_every_subsampling_is_what_torchvision_makes_of_it(subsampling: str) -> None:
    pictures = [drawn(h, w, seed=h) for h, w in ((301, 407), (63, 65), (17, 9), (2, 5), (1, 1))]
    check([
        simplejpeg.encode_jpeg(
            np.asarray(picture), quality=quality, colorsubsampling=subsampling, fastdct=False
        )
        for picture, quality in itertools.product(pictures, (60, 95))
    ])  # fmt: skip


@pytest.mark.parametrize("kind", odd_jpegs.JPEGS)
def test_rare_kinds_of_jpeg_are_what_torchvision_makes_of_them(kind: str) -> None:
    image = odd_jpegs.JPEGS[kind]
    assert seen(image).size[::-1] == odd_jpegs.SIZE
    check([image])


def test_every_colour_space_is_what_torchvision_makes_of_it() -> None:
    cmyk = encoded(drawn(90, 120, "CMYK"), quality=90)
    marker = cmyk.index(b"Adobe")
    # The last byte of Adobe's marker says which transform the colours went through: 2 is YCCK.
    ycck = cmyk[: marker + 11] + b"\2" + cmyk[marker + 12 :]
    rgb = encoded(drawn(90, 120), quality=90, keep_rgb=True, subsampling="4:4:4")
    check([cmyk, ycck, rgb, encoded(drawn(90, 120, "L")), encoded(drawn(90, 120, "LA"), "PNG")])


def test_turned_images_are_what_torchvision_makes_of_them() -> None:
    options: tuple[dict[str, Any], ...] = (
        {}, {"progressive": True}, {"restart_marker_blocks": 3, "subsampling": "4:2:2"}
    )  # fmt: skip
    check([
        encoded(drawn(151, 203), exif=exif(turn), **more)
        for turn, more in itertools.product(range(1, 9), options)
    ])  # fmt: skip


def test_very_large_and_very_thin_images_are_what_torchvision_makes_of_them() -> None:
    noise = np.random.default_rng(0).integers(0, 2, (4000, 6000, 3), np.uint8) * 255
    large = Image.fromarray(noise)
    check([encoded(large, quality=50)], (EVALUATION,))
    thin = [drawn(1, 3000), drawn(3000, 2), drawn(7, 1500)]
    check([encoded(picture, quality=90) for picture in thin], ((Resize((64, 64)),),))


def test_reduced_random_crops_stay_close_to_exact_ones(data_dir: Path) -> None:
    """The figures that docs/images.md gives, of these photographs."""
    images, steps = photographs(data_dir / "images"), [RandomResizedCrop(128)]
    assert steps_of(image_spec("jpg", steps)).may_reduce
    far = np.abs(
        by_us(images, steps, FOUND, may_reduce=True) - by_us(images, steps, FOUND)
    ).reshape(len(images), -1)
    reduced = far[far.any(axis=1)]
    assert len(reduced) > len(images) / 4
    assert reduced.mean() <= 2
    assert reduced.mean(axis=1).max() <= 6
    assert np.percentile(reduced, 99) <= 13
    assert reduced.max() <= 64


@pytest.mark.slow
def test_a_thousand_photographs_are_what_torchvision_makes_of_them(data_dir: Path) -> None:
    """Each of them cropped, resized and encoded in eleven more ways."""
    numbers, images = random.Random(0), photographs(data_dir / "images")
    pictures = [seen(image) for image in images]
    for picture in pictures:
        images += [_another(picture, numbers) for _ in range(11)]
    assert len(images) >= 1000
    for start in range(0, len(images), 96):
        check(images[start : start + 96], TARGETS[:3])


def _another(picture: Image.Image, numbers: random.Random) -> bytes:
    width, height = numbers.randint(1, 1800), numbers.randint(1, 1400)
    if max(width, height) > 20 * min(width, height):
        width = height
    resized = picture.resize((width, height), Image.Resampling.LANCZOS)
    quality = numbers.choice((50, 75, 90, 97))
    if numbers.random() < 0.5:
        return bytes(
            simplejpeg.encode_jpeg(
                np.asarray(resized),
                quality=quality,
                colorsubsampling=numbers.choice(("444", "422", "420", "440", "411")),
                fastdct=False,
            )
        )
    file = io.BytesIO()
    resized.convert(numbers.choice(("RGB", "RGB", "RGB", "L", "CMYK"))).save(
        file,
        "JPEG",
        quality=quality,
        progressive=numbers.random() < 0.3,
        restart_marker_blocks=numbers.choice((0, 0, 7)),
        exif=exif(numbers.randint(1, 8)),
    )
    return file.getvalue()
