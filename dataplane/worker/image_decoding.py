"""The images of one slab: find the encoded images, choose the part of each, and write its
pixels.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from dataplane.base.suffixes import BY_FORMAT, FILES, path_of
from dataplane.model.errors import ImageError
from dataplane.model.joined import KEY
from dataplane.model.records import ColumnSpec, Kind
from dataplane.rpc.tasks import Origin, Render
from dataplane.transforms import draws, pixels, restart_indexes
from dataplane.transforms.image_steps import Draw, ImageSteps, steps_of
from dataplane.transforms.images import delivered
from dataplane.worker.columns import BlockColumns, Bytes, Ints, RowIndex
from dataplane.worker.rows import Rows, TriedImages

_KEY_LENGTH_MAX = 300
_NULL = "the image is null"
_PLAIN_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)
_PLAIN_KEY = re.compile(r"[\w./+=-]+", re.ASCII)
_FILES = re.compile(r"(.+)\+(\d+)")
"""The url of a shard that is joined from files: its table or its first file, and a number."""
_SUFFIXES = tuple(suffix for suffixes in BY_FORMAT.values() for suffix in suffixes)


class _Encoded(Struct, frozen=True):
    """The encoded images of a column: for each row, whether it has one, the image's address and
    length, and its restart index.
    """

    valid: Bytes
    places: Ints
    restart_indexes: Ints | None


class SlabImages:
    """The image columns of one slab. The attribute `specs` has the columns as they are delivered;
    `kept` are the restart indexes of each block, if it has any; `numbers` are the numbers of the
    rows in their blocks. If `tried` is given, images that cannot be decoded are noted there instead
    of raising an error.

    Shapes:  numbers: int32[rows].
    Raises:  ConfigError: a column holds no bytes.
    """

    def __init__(
        self,
        render: Render,
        specs: Sequence[ColumnSpec],
        origins: Sequence[Origin],
        kept: Sequence[Bytes | None],
        numbers: npt.NDArray[np.int32],
        tried: TriedImages | None = None,
    ) -> None:
        self.specs = delivered(specs, render.images)
        images = {image.column: steps_of(image) for image in render.images}
        self._images = {at: images[s.name] for at, s in enumerate(specs) if s.name in images}
        self._bytes_before = {at: _bytes_of(specs[:at]) for at in self._images}
        self._render, self._origins, self._numbers = render, origins, numbers
        self._shards = np.array([origin.shard for origin in origins], np.int64)
        self._first_rows = np.array([origin.first_row for origin in origins], np.int64)
        self._tried = tried
        # Keep the restart indexes alive: addresses point into their memory.
        self._held = kept
        self._restart_indexes = np.array(
            [(0, 0) if each is None else (each.ctypes.data, len(each)) for each in kept], np.int64
        )

    def __contains__(self, at: int) -> bool:
        """Whether this column's values are images."""
        return at in self._images

    def write(
        self, at: int, blocks: Sequence[BlockColumns], row_index: RowIndex, rows: Rows, out: Bytes
    ) -> None:
        """Write the pixels of the first rows of the index, as many as `out` has room for. The index
        names places in `blocks`, some of which may be excerpts.

        Shapes:  row_index: int32[rows, 2].   out: uint8[n * bytes of one image].
        Raises:  ImageError: names shard, row and column.
        """
        size = self._images[at].view().bytes
        row_index = row_index[: len(out) // size]
        if not len(row_index):
            return
        encoded = self._encoded(at, blocks, row_index, rows)
        if self._tried is None:
            self._write(at, blocks, row_index, encoded, slice(0, len(row_index)), out)
            return
        for some in self._tried.missing(at, self._numbers, size, out):
            for place, error in self._faults(at, blocks, row_index, encoded, some, out):
                self._tried.faults.setdefault(place, error)

    def _encoded(
        self, at: int, blocks: Sequence[BlockColumns], row_index: RowIndex, rows: Rows
    ) -> _Encoded:
        count = len(row_index)
        starts, lengths = (each[:count] for each in rows.spans(at))
        firsts = np.array([block.values[at].address for block in blocks], np.int64)
        return _Encoded(
            rows.valid(at, count),
            np.stack([firsts[row_index[:, 0]] + starts, lengths], axis=1),
            self._restart_indexes_of(at, blocks, row_index, (starts, lengths)),
        )

    def _faults(
        self,
        at: int,
        blocks: Sequence[BlockColumns],
        row_index: RowIndex,
        encoded: _Encoded,
        some: slice,
        out: Bytes,
    ) -> Iterator[tuple[int, ImageError]]:
        """Write the pixels of some rows; yield the place and the error of each image that fails."""
        try:
            self._write(at, blocks, row_index, encoded, some, out)
        except ImageError as error:
            if some.stop - some.start == 1:
                yield some.start, error
                return
            for place in range(some.start, some.stop):
                one = slice(place, place + 1)
                yield from self._faults(at, blocks, row_index, encoded, one, out)

    def _write(
        self,
        at: int,
        blocks: Sequence[BlockColumns],
        row_index: RowIndex,
        encoded: _Encoded,
        some: slice,
        out: Bytes,
    ) -> None:
        """Write the pixels of some rows.   Raises:  ImageError: names shard, row and column."""
        image = self._images[at]
        view = image.view()
        row_index, numbers = row_index[some], self._numbers[some]
        kept = encoded.restart_indexes
        try:
            nulls = np.flatnonzero(encoded.valid[some] == 0)
            if len(nulls):
                raise ImageError(_NULL, row=int(nulls[0]))
            places = encoded.places[some]
            draw = self._draw_of(image.column, row_index, numbers)
            crops = image.crops(pixels.sizes(places), draw)
            pixels.render(
                places, crops.boxes, crops.flips, view,
                out[some.start * view.bytes : some.stop * view.bytes],
                restart_indexes=None if kept is None else kept[some],
                may_reduce=image.may_reduce,
                changes=image.changes(len(places), draw),
            )  # fmt: skip
        except ImageError as error:
            raise self._placed(image, blocks, row_index, numbers, error) from error

    def _restart_indexes_of(
        self, at: int, blocks: Sequence[BlockColumns], row_index: RowIndex, spans: tuple[Ints, Ints]
    ) -> Ints | None:
        """Find the restart indexes of images. The place of an index depends on where the image lies
        among all BYTES values of its block, other columns included.
        """
        if not self._images[at].is_cut or not self._restart_indexes.any():
            return None
        others = self._bytes_before[at]
        before = np.array([sum(b.values[c].length for c in others) for b in blocks], np.int64)
        (starts, lengths), of = spans, row_index[:, 0].astype(np.int64)
        return restart_indexes.places(self._restart_indexes, of, before[of] + starts, lengths)

    def _draw_of(self, column: str, row_index: RowIndex, numbers: npt.NDArray[np.int32]) -> Draw:
        """Return the function that draws the numbers of a step for each of these samples."""
        shards = self._shards[row_index[:, 0]]
        rows = self._first_rows[row_index[:, 0]] + numbers
        seed, epoch = self._render.seed, self._render.epoch
        return lambda step, count: draws.uniform(
            draws.draw_keys(column, step, seed, epoch, shards, rows), count
        )

    def _placed(
        self,
        image: ImageSteps,
        blocks: Sequence[BlockColumns],
        row_index: RowIndex,
        numbers: npt.NDArray[np.int32],
        error: ImageError,
    ) -> ImageError:
        block, place = row_index[int(error.row or 0)].tolist()
        origin, key = self._origins[block], _key_of(blocks[block], place)
        row = origin.first_row + int(numbers[int(error.row or 0)])
        named = " of those in the view" if origin.of_view else ""
        named += "" if key is None else f" ({KEY} {key!r})"
        other = "" if self._render.replaces else (
            'to go on with another row in its place: bad_images="replace"; '
        )  # fmt: skip
        if error.nouns.get("reason", str(error)) == _NULL:
            # Advise to leave out all null images instead of replacing them: there may be many, and
            # the rows in their places would come again and again.
            name = image.column if _PLAIN_NAME.fullmatch(image.column) else f"`{image.column}`"
            other = f'to train without all rows that have none: where="{name} is not null"; '
        return ImageError(
            f"{_place(origin, row, key)}{named}, column {image.column!r}: {error}"
            f" ({other}to train without this row: {_without(origin, row, key)})",
            shard=origin.url,
            row=row,
            column=image.column,
            key=key,
            reason=error.nouns.get("reason", str(error)),
        )


def _files(origin: Origin) -> re.Match[str] | None:
    """Return the parts of the url of a shard that is joined from files; None for other shards."""
    parts = _FILES.fullmatch(origin.url)
    return parts if parts is not None and path_of(parts[1]).endswith(_SUFFIXES) else None


def _is_image(url: str) -> bool:
    return path_of(url).endswith(BY_FORMAT[FILES])


def _place(origin: Origin, row: int, key: str | None) -> str:
    """Name the file, the row of the table of paths, or the row of the shard."""
    files = _files(origin)
    if files is None or (origin.of_view and not _is_image(files[1])):
        return f"{origin.url}: row {row}"
    if _is_image(files[1]):
        named = f"the file {key!r}, " if key else ""
        return f"{named}row {row} of the files from {files[1]} on"
    return f"{files[1]}: row {int(files[2]) + row}"


def _without(origin: Origin, row: int, key: str | None) -> str:
    """Describe what leaves the row out of a job."""
    files = _files(origin)
    mend = "delete or mend the file, or " if files else ""
    if key is not None and _PLAIN_KEY.fullmatch(key):
        return f"""{mend}where="{KEY} != '{key}'\""""
    if key is None and files and _is_image(files[1]):
        return f'{mend}where= with its {KEY}, which this error names if columns= has "{KEY}"'
    if files:
        return f"{mend}where= on a column that tells it"
    if origin.of_view:
        return "another where=, which does not have it"
    name = origin.url.rpartition("/")[2]
    return (
        "where= on a column that tells it, or in a job of a service "
        f"`dataplane tombstone JOB --row {name}:{row}`"
    )


def _key_of(block: BlockColumns, row: int) -> str | None:
    """Return the key of a sample in a tar file; None for other samples, or if the job leaves out
    the column of keys.
    """
    if KEY not in block.batch.schema.names:
        return None
    key = block.batch.column(KEY)[row].as_py()
    if isinstance(key, bytes):
        key = key.decode(errors="replace")
    return key[:_KEY_LENGTH_MAX] if isinstance(key, str) else None


def _bytes_of(specs: Sequence[ColumnSpec]) -> tuple[int, ...]:
    return tuple(at for at, spec in enumerate(specs) if spec.kind is Kind.BYTES)
