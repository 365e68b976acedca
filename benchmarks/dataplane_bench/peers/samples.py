"""Parts of batches for loaders that leave them to the trainer's code: crops, padding, packs, bytes.

libjpeg-turbo (simplejpeg) and OpenCV are the fastest Python libraries for images; both release
the interpreter's lock, so that threads help too. A loader with a decoder of its own uses its own.

A document longer than a pack fills whole packs, and its rest is packed as a document.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataplane_bench.model import CROP, ColumnType, WorkloadColumn

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


def padded(rows: Sequence[NDArray[Any]]) -> tuple[Any, Any]:
    """One tensor of these rows, each padded with 0, and their lengths.

    Shapes:  rows: [T_i] of one dtype, at least one.
             result: dtype[B, max(T_i)] and int64[B], torch tensors.
    """
    import torch

    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    whole = np.zeros((len(rows), int(lengths.max())), rows[0].dtype)
    for index, row in enumerate(rows):
        whole[index, : len(row)] = row
    return torch.from_numpy(whole), torch.from_numpy(lengths)


def encoded(column: WorkloadColumn, value: Any) -> bytes:
    """One value: an image as it is, text in UTF-8, numbers as they lie in memory."""
    match column.kind:
        case ColumnType.IMAGE:
            return bytes(value)
        case ColumnType.STRING:
            return str(value).encode()
        case _:
            return np.asarray(value, column.dtype).tobytes()


Bounds = NDArray[np.int64]
Ids = NDArray[np.int32]


def pieces(offsets: Bounds, length: int) -> tuple[Bounds, Bounds]:
    """Where the pieces of documents begin and end: the documents, cut every `length` tokens.

    Shapes:  offsets: int64[documents + 1].   result: int64[pieces], int64[pieces].
    """
    sizes = np.diff(offsets)
    counts = -(-sizes // length)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    places = np.arange(int(counts.sum())) - first
    starts = np.repeat(offsets[:-1], counts) + places * length
    return starts, np.minimum(starts + length, np.repeat(offsets[1:], counts))


def pack_batch(
    tokens: Sequence[Ids], lengths: Sequence[NDArray[Any]], length: int
) -> dict[str, Any]:
    """Tensors of these packs.

    Shapes:  tokens: int32[n <= length] of each pack.   lengths: those of its documents.
    result: int32[packs, length] each, padded with 0; document_ids with -1.
    """
    import torch

    rows = np.zeros((len(tokens), length), np.int32)
    positions = np.zeros_like(rows)
    documents = np.full_like(rows, -1)
    for index, (row, sizes) in enumerate(zip(tokens, lengths, strict=True)):
        count = len(row)
        rows[index, :count] = row
        firsts = np.repeat(np.cumsum(sizes) - sizes, sizes)
        positions[index, :count] = np.arange(count) - firsts
        documents[index, :count] = np.repeat(np.arange(len(sizes)), sizes)
    named = {"tokens": rows, "position_ids": positions, "document_ids": documents}
    return {name: torch.from_numpy(array) for name, array in named.items()}


def unpacked(batch: dict[str, Any], length: int, batch_size: int) -> Iterator[dict[str, Any]]:
    """The pieces of a padded batch's documents, each in a pack of its own."""
    values, counts = batch["tokens"].numpy(), batch["tokens.length"].numpy()
    width = values.shape[1]
    flat = values.reshape(-1)
    packs: list[Ids] = []
    for index, count in enumerate(counts.tolist()):
        starts, ends = pieces(np.array([0, count]) + index * width, length)
        bounds = zip(starts.tolist(), ends.tolist(), strict=True)
        packs += [flat[start:end] for start, end in bounds]
    for at in range(0, len(packs), batch_size):
        some = packs[at : at + batch_size]
        yield pack_batch(some, [np.array([len(pack)]) for pack in some], length)
