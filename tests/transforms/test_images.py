"""Declared transforms: which lists are allowed, and what they mean."""

from __future__ import annotations

import collections
import itertools
import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given, reject
from hypothesis import strategies as st
from kernels import without
from msgspec.structs import replace
from mutated_jpegs import Outcomes, Sources, mutant, pass_through
from pictures import drawn, encoded

from dataplane.model.errors import ConfigError, ImageError
from dataplane.model.records import ColumnSpec, Cut, ImageSpec, Kind
from dataplane.transforms import draws
from dataplane.transforms.image_steps import steps_of
from dataplane.transforms.images import delivered, image_spec, image_specs
from dataplane.transforms.pixels_library import maker
from dataplane.transforms.pixels_pillow import said_of
from dataplane.transforms.stacks import Stack, stack_specs
from dataplane.transforms.steps.kind import Crops
from dataplane.transforms.steps.random_resized_crop import logarithm, power
from dataplane.transforms.steps.registry import (
    CenterCrop,
    Normalize,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
    ToDtype,
    ToLayout,
)

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
NORMAL = Normalize(MEAN, STD)


def test_lists_that_mean_the_same_are_equal() -> None:
    whole = [
        RandomResizedCrop(224, scale=(0.08, 1)),
        RandomHorizontalFlip(),
        Normalize(list(MEAN), list(STD)),
        ToLayout("CHW"),
    ]
    other = [RandomResizedCrop([224, 224]), RandomHorizontalFlip(0.5), ToLayout("CHW"), NORMAL]
    want = ImageSpec(
        "jpg", 224, 224, Cut.RANDOM, scale=(0.08, 1.0), ratio=(3 / 4, 4 / 3), flip=0.5,
        layout="CHW", dtype="float32", mean=MEAN, std=STD,
    )  # fmt: skip
    assert image_spec("jpg", whole) == image_spec("jpg", other) == want
    assert image_specs({"b": [CenterCrop(8)], "a": [Resize((4, 6))]}) == (
        ImageSpec("a", 4, 6, Cut.WHOLE, resize=(4, 6)),
        ImageSpec("b", 8, 8, Cut.CENTER),
    )


def test_deterministic_geometries_are_exact_and_random_crops_fast_by_default() -> None:
    steps = {"a": [Resize(9), CenterCrop(8)], "b": [Resize((8, 8))], "c": [RandomResizedCrop(8)]}
    for decode, reduced in (
        (None, [False, False, True]),
        ("exact", [False, False, False]),
        ("fast", [True, True, True]),
    ):
        assert [steps_of(spec).may_reduce for spec in image_specs(steps, decode)] == reduced


def test_a_decode_that_changes_no_pixel_changes_no_spec() -> None:
    crop, resize = {"a": [RandomResizedCrop(8)]}, {"a": [Resize((8, 8))]}
    assert image_specs(crop, "fast") == image_specs(crop)
    assert image_specs(resize, "exact") == image_specs(resize)
    assert image_specs(crop, "exact") != image_specs(crop)
    assert image_specs(resize, "fast") != image_specs(resize)


@pytest.mark.parametrize(
    ("decode", "transforms"),
    [("auto", {"a": [CenterCrop(8)]}), (True, {"a": [CenterCrop(8)]}), ("fast", {})],
)
def test_an_unknown_value_of_decode_is_refused(decode, transforms) -> None:
    with pytest.raises(ConfigError, match="decode") as caught:
        image_specs(transforms, decode)
    assert caught.value.field == "decode"


def foreign(name: str, module: str = "torchvision.transforms.transforms") -> object:
    return type(name, (), {"__module__": module})()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("RandomResizedCrop", "use RandomResizedCrop of dataplane_torch"),
        ("Normalize", "use Normalize of dataplane_torch"),
        ("ToTensor", r'use ToDtype\("float32"\) and ToLayout'),
        ("ColorJitter", "torchvision's ColorJitter, which nodes do not implement; allowed are"),
    ],
)
def test_a_transform_of_torchvision_says_what_to_use_here(name, says) -> None:
    with pytest.raises(ConfigError, match=says):
        image_specs({"jpg": [foreign(name)]})
    with pytest.raises(ConfigError, match="use a list of the transforms"):
        image_specs({"jpg": foreign("Compose", "torchvision.transforms.v2")})


@pytest.mark.parametrize("given", [torch.float16, np.float16, np.dtype("float16"), "float16"])
def test_a_dtype_may_be_torchs_or_numpys(given) -> None:
    (spec,) = image_specs({"a": [CenterCrop(8), ToDtype(given)]})
    assert spec.dtype == "float16"
    assert stack_specs({"x": Stack(["a"], dtype=given)})[0].dtype == "float16"
    with pytest.raises(ConfigError, match="uint8, float16, bfloat16, float32"):
        image_specs({"a": [CenterCrop(8), ToDtype(torch.float64)]})


