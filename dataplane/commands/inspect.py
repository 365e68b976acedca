"""`dataplane inspect`: what is in a dataset."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from dataplane.commands import output
from dataplane.commands.interrupt import interruptible
from dataplane.commands.options import (
    Settings,
    format_option,
    json_option,
    setting_options,
    urls_argument,
    workers_option,
)

if TYPE_CHECKING:
    from dataplane.plan.manifest import Manifest

CELL_CHARACTERS_MAX = 60
BYTES_SHOWN = 16


@click.command("inspect")
@urls_argument
@click.option(
    "--rows",
    "row_count",
    type=click.IntRange(0, 1000),
    default=5,
    show_default=True,
    help="How many of the first samples to show.",
)
@format_option
@workers_option
@setting_options("cache_dir")
@json_option
@interruptible
def inspect(
    urls: tuple[str, ...],
    *,
    settings: Settings,
    row_count: int,
    format_name: str,
    workers: int,
    as_json: bool,
) -> None:
    """Show a dataset: schema, shards, blocks, samples, and the first samples.

    A dataset that was not indexed yet is indexed first. In JSON, the keys are schema (column to
    type), shards, blocks, samples (counts), rows (the first samples), format, bytes, fingerprint.

    \b
    Examples:
      dataplane inspect s3://bucket/train/
      dataplane inspect shard.tar --rows 1
      dataplane inspect train.manifest --json
    """
    from dataplane.commands.datasets import facts, opened, schema_of

    manifest = opened(urls, format_name, workers, str(settings["cache_dir"].value))
    schema = schema_of(manifest)
    rows = first_rows(manifest, row_count)
    if as_json:
        types = {field.name: str(field.type) for field in schema}
        shown = [{name: _plain(value) for name, value in row.items()} for row in rows]
        output.write_json({"schema": types, **facts(manifest), "rows": shown})
        return
    output.write_table(("", ""), facts(manifest).items())
    output.stdout().print()
    output.write_table(("column", "type"), [(field.name, str(field.type)) for field in schema])
    if rows:
        output.stdout().print()
        cells = [[_short(row[name]) for name in schema.names] for row in rows]
        output.write_table(schema.names, cells, f"first {len(rows)} samples")


def first_rows(manifest: Manifest, count: int) -> list[dict[str, object]]:
    """The first samples in the dataset's own order, each as column -> value."""
    from dataplane.commands.datasets import read_block, schema_of

    schema = schema_of(manifest)
    rows: list[dict[str, object]] = []
    for block in range(manifest.block_count):
        if len(rows) >= count:
            break
        batch = read_block(manifest, block, schema, schema.names)
        rows += batch.slice(0, count - len(rows)).to_pylist()
    return rows


def _plain(value: object) -> object:
    """A value that JSON has. Bytes are text where they are UTF-8, and else a length and a start."""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return {"bytes": len(value), "hex": value[:BYTES_SHOWN].hex()}
    if isinstance(value, dict):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value


def _short(value: object) -> str:
    """A value's text, cut to what a column of a table has room for."""
    if isinstance(value, bytes) and len(value) > BYTES_SHOWN:
        return f"{len(value):,} bytes {value[:BYTES_SHOWN].hex()}…"
    if isinstance(value, list) and len(value) > BYTES_SHOWN:
        start = ", ".join(map(str, value[:8]))
        value = f"[{start}, … {len(value):,} values]"
    text = str(value)
    cut = len(text) > CELL_CHARACTERS_MAX
    return f"{text[: CELL_CHARACTERS_MAX - 1]}…" if cut else text
