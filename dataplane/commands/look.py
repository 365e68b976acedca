"""`dataplane look`: what a trainer gets in a step, as one page that needs no other file."""

from __future__ import annotations

import base64
import dataclasses
import html
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np
import pyarrow as pa
from msgspec.structs import asdict, replace
from numpy.typing import NDArray

from dataplane.base.units import meant, some_of
from dataplane.commands import output
from dataplane.commands.inspect import short
from dataplane.commands.options import Settings, interruptible
from dataplane.commands.replay import may_map, step_rows, values_of
from dataplane.commands.traced import COUNT, Traced, is_a_ledger, names_urls, traced, traced_options
from dataplane.model.errors import ConfigError, ImageError
from dataplane.model.joined import KEY
from dataplane.model.records import ImageSpec
from dataplane.model.redact import redacted
from dataplane.plan.shards import starts_of

if TYPE_CHECKING:
    from dataplane.plan.tombstones import StepRows

_PREFIX, _PLACE = "dataplane.", ("position", "dp_rank", "source", "shard", "row")
_GLOBAL_BATCH = 32
_READ_MAX, _SHOWN_MAX, _TEXT_MAX, _TOKENS_MAX, _COLUMNS_MAX = 256, 32, 400, 12, 64
"""The largest number of samples that are read, and of those that are shown; of characters of a
text, tokens of a document, and columns.
"""
_WIDE, _VALUES_MAX = 30, 2
_IMAGE_COLUMNS_MAX, _IMAGE_BYTES_MAX, _SIDE = 4, 32 << 20, 224
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'"
_STYLE = """
.shots { display: grid; gap: 1rem; }
.shots { grid-template-columns: repeat(auto-fill, minmax(min(100%, 15rem), 1fr)); }
figure { margin: 0; } figcaption { font-size: .8rem; color: var(--soft); }
.pair { display: flex; gap: .5rem; align-items: flex-start; }
.pair > * { flex: 0 1 auto; min-width: 0; }
.whole { position: relative; display: inline-block; line-height: 0; } img { max-width: 100%; }
.whole i { position: absolute; border: 2px solid #fff; outline: 1px solid #000; }
.pack { display: flex; gap: 2px; height: 1.1rem; margin: .15rem 0; background: var(--line); }
.pack i { background: var(--memory); min-width: 1px; }
.pack i:nth-child(even) { background: var(--neighbour); }
td.text { white-space: pre-wrap; overflow-wrap: anywhere; min-width: 16rem; }
td { vertical-align: top; }
"""