@pytest.mark.parametrize("number", [np.int64, np.uint8, np.int32, torch.tensor])
def test_sides_may_be_any_whole_numbers(number) -> None:
    plain = {"a": [Resize(20), CenterCrop((8, 12))]}
    same = {"a": [Resize(number(20)), CenterCrop((number(8), number(12)))]}
    assert image_specs(same) == image_specs(plain)
    assert image_specs({"a": [CenterCrop(np.array([8, 12]))]}) == image_specs(
        {"a": [CenterCrop((8, 12))]}
    )
    for wrong in (True, 8.0, np.float64(8), (8, True), (8,), None):
        with pytest.raises(ConfigError, match="a size must be one int"):
            image_specs({"a": [CenterCrop(wrong)]})


def test_shapes_and_dtypes_of_what_is_delivered() -> None:
    specs = (ColumnSpec("jpg", Kind.BYTES, ""), ColumnSpec("cls", Kind.FIXED, "int64"))
    for steps, dtype, shape in (
        ([Resize(20), CenterCrop((8, 12))], "uint8", (8, 12, 3)),
        ([RandomResizedCrop(9), ToLayout("CHW"), ToDtype("bfloat16")], "bfloat16", (3, 9, 9)),
        ([CenterCrop(4), NORMAL], "float32", (4, 4, 3)),
        ([CenterCrop(4), NORMAL, ToDtype("float16")], "float16", (4, 4, 3)),
    ):
        found = delivered(specs, image_specs({"jpg": steps}))
        assert found == (ColumnSpec("jpg", Kind.FIXED, dtype, shape), specs[1])
        assert found[0].value_bytes == {"uint8": 1, "float32": 4}.get(dtype, 2)


GEOMETRY = (Resize(16), Resize((16, 16)), CenterCrop(8), RandomResizedCrop(8))
OTHERS = (RandomHorizontalFlip(), ToDtype("float32"), NORMAL, ToLayout("CHW"))


def allowed(steps) -> bool:
    """The rule, written independently of the code."""
    kinds = [type(step) for step in steps]
    geometry = list(itertools.takewhile(lambda step: step in GEOMETRY, steps))
    rest = kinds[len(geometry) :]
    if [type(step) for step in geometry] not in (
        [Resize], [CenterCrop], [Resize, CenterCrop], [RandomResizedCrop],
    ):  # fmt: skip
        return False
    if geometry == [Resize(16)] or len(set(rest)) < len(rest):
        return False
    return not set(rest) & set(map(type, GEOMETRY)) and RandomHorizontalFlip not in rest[1:]


@given(steps=st.lists(st.sampled_from(GEOMETRY + OTHERS), max_size=6))
def test_only_sensible_orders_of_image_steps_are_accepted(steps) -> None:
    if allowed(steps):
        image_spec("jpg", steps)
    else:
        with pytest.raises(ConfigError, match="column 'jpg'") as caught:
            image_spec("jpg", steps)
        assert caught.value.field == "transforms"


@pytest.mark.parametrize(
    ("steps", "match"),
    [
        (
            [RandomHorizontalFlip(), CenterCrop(8)],
            r"step 2 \(CenterCrop.*RandomHorizontalFlip; all",
        ),
        ([Resize(256)], r"Resize\(int\) keeps the ratio.*CenterCrop"),
        ([], "no fixed size.*begin with a geometry"),
        ([CenterCrop(8), CenterCrop(8)], r"step 2 .*cannot come after CenterCrop"),
        ([CenterCrop(8), "flip"], r"step 2 \('flip'\): is not a transform"),
        (CenterCrop(8), "pass a list"),
        (
            [Resize(8), CenterCrop(9)],
            r"CenterCrop\(9, 9\) is larger than the result of Resize\(8,\)",
        ),
        ([CenterCrop(0)], "1 to 16384 pixels"),
        ([CenterCrop((8, 8, 8))], r"one int, or \(height, width\)"),
        ([RandomResizedCrop(8, scale=(0, 1))], "scale is"),
        ([RandomResizedCrop(8, scale=(0.5, 1.5))], "scale is"),
        ([RandomResizedCrop(8, ratio=(2, 1))], "ratio is"),
        ([RandomResizedCrop(8, ratio=(1,))], "ratio must be 2 finite numbers"),
        ([CenterCrop(8), RandomHorizontalFlip(1.5)], "p is 1.5"),
        ([CenterCrop(8), Normalize((0.5,), (0.5,))], "mean must be 3 finite numbers"),
        ([CenterCrop(8), Normalize(MEAN, (1, 1, 0))], "std is"),
        ([CenterCrop(8), Normalize(MEAN, (1, 1, math.nan))], "std must be"),
        ([CenterCrop(8), NORMAL, ToDtype("uint8")], "cannot hold"),
        ([CenterCrop(8), ToDtype("float64")], "uint8, float16, bfloat16, float32"),
        ([CenterCrop(8), ToLayout("NHWC")], "HWC, CHW"),
    ],
)
def test_what_means_nothing_is_refused_with_column_step_and_what_is_allowed(steps, match) -> None:
    with pytest.raises(ConfigError, match=match) as caught:
        image_spec("jpg", steps)
    assert "'jpg'" in str(caught.value)
    assert caught.value.field == "transforms"


