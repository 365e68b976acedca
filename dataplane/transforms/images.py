"""What may be done to the encoded images of a column, as a user declares it, and what that means.

    one of   Resize((h, w)) | CenterCrop | Resize then CenterCrop | RandomResizedCrop
    then     RandomHorizontalFlip, if wanted
    then     ToDtype, Normalize and ToLayout, each once at most, in any order

Names and arguments are torchvision's. A list of them is one `ImageSpec`: two lists that mean the
same are equal. Pure, and without arrays: a trainer links it.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from dataplane.errors import ConfigError
from dataplane.model import ColumnSpec, Cut, Decoding, ImageSpec, Kind
from dataplane.transforms.dtypes import dtype_name
from dataplane.units import whole

Size = int | Sequence[int]

DTYPES: Final = ("uint8", "float16", "bfloat16", "float32")
LAYOUTS: Final = ("HWC", "CHW")
SIDE_MAX = 1 << 14
_COLOURS = 3


@dataclass(frozen=True, slots=True)
class Resize:
    """To (height, width); an int is the length of the shorter side, and a CenterCrop must follow:
    batches need images of one size.
    """

    size: Size


@dataclass(frozen=True, slots=True)
class CenterCrop:
    """The middle of every image; an int is both height and width."""

    size: Size


@dataclass(frozen=True, slots=True)
class RandomResizedCrop:
    """A random part of every image, resized: its share of the image's area is within `scale`, its
    width divided by its height within `ratio`.

    Source:  torchvision.transforms.RandomResizedCrop.
    """

    size: Size
    scale: Sequence[float] = (0.08, 1.0)
    ratio: Sequence[float] = (3 / 4, 4 / 3)


@dataclass(frozen=True, slots=True)
class RandomHorizontalFlip:
    """Mirrors the share `p` of all images."""

    p: float = 0.5


@dataclass(frozen=True, slots=True)
class ToDtype:
    """uint8 is 0 to 255; float16, bfloat16 and float32 are 0 to 1. A name, or torch's dtype."""

    dtype: object


@dataclass(frozen=True, slots=True)
class Normalize:
    """(value - mean) / std, one of each for red, green and blue, of values from 0 to 1. The result
    is float32 unless ToDtype says otherwise.
    """

    mean: Sequence[float]
    std: Sequence[float]


@dataclass(frozen=True, slots=True)
class ToLayout:
    """Tensors of [B, height, width, 3] ("HWC", the default) or [B, 3, height, width] ("CHW")."""

    layout: str


Transform = (
    Resize | CenterCrop | RandomResizedCrop | RandomHorizontalFlip | ToDtype | Normalize | ToLayout
)
# What may come after what: a step's stage never falls, and only the last stage has several steps.
_STAGES: Final[Mapping[type, int]] = {
    Resize: 0, CenterCrop: 1, RandomResizedCrop: 1, RandomHorizontalFlip: 2,
    ToDtype: 3, Normalize: 3, ToLayout: 3,
}  # fmt: skip
# Transforms of torchvision that are called otherwise here.
_INSTEAD: Final[Mapping[str, str]] = {
    "Compose": "a list of the transforms",
    "ToTensor": 'ToDtype("float32") and ToLayout("CHW")',
    "PILToTensor": 'ToLayout("CHW")',
    "ToImage": 'ToLayout("CHW")',
    "ConvertImageDtype": "ToDtype",
}
_ALLOWED = (
    "allowed are one geometry (Resize((h, w)), CenterCrop, Resize then CenterCrop, or "
    "RandomResizedCrop), then RandomHorizontalFlip, then ToDtype, Normalize and ToLayout, each "
    "once at most"
)


def image_specs(
    transforms: Mapping[str, Sequence[Transform]], decode: str | None = None
) -> tuple[ImageSpec, ...]:
    """What these lists mean, by column; `decode` is "exact", "fast" or None, for all of them.

    Raises:  ConfigError: steps that mean nothing, or not in this order; names column and step.
             A `decode` that is unknown, or given without transforms.
    """
    decoding = _decoding(decode)
    if decode is not None and not transforms:
        raise ConfigError(
            f"decode={decode!r} without transforms: it says how precisely the images of transforms "
            "are decoded; leave it out, or declare transforms",
            field="decode",
        )
    if not isinstance(transforms, Mapping) or not all(isinstance(one, str) for one in transforms):
        raise ConfigError(
            f"transforms={transforms!r:.80}: pass a dict of lists, by column: "
            '{"jpg": [RandomResizedCrop(224)]}',
            field="transforms",
        )
    specs = (image_spec(column, transforms[column]) for column in sorted(transforms))
    return tuple(_with_decoding(spec, decoding) for spec in specs)


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
    """Equal to the default where it means the same, so that digests are equal too."""
    asked = replace(spec, decode=decoding)
    return spec if asked.may_reduce == spec.may_reduce else asked


