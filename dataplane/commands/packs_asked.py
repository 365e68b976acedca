"""`--pack` and `--map`: the packs that a command line describes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click
from msgspec import structs

from dataplane.errors import ConfigError

if TYPE_CHECKING:
    from dataplane.model import View


def pack_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """`--pack` and `--map`. The command is called with `packs`, None without them."""

    @functools.wraps(command)
    def chosen(*, pack: str | None, map_name: str | None, **given: Any) -> Any:
        if map_name is not None and pack is None:
            raise ConfigError(
                "--map needs --pack: only packs depend on what a map makes", field="map"
            )
        asked = None if pack is None else PacksAsked(pack, map_name)
        return command(packs=asked, **given)

    about = "Packs are of what this function makes, as with map=; it is imported and called."
    made = click.option("--map", "map_name", metavar="MODULE:FUNCTION", help=about)(chosen)
    about = "Packs of this column, as with pack=: index counts and stores them, too."
    return click.option("--pack", metavar="COLUMN,length=N,…", help=about)(made)


@dataclasses.dataclass(frozen=True, slots=True)
class PacksAsked:
    """The packs of a command line, and the map that makes their tokens."""

    text: str
    map_name: str | None = None

    def view(self, rows: View) -> View:
        """The view with these packs of its rows.

        Raises:  ConfigError: the text is wrong, or the map is no name of a function.
        """
        from dataplane.transforms.functions import function_name
        from dataplane.transforms.pack_options import pack_of_text

        name = function_name(self.map_name, "map")
        return structs.replace(rows, pack=pack_of_text(self.text), map=name)
