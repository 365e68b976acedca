"""The transforms that users declare for the encoded images of a column, and their `ImageSpec`.

    one of   Resize((h, w)) | CenterCrop | Resize then CenterCrop | RandomResizedCrop
    then     RandomHorizontalFlip, optional
    then     ToDtype, Normalize and ToLayout, each at most once, in any order

Names and arguments are torchvision's; each step has a file in steps/. A list of them is one
`ImageSpec`: two lists that mean the same are equal. Pure: a trainer links it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from msgspec.structs import replace

from dataplane.model.config import RAISE, REPLACE
from dataplane.model.errors import ConfigError
from dataplane.model.records import ColumnSpec, Cut, Decoding, ImageSpec, Kind
from dataplane.transforms.image_steps import kind_of, kinds, may_follow, saved, steps_of
from dataplane.transforms.steps import registry
from dataplane.transforms.steps.kind import StepGroup
from dataplane.transforms.steps.parameters import sides_fault
from dataplane.transforms.steps.registry import Transform
from dataplane.transforms.steps.resize import KEEPS_RATIO, Resize
from dataplane.transforms.view import COLOURS

# Names of columns that have a class or a distance for each pixel: "mask", "seg.png",
# "instance_masks".
_MASK = re.compile(
    r"(?i)(^|[._-])(masks?|segs?|segmentations?|labels?|annotations?|instances?|panoptic|depth)"
    r"($|[._-])"
)
# In a tar, a PNG beside a JPEG is usually a mask of it.
_PHOTOGRAPH, _PNG = re.compile(r"(^|\.)jpe?g$"), re.compile(r"(^|\.)png$")
# Transforms of torchvision that have another name in Dataplane.
_INSTEAD: Final[Mapping[str, str]] = {
    "Compose": "a list of the transforms",
    "ToTensor": 'ToDtype("float32") and ToLayout("CHW")',
    "PILToTensor": 'ToLayout("CHW")',
    "ToImage": 'ToLayout("CHW")',
    "ConvertImageDtype": "ToDtype",
}


def image_specs(
    transforms: Mapping[str, Sequence[Transform]],
    decode: str | None = None,
    bad_images: str = RAISE,
) -> tuple[ImageSpec, ...]:
    """Convert lists of steps to specs, by column. `decode` is "exact", "fast" or None, for all
    columns; `bad_images` is "raise" or "replace".

    Raises:  ConfigError: steps are invalid or in an invalid order (names column and step), or
    `decode` or `bad_images` is unknown, or given without transforms.
    """
    decoding, replaces = _decoding(decode), _replaces(bad_images, transforms)
    if decode is not None and not transforms:
        raise ConfigError(
            f"decode={decode!r} without transforms: it sets how precisely images are decoded for "
            f"transforms; leave it out, or pass transforms",
            field="decode",
        )
    if not isinstance(transforms, Mapping) or not all(
        isinstance(transform, str) for transform in transforms
    ):
        raise ConfigError(
            f"transforms={transforms!r:.80}: pass a dict of lists, by column: "
            '{"jpg": [RandomResizedCrop(224)]}',
            field="transforms",
        )
    specs = (image_spec(column, transforms[column]) for column in sorted(transforms))
    found = (_with_decoding(spec, decoding) for spec in specs)
    return tuple(replace(spec, replaces=True) if replaces else spec for spec in found)


def _replaces(given: object, transforms: object) -> bool:
    if not isinstance(given, str) or given not in {RAISE, REPLACE}:
        raise ConfigError(
            f'bad_images={given!r:.80}: choose "{RAISE}", which ends the run with an error if an '
            f'image cannot be decoded, or "{REPLACE}", which delivers another row of the same '
            "block in its place, the same on all ranks",
            field="bad_images",
        )
    if given == REPLACE and not transforms:
        raise ConfigError(
            f'bad_images="{REPLACE}" without transforms: no image is decoded then; leave it out, '
            "or pass transforms",
            field="bad_images",
        )
    return given == REPLACE


def _decoding(given: object) -> Decoding:
    choices = {"exact": Decoding.EXACT, "fast": Decoding.FAST, None: Decoding.AUTO}
    if not isinstance(given, str | None) or given not in choices:
        raise ConfigError(
            f'decode={given!r:.80}: choose "exact" or "fast", or leave it out for exact resizes '
            "and center crops, and fast random crops",
            field="decode",
        )
    return choices[given]


def _with_decoding(spec: ImageSpec, decoding: Decoding) -> ImageSpec:
    """Return the spec with this decoding. It is unchanged if the decoding has no effect, so that
    the digest stays the same.
    """
    asked = replace(spec, decode=decoding)
    return spec if steps_of(asked).may_reduce == steps_of(spec).may_reduce else asked


def image_spec(column: str, steps: Sequence[Transform]) -> ImageSpec:
    """Convert one column's list to a spec.   Raises:  ConfigError: as `image_specs`."""
    if not isinstance(steps, Sequence) or isinstance(steps, str):
        where = f"transforms of column {column!r}"
        raise ConfigError(
            f"{where}: pass a list of them, not {steps!r:.80}; {_instead(steps) or _allowed()}",
            field="transforms",
        )
    found, seen = list[Transform](), list[type]()
    for number, step in enumerate(steps, 1):
        where = f"transforms of column {column!r}, step {number} ({step!r:.80})"
        if type(step) not in kinds():
            why = _instead(step) or f"is not a transform; {_allowed()}"
            raise ConfigError(f"{where}: {why}", field="transforms")
        if not may_follow(type(step), seen):
            after = f"after {seen[-1].__name__}" if seen else "first"
            raise ConfigError(f"{where} cannot come {after}; {_allowed()}", field="transforms")
        found.append(kind_of(step).checked(step, where))
        seen.append(type(step))
    spec = saved(column, found)
    sizes = [kind.size(step) for step in found if (kind := kind_of(step)).size is not None]
    if not any(sizes):
        raise ConfigError(
            f"transforms of column {column!r} give no fixed size, but a batch is one tensor: "
            + (KEEPS_RATIO if Resize in seen else f"begin with a geometry; {_allowed()}"),
            field="transforms",
        )
    check_image(spec)
    return spec


