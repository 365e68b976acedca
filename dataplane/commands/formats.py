"""`dataplane formats`: the formats that can be read."""

from __future__ import annotations

import click
from msgspec import to_builtins

from dataplane.commands import output
from dataplane.commands.options import interruptible, json_option
from dataplane.formats import registry


@click.command("formats")
@json_option
@interruptible
def formats(*, as_json: bool) -> None:
    """List the formats that can be read, with those that installed packages add.

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
