"""`dataplane inspect`: show the contents of a dataset; `dataplane formats`: the formats that can be
read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
from msgspec import to_builtins

from dataplane.commands import output
from dataplane.commands.options import (
    Settings,
    format_option,
    interruptible,
    json_option,
    setting_options,
    urls_argument,
    view_options,
    workers_option,
)
from dataplane.formats import registry
from dataplane.model.records import View
from dataplane.settings import node_config

if TYPE_CHECKING:
    from dataplane.plan.manifest import Manifest

CELL_CHARACTERS_MAX = 60
VALUES_SHOWN = 16


@click.command("inspect")
@urls_argument
@click.option(
    "--rows",
    "row_count",
    type=click.IntRange(0, 1000),
    default=5,
    show_default=True,
    help="Number of samples to show, from the first on.",
)
@format_option
@view_options
@workers_option
@setting_options("cache_dir")
@json_option
@interruptible
def inspect(
    urls: tuple[str, ...],
    *,
    settings: Settings,
    view: View,
    row_count: int,
    format_name: str,
    workers: int,
    as_json: bool,
) -> None:
    """Show a dataset: schema, shards, blocks, samples, and the first samples.

    If the dataset has no index yet, the command indexes it first. With --where, --sample, --split
    and --limit, the command shows the rows that a loader with these arguments would read. In JSON,
    the keys are
    schema (column to type), not_supported (column to reason), shards, blocks, samples (counts), of
    (samples of the whole dataset, with options that select rows), rows (the first samples), format,
    bytes,
    fingerprint. Values are exact: times in ISO 8601 with all their digits.

    \b
    Examples:
      dataplane inspect s3://bucket/train/
      dataplane inspect shard.tar --rows 1
      dataplane inspect s3://bucket/train/ --where "lang == 'en'" --split validation:0.01
      dataplane inspect train.manifest --json
    """
    from dataplane.commands.datasets import facts, opened, schema_of
    from dataplane.formats.unsupported import unsupported
    from dataplane.index.viewing import said_of_folders

    manifest = opened(urls, format_name, workers, node_config(settings), view)
    if said := said_of_folders(manifest.whole or manifest):
        output.warn(said)
    schema = schema_of(manifest)
    refused = {field.name: why for field in schema if (why := unsupported(field))}
    rows = first_rows(manifest, row_count, view)
    if as_json:
        types = {field.name: str(field.type) for field in schema}
        found = {"schema": types, "not_supported": refused, **facts(manifest), "rows": rows}
        output.write_json(found)
        return
    output.write_table(("", ""), facts(manifest).items())
    output.stdout().print()
    output.write_table(
        ("column", "type"),
        [
            (field.name, f"{field.type}{', not supported' if field.name in refused else ''}")
            for field in schema
        ],
    )
    if rows:
        output.stdout().print()
        cells = [[short(value) for value in row.values()] for row in rows]
        output.write_table(list(rows[0]), cells, f"first {output.counted(len(rows), 'sample')}")


def first_rows(manifest: Manifest, count: int, view: View) -> list[dict[str, object]]:
    """Return the first samples in the dataset's own order, each as column -> value in JSON's types,
    without unsupported columns.
    """
    from dataplane.commands.datasets import read_block, schema_of, shown
    from dataplane.formats.unsupported import supported_names

    schema = schema_of(manifest)
    names = supported_names(schema)
    rows: list[dict[str, object]] = []
    for block in range(manifest.block_count):
        if len(rows) >= count or not names:
            break
        batch = read_block(manifest, block, schema, names, view=view)
        batch = batch.slice(0, count - len(rows))
        columns = [shown(column) for column in batch.columns]
        rows += [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
    return rows


def short(value: object) -> str:
    """Return a value's text, cut to the width of a table column."""
    if isinstance(value, dict) and value.keys() == {"bytes", "hex"}:
        return f"{value['bytes']:,} bytes {value['hex']}…"
    if isinstance(value, list) and len(value) > VALUES_SHOWN:
        start = ", ".join(map(str, value[:8]))
        value = f"[{start}, … {len(value):,} values]"
    text = str(value)
    cut = len(text) > CELL_CHARACTERS_MAX
    return f"{text[: CELL_CHARACTERS_MAX - 1]}…" if cut else text


@click.command("formats")
@json_option
@interruptible
def formats(*, as_json: bool) -> None:
    """List all readable formats, including formats that installed packages add.

    \b
    Examples:
      dataplane formats
      dataplane formats --json
    """
    known = registry.known_formats()
    if as_json:
        output.write_json(to_builtins(known))
        return
    rows = [(form.name, " ".join(form.suffixes), form.package, form.needs or "-") for form in known]
    output.write_table(("format", "suffixes", "package", "needs"), rows)
