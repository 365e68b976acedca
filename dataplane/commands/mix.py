"""`dataplane mix`: change the weights of a mixture while a job reads it."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

import click

from dataplane.commands import output
from dataplane.commands.changing import changed, told_as_json, who
from dataplane.commands.options import (
    CLIENT_SETTINGS,
    Settings,
    json_option,
    setting_options,
)
from dataplane.commands.traced import COUNT
from dataplane.errors import ConfigError


@click.command("mix")
@click.argument("job", metavar="JOB")
@click.argument("weights", metavar="NAME=WEIGHT...", nargs=-1, required=True)
@click.option(
    "--at-step",
    type=COUNT,
    metavar="STEP",
    help="From this step of its epoch on, counted from 0. Default: as soon as possible.",
)
@click.option("--epoch", type=COUNT, help="Of that step. Default: the one that the job is in.")
@setting_options(*CLIENT_SETTINGS)
@json_option
def mix(
    settings: Settings,
    *,
    job: str,
    weights: tuple[str, ...],
    at_step: int | None,
    epoch: int | None,
    as_json: bool,
) -> None:
    """Change how much of each source a job reads, from outside and while it runs.

    It is as if all ranks called loader.set_weights() at one step: name each source of the mixture
    with a weight, in its unit; 0 for one that is not read. The ranks agree on the step first, which
    takes a few seconds, and none of them has read beyond it. The weights take effect with the first
    round that begins there or later (docs/mixtures.md), are in the states of the run from then on,
    and in the ledger of the job: a run that goes back before that step has them there again.

    The job is one of a coordinator (`dataplane serve`). In a job that nobody reads now, the weights
    hold from the step on that it had come to, or from --at-step.

    \b
    Examples:
      dataplane mix pretrain-7 web=0.6 code=0.4 --join head:7077
      dataplane mix pretrain-7 web=0.5 code=0.3 math=0.2 --at-step 120000 --join head:7077
    """
    from dataplane.rpc.membership import ChangeRequest, MixAsked

    given = weights_in(weights)
    if epoch is not None and at_step is None:
        raise ConfigError("--epoch is that of --at-step: give both", field="epoch")
    asked = MixAsked(uuid.uuid4().hex, tuple(given), tuple(given.values()), at_step, epoch)
    entry, answer = changed(settings, ChangeRequest(job, who(), mix=asked))
    if as_json:
        told_as_json(job, entry, answer)
        return
    at, batch = entry.position, answer.global_batch
    shown = ", ".join(f"{name} {weight:g}" for name, weight in given.items())
    text = f"job {job}: {shown} from step {-(-at.cursor // batch)} of epoch {at.epoch} on"
    say = output.stdout().print
    say(f"{text} (entry {entry.seq})", markup=False, soft_wrap=True)
    now = f"epoch {answer.epoch}, step {-(-answer.cursor // batch)}"
    text = f"it runs, at {now}: the first round that begins there or later has these weights"
    if not answer.is_running:
        text = f"nobody reads it now, and it had come to {now}: the run that passes that step next"
        text += " has these weights from there on"
    say(text, markup=False, soft_wrap=True)


def weights_in(texts: Sequence[str]) -> dict[str, float]:
    """The weight of each source, of NAME=WEIGHT.   Raises:  ConfigError."""
    given = dict(map(_weight, texts))
    if len(given) < len(texts):
        raise ConfigError(f"{' '.join(texts)}: give each source one weight", field="weights")
    return given


def _weight(text: str) -> tuple[str, float]:
    name, _, weight = text.rpartition("=")
    try:
        if name:
            return name, float(weight)
    except ValueError:
        pass
    raise ConfigError(f"{text}: give NAME=WEIGHT, such as web=0.6", field="weights")
