"""Boxes and flips follow torchvision's rules, with numbers that depend only on the sample."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from dataplane.model.errors import ImageError
from dataplane.model.records import ImageSpec
from dataplane.transforms import draws
from dataplane.transforms.image_steps import steps_of
from dataplane.transforms.images import image_spec
from dataplane.transforms.steps.kind import Crops
from dataplane.transforms.steps.random_resized_crop import logarithm, power
from dataplane.transforms.steps.registry import (
    CenterCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
)

COUNT = 4000
CROP = image_spec("jpg", [RandomResizedCrop(224)])
FLIP = "RandomHorizontalFlip"
GOLDEN_KEYS = [6302782755020031711, 538273272590962882, 5062894834344605514]
GOLDEN_BOXES = [[51, 79, 312, 350], [65, 55, 173, 196], [67, 115, 301, 331]]


def keys(count: int, seed: int = 1, image: ImageSpec = CROP, what: str = "RandomResizedCrop"):
    rows = np.arange(count)
    return draws.draw_keys(image.column, what, seed, 0, np.zeros_like(rows), rows)


def crops(image: ImageSpec, sizes, drawn) -> Crops:
    return steps_of(image).crops(sizes, lambda step, count: draws.uniform(drawn, count))


def boxes(image: ImageSpec, sizes, drawn):
    return crops(image, sizes, drawn).boxes


def sizes(height: int, width: int, count: int = COUNT):
    return np.tile(np.array([[height, width]], np.int32), (count, 1))


def rule(
    height: int, width: int, scale, ratio, uniform, tie=lambda: None
) -> tuple[int, int, int, int]:
    """torchvision.transforms.RandomResizedCrop.get_params, with numbers in [0, 1) from `uniform`:
    ten areas, ten ratios, top, left. Calls `tie` where the last bit of exp() decides.
    """
    low, high = math.log(ratio[0]), math.log(ratio[1])
    for i in range(10):
        area = height * width * (scale[0] + uniform[i] * (scale[1] - scale[0]))
        aspect = math.exp(low + uniform[10 + i] * (high - low))
        wide, tall = math.sqrt(area * aspect), math.sqrt(area / aspect)
        if any(abs(side % 1 - 0.5) < 1e-9 for side in (wide, tall)):
            tie()
        w, h = round(wide), round(tall)
        if 0 < w <= width and 0 < h <= height:
            top = math.floor(uniform[20] * (height - h + 1))
            left = math.floor(uniform[21] * (width - w + 1))
            return top, left, h, w
    whole = width / height
    h, w = height, width
    if whole < ratio[0]:
        h = round(width / ratio[0])
    elif whole > ratio[1]:
        w = round(height * ratio[1])
    return (height - h) // 2, (width - w) // 2, h, w


def distance(one, other) -> float:
    """The Kolmogorov-Smirnov distance of two samples."""
    both = np.sort(np.concatenate([one, other]))
    return float(
        np.abs(
            np.searchsorted(np.sort(one), both, side="right") / len(one)
            - np.searchsorted(np.sort(other), both, side="right") / len(other)
        ).max()
    )


sides = st.integers(8, 3000)
ranges = st.tuples(st.floats(0.01, 1), st.floats(0.01, 1)).map(lambda r: tuple(sorted(r)))
ratios = st.tuples(st.floats(0.1, 8), st.floats(0.1, 8)).map(lambda r: tuple(sorted(r)))


@given(height=sides, width=sides, scale=ranges, ratio=ratios, seed=st.integers(0, 2**64 - 1))
def test_every_box_is_what_torchvisions_rule_makes_of_the_same_numbers(
    height, width, scale, ratio, seed
) -> None:
    image = image_spec("jpg", [RandomResizedCrop(64, scale, ratio)])
    drawn = keys(8, seed, image)
    found = boxes(image, sizes(height, width, 8), drawn)
    numbers = draws.uniform(drawn, 22).tolist()
    assert found.tolist() == [[*rule(height, width, scale, ratio, one, reject)] for one in numbers]
    assert (found >= [0, 0, 1, 1]).all()
    assert (found[:, :2] + found[:, 2:] <= [height, width]).all()


@pytest.mark.parametrize(("height", "width"), [(375, 500), (500, 333), (100, 900), (640, 96)])
def test_boxes_are_distributed_as_torchvisions(height, width) -> None:
    chance = np.random.default_rng(5)
    expected = np.array(
        [rule(height, width, (0.08, 1), (3 / 4, 4 / 3), one) for one in chance.random((COUNT, 22))]
    )
    found = boxes(CROP, sizes(height, width), keys(COUNT))
    # The distance that two samples of one distribution exceed once in a thousand times.
    limit = 1.95 * math.sqrt(2 / COUNT)
    for look in (
        lambda b: b[:, 2] * b[:, 3],
        lambda b: b[:, 3] / b[:, 2],
        lambda b: b[:, 0],
        lambda b: b[:, 1],
    ):
        assert distance(look(found), look(expected)) < limit


def test_numbers_are_uniform_and_flips_have_their_share() -> None:
    drawn = draws.uniform(keys(COUNT), 22)
    assert (drawn >= 0).all()
    assert (drawn < 1).all()
    grid = (np.arange(COUNT) + 0.5) / COUNT
    assert all(distance(column, grid) < 1.95 / math.sqrt(COUNT) for column in drawn.T)
    assert np.abs(np.corrcoef(drawn.T) - np.eye(22)).max() < 0.08
    for share in (0.0, 0.3, 1.0):
        image = image_spec("jpg", [CenterCrop(8), RandomHorizontalFlip(share)])
        flips = crops(image, sizes(9, 9), keys(COUNT, what=FLIP)).flips
        assert flips.dtype == np.uint8
        assert abs(flips.mean() - share) < 0.03


def test_draws_are_pinned() -> None:
    """A change of these is another augmentation of every run that is resumed."""
    rows = np.array([0, 1, 1 << 40])
    drawn = draws.draw_keys("jpg", "RandomResizedCrop", 42, 7, np.array([0, 0, 3]), rows)
    assert drawn.tolist() == GOLDEN_KEYS
    assert boxes(CROP, sizes(375, 500, 3), drawn).tolist() == GOLDEN_BOXES


def test_keys_differ_by_column_transform_seed_epoch_and_sample() -> None:
    rows = np.arange(3)
    made = [
        draws.draw_keys(column, what, seed, epoch, shard, rows)
        for column in ("a", "b")
        for what in ("RandomResizedCrop", FLIP)
        for seed in (0, 1)
        for epoch in (0, 1)
        for shard in (np.zeros(3, int), np.ones(3, int))
    ]
    assert len(set(np.concatenate(made).tolist())) == 3 * 32


def test_powers_are_right_to_the_last_digits() -> None:
    exponents = np.linspace(0, 1, 1001)
    for base in (1.0, 16 / 9, 80.0, 1e-3, 1e6):
        assert np.allclose(power(base, exponents), base**exponents, rtol=1e-12)
        assert math.isclose(logarithm(base), math.log(base), rel_tol=1e-14, abs_tol=1e-15)


@given(height=sides, width=sides, short=st.integers(8, 512), kept=st.integers(1, 512))
def test_a_centred_crop_of_a_resized_image_is_one_box_of_the_original(
    height, width, short, kept
) -> None:
    kept = min(kept, short)
    image = image_spec("jpg", [Resize(short), CenterCrop(kept)])
    (found,) = boxes(image, sizes(height, width, 1), keys(1)).tolist()
    # torchvision's: the longer side is rounded down, the corner to even.
    least = min(height, width)
    tall, wide = int(short * height / least), int(short * width / least)
    top, left = round((tall - kept) / 2), round((wide - kept) / 2)
    want = [top * height / tall, left * width / wide, kept * height / tall, kept * width / wide]
    assert found == pytest.approx(want, rel=1e-12)
    assert found[0] + found[2] <= height * (1 + 1e-9)
    assert found[1] + found[3] <= width * (1 + 1e-9)


def test_a_crop_without_a_resize_needs_an_image_that_is_large_enough() -> None:
    image = image_spec("jpg", [CenterCrop((100, 60))])
    assert boxes(image, sizes(100, 61, 1), keys(1)).tolist() == [[0, 0, 100, 60]]
    two = np.array([[100, 60], [99, 400]], np.int32)
    with pytest.raises(ImageError, match=r"99 x 400 pixels is smaller.*Resize") as caught:
        boxes(image, two, keys(2))
    assert caught.value.row == 1


def test_a_resize_to_height_and_width_takes_all_of_the_image() -> None:
    image = image_spec("jpg", [Resize((10, 20))])
    assert boxes(image, sizes(300, 200, 1), keys(1)).tolist() == [[0, 0, 300, 200]]
    cut = image_spec("jpg", [Resize((20, 40)), CenterCrop((10, 40))])
    assert boxes(cut, sizes(300, 200, 1), keys(1)).tolist() == [[75, 0, 150, 200]]
