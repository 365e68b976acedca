"""Every step of the registry is complete: what it declares, what it draws, its Python and its C."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dataplane_torch
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import pixels as oracle
from pictures import Encoded, drawn, encoded

from dataplane.model.errors import ConfigError
from dataplane.model.records import ImageSpec, StepSpec
from dataplane.rpc import codec
from dataplane.transforms import draws, pixels
from dataplane.transforms.image_steps import Draw, in_order, kind_of, steps_of
from dataplane.transforms.images import image_spec
from dataplane.transforms.steps.kind import AnyStep, Crops, StepGroup, StepKind
from dataplane.transforms.steps.registry import (
    STEPS,
    CenterCrop,
    Normalize,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
    ToDtype,
    ToLayout,
)

ROOT = Path(__file__).resolve().parents[2]
SIDES = st.integers(1, 40)
SIZES = SIDES | st.tuples(SIDES, SIDES)
COLOURS = st.tuples(*(st.floats(0.1, 0.9),) * 3)
SHARES = st.tuples(st.floats(0.05, 1), st.floats(0.05, 1)).map(lambda two: tuple(sorted(two)))
RATIOS = st.tuples(st.floats(0.3, 4), st.floats(0.3, 4)).map(lambda two: tuple(sorted(two)))
# Parameters of each step: one that is new has its own here.
PARAMETERS: Mapping[type, st.SearchStrategy[AnyStep]] = {
    Resize: st.builds(Resize, st.tuples(SIDES, SIDES)),
    CenterCrop: st.builds(CenterCrop, SIZES),
    RandomResizedCrop: st.builds(RandomResizedCrop, SIZES, SHARES, RATIOS),
    RandomHorizontalFlip: st.builds(RandomHorizontalFlip, st.floats(0.1, 1)),
    ToDtype: st.builds(ToDtype, st.sampled_from(["uint8", "float16", "bfloat16", "float32"])),
    Normalize: st.builds(Normalize, COLOURS, COLOURS),
    ToLayout: st.builds(ToLayout, st.sampled_from(["HWC", "CHW"])),
}
NAMES = [kind.name for kind in STEPS]
DRAWING = [kind.name for kind in STEPS if kind.draws and kind.place]
EXAMPLES = 20


@st.composite
def lists(draw: st.DrawFn, kind: StepKind[AnyStep] | None = None) -> list[AnyStep]:
    """A list that is allowed, with this step in it."""
    cuts = [one.step for one in STEPS if one.group is StepGroup.CUT]
    if kind is not None and kind.group <= StepGroup.CUT:
        found = [draw(PARAMETERS[kind.step])]
    else:
        found = [draw(PARAMETERS[draw(st.sampled_from([Resize, *cuts]))])]
    rest = [one for one in STEPS if one.group > StepGroup.CUT]
    given = [one for one in rest if one is kind or draw(st.booleans())]
    if ToDtype in (types := [one.step for one in given]) and Normalize in types:
        given = [one for one in given if one.step is not (ToDtype if kind is None else Normalize)]
    return found + [draw(PARAMETERS[one.step]) for one in sorted(given, key=lambda k: k.group)]


def draw_from(seed: int, count: int) -> Draw:
    rows = np.arange(count)
    shards = np.zeros_like(rows)
    return lambda step, numbers: draws.uniform(
        draws.draw_keys("jpg", step, seed, 0, shards, rows), numbers
    )


def made(
    spec: ImageSpec, images: list[bytes], seed: int = 0, render: Any = pixels.render
) -> np.ndarray[Any, Any]:
    """Make pixels as a worker does.   Shapes:  result: [n, ...] of the dtype; bfloat16 as uint16."""
    steps, there = steps_of(spec), Encoded.of(images)
    view, draw = steps.view(), draw_from(seed, len(images))
    crops = steps.crops(pixels.sizes(there.places), draw)
    out = np.zeros(len(images) * view.bytes, np.uint8)
    render(
        there.places, crops.boxes, crops.flips, view, out,
        may_reduce=steps.may_reduce, changes=steps.changes(len(images), draw),
    )  # fmt: skip
    dtype = "uint16" if view.dtype == "bfloat16" else view.dtype
    shape = (view.height, view.width, 3) if view.layout == "HWC" else (3, view.height, view.width)
    return out.view(dtype).reshape(-1, *shape)


def as_bytes(spec: ImageSpec, found: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Delivered pixels converted back to 0..255: float64[n, h, w, 3]."""
    view = steps_of(spec).view()
    if view.layout == "CHW":
        found = found.transpose(0, 2, 3, 1)
    if view.dtype == "uint8":
        return found.astype(np.float64)
    if view.dtype == "bfloat16":
        found = (found.astype(np.uint32) << 16).view(np.float32)
    scale, bias = view.factors()
    return (found.astype(np.float64) - bias) / scale