def _allowed() -> str:
    """Describe the allowed orders of steps, for an error."""
    groups: dict[StepGroup, list[str]] = {group: [] for group in StepGroup}
    for kind in registry.STEPS:
        groups[kind.group].append(kind.name)
    geometries = ["Resize((h, w))"]
    for kind in registry.STEPS:
        if kind.group is StepGroup.CUT:
            after_resize = [] if kind.is_first else [f"Resize then {kind.name}"]
            geometries += [kind.name, *after_resize]
    rest = (StepGroup.MIRROR, StepGroup.PIXELS, StepGroup.FORM)
    then = "".join(f", then {_joined(groups[one], 'and')}" for one in rest if groups[one])
    return f"allowed are one geometry ({_joined(geometries, ', or')}){then}, each once at most"


def _joined(names: Sequence[str], last: str) -> str:
    if len(names) == 1:
        return names[0]
    between = f"{last} " if last.startswith(",") else f" {last} "
    return f"{', '.join(names[:-1])}{between}{names[-1]}"


def _instead(step: object) -> str:
    """Return advice about a transform of torchvision, which only trainers can run; else ""."""
    name = type(step).__name__
    if not type(step).__module__.startswith("torchvision."):
        return ""
    ours = {kind.name: kind.name for kind in registry.STEPS} | dict(_INSTEAD)
    if name not in ours:
        return f"it is torchvision's {name}, which nodes do not implement; {_allowed()}"
    return f"it is torchvision's {name}: use {ours[name]} of dataplane_torch, which nodes run"


