"""Settings as command-line options. A command declares some of them, and gets all settings
resolved.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from dataplane import security_settings, settings, units
from dataplane.machine import this_machine
from dataplane.settings import Resolved

if TYPE_CHECKING:
    from dataplane.security.security import Security

Settings = Mapping[str, Resolved]


@dataclass(slots=True)
class Manner:
    """The way in which errors are printed; known as soon as its options are parsed."""

    debug: bool = False
    as_json: bool = False


# The options of a node that a command line may set when it starts one.
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
SECURITY_SETTINGS = tuple(setting.name for setting in security_settings.SECURITY_SETTINGS)
CLIENT_SETTINGS = (
    *("join", "listen", "state_dir", "token_file", "tls_ca", "tls_cert", "tls_key", "insecure"),
)
"""The settings that a command needs to reach a coordinator. The rest of SECURITY_SETTINGS act in
servers, in nodes, and where functions are called.
"""


def json_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """The option `--json`. With it, errors are JSON too. It is read before other options, so that
    errors about those are also JSON.
    """
    return click.option(
        "--json",
        "as_json",
        is_flag=True,
        is_eager=True,
        callback=_told_as_json,
        help="Write JSON to stdout; an error is one JSON object, in the last line of stderr.",
    )(command)


def is_json_asked(arguments: Sequence[str], command: click.Command) -> bool:
    """Whether a command line that could not be parsed contains --json."""
    has_it = any(
        isinstance(one, click.Option) and one.is_flag and "--json" in one.opts
        for one in command.params
    )
    return has_it and "--json" in arguments


def _told_as_json(context: click.Context, _: click.Parameter, value: bool) -> bool:
    manner = context.find_root().obj
    if isinstance(manner, Manner):
        manner.as_json = value
    return value


def urls_argument(command: Callable[..., Any]) -> Callable[..., Any]:
    """One dataset: one url or several."""
    return click.argument("urls", nargs=-1, required=True, metavar="URL...")(command)


def format_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """`--format`, for shards whose names do not show it."""
    text = "Format of the shards, if their names do not show it."
    return click.option("--format", "format_name", default="", metavar="NAME", help=text)(command)


def workers_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """`--workers`: how many shards or blocks are read at once."""
    return click.option(
        "--workers",
        type=click.IntRange(1, 256),
        default=8,
        show_default=True,
        envvar="DATAPLANE_WORKERS",
        show_envvar=True,
        help="Number of reads in flight at once.",
    )(command)


def view_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """`--where`, `--sample`, `--split` and `--limit`, as a loader has them. The command is called
    with `view`.
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
        from dataplane.transforms.view_options import split_of_text, view_of

        parts = None if split is None else split_of_text(split)
        view = view_of(where=where, sample=sample, split=parts, limit=limit)
        return command(view=view, **given)

    made: Callable[..., Any] = chosen
    for flag, metavar, kind, text in (
        ("--limit", "ROWS", int, "Only so many rows, the first ones of the others."),
        (
            "--split",
            "NAME:SHARE",
            str,
            "Only a part: train:0.99, validation:0.01, my:0.98:0.99.",
        ),
        ("--sample", "SHARE", float, "Only this share of the rows, by a hash of each row."),
        ("--where", "CONDITION", str, "Only rows where this is true: \"lang == 'en'\"."),
    ):
        made = click.option(flag, metavar=metavar, type=kind, help=text)(made)
    return made


def config_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """`--config`, before or after the command's name."""
    return click.option(
        "--config",
        "config_file",
        metavar="FILE",
        help="Read settings from this TOML file.  [env: DATAPLANE_CONFIG]",
    )(command)


def setting_options(
    *names: str, also: Mapping[str, str] | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command the options of these settings. It is called with `settings`: all of them,
    each with its source. `also`: another flag for a setting.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        @click.pass_context
        def resolved(context: click.Context, /, config_file: str | None, **given: Any) -> Any:
            flags = {name: given.pop(name) for name in names}
            general = context.find_root().params.get("config_file")
            file = settings.find_file(config_file or general, os.environ)
            known = {name: value for name, value in flags.items() if value is not None}
            found = settings.resolve(known, os.environ, file, this_machine())
            return command(settings=found, **given)

        made: Callable[..., Any] = resolved
        for name in reversed(names):
            made = _option(settings.BY_NAME[name], (also or {}).get(name))(made)
        return config_option(made)

    return decorate


def security_given(given: Settings, *, listens: bool) -> Security:
    """Return the credentials to show to others and to require from them. `listens`: on TCP.

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