@pytest.mark.parametrize("kind", STEPS, ids=NAMES)
def test_one_file_defines_all_of_an_image_step(kind: StepKind[AnyStep]) -> None:
    stem = re.sub(r"(?<!^)(?=[A-Z])", "_", kind.name).lower()
    module = importlib.import_module(f"dataplane.transforms.steps.{stem}")
    assert module.STEP is kind
    assert kind.step.__module__ == module.__name__
    assert inspect.getdoc(kind.step)
    assert getattr(dataplane_torch, kind.name) is kind.step
    assert kind.name in dataplane_torch.__all__
    assert f"`{kind.name}(" in (ROOT / "docs" / "images.md").read_text()
    is_placed = kind.group in {StepGroup.RESIZE, StepGroup.CUT, StepGroup.MIRROR}
    assert (kind.place is not None) == is_placed
    assert (kind.change is not None) == (kind.group is StepGroup.PIXELS)
    assert (kind.view is not None) == (kind.group is StepGroup.FORM)
    assert kind.in_c == Path(str(module.__file__)).with_suffix(".c").exists()
    assert len(set(kind.draws)) == len(kind.draws)


def test_every_step_has_parameters_here() -> None:
    assert PARAMETERS.keys() == {kind.step for kind in STEPS}


@pytest.mark.parametrize("kind", STEPS, ids=NAMES)
@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_a_saved_spec_stands_for_the_steps_that_it_was_made_of(kind, data) -> None:
    steps = data.draw(lists(kind))
    spec = image_spec("jpg", steps)
    assert codec.decode(ImageSpec, codec.encode(spec)) == spec
    found = steps_of(spec)
    assert image_spec("jpg", found.steps) == spec
    checked = {type(step): kind_of(step).checked(step, "") for step in steps}
    for step in found.steps:
        assert checked.get(type(step), step) == step
    assert found.steps == in_order(found.steps)


@pytest.mark.parametrize("kind", [one for one in STEPS if one.draws and one.place], ids=DRAWING)
def test_each_number_that_a_step_draws_changes_its_result(kind: StepKind[AnyStep]) -> None:
    count, chance = 3000, np.random.default_rng(3)
    step = kind.checked(kind.step(8) if kind.size else kind.step(), kind.name)
    # Of such images most tries do not fit, so that the last ones count.
    whole = np.tile(np.array([[30.0, 400.0]]), (count, 1))
    boxes = np.concatenate([np.zeros_like(whole), whole], axis=1)
    crops = Crops(whole, whole, boxes, np.zeros(count, np.uint8))
    numbers = chance.random((count, len(kind.draws)))

    def placed(given: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        assert kind.place is not None
        found = kind.place(step, crops, given)
        return np.concatenate([found.boxes, found.flips[:, None]], axis=1)

    for number, meaning in enumerate(kind.draws):
        others = numbers.copy()
        others[:, number] = chance.random(count)
        assert (placed(others) != placed(numbers)).any(), meaning


SOURCES = [
    encoded(drawn(57, 83), "PNG"),
    encoded(drawn(120, 41), quality=90),
    encoded(drawn(64, 200, "L"), quality=60),
]


@pytest.mark.parametrize("kind", STEPS, ids=NAMES)
@settings(max_examples=EXAMPLES)
@given(data=st.data(), seed=st.integers(0, 2**63))
def test_c_makes_of_every_step_what_the_oracle_makes(kind, data, seed) -> None:
    spec = image_spec("jpg", data.draw(lists(kind)))
    renders = (pixels.render, oracle.render)
    found, other = (as_bytes(spec, made(spec, SOURCES, seed, render)) for render in renders)
    # What a rounding to the dtype adds, of values that may be far above 1 after Normalize.
    rounding = {"uint8": 0.0, "float32": 0.01, "float16": 0.6, "bfloat16": 5.0}[spec.dtype]
    assert np.abs(found - other).max() <= pixels.TOLERANCE + rounding


def test_a_spec_with_a_step_of_another_version_is_refused() -> None:
    spec = ImageSpec("jpg", 8, 8, image_spec("jpg", [CenterCrop(8)]).cut, steps=(StepSpec("Blur"),))
    with pytest.raises(
        ConfigError, match="column 'jpg': Blur is not a step that this version knows"
    ):
        steps_of(spec)
