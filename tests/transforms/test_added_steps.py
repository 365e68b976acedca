"""Steps that are added, random_solarize.py and random_crop.py: each is a file, its C if it has any,
and a line in the registry.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import random_crop
import random_solarize
from kernels import without
from msgspec import structs
from oracles import pixels as oracle
from pictures import Encoded, drawn, encoded, without_libjpeg
from random_crop import RandomCrop
from random_solarize import RandomSolarize

from dataplane.base import compiled
from dataplane.model.config import JobSpec
from dataplane.model.errors import ConfigError, ImageError
from dataplane.model.records import ColumnSpec, Cut, ImageSpec, Kind, StepSpec
from dataplane.rpc import codec, tasks
from dataplane.transforms import draws, pixels
from dataplane.transforms.image_steps import Draw, ImageSteps, steps_of
from dataplane.transforms.images import delivered, image_spec
from dataplane.transforms.pixels_library import _CHANGE, LIBRARY, Maker, maker
from dataplane.transforms.steps import registry
from dataplane.transforms.steps.registry import CenterCrop, Normalize, Resize, ToDtype, ToLayout
from dataplane.worker.columns import open_block
from dataplane.worker.image_decoding import SlabImages
from dataplane.worker.rows import Rows

CSRC = Path(registry.__file__).parents[1] / "csrc"
FORMS = (
    [],
    [ToLayout("CHW")],
    [ToDtype("float16"), ToLayout("CHW")],
    [ToDtype("bfloat16")],
    [Normalize((0.4, 0.5, 0.6), (0.2, 0.3, 0.4))],
    [Normalize((0.4, 0.5, 0.6), (0.2, 0.3, 0.4)), ToLayout("CHW")],
)
IMAGES = [encoded(drawn(90, 120, seed=seed), "PNG" if seed % 3 else "JPEG") for seed in range(9)]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Maker:
    """libpixels.so with the step's C, as it would be if that lay in steps/."""
    found = maker()
    if found.missing or shutil.which("cc") is None:
        without("no C compiler, or no headers of libjpeg-turbo")
    path = tmp_path_factory.mktemp("c") / "libadded.so"
    source = Path(random_solarize.__file__).with_suffix(".c")
    subprocess.run(
        ["cc", "-std=c11", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra",
         "-Werror", "-Wmissing-prototypes", f"-I{CSRC}", "-o", path, source, "-Wl,--no-as-needed", LIBRARY,
         f"-Wl,-rpath,{LIBRARY.parent}"],
        check=True,
    )  # fmt: skip
    added = ctypes.CDLL(str(path))
    added.change_RandomSolarize.restype, added.change_RandomSolarize.argtypes = _CHANGE
    for name in ("pixels_sizes", "pixels_render", "pixels_resize", "pixels_form"):
        function = getattr(added, name)
        original = getattr(found.library, name)
        function.restype, function.argtypes = original.restype, original.argtypes
    return structs.replace(found, library=added)


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        registry, "STEPS", (*registry.STEPS, random_crop.STEP, random_solarize.STEP)
    )


def steps_with(*steps: object) -> ImageSteps:
    return steps_of(image_spec("jpg", [CenterCrop((40, 60)), *steps]))


def numbers(count: int) -> Draw:
    rows = np.arange(count)
    return lambda step, many: draws.uniform(
        draws.draw_keys("jpg", step, 5, 1, np.zeros_like(rows), rows), many
    )


def made(steps: ImageSteps, images: list[bytes], by: Maker) -> np.ndarray:
    """Shapes:  result: uint8[n, view.bytes]."""
    there, view, draw = Encoded.of(images), steps.view(), numbers(len(images))
    crops = steps.crops(pixels.sizes(there.places, by), draw)
    out = np.zeros((len(images), view.bytes), np.uint8)
    pixels.render(
        there.places, crops.boxes, crops.flips, view, out.reshape(-1), by,
        changes=steps.changes(len(images), draw),
    )  # fmt: skip
    return out


def test_it_is_declared_checked_sent_and_saved_without_a_change_elsewhere() -> None:
    plain = image_spec("jpg", [CenterCrop(8), ToLayout("CHW")])
    spec = image_spec("jpg", [CenterCrop(8), RandomSolarize(128), ToLayout("CHW")])
    assert spec == structs.replace(plain, steps=(StepSpec("RandomSolarize", (128.0, 0.5)),))
    assert codec.decode(ImageSpec, codec.encode(spec)) == spec
    assert RandomSolarize(128.0, 0.5) in steps_of(spec).steps
    # The digest of a job with this step is a promise, too.
    digests = [JobSpec("0123456789abcdef" * 2, transforms=(one,)).digest() for one in (plain, spec)]
    assert digests[0] != digests[1]
    assert digests[1] == "e39db9e1ab4cfc58a26c132a0e4556ee"
    with pytest.raises(ConfigError, match=r"p is 2.0: 0 to 1"):
        image_spec("jpg", [CenterCrop(8), RandomSolarize(128, 2)])
    with pytest.raises(ConfigError, match=r"RandomSolarize, then ToDtype"):
        image_spec("jpg", [RandomSolarize(128), CenterCrop(8)])
    with pytest.raises(ConfigError, match=r"RandomSolarize: .*positional"):
        steps_of(structs.replace(plain, steps=(StepSpec("RandomSolarize", (1.0,) * 3),)))