@click.command("look")
@click.option("--step", type=COUNT, default=0, show_default=True, help="The step of the epoch.")
@click.option(
    "--epoch", type=COUNT, help="The epoch. Default: the job's present epoch; 0 for URLs."
)
@click.option("--dp-rank", type=COUNT, help="Only the samples of this data-parallel rank.")
@click.option(
    "--transform",
    "--transforms",
    "transform",
    multiple=True,
    metavar="COLUMN=STEP(…),…",
    help="With URL: the steps of an image column, as in `transforms=`.",
)
@click.option(
    "-o", "--output", "out", metavar="FILE",
    help="File for the page. Default: look.html; with --json, no file.",
)  # fmt: skip
@traced_options
@interruptible
def look_at_step(
    settings: Settings,
    *,
    step: int,
    epoch: int | None,
    dp_rank: int | None,
    transform: tuple[str, ...],
    out: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Write an HTML page that shows the samples of a step.

    The page shows images before and after the job's crops and flips, texts, and packs with the ends
    of their documents. It also shows type, shape, minimum, maximum, mean and nulls of each
    column, and the sources of a mixture as bars. The command reads at most 256 samples, and shows
    32. The page is one file that loads no other files.

    Name the job as for `dataplane trace`. For URLs, a step has 32 samples by default
    (--global-batch). If the job has a map=, allow the function with --allowed-functions. The page
    shows stored values, so dtype=, codes= and collate= have no effect.

    \b
    Examples:
      dataplane look s3://bucket/train/
      dataplane look photos/ --transform "jpg=RandomResizedCrop(224), RandomHorizontalFlip()"
      dataplane look pretrain-7 --step 12000 --join head:7077 -o step.html
      dataplane look checkpoints/ledger.jsonl --step 7 --json
    """
    job = _job_of(settings, options, transform)
    epoch = job.epoch if epoch is None else epoch
    job = job.at(epoch)
    rows = step_rows(job, step, epoch, dp_rank, options["cursor"])
    view = _Look(job, rows, epoch, step, redacted(" ".join(options["target"])))
    if job.is_packed:
        view.read_packs()
    else:
        view.read(may_map(settings, job), options["workers"])
    for note in view.notes:
        output.warn(note)
    if as_json:
        output.write_json(view.facts())
        if out is None:
            return
    path = Path(out or "look.html")
    try:
        path.write_text(view.page(), encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror}; give another file with -o", path=str(path)
        ) from error
    if not as_json:
        output.stdout().print(f"{view.title}: {path}", markup=False, soft_wrap=True)


def _job_of(settings: Settings, options: dict[str, Any], transform: Sequence[str]) -> Traced:
    """Return the job that the command line names, with these image steps."""
    from dataplane.commands.doctor_run import transforms_of
    from dataplane.transforms.images import image_specs

    target = options["target"]
    if names_urls(target) and not is_a_ledger(target):
        options["global_batch"] = options["global_batch"] or _GLOBAL_BATCH
    elif transform:
        raise ConfigError("--transform is for urls: a job has its own, so leave it out")
    job = traced(settings, options)
    if not transform:
        return job
    spec = replace(job.spec, transforms=image_specs(transforms_of(transform)))
    return dataclasses.replace(job, spec=spec)


class _Look:
    """The content of one step: facts first, and the page made of them."""

    def __init__(self, job: Traced, rows: StepRows, epoch: int, step: int, target: str) -> None:
        from dataplane.index.viewing import said_of_folders

        self._job, self._epoch = job, epoch
        self._count, self._step_rows = len(rows.positions), rows
        self.rows = _first(rows, _READ_MAX)
        self.title = f"step {step} of epoch {epoch} of {target}"
        self.columns: list[dict[str, Any]] = []
        self.samples: list[dict[str, Any]] = []
        self.packs: list[dict[str, Any]] = []
        self.shots: list[dict[str, Any]] = []
        stored = (source.manifest.whole or source.manifest for source in job.sources)
        self.notes = [*filter(None, map(said_of_folders, stored))]

    def read(self, is_mapped: bool, workers: int) -> None:
        """Read the samples, and make the facts of columns and images."""
        from dataplane.commands.datasets import column_facts, shown

        table = values_of(self._job, self.rows, None, workers, self._epoch if is_mapped else None)
        own = [name for name in table.column_names if not name.startswith(_PREFIX)]
        if len(own) > _COLUMNS_MAX:
            self.notes.append(f"{_COLUMNS_MAX} of {len(own)} columns are shown")
            own = own[:_COLUMNS_MAX]
        images = {spec.column: spec for spec in self._job.spec.transforms}
        self.columns = [column_facts(name, table.column(name)) for name in own]
        self._shoot(table, images)
        drawn = {shot["column"] for shot in self.shots}
        place = [name for name in table.column_names if name.startswith(_PREFIX)]
        names = [*place, *(name for name in own if name not in drawn)]
        first = table.slice(0, _SHOWN_MAX)
        cells = [shown(first.column(name).combine_chunks()) for name in names]
        self.samples = [
            {name.removeprefix(_PREFIX): value for name, value in zip(names, row, strict=True)}
            for row in zip(*cells, strict=True)
        ]
        self._name_shots()

    def read_packs(self) -> None:
        """Read the documents of the first packs."""
        from dataplane.commands.datasets import column_facts
        from dataplane.commands.documents import replayed_documents

        rows = _first(self.rows, _SHOWN_MAX)
        table = replayed_documents(self._job, rows, self._epoch, None, _PREFIX)
        own = [name for name in table.column_names if not name.startswith(_PREFIX)]
        self.columns = [column_facts(name, table.column(name)) for name in own]
        lengths = [
            0 if source.view.pack is None else source.view.pack.length
            for source in self._job.sources
        ]
        by_position = dict(zip(rows.positions.tolist(), rows.sources.tolist(), strict=True))
        for row in table.to_pylist():
            at = row[f"{_PREFIX}position"]
            if not self.packs or self.packs[-1]["position"] != at:
                length = lengths[by_position[at]]
                self.packs.append({"position": at, "length": length, "documents": []})
            tokens = row[own[0]] or ()
            self.packs[-1]["documents"].append({
                **{name: row[_PREFIX + name] for name in ("shard", "row", "place", "tokens")},
                "begins": [*tokens[:_TOKENS_MAX]],
            })  # fmt: skip

    def facts(self) -> dict[str, Any]:
        """Return what the page shows, without the pixels of images."""
        images = [{k: v for k, v in shot.items() if k != "drawings"} for shot in self.shots]
        return {
            "title": self.title,
            "samples_in_step": self._count,
            "sources": self._sources(),
            "columns": self.columns,
            "samples": self.samples,
            "packs": self.packs,
            "images": images,
            "notes": self.notes,
        }

    def _sources(self) -> dict[str, int]:
        """Return how many samples of the step come from each source of a mixture."""
        if self._job.spec.mixture is None:
            return {}
        own = self._step_rows.sources
        return {source.name: int((own == at).sum()) for at, source in enumerate(self._job.sources)}

    # -- images ----------------------------------------------------------------------------------

    def _shoot(self, table: pa.Table, images: dict[str, ImageSpec]) -> None:
        """Draw the columns that are images: those with steps, and those whose bytes are images."""
        names = [*images]
        if not names:
            names = [
                name
                for name in _bytes_columns(table)
                if any(v and _size_of(v) is not None for v in _bytes_of(table, name))
            ]
        for name in names[:_IMAGE_COLUMNS_MAX]:
            try:
                encoded = _bytes_of(table, name)
            except (KeyError, pa.ArrowInvalid) as error:
                known = _bytes_columns(table)
                raise ConfigError(
                    f"transforms of {name!r}: no column of bytes has this name{meant(name, known)} "
                    f"(columns of bytes are {', '.join(known) or 'none'})",
                    field="transforms",
                ) from error
            left = _IMAGE_BYTES_MAX
            for at, value in enumerate(encoded):
                left -= len(value or b"")
                if left < 0:
                    self.notes.append(f"{at} images of {name} are shown, the larger ones are not")
                    break
                self.shots.append(self._shot(name, at, value, images.get(name)))

    def _name_shots(self) -> None:
        """Add to each image the name of its sample; note the images that cannot be decoded."""
        for column in dict.fromkeys(shot["column"] for shot in self.shots):
            shots = [shot for shot in self.shots if shot["column"] == column]
            for shot, sample in zip(shots, self.samples, strict=False):
                own = {k: v for k, v in sample.items() if k not in {*_PLACE, KEY}}
                known = [f"{k} {_cut(v)}" for k, v in own.items() if isinstance(v, str | int)]
                name = sample.get(KEY) or f"{sample['shard']}:{sample['row']}"
                shot |= {"sample": name, "values": ", ".join(known[:_VALUES_MAX])}
            if bad := [shot["sample"] for shot in shots if shot.get("error", "null") != "null"]:
                count = output.counted(len(shots), "image")
                self.notes.append(f"{len(bad)} of {count} of {column} are damaged: {some_of(bad)}")

    def _shot(
        self, name: str, at: int, encoded: bytes | None, spec: ImageSpec | None
    ) -> dict[str, Any]:
        """Return one image, whole and as the trainer gets it, or why it cannot be drawn."""
        shot: dict[str, Any] = {"column": name, "position": int(self.rows.positions[at])}
        size = None if encoded is None else _size_of(encoded)
        if encoded is None or size is None:
            return {**shot, "error": "null" if encoded is None else "not an image"}
        shot |= {"height": size[0], "width": size[1]}
        try:
            drawings = {"whole": _rendered(encoded, *_fitting(*size))}
            if spec is not None:
                shot |= self._crop(encoded, size, spec, at, drawings)
        except ImageError as error:
            return {**shot, "error": str(error)}
        return {**shot, "drawings": drawings}

    def _crop(
        self,
        encoded: bytes,
        size: tuple[int, int],
        spec: ImageSpec,
        at: int,
        drawings: dict[str, str],
    ) -> dict[str, Any]:
        """Draw the crop with the random numbers that the job has for this sample; return the box of
        the crop, and the shape and dtype that the trainer gets.
        """
        from dataplane.transforms import draws
        from dataplane.transforms.image_steps import steps_of

        of = self._job.sources[int(self.rows.sources[at])].manifest
        block, shard = int(self.rows.blocks[at]), int(self.rows.shards[at])
        starts = starts_of(of.block_rows)
        row = starts[block] - starts[of.shards.block_starts[shard]] + self.rows.block_rows[at]
        sample = np.array([shard]), np.array([row], np.int64)

        def draw(step: str, count: int) -> NDArray[np.float64]:
            keys = draws.draw_keys(spec.column, step, self._job.spec.seed, self._epoch, *sample)
            return draws.uniform(keys, count)

        steps = steps_of(spec)
        crops = steps.crops(np.array([size], np.int32), draw)
        view = steps.view()
        drawings["crop"] = _rendered(
            encoded, view.height, view.width, crops.boxes, crops.flips,
            changes=steps.changes(1, draw), may_reduce=steps.may_reduce,
        )  # fmt: skip
        shape = [view.height, view.width]
        return {
            "box": [round(float(side), 1) for side in crops.boxes[0]],
            "is_flipped": bool(crops.flips[0]),
            "shape": [3, *shape] if view.layout == "CHW" else [*shape, 3],
            "dtype": view.dtype,
        }

    # -- the page --------------------------------------------------------------------------------

    def page(self) -> str:
        """Return the page. All that comes from the dataset is escaped, or in an image's data."""
        from dataplane.page.figures import page_style

        shown = min(self._count, _SHOWN_MAX)
        about = f"{output.counted(self._count, 'sample')} in this step, {shown} shown"
        parts = [
            "<!doctype html>\n<html lang=en><head><meta charset=utf-8>",
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">',
            f"<title>{_text(self.title)}</title><style>{page_style()}{_STYLE}</style></head><body>",
            f"<header><h1>{_text(self.title)}</h1></header><main>",
            *(f'<p class="soft">{_text(note)}</p>' for note in (about, *self.notes)),
            *self._mixture_parts(),
            *_image_parts(self.shots),
            *_pack_parts(self.packs),
            *_table("Columns", self.columns),
            *_table("Samples", self.samples),
            "</main></body></html>\n",
        ]
        return "\n".join(parts)

    def _mixture_parts(self) -> Iterator[str]:
        counts = self._sources()
        if not counts:
            return
        yield '<section class="card"><h2>Mixture</h2><dl>'
        for name, count in counts.items():
            share = count / max(1, self._count)
            yield (
                f"<dt>{_text(name)}: {output.counted(count, 'sample')}, {share:.1%}</dt>"
                f'<dd class="bar"><i class="origin" style="flex:0 0 {100 * share:.2f}%"></i></dd>'
            )
        yield "</dl></section>"


def _first(rows: StepRows, count: int) -> StepRows:
    from dataplane.plan.tombstones import StepRows

    return StepRows(**{name: values[:count] for name, values in asdict(rows).items()})


def _text(value: object) -> str:
    return html.escape(str(value))


def _cut(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, str):
        more = f"… {len(value):,} characters" if len(value) > _TEXT_MAX else ""
        return value[:_TEXT_MAX] + more
    return "null" if value is None else short(value)


def _table(title: str, rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Make a table of these rows, which have the same keys."""
    if not rows:
        return
    yield f'<section class="card"><h2>{title}</h2>'
    yield f'<div class="scroll" tabindex="0" role="region" aria-label="{title}"><table><thead><tr>'
    yield "".join(f'<th scope="col">{_text(name)}</th>' for name in rows[0])
    yield "</tr></thead><tbody>"
    for row in rows:
        cells = [_cut(value) for value in row.values()]
        yield "<tr>"
        for cell in cells:
            kind = ' class="text"' if len(cell) > _WIDE else ""
            yield f"<td{kind}>{_text(cell)}</td>"
        yield "</tr>"
    yield "</tbody></table></div></section>"


def _image_parts(shots: Sequence[dict[str, Any]]) -> Iterator[str]:
    if not shots:
        return
    yield '<section class="card"><h2>Images, and what the trainer gets of them</h2>'
    yield '<div class="shots">'
    for shot in shots:
        title = f"{shot['column']} at position {shot['position']}"
        yield "<figure>"
        if "drawings" in shot:
            yield f'<div class="pair"><span class="whole"><img alt="{_text(title)}, whole"'
            yield f' src="{shot["drawings"]["whole"]}">{_box(shot)}</span>'
            if "crop" in shot["drawings"]:
                yield f'<img alt="{_text(title)}, as it comes" src="{shot["drawings"]["crop"]}">'
            yield "</div>"
        words = [title, shot["sample"], shot["values"]]
        words.append(f"{shot['height']} x {shot['width']}" if "height" in shot else "")
        if "box" in shot:
            flipped = ", flipped" if shot["is_flipped"] else ""
            words.append(f"{shot['dtype']} {shot['shape']}{flipped}")
        words.append(shot.get("error", ""))
        yield f"<figcaption>{_text('; '.join(filter(None, words)))}</figcaption></figure>"
    yield "</div></section>"


def _box(shot: dict[str, Any]) -> str:
    if "box" not in shot:
        return ""
    top, left, height, width = shot["box"]
    sides = {
        "top": top / shot["height"], "left": left / shot["width"],
        "height": height / shot["height"], "width": width / shot["width"],
    }  # fmt: skip
    style = ";".join(f"{name}:{100 * share:.2f}%" for name, share in sides.items())
    return f'<i style="{style}"></i>'


def _pack_parts(packs: Sequence[dict[str, Any]]) -> Iterator[str]:
    if not packs:
        return
    yield '<section class="card"><h2>Packs, and the documents in them</h2>'
    for pack in packs:
        documents = pack["documents"]
        filled = sum(document["tokens"] for document in documents)
        of = f" of {pack['length']:,}" if pack["length"] else ""
        words = f"position {pack['position']}: {output.counted(len(documents), 'document')}"
        yield f"<h3>{words}, {filled:,}{of} tokens</h3>"
        length = max(pack["length"], filled, 1)
        bars = (
            f'<i style="flex:0 0 {100 * document["tokens"] / length:.3f}%"></i>'
            for document in documents
        )
        yield f'<div class="pack" aria-hidden="true">{"".join(bars)}</div><ol>'
        for document in documents[:_SHOWN_MAX]:
            begin, count = document["place"], document["tokens"]
            tokens = ", ".join(map(str, document["begins"])) + ("…" if count > _TOKENS_MAX else "")
            place = f"{document['shard']}:{document['row']}"
            yield f"<li>{begin:,} to {begin + count:,}: {_text(place)}: {_text(tokens)}</li>"
        yield "</ol>"
    yield "</section>"


# -- values ------------------------------------------------------------------------------------


def _bytes_columns(table: pa.Table) -> list[str]:
    """Return the columns of bytes, also within structs, as "image.bytes"."""
    names = []
    for field in table.schema:
        is_struct = pa.types.is_struct(field.type)
        for name, kind in (
            [(f"{field.name}.{part.name}", part.type) for part in field.type.fields]
            if is_struct
            else [(field.name, field.type)]
        ):
            if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
                names.append(name)
    return names


def _bytes_of(table: pa.Table, name: str) -> list[bytes | None]:
    """Return the first values of a column of bytes.

    Raises:  KeyError: there is no such column.  pa.ArrowInvalid: it has no bytes.
    """
    import pyarrow.compute as pc

    if name in table.column_names:
        column = table.column(name)
    else:
        top, _, rest = name.partition(".")
        column = pc.struct_field(table.column(top), rest.split("."))
    if not (pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type)):
        raise pa.ArrowInvalid(f"{name} has no bytes")
    values: list[bytes | None] = column.slice(0, _SHOWN_MAX).to_pylist()
    return values


def _place_of(encoded: bytes) -> tuple[NDArray[np.int64], object]:
    """Return the address and the length of bytes, and the object that keeps them in memory."""
    held = np.frombuffer(encoded, np.uint8)
    return np.array([[held.ctypes.data, len(held)]], np.int64), held


def _size_of(encoded: bytes) -> tuple[int, int] | None:
    """Return height and width of an image; None if these bytes are not an image."""
    from dataplane.transforms import pixels

    place, held = _place_of(encoded)
    try:
        height, width = pixels.sizes(place)[0].tolist()
    except ImageError:
        return None
    del held
    return height, width


def _fitting(height: int, width: int) -> tuple[int, int]:
    scale = min(1.0, _SIDE / max(height, width))
    return max(1, round(height * scale)), max(1, round(width * scale))


def _rendered(
    encoded: bytes,
    height: int,
    width: int,
    boxes: NDArray[np.float64] | None = None,
    flips: NDArray[np.uint8] | None = None,
    **how: Any,
) -> str:
    """Return a box of an image, by default the whole image, rendered at this size as the data url
    of a JPEG.

    Raises:  ImageError.
    """
    import io

    from PIL import Image

    from dataplane.transforms import pixels
    from dataplane.transforms.view import PixelView

    place, held = _place_of(encoded)
    whole = np.zeros((1, 4))
    whole[:, 2:] = pixels.sizes(place)
    pixel_rows = np.empty(height * width * 3, np.uint8)
    pixels.render(
        place,
        whole if boxes is None else boxes,
        np.zeros(1, np.uint8) if flips is None else flips,
        PixelView(height, width, "HWC", "uint8", None, None),
        pixel_rows,
        **how,
    )
    del held
    made = Image.fromarray(pixel_rows.reshape(height, width, 3))
    made.thumbnail((_SIDE, _SIDE))
    file = io.BytesIO()
    made.save(file, "JPEG", quality=80)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()
