"""`dataplane skip`: leave steps out of a job."""

from __future__ import annotations

import click

from dataplane.commands import output
from dataplane.commands.changing import changed, tell, who
from dataplane.commands.options import (
    CLIENT_SETTINGS,
    Settings,
    json_option,
    setting_options,
)
from dataplane.commands.traced import COUNT, DIGITS_MAX
from dataplane.errors import ConfigError


@click.command("skip")
@click.argument("job", metavar="JOB")
@click.option(
    "--steps",
    required=True,
    metavar="FIRST:STOP",
    help="Counted from 0 in their epoch; STOP is the first that is not skipped.",
)
@click.option("--epoch", type=COUNT, help="Default: the one that the job is in.")
@setting_options(*CLIENT_SETTINGS)
@json_option
def skip(
    settings: Settings, *, job: str, steps: str, epoch: int | None, as_json: bool
) -> None:  # fmt: skip
    """Leave steps out of a job, from its next start on: to pass over a spike of the loss, say.

    Nothing of these steps is loaded: step FIRST - 1 is followed by step STOP, on all ranks, and
    cursors are what they would be without. A running job goes on as it is, and steps that it has
    begun cannot be skipped. To go back before steps that it has read, stop the job, skip them, and
    resume it from an older checkpoint.

    The job is one of a coordinator (`dataplane serve`), in whose ledger the skip is kept. A job
    whose node its trainer started has none.

    \b
    Examples:
      dataplane skip pretrain-7 --steps 12000:12150 --join head:7077
      dataplane skip pretrain-7 --steps 0:50 --epoch 2 --join head:7077
    """
    from dataplane.rpc.membership import ChangeRequest, StepsSkipped

    first, _, stop = steps.partition(":")
    if not all(one.isdecimal() and len(one) <= DIGITS_MAX for one in (first, stop)):
        raise ConfigError(f"--steps {steps}: give FIRST:STOP, such as 120:150", field="steps")
    asked = StepsSkipped(int(first), int(stop), epoch)
    entry, answer = changed(settings, ChangeRequest(job, who(), skip=asked))
    count = output.counted(asked.stop - asked.first, "step")
    steps = f"{asked.first} to {asked.stop - 1}"
    what = f"{count} of epoch {entry.position.epoch} will be skipped, {steps}"
    tell(job, what, entry, answer, as_json=as_json)
