"""Commands of other packages: entry points of the group `dataplane.commands`.

Each is a click command, which is loaded only when it is called or listed. `OFFERED` are those that
we publish: where their package is missing, the command says how to install it.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

import click

from dataplane.commands.options import json_option
from dataplane.config import VERSION
from dataplane.errors import ConfigError

GROUP = "dataplane.commands"
OFFERED = {"bench": "dataplane-bench"}


class ExtensibleGroup(click.Group):
    """A group of its own commands and of those that other packages install."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        own = super().list_commands(ctx)
        return [*own, *sorted({*_installed(), *OFFERED} - {*own})]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        own = super().get_command(ctx, cmd_name)
        if own is not None:
            return own
        if (entry := _installed().get(cmd_name)) is not None:
            loaded = entry.load()
            return loaded if isinstance(loaded, click.Command) else None
        package = OFFERED.get(cmd_name)
        return None if package is None else _missing(cmd_name, package)


def _installed() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def _missing(name: str, package: str) -> click.Command:
    """The command of a package that is not installed: it takes any arguments, and says so."""
    install = f"pip install {package}=={VERSION}"

    @json_option
    def refuse(**_: object) -> None:
        raise ConfigError(f"`dataplane {name}` is in a package of its own: {install}")

    return click.command(
        name,
        short_help=f"(not installed: {install})",
        add_help_option=False,
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    )(refuse)