def check_image(spec: ImageSpec) -> None:
    """Check that the steps fit together.   Raises:  ConfigError: names the column."""
    where, steps = f"transforms of column {spec.column!r}", steps_of(spec).steps
    types = [type(step) for step in steps]
    for number, step in enumerate(types):
        if not may_follow(step, types[:number]):
            raise ConfigError(
                f"{where}: {step.__name__} cannot come after {types[number - 1].__name__}; "
                f"{_allowed()}",
                field="transforms",
            )
    faults = [fault for step in steps for fault in kind_of(step).faults(step, steps)]
    for fault in (*faults, sides_fault((spec.height, spec.width))):
        if fault:
            raise ConfigError(f"{where}: {fault}", field="transforms")


def delivered(specs: Sequence[ColumnSpec], images: Sequence[ImageSpec]) -> tuple[ColumnSpec, ...]:
    """Return the columns of batches, with those named by `images` turned into pixels.

    Raises:  ConfigError: a column does not exist, or holds no bytes; says what it holds.
    """
    by_name = {spec.name: spec for spec in specs}
    pixels: dict[str, ColumnSpec] = {}
    for image in images:
        check_image(image)
        if image.column in pixels:
            raise ConfigError(f"transforms name {image.column!r} twice", field="transforms")
        found = by_name.get(image.column)
        if found is None:
            raise ConfigError(
                f"transforms name {image.column!r}, which is not a column of the batches; they "
                f"have: {', '.join(sorted(by_name))}{_meant(image.column, specs)}",
                field="transforms",
            )
        if found.kind is not Kind.BYTES:
            raise ConfigError(
                f"transforms: column {image.column!r} does not hold encoded images: it is "
                f"{_said(found)}, not bytes",
                field="transforms",
            )
        size = (image.height, image.width)
        shape = (*size, COLOURS) if image.layout == "HWC" else (COLOURS, *size)
        pixels[image.column] = ColumnSpec(image.column, Kind.FIXED, image.dtype, shape)
    return tuple(pixels.get(spec.name, spec) for spec in specs)


def masks_advice(images: Sequence[ImageSpec]) -> str:
    """Return a warning if transforms are wrong for masks; "" if names and steps suggest that all
    columns are photographs.
    """
    moved = [image.column for image in images if image.cut is Cut.RANDOM or 0 < image.flip < 1]
    way = (
        "leave it out of transforms=, and decode it together with its picture in a map= or in the "
        "trainer, with one crop for both"
    )
    if len(moved) > 1:
        return (
            f"transforms= crops or flips the images of columns {_joined(moved, 'and')} "
            "independently: two views of a sample may differ so, but a mask or depth map no longer "
            f"fits its picture, and its values are mixed (bilinear, RGB). For such a column: {way}"
        )
    columns = [image.column for image in images]
    is_photographed = any(_PHOTOGRAPH.search(column) for column in columns)
    masks = [
        column for column in columns
        if _MASK.search(column) or (is_photographed and _PNG.search(column))
    ]  # fmt: skip
    if masks:
        return (
            f"transforms= of column {masks[0]!r}: its images become RGB and are resized "
            f"bilinearly, which mixes the class numbers of a mask. If it is one: {way}"
        )
    return ""


def _meant(column: str, specs: Sequence[ColumnSpec]) -> str:
    """Guess which column the user meant: bytes within a struct of that name (Hugging Face's image
    has `bytes` and `path`), a similar name, or the only column of bytes.
    """
    encoded = [spec.name for spec in specs if spec.kind is Kind.BYTES]
    within = [name for name in encoded if name.startswith(f"{column}.")]
    import difflib

    near = within or difflib.get_close_matches(column, encoded, 1) or encoded
    return f"; did you mean {near[0]!r}?" if len(near) == 1 else ""


def _said(spec: ColumnSpec) -> str:
    match spec.kind:
        case Kind.FIXED:
            return f"{spec.dtype} of shape {list(spec.shape)}" if spec.shape else spec.dtype
        case Kind.PADDED | Kind.RAGGED:
            return f"lists of {spec.dtype}"
        case Kind.STRING:
            return "text"
        case _:
            return "nested values"
