"""Commands of other packages: entry points of the group `dataplane.commands`.

Each is a click command, which is loaded only when it is called or listed.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

import click

GROUP = "dataplane.commands"


class ExtensibleGroup(click.Group):
    """A group of its own commands and of those that other packages install."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        own = super().list_commands(ctx)
        return [*own, *sorted(name for name in _installed() if name not in own)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        own = super().get_command(ctx, cmd_name)
        if own is not None or cmd_name not in (found := _installed()):
            return own
        loaded = found[cmd_name].load()
        return loaded if isinstance(loaded, click.Command) else None


def _installed() -> dict[str, EntryPoint]:
    return {one.name: one for one in entry_points(group=GROUP)}
