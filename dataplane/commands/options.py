"""Settings as command-line options: a command declares some of them, and gets all settings
resolved. Also options that several commands share, and `dataplane config`, which shows settings.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click
from msgspec import structs

from dataplane import settings
from dataplane.base import units
from dataplane.base.machine import this_machine
from dataplane.commands.output import warn, write_json, write_table
from dataplane.model.errors import ConfigError
from dataplane.model.records import View
from dataplane.settings import BY_NAME, Resolved, unknown_variables

if TYPE_CHECKING:
    from dataplane.security.security import Security


Settings = Mapping[str, Resolved]


@dataclass(slots=True)
class Manner:
    """How errors are printed. Set as soon as `--debug` or `--json` is parsed."""

    debug: bool = False
    as_json: bool = False


# The settings of a node that commands which start a node take as options.
NODE_SETTINGS = (
    "data_listen",
    "peer_tls",
    "cache_dir",
    "cache_bytes",
    "block_arena_bytes",
    "delivery_bytes_per_rank",
    "slab_bytes",
    "worker_count",
    "worker_memory_bytes",
    "fetch_count",
    "fetch_timeout_s",
    "stall_timeout_s",
)
SECURITY_SETTINGS = tuple(setting.name for setting in settings.SECURITY_SETTINGS)
CLIENT_SETTINGS = (
    *("join", "listen", "state_dir", "token_file", "tls_ca", "tls_cert", "tls_key", "insecure"),
)
"""The settings that a command needs to reach a coordinator. The other security settings concern
servers, nodes, and functions that workers call.
"""


def json_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the option `--json`, with which errors are JSON, too. The option is parsed before others,
    so that errors about other options are also JSON.
    """
    return click.option(
        "--json",
        "as_json",
        is_flag=True,
        is_eager=True,
        callback=_told_as_json,
        help="Write JSON to stdout. An error is one JSON object on the last line of stderr.",
    )(command)


def is_json_asked(arguments: Sequence[str], command: click.Command) -> bool:
    """Return whether a command line that could not be parsed contains --json."""
    has_it = any(
        isinstance(param, click.Option) and param.is_flag and "--json" in param.opts
        for param in command.params
    )
    return has_it and "--json" in arguments


