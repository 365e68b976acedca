"""`dataplane`: the command line. It reads flags, the environment and files; nothing below it does.

Errors are printed as one block (what, where, what to do) and become an exit status; a traceback
comes only with --debug, or for a bug.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import click

from dataplane import trace
from dataplane.commands import output
from dataplane.commands.config import config
from dataplane.commands.doctor.command import doctor
from dataplane.commands.extensions import ExtensibleGroup
from dataplane.commands.index import index
from dataplane.commands.inspect import inspect
from dataplane.commands.options import config_option
from dataplane.commands.plan import plan
from dataplane.commands.serve import serve
from dataplane.commands.status import status
from dataplane.commands.verify import verify
from dataplane.config import VERSION
from dataplane.errors import DataplaneError


@dataclass(slots=True)
class Manner:
    """How errors are told; known as soon as the general options are read."""

    debug: bool = False


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
    del config_file  # the commands that read settings ask for it
    trace.configure("debug" if debug else "info", "text")


for command in (index, inspect, verify, plan, doctor, serve, status, config):
    cli.add_command(command)


def run(arguments: Sequence[str]) -> int:
    """Carry out one command line; the result is the exit status."""
    manner = Manner()
    try:
        status = cli.main(list(arguments), prog_name="dataplane", standalone_mode=False, obj=manner)
    except (click.Abort, KeyboardInterrupt):
        output.stderr().print("interrupted")
        return output.EXIT_INTERRUPTED
    except click.ClickException as error:
        error.show()
        return output.EXIT_USAGE
    except (BrokenPipeError, SystemExit):
        # The reader of our output has seen enough. click and rich say so with SystemExit, which
        # no command raises; Python must not complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return output.EXIT_PIPE_CLOSED
    except DataplaneError as error:
        if manner.debug:
            output.write_traceback()
        output.write_error(error)
        return output.exit_code(error)
    except Exception as error:  # noqa: BLE001 - the outermost door: whatever else comes is a bug
        output.write_traceback()
        output.write_error(error)
        output.stderr().print("  this is a bug in dataplane: please report it with the above")
        return output.EXIT_BUG
    return status if isinstance(status, int) else output.EXIT_OK


def main() -> None:
    """The console script."""
    status = run(sys.argv[1:])
    if status == output.EXIT_INTERRUPTED:
        # Threads may still wait for a store; nobody waits for them.
        output.stderr().show_cursor()
        sys.stdout.flush()
        os._exit(status)
    sys.exit(status)