def image_spec(column: str, steps: Sequence[Transform]) -> ImageSpec:
    """What one column's list means.   Raises:  ConfigError: as `image_specs`."""
    if not isinstance(steps, Sequence) or isinstance(steps, str):
        where = f"transforms of column {column!r}"
        raise ConfigError(
            f"{where}: pass a list of them, not {steps!r:.80}; {_instead(steps) or _ALLOWED}",
            field="transforms",
        )
    spec, seen = ImageSpec(column, 0, 0, Cut.WHOLE), list[type]()
    for number, step in enumerate(steps, 1):
        where = f"transforms of column {column!r}, step {number} ({step!r:.80})"
        if type(step) not in _STAGES:
            why = _instead(step) or f"is not a transform; {_ALLOWED}"
            raise ConfigError(f"{where}: {why}", field="transforms")
        if not _may_follow(type(step), seen):
            after = f"after {seen[-1].__name__}" if seen else "first"
            raise ConfigError(f"{where} cannot come {after}; {_ALLOWED}", field="transforms")
        spec = _with(spec, step, where)
        seen.append(type(step))
    if Normalize in seen and ToDtype not in seen:
        spec = replace(spec, dtype="float32")
    if spec.cut is Cut.WHOLE and len(spec.resize) < 2:
        raise ConfigError(
            f"transforms of column {column!r} give no fixed size, and a batch is one tensor: "
            + ("Resize(int) keeps the ratio of each image; pass Resize((height, width)), or let a "
               "CenterCrop follow" if spec.resize else f"begin with a geometry; {_ALLOWED}"),
            field="transforms",
        )  # fmt: skip
    check_image(spec)
    return spec


def _instead(step: object) -> str:
    """What to use in place of a transform of torchvision, which runs in the trainer; "" of all
    else.
    """
    name = type(step).__name__
    if not type(step).__module__.startswith("torchvision."):
        return ""
    ours = {one.__name__: one.__name__ for one in _STAGES} | dict(_INSTEAD)
    if name not in ours:
        return f"it is torchvision's {name}, which nodes do not have; {_ALLOWED}"
    return f"it is torchvision's {name}: use {ours[name]} of dataplane_torch, which nodes run"


def _may_follow(step: type, seen: Sequence[type]) -> bool:
    if not seen:
        return True
    if seen[-1] is Resize and step is RandomResizedCrop:
        return False
    before, stage = _STAGES[seen[-1]], _STAGES[step]
    return stage > before or (stage == before == _STAGES[ToLayout] and step not in seen)


def _with(spec: ImageSpec, step: Transform, where: str) -> ImageSpec:
    match step:
        case Resize(size) if (side := whole(size)) is not None:
            return replace(spec, resize=(side,))
        case Resize(size):
            height, width = _size(size, where)
            return replace(spec, resize=(height, width), height=height, width=width)
        case CenterCrop(size):
            height, width = _size(size, where)
            return replace(spec, cut=Cut.CENTER, height=height, width=width)
        case RandomResizedCrop(size, scale, ratio):
            height, width = _size(size, where)
            return replace(
                spec, cut=Cut.RANDOM, height=height, width=width,
                scale=_numbers(scale, 2, "scale", where), ratio=_numbers(ratio, 2, "ratio", where),
            )  # fmt: skip
        case RandomHorizontalFlip(p):
            return replace(spec, flip=_numbers([p], 1, "p", where)[0])
        case Normalize(mean, std):
            return replace(
                spec,
                mean=_numbers(mean, _COLOURS, "mean", where),
                std=_numbers(std, _COLOURS, "std", where),
            )
        case ToDtype(dtype):
            return replace(spec, dtype=_word(dtype_name(dtype), DTYPES, where))
        case ToLayout(layout):
            return replace(spec, layout=_word(layout, LAYOUTS, where))


def _size(given: Size, where: str) -> tuple[int, int]:
    side = whole(given)
    if side is not None:
        return side, side
    sides = [whole(each) for each in given] if isinstance(given, Iterable) else []
    match sides:
        case [int(height), int(width)]:
            return height, width
    raise ConfigError(f"{where}: a size is one int, or (height, width)", field="transforms")