def logs_json(arguments: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Return whether this command line, which may be wrong elsewhere, starts a service whose log is
    JSON.
    """
    if "serve" not in arguments:
        return False
    given = {"log_format": environ.get(BY_NAME["log_format"].variable), "config": None}
    for flag, following in zip(arguments, [*arguments[1:], None], strict=True):
        name, equals, value = flag.partition("=")
        if name in ("--log-format", "--config"):
            given[name[2:].replace("-", "_")] = value if equals else following
    if given["log_format"] is None:
        with contextlib.suppress(ConfigError, OSError):
            file = settings.find_file(given["config"], environ)
            given["log_format"] = None if file is None else str(file.values.get("log_format"))
    return given["log_format"] == "json"


def _told_as_json(context: click.Context, _: click.Parameter, value: bool) -> bool:
    manner = context.find_root().obj
    if isinstance(manner, Manner):
        manner.as_json = value
    return value


def urls_argument(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the argument for one dataset: one url or several."""
    return click.argument("urls", nargs=-1, required=True, metavar="URL...")(command)


def format_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--format`, for shards whose names do not show it, and `--files`, for tables of paths."""
    text = "Format of the shards, if their names have no known suffix."
    command = click.option(
        "--format", "format_name", default="", metavar="NAME", help=text, callback=_of_files
    )(command)
    text = "Column with paths: each row is the file at its path, as with files=."
    return click.option(
        "--files", metavar="COLUMN", help=text, is_eager=True, expose_value=False, callback=_noted
    )(command)


def _noted(context: click.Context, _: click.Parameter, column: str | None) -> None:
    context.meta["dataplane.files"] = column


def _of_files(context: click.Context, _: click.Parameter, name: str) -> str:
    column = context.meta.get("dataplane.files")
    return f"files:{name}:{column}" if column else name


def workers_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--workers`: how many shards or blocks are read at once."""
    return click.option(
        "--workers",
        type=click.IntRange(1, 256),
        default=8,
        show_default=True,
        envvar="DATAPLANE_WORKERS",
        show_envvar=True,
        help="Number of parallel reads.",
    )(command)


_OPERATORS = ("=", "==", "!=", "in", "not", "is", "like", "and", "or")


def view_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--where`, `--sample`, `--split` and `--limit`, with the meaning of a loader's arguments.
    The command is called with `view`.
    """

    @functools.wraps(command)
    def chosen(
        *,
        where: str | None,
        sample: float | None,
        split: str | None,
        limit: int | None,
        **given: Any,
    ) -> Any:
        from dataplane.transforms.options import split_of_text, view_of

        named = {*(given.get("urls") or ()), *(given.get("target") or ())}
        if where is not None and not named.isdisjoint(_OPERATORS):
            raise ConfigError(
                f"--where {where}: quote the whole condition, as in --where \"lang == 'en'\"",
                field="where",
            )
        parts = None if split is None else split_of_text(split)
        view = view_of(where=where, sample=sample, split=parts, limit=limit)
        return command(view=view, **given)

    made: Callable[..., Any] = chosen
    for flag, metavar, kind, text in (
        ("--limit", "ROWS", int, "At most this number of rows, from the first row on."),
        (
            "--split",
            "NAME:SHARE",
            str,
            "Only this split: train:0.99, validation:0.01, my:0.98:0.99.",
        ),
        (
            "--sample",
            "SHARE",
            float,
            "Only this share of the rows, selected by a hash of each row.",
        ),
        (
            "--where",
            "CONDITION",
            str,
            "Only rows for which this condition is true: \"lang == 'en'\".",
        ),
    ):
        made = click.option(flag, metavar=metavar, type=kind, help=text)(made)
    return made


def config_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--config`, which may come before or after the command's name."""
    return click.option(
        "--config",
        "config_file",
        metavar="FILE",
        help="Read settings from this TOML file.  [env: DATAPLANE_CONFIG]",
    )(command)


def settings_of(context: click.Context) -> Settings:
    """Return all settings, as the options of this command, the environment and the file have them
    now.

    Raises:  ConfigError: the file or a value is wrong.
    """
    given = {name: value for name, value in context.params.items() if value is not None}
    flags = {name: value for name, value in given.items() if name in settings.BY_NAME}
    named = given.get("config_file") or context.find_root().params.get("config_file")
    file = settings.find_file(named, os.environ)
    return settings.resolve(flags, os.environ, file, this_machine())


def setting_options(
    *names: str, also: Mapping[str, str] | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add the options of these settings to a command. The command is called with `settings`: all
    settings, each with its source. `also` has additional flags for some settings.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        @click.pass_context
        def resolved(context: click.Context, /, config_file: str | None, **given: Any) -> Any:
            del config_file  # `settings_of` takes it from the context
            others = {name: value for name, value in given.items() if name not in names}
            return command(settings=settings_of(context), **others)

        made: Callable[..., Any] = resolved
        for name in reversed(names):
            made = _option(settings.BY_NAME[name], (also or {}).get(name))(made)
        return config_option(made)

    return decorate


def security_given(given: Settings, *, listens: bool) -> Security:
    """Return the credentials that this process presents, and those that it requires from others.
    `listens` is true if it listens on TCP.

    Raises:  ConfigError: the token cannot be read.
    """
    from dataplane.security.security import security_of
    from dataplane.store.urls import normalise

    values = {name: one.value for name, one in given.items()}
    allowed = map(normalise, str(values["allowed_urls"]).split())
    return security_of({**values, "allowed_urls": " ".join(allowed)}, listens=listens)


def _option(
    setting: units.Setting, also: str | None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    meaning = setting.meaning[0].upper() + setting.meaning[1:]
    text = f"{meaning}.  [env: {setting.variable}]"
    names = [setting.flag, *filter(None, [also]), setting.name]
    if setting.kind is units.SWITCH:
        return click.option(*names, is_flag=True, default=None, help=text)
    return click.option(*names, metavar=setting.kind.metavar, help=text)


# -- interrupt ---------------------------------------------------------------------------------
#
# Make Ctrl-C work at once, even while a command waits for a store that does not answer.
#
# During a blocking call into native code, Python runs no signal handlers. So the work is done in a
# thread, and the main thread only waits for it. After Ctrl-C the process exits without waiting for
# the thread (see `cli.main`). Nothing is lost: the index's journal stays valid after a kill at any
# time.

SIGNAL_CHECK_S = 0.2
"""How often the main thread wakes up. A signal that arrives just before the main thread sleeps, or
that the kernel delivers to another thread, would not end a wait without a timeout."""


def interruptible(command: Callable[..., Any]) -> Callable[..., Any]:
    """Run a command in a thread, while the main thread waits for Ctrl-C."""

    @functools.wraps(command)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        ended: Future[Any] = Future()

        def carry_out() -> None:
            try:
                ended.set_result(command(*arguments, **named))
            except BaseException as error:  # noqa: BLE001 - raised again in the main thread
                ended.set_exception(error)

        threading.Thread(target=carry_out, name="dataplane-command", daemon=True).start()
        while not ended.done():
            wait([ended], timeout=SIGNAL_CHECK_S)
        return ended.result()

    return wrapped


# -- packs asked -------------------------------------------------------------------------------
#
# `--pack` and `--map`: the packs that a command line describes.


def pack_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--pack` and `--map`. The command is called with `packs`, None without these options."""

    @functools.wraps(command)
    def chosen(*, pack: str | None, map_name: str | None, **given: Any) -> Any:
        if map_name is not None and pack is None:
            raise ConfigError(
                "--map needs --pack, since only packs depend on a map: add --pack, or omit --map",
                field="map",
            )
        asked = None if pack is None else PacksAsked(pack, map_name)
        return command(packs=asked, **given)

    about = "Make packs of what this function returns, as with map=."
    made = click.option("--map", "map_name", metavar="MODULE:FUNCTION", help=about)(chosen)
    about = "Make packs of this column, as with pack=, and count them."
    return click.option("--pack", metavar="COLUMN,length=N,…", help=about)(made)


@dataclasses.dataclass(frozen=True, slots=True)
class PacksAsked:
    """The packs that a command line describes, and the map that makes their tokens."""

    text: str
    map_name: str | None = None

    def view(self, rows: View) -> View:
        """Return the view `rows` with these packs as its samples.

        Raises:  ConfigError: the text is invalid, or the map is not the name of a function.
        """
        from dataplane.transforms.functions import function_name
        from dataplane.transforms.pack_options import pack_of_text

        name = function_name(self.map_name, "map")
        return structs.replace(rows, pack=pack_of_text(self.text), map=name)


# -- config ------------------------------------------------------------------------------------
#
# `dataplane config`: the settings, and where each value came from.


@click.group()
def config() -> None:
    """Settings: flags, DATAPLANE_* variables, a TOML file, defaults."""


@config.command("show")
@setting_options(*BY_NAME)
@json_option
def show(settings: Settings, *, as_json: bool) -> None:
    """Show every setting, its value, and where the value came from.

    A setting has one name everywhere: --slab-bytes as a flag, DATAPLANE_SLAB_BYTES in the
    environment, slab_bytes in the file. A flag has priority over a variable, and a variable over
    the file. Some defaults depend on the machine.

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
                name: {
                    "value": resolved.value,
                    "source": resolved.source,
                    "variable": resolved.setting.variable,
                }
                for name, resolved in settings.items()
            }
        )
    else:
        write_table(
            ("setting", "value", "source", "meaning"),
            (
                (
                    name,
                    resolved.setting.kind.show(resolved.value),
                    resolved.source,
                    resolved.setting.meaning,
                )
                for name, resolved in settings.items()
            ),
        )
    from dataplane.transforms.pixels_advice import INSTALL_LIBJPEG
    from dataplane.transforms.pixels_library import maker

    if missing := maker().missing:
        warn(f"Pillow decodes JPEGs, several times slower: {missing}; {INSTALL_LIBJPEG}")
    for name in unknown_variables(os.environ):
        warn(f"{name} is set in the environment, but is not a setting; it is ignored")
