"""`dataplane`: the command line. It reads flags, the environment and files; lower layers read none.

Errors are printed as one block (what, where, what to do), and determine the exit status. A
traceback is printed only with --debug, or for a bug.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points

import click

from dataplane.base import trace
from dataplane.commands import output
from dataplane.commands.doctor import doctor
from dataplane.commands.index import index
from dataplane.commands.inspect import formats, inspect
from dataplane.commands.ledger import ledger, mix, skip, tombstone
from dataplane.commands.look import look_at_step
from dataplane.commands.options import (
    Manner,
    config,
    config_option,
    is_json_asked,
    json_option,
    logs_json,
)
from dataplane.commands.pack import pack
from dataplane.commands.plan import plan
from dataplane.commands.replay import replay
from dataplane.commands.replay import trace as trace_step
from dataplane.commands.serve import serve
from dataplane.commands.status import status
from dataplane.commands.verify import verify
from dataplane.commands.where import where
from dataplane.model.config import VERSION
from dataplane.model.errors import ConfigError, DataplaneError

# -- extensions --------------------------------------------------------------------------------
#
# Commands of other packages: entry points of the group `dataplane.commands`.
#
# Each is a click command, which is loaded only when it is called or listed. `OFFERED` has the
# commands of packages that we publish: if the package is missing, the command says how to install
# it.

GROUP = "dataplane.commands"
OFFERED = {"bench": "dataplane-bench"}


class ExtensibleGroup(click.Group):
    """A group of its own commands, and of those that other packages install."""

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
    """Return the command of a missing package: it accepts any arguments, and fails."""
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


_NOT_WRITTEN = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG}


@click.group(
    cls=ExtensibleGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="\b\n" + output.EXIT_CODES,
)
@click.version_option(VERSION, "--version", message="dataplane %(version)s")
@click.option(
    "--debug",
    is_flag=True,
    envvar="DATAPLANE_DEBUG",
    help="Log everything, and show tracebacks.  [env: DATAPLANE_DEBUG]",
)
@config_option
@click.pass_obj
def cli(manner: Manner, /, *, debug: bool, config_file: str | None) -> None:
    """Feed training loops from object storage: one order on any number of GPUs, exact resume.

    \b
    Look at a dataset, check it, then serve it:
      dataplane inspect s3://bucket/train/
      dataplane verify s3://bucket/train/
      dataplane plan s3://bucket/train/ --dp-size 64 --global-batch 1024
      dataplane doctor s3://bucket/train/ --batch-size 256
      dataplane serve
      dataplane bench
    """
    manner.debug = debug
    del config_file  # read later, by the commands that need settings
    trace.configure("debug" if debug else "warning", "text")


for command in (
    *(index, pack, inspect, verify, formats, plan, doctor, serve, status, config),
    *(trace_step, where, replay, look_at_step, ledger, skip, tombstone, mix),
):
    cli.add_command(command)


def run(arguments: Sequence[str]) -> int:
    """Run one command line, and return the exit status."""
    manner = Manner()
    try:
        status = cli.main(list(arguments), prog_name="dataplane", standalone_mode=False, obj=manner)
        sys.stdout.flush()
    except (BrokenPipeError, SystemExit):
        # The reader of our output has closed the pipe: click and rich raise SystemExit, which no
        # command of ours raises.
        _drop_output()
        return output.EXIT_PIPE_CLOSED
    except click.UsageError as error:
        if error.ctx is not None and is_json_asked(arguments, error.ctx.command):
            manner.as_json = True
        return _told(error, manner, arguments)
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - the outermost door
        # An OSError about a file that was opened by name has a filename; this one is about stdout.
        if isinstance(error, OSError) and error.filename is None and error.errno in _NOT_WRITTEN:
            _drop_output()
            output.stderr().print(f"error: the output cannot be written: {error.strerror}")
            return output.EXIT_NOT_WRITTEN
        return _told(error, manner, arguments)
    return status if isinstance(status, int) else output.EXIT_OK


def _drop_output() -> None:
    """Discard further output to stdout, so that Python does not fail when it flushes at exit."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _told(error: BaseException, manner: Manner, arguments: Sequence[str]) -> int:
    """Report the error that ended a command, as text or JSON; return the exit status. In a service
    whose log is JSON, the report is a line of the log.
    """
    is_bug = False
    match error:
        case click.Abort() | KeyboardInterrupt():
            status = output.EXIT_INTERRUPTED
        case click.ClickException():
            status = output.EXIT_USAGE
        case DataplaneError():
            status = output.exit_code(error)
        case _:
            status, is_bug = output.EXIT_BUG, True
    if logs_json(arguments, os.environ):
        output.log_error(error, status, with_traceback=is_bug or manner.debug)
    elif manner.as_json:
        output.write_error_as_json(error, status, with_traceback=is_bug or manner.debug)
    elif status == output.EXIT_INTERRUPTED:
        output.stderr().print("interrupted")
    elif isinstance(error, click.ClickException):
        error.show()
    else:
        if is_bug or manner.debug:
            output.write_traceback(error)
        output.write_error(error)
        if is_bug:
            output.stderr().print("  this is a bug in dataplane: please report it with the above")
    return status


def _open_standard_streams() -> None:
    """Open standard streams that are closed. Output to them is discarded, and no other file or
    socket gets their numbers.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(opened, True)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def main() -> None:
    """Run the command line of this process, and exit with its status."""
    _open_standard_streams()
    status = run(sys.argv[1:])
    if status == output.EXIT_INTERRUPTED:
        # Do not wait for threads that may still wait for a store.
        output.stderr().show_cursor()
        sys.stdout.flush()
        os._exit(status)
    sys.exit(status)