def _numbers(given: Sequence[float], count: int, name: str, where: str) -> tuple[float, ...]:
    try:
        found = tuple(float(value) for value in given)
    except (TypeError, ValueError):
        found = ()
    if len(found) != count or not all(math.isfinite(value) for value in found):
        raise ConfigError(
            f"{where}: {name} must be {count} finite number{'s' * (count > 1)}", field="transforms"
        )
    return found


def _word(given: str, words: Sequence[str], where: str) -> str:
    if given not in words:
        raise ConfigError(f"{where}: choose one of {', '.join(words)}", field="transforms")
    return given


def check_image(spec: ImageSpec) -> None:
    """That images can be made so, whoever asks for it.   Raises:  ConfigError: names the column."""
    sides = (spec.height, spec.width)
    resized = spec.resize * 2 if len(spec.resize) == 1 else spec.resize
    rules = {
        f"resize is {spec.resize}: none, the shorter side, or height and width": len(spec.resize)
        <= 2,
        f"every side has 1 to {SIDE_MAX} pixels, not {(*spec.resize, *sides)}": all(
            1 <= side <= SIDE_MAX for side in (*resized, *sides)
        ),
        f"CenterCrop{sides} is larger than what Resize{spec.resize} leaves": spec.cut
        is not Cut.CENTER
        or all(side <= room for side, room in zip(sides, resized, strict=False)),
        f"RandomResizedCrop's scale is {spec.scale}: two shares of the area, 0 < least <= most <= "
        "1": spec.cut is not Cut.RANDOM or _is_range(spec.scale, 1.0),
        f"RandomResizedCrop's ratio is {spec.ratio}: two of width by height, 0 < least <= most":
        spec.cut is not Cut.RANDOM or _is_range(spec.ratio, math.inf),
        f"RandomHorizontalFlip's p is {spec.flip}: 0 to 1": 0 <= spec.flip <= 1,
        f"dtype {spec.dtype!r} is none of {', '.join(DTYPES)}": spec.dtype in DTYPES,
        f"layout {spec.layout!r} is none of {', '.join(LAYOUTS)}": spec.layout in LAYOUTS,
        "Normalize gives fractions, which ToDtype('uint8') has no room for": not spec.mean
        or spec.dtype != "uint8",
        f"Normalize's std is {spec.std}: above 0": all(value > 0 for value in spec.std),
        "Normalize has a mean and a std for each of three colours": len(spec.mean)
        == len(spec.std)
        and len(spec.mean) in {0, _COLOURS},
    }  # fmt: skip
    for rule, holds in rules.items():
        if not holds:
            raise ConfigError(f"transforms of column {spec.column!r}: {rule}", field="transforms")


def _is_range(given: Sequence[float], most: float) -> bool:
    return len(given) == 2 and 0 < given[0] <= given[1] <= most


def delivered(specs: Sequence[ColumnSpec], images: Sequence[ImageSpec]) -> tuple[ColumnSpec, ...]:
    """The columns of batches, where those named by `images` are pixels.

    Raises:  ConfigError: there is no such column, or it holds no bytes; says what it holds.
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
                f"transforms name {image.column!r}, which is no column of the batches"
                f"{_meant(image.column, specs)}; they have: {', '.join(sorted(by_name))}",
                field="transforms",
            )
        if found.kind is not Kind.BYTES:
            raise ConfigError(
                f"transforms: column {image.column!r} holds no encoded images: it is {_said(found)}"
                ", and not bytes",
                field="transforms",
            )
        size = (image.height, image.width)
        shape = (*size, _COLOURS) if image.layout == "HWC" else (_COLOURS, *size)
        pixels[image.column] = ColumnSpec(image.column, Kind.FIXED, image.dtype, shape)
    return tuple(pixels.get(spec.name, spec) for spec in specs)


def _meant(column: str, specs: Sequence[ColumnSpec]) -> str:
    """The column that was most likely meant: bytes within a struct of that name (Hugging Face's
    image has `bytes` and `path`), a similar name, or the only one that has bytes.
    """
    encoded = [spec.name for spec in specs if spec.kind is Kind.BYTES]
    within = [name for name in encoded if name.startswith(f"{column}.")]
    near = within or difflib.get_close_matches(column, encoded, 1) or encoded
    return f": did you mean {near[0]!r}?" if len(near) == 1 else ""


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
