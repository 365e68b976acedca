"""`dataplane config`: the settings, and where each value came from."""

from __future__ import annotations

import os

import click

from dataplane.commands.options import Settings, json_option, setting_options
from dataplane.commands.output import warn, write_json, write_table
from dataplane.settings import BY_NAME, unknown_variables
from dataplane.transforms.pixels_advice import INSTALL_LIBJPEG
from dataplane.transforms.pixels_library import maker


@click.group()
def config() -> None:
    """Settings: flags, DATAPLANE_* variables, a TOML file, defaults."""


@config.command("show")
@setting_options(*BY_NAME)
@json_option
def show(settings: Settings, *, as_json: bool) -> None:
    """Show every setting, its value, and where the value came from.

    A setting has one name everywhere: --slab-bytes as a flag, DATAPLANE_SLAB_BYTES in the
    environment, slab_bytes in the file. A flag beats a variable, a variable beats the file, and
    the file beats the default, which is computed from this machine.

    The file is the first of: --config, DATAPLANE_CONFIG, ./dataplane.toml,
    ~/.config/dataplane/config.toml.

    \b
    Examples:
      dataplane config show
      DATAPLANE_SLAB_BYTES=8MiB dataplane config show --worker-count 4
      dataplane config show --config cluster.toml --json
    """
    if as_json:
        write_json(
            {
                name: {"value": one.value, "source": one.source, "variable": one.setting.variable}
                for name, one in settings.items()
            }
        )
    else:
        write_table(
            ("setting", "value", "source", "meaning"),
            (
                (name, one.setting.kind.show(one.value), one.source, one.setting.meaning)
                for name, one in settings.items()
            ),
        )
    if missing := maker().missing:
        warn(f"images are made by Pillow, several times slower: {missing}; {INSTALL_LIBJPEG}")
    for name in unknown_variables(os.environ):
        warn(f"{name} is set in the environment, but is not a setting; it is ignored")