@pytest.mark.parametrize(
    ("spec", "what"),
    [
        (ColumnSpec("x", Kind.FIXED, "int32"), "it is int32"),
        (ColumnSpec("x", Kind.FIXED, "int32", (4,)), r"int32 of shape \[4\]"),
        (ColumnSpec("x", Kind.PADDED, "uint8"), "lists of uint8"),
        (ColumnSpec("x", Kind.STRING, ""), "it is text"),
        (ColumnSpec("x", Kind.OBJECT, ""), "nested values"),
        (ColumnSpec("y", Kind.BYTES, ""), "not a column of the batches.*; they have: y"),
    ],
)
def test_a_column_without_bytes_is_refused_and_its_type_named(spec, what) -> None:
    with pytest.raises(ConfigError, match=what):
        delivered([spec], [image_spec("x", [CenterCrop(8)])])


@pytest.mark.parametrize(
    ("given", "columns", "meant"),
    [
        ("image", ("image.bytes", "other"), "'image.bytes'"),
        ("jgp", ("jpg", "raw"), "'jpg'"),
        ("picture", ("jpg",), "'jpg'"),
    ],
)
def test_the_column_of_images_that_was_probably_meant_is_suggested(given, columns, meant) -> None:
    specs = [ColumnSpec("image.path", Kind.STRING, "")]
    specs += [ColumnSpec(name, Kind.BYTES, "") for name in columns]
    with pytest.raises(ConfigError, match=f"did you mean {meant}"):
        delivered(specs, [image_spec(given, [CenterCrop(8)])])


IMAGE = image_spec("x", [Resize(9), CenterCrop(8)])


@pytest.mark.parametrize(
    "images",
    [
        (IMAGE, IMAGE),
        (replace(IMAGE, height=0),),
        (replace(IMAGE, resize=(9, 9, 9)),),
        (replace(IMAGE, cut=Cut.RANDOM),),
        (replace(IMAGE, dtype="int7"),),
        (replace(IMAGE, mean=(0.5,), dtype="float32"),),
    ],
)
def test_a_node_refuses_columns_that_cannot_be_images(images) -> None:
    with pytest.raises(ConfigError, match="transforms"):
        delivered([ColumnSpec("x", Kind.BYTES, "")], images)


def test_transforms_are_lists_by_column() -> None:
    for wrong in ([CenterCrop(8)], {1: [CenterCrop(8)]}, "jpg"):
        with pytest.raises(ConfigError, match="dict of lists"):
            image_specs(wrong)  # type: ignore[arg-type]


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


JPEG_COUNT = 150
SOURCES = Sources.of([encoded(drawn(120, 160), quality=90)])


def test_damaged_jpegs_are_refused_or_become_pixels() -> None:
    if maker().missing:
        without(maker().missing)
    outcomes: Outcomes = collections.Counter()
    for number in range(JPEG_COUNT):
        outcomes += pass_through(*mutant(SOURCES, 0, number), number)
    assert min(outcomes["made"], outcomes["refused"], outcomes["header refused"]) > 0


def test_a_mutant_is_made_of_its_number_alone() -> None:
    made = [mutant(SOURCES, 0, number) for number in range(JPEG_COUNT)]
    assert made == [mutant(SOURCES, 0, number) for number in range(JPEG_COUNT)]
    assert len({image for image, _ in made}) > JPEG_COUNT * 0.9


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (b"", "0 bytes"),
        (b"\0" * 5000, "5000 bytes that begin with 00 00 .* …, and all of them are zero"),
        (b"\n <!DOCTYPE html><html>", "HTML page"),
        (b"/9j/4AAQSkZJRg", "JPEG image in base64"),
        (b"train/n01/cat.JPEG\n", "is text: 'train/n01/cat.JPEG.*is it the path of an image"),
        (b"\0\0\0\x18ftypheic", "HEIC image, which is not supported"),
        (b"RIFF\0\0\0\0WAVE", "audio or video"),
        (b"\x80\x05\x95", "a Python pickle"),
        (b"\x01", "1 byte that is 01, of an unknown kind"),
    ],
)
def test_what_lies_there_is_named(found: bytes, said: str) -> None:
    assert re.search(said, said_of(found))


@given(st.binary(max_size=100))
def test_any_bytes_are_described_in_one_short_printable_line(found: bytes) -> None:
    said = said_of(found)
    assert said.isprintable()
    assert len(said) < 300
    assert "bytes" in said or "byte" in said
