"""Declared transforms: which lists are allowed, and what they mean."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from dataplane.model.errors import ConfigError
from dataplane.model.records import ColumnSpec, Cut, ImageSpec, Kind
from dataplane.transforms.image_steps import steps_of
from dataplane.transforms.images import delivered, image_spec, image_specs
from dataplane.transforms.stacks import Stack, stack_specs
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
        with pytest.raises(ConfigError, match="a size is one int"):
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
        ([Resize(8), CenterCrop(9)], r"CenterCrop\(9, 9\) is larger than what Resize\(8,\)"),
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
        (ColumnSpec("y", Kind.BYTES, ""), "no column of the batches.*; they have: y"),
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