def test_a_step_that_crops_needs_no_field_of_its_own() -> None:
    spec = image_spec("jpg", [Resize(64), RandomCrop((24, 32))])
    assert (spec.height, spec.width) == (24, 32)
    assert spec.steps == (StepSpec("RandomCrop", (24.0, 32.0)),)
    steps = steps_of(codec.decode(ImageSpec, codec.encode(spec)))
    assert steps.steps[:2] == (Resize(64), RandomCrop((24, 32)))
    assert steps.is_cut
    assert not steps.may_reduce
    assert (steps.view().height, steps.view().width) == (24, 32)
    sizes = np.tile(np.array([[128, 256]], np.int32), (50, 1))
    boxes = steps.crops(sizes, numbers(50)).boxes
    assert (boxes[:, 2:] == [48, 64]).all()
    assert (boxes[:, :2] >= 0).all()
    assert (boxes[:, :2] + boxes[:, 2:] <= [128, 256]).all()
    assert len(np.unique(boxes[:, 1])) > 10
    with pytest.raises(ConfigError, match="RandomCrop cannot come after CenterCrop"):
        delivered([ColumnSpec("jpg", Kind.BYTES, "")], [structs.replace(spec, cut=Cut.CENTER)])


def test_its_python_and_its_c_change_pixels_alike(library: Maker) -> None:
    chance = np.random.default_rng(1)
    (change,) = steps_with(RandomSolarize(128, 0.5)).changes(40, numbers(40))
    for row in range(40):
        by_python = chance.integers(0, 256, (7, 11, 3)).astype(np.uint8)
        by_c, before = by_python.copy(), by_python.copy()
        change.kind.change(change.step, by_python, change.drawn[row])
        pixels._change(by_c, change, row, library)
        assert (by_python == by_c).all()
        is_changed = change.drawn[row, 0] < 0.5
        assert (by_c != before).any() == is_changed
        assert (by_c[before < 128] == before[before < 128]).all()


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_what_it_changed_is_delivered_in_every_form(form, library: Maker) -> None:
    """As numpy makes it of the pixels that are delivered without it, and without a form."""
    steps, plain = steps_with(RandomSolarize(99, 0.7), *form), steps_with()
    drawn_for = numbers(len(IMAGES))("RandomSolarize", 1)
    for by in (library, without_libjpeg(library)):
        want = made(plain, IMAGES, by).reshape(len(IMAGES), 40, 60, 3)
        for one, drawn_one in zip(want, drawn_for, strict=True):
            random_solarize.STEP.change(RandomSolarize(99, 0.7), one, drawn_one)
        view = steps.view()
        delivered = [oracle.delivered(one, view) for one in want]
        found = made(steps, IMAGES, by)
        if view.dtype == "uint8":
            assert (found == delivered).all()
        else:
            dtype = {"bfloat16": "uint16"}.get(view.dtype, view.dtype)
            bits = [np.stack([*each]).view(dtype) for each in (found, delivered)]
            # The last bit: C and numpy may multiply in another order.
            unit = dtype.replace("float", "int").replace("uu", "u")
            far = np.abs(bits[0].view(unit).astype(np.int64) - bits[1].view(unit))
            assert far.max() <= 1


def test_an_image_that_fails_is_named_by_its_row(
    library: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many images are changed together."""
    monkeypatch.setattr(pixels, "_CHANGED_BYTES", 2 * 40 * 60 * 3)
    images = [*IMAGES[:5], b"no image", *IMAGES[6:]]
    there, steps = Encoded.of(images), steps_with(RandomSolarize(128))
    boxes, flips = np.tile([0.0, 0, 40, 60], (9, 1)), np.zeros(9, np.uint8)
    for by in (library, without_libjpeg(library)):
        whole = made(steps, IMAGES, by)
        out = np.zeros(whole.size, np.uint8)
        with pytest.raises(ImageError) as caught:
            pixels.render(
                there.places, boxes, flips, steps.view(), out, by,
                changes=steps.changes(9, numbers(9)),
            )  # fmt: skip
        assert caught.value.row == 5
        monkeypatch.setattr(pixels, "_CHANGED_BYTES", 1 << 30)
        assert (made(steps, IMAGES, by) == whole).all()
        monkeypatch.setattr(pixels, "_CHANGED_BYTES", 2 * 40 * 60 * 3)


def test_a_worker_applies_an_added_step_to_its_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Python, between the C that decodes and the C that delivers."""
    in_python = structs.replace(random_solarize.STEP, in_c=False)
    monkeypatch.setattr(registry, "STEPS", (*registry.STEPS[:-1], in_python))
    specs = [ColumnSpec("jpg", Kind.BYTES, "")]
    batch = pa.record_batch([pa.array(IMAGES, "large_binary")], names=["jpg"])
    block = open_block(batch, specs)
    index = np.array([(0, row) for row in (4, 2, 7, 1, 0)], np.int32)

    def written(*steps: object) -> np.ndarray:
        spec = image_spec("jpg", [CenterCrop((40, 60)), *steps])
        render, origins = tasks.Render((spec,), 5, 1), [tasks.Origin("s3://shard", 0, 100)]
        images = SlabImages(render, specs, origins, [None], index[:, 1])
        out = np.zeros((len(index), 40, 60, 3), np.uint8)
        images.write(0, [block], index, Rows([block], index), out.reshape(-1))
        return out

    found, want = written(RandomSolarize(128, 0.5)), written()
    rows = 100 + index[:, 1].astype(np.int64)
    keys = draws.draw_keys("jpg", "RandomSolarize", 5, 1, np.zeros_like(rows), rows)
    for one, number in zip(want, draws.uniform(keys, 1), strict=True):
        in_python.change(RandomSolarize(128, 0.5), one, number)
    assert (found == want).all()
    assert (found != written()).any()


def test_a_library_without_its_c_is_not_used() -> None:
    changes = {"change_RandomSolarize": _CHANGE}
    with pytest.raises(ConfigError, match="change_RandomSolarize"):
        compiled.load(LIBRARY, CSRC.parent, "pixels_source_crc", changes)
