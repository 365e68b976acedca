"""A schedule of stages: parts of a run that follow one another, each with a recipe of its own."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from msgspec import Struct
from msgspec.structs import asdict, replace
from typing_extensions import Unpack

from dataplane.base.units import whole_from
from dataplane.client.stages import FINISH, RESTART, STAGES_MAX, UNREAD, Named
from dataplane.client.state import RunState
from dataplane.model.errors import ConfigError
from dataplane.model.ledger import PLACE_MAX, PlannedStage, canonical
from dataplane.rpc.messages import OpenJob
from dataplane_torch.arguments import JobToOpen, before_of, job_of
from dataplane_torch.options import (
    Arguments,
    JobArguments,
    PlaceArguments,
    UrlOptions,
    url_options,
)

_SAME: Any = ...
"""The default of what a stage takes from its loader."""
_OF_RUN: Final = (PlaceArguments.__annotations__ | JobArguments.__annotations__).keys() - {
    *("format", "files", "on_bad", "bad_max"),
}


class Stage:
    """A part of a run with a recipe of its own: DataLoader(urls, …, stages=[Stage(…), Stage(…)]).

    A stage has the loader's arguments except those that it is given: another dataset, batch size,
    shuffle and options over urls. It lasts `steps` steps or `epochs` epochs; the last stage goes on
    until the loop ends. A stage that begins within an epoch, since the stage before it ended after
    so many steps, begins the next epoch, and needs `change`: "unread" for the data that the
    interrupted epoch had not delivered, and what is new, "restart" for all data.

    Raises:  ConfigError: arguments contradict each other, or are those of a whole run.
    """

    @url_options
    def __init__(
        self,
        dataset: Any = _SAME,
        *,
        steps: int | None = None,
        epochs: int | None = None,
        change: str | None = None,
        batch_size: int | None = _SAME,
        shuffle: bool | None = _SAME,
        drop_last: bool = _SAME,
        **options: Unpack[UrlOptions],
    ) -> None:
        if of_run := sorted(options.keys() & _OF_RUN):
            raise ConfigError(
                f"{of_run[0]} holds for the whole run: pass it to the loader, not to a Stage",
                field=of_run[0],
            )
        for name, count in (("steps", steps), ("epochs", epochs)):
            if count is not None:
                whole_from(name, count, 1, PLACE_MAX - 1)
        if steps and epochs:
            raise ConfigError(
                f"steps={steps} and epochs={epochs}: a stage lasts so many of one: pass one",
                field="steps",
            )
        if change not in (None, RESTART, UNREAD):
            ends = "; to end an epoch first, give the stage before it epochs=" * (change == FINISH)
            raise ConfigError(
                f'change={change!r:.80}: pass "restart" or "unread" (as load_state_dict has them)'
                f"{ends}",
                field="change",
            )
        own = {"dataset": dataset, "batch_size": batch_size, "shuffle": shuffle}
        own |= {"drop_last": drop_last}
        self._own = {name: value for name, value in own.items() if value is not _SAME}
        self._options = options
        shown = [_shown(name, value) for name, value in {**self._own, **options}.items()]
        self.lasts = PlannedStage(
            int(steps or 0), int(epochs or 0), change or "", ", ".join(shown)[:200]
        )

    def of(self, given: Arguments) -> Arguments:
        """Return the arguments of this stage, given those of its loader."""
        own = dict(self._own)
        own["urls"] = own.pop("dataset", given.urls)
        options = {**given.options, **self._options, "stages": None}
        if "batch_size" in own and "global_batch_size" not in self._options:
            options["global_batch_size"] = None
        elif "global_batch_size" in self._options:
            own.setdefault("batch_size", 1)
        return replace(given, **own, options=cast("UrlOptions", options))


class StageToOpen(Struct, frozen=True):
    """A stage of a loader: the job to open, how long it lasts, and the urls `before` of the stage
    before it, if its datasets have others. A loader without a schedule has one.
    """

    job: JobToOpen
    lasts: PlannedStage = PlannedStage()
    before: Named = ()

    @property
    def digest(self) -> str:
        """16 hex digits over the recipe of the stage, and how long it lasts."""
        lasts, request = self.lasts, self.job.request
        names = [*_urls_of(request)]
        facts = [request.spec.facts(), names, lasts.steps, lasts.epochs, lasts.change]
        return hashlib.blake2b(canonical(facts).encode(), digest_size=8).hexdigest()


def stages_of(given: Arguments) -> tuple[StageToOpen, ...]:
    """Return the stages of a loader with these arguments.

    Raises:  ConfigError: they are no schedule, or a stage is impossible.  As `job_of`.
    """
    stages = given.options["stages"]
    if stages is None:
        return (StageToOpen(job_of(given)),)
    _check(stages, given)
    opened = list[StageToOpen]()
    for number, stage in enumerate(stages, 1):
        try:
            job, before = job_of(stage.of(given)), Named()
            if opened:
                job = _in_run(job, opened[0].job)
                former = _urls_of(opened[-1].job.request)
                before = before_of(former) if former != _urls_of(job.request) else ()
        except ConfigError as error:
            raise ConfigError(f"stage {number}: {error}", **error.nouns) from error
        opened.append(StageToOpen(job, stage.lasts, before))
    for number, (earlier, later) in enumerate(itertools.pairwise(opened), 2):
        if earlier.job == later.job:
            raise ConfigError(
                f"stage {number} has the recipe of the stage before it: make one stage of both",
                field="stages",
            )
    return tuple(opened)


def scheduled(stages: Sequence[StageToOpen], state_dict: object) -> tuple[int, int]:
    """Return the number of the stage of a schedule in which this state was saved, and how many of
    its steps were made.

    Raises:  ConfigError: the schedule has no such stage, stages that are over differ, or this is
    not a state.
    """
    if len(stages) == 1 or not isinstance(state_dict, Mapping) or not state_dict:
        return 0, 0
    state = RunState.from_dict(state_dict)
    number = sum(stage.planned for stage in state.stages)
    if number >= len(stages):
        raise ConfigError(
            f"this state is of stage {number + 1} of a schedule, and this loader has"
            f" {len(stages)} stages: keep the stages that are over in stages=",
            field="stages",
        )
    if state.schedule is None:
        return number, 0
    for at, (digest, stage) in enumerate(zip(state.schedule.over, stages, strict=False), 1):
        if digest != stage.digest:
            lasts = f"steps={stage.lasts.steps}, epochs={stage.lasts.epochs}"
            raise ConfigError(
                f"stage {at} of stages= ({lasts}, {stage.lasts.options or 'no options'}) is not the"
                " one that this run has read, which is over: the state is of stage"
                f" {number + 1}. Keep stages that are over as they were, and change later ones",
                field="stages",
            )
    return number, state.schedule.made


def _check(stages: object, given: Arguments) -> None:
    is_list = isinstance(stages, Sequence) and all(isinstance(stage, Stage) for stage in stages)
    if not isinstance(stages, Sequence) or not is_list or not 2 <= len(stages) <= STAGES_MAX:
        raise ConfigError(
            f"stages={stages!r:.80}: pass a list of 2 to {STAGES_MAX} Stages, in their order:"
            " [Stage(steps=9000, max_length=4096), Stage(max_length=32768)]",
            field="stages",
        )
    if given.options["follow"]:
        raise ConfigError(
            "stages= with follow=True: shards that arrive begin stages themselves, so pass one of"
            " them",
            field="stages",
        )
    if stages[0].lasts.change:
        raise ConfigError(
            "the first stage begins the run, so it has no change=: pass it to the stage that begins"
            " within an epoch",
            field="change",
        )
    *ending, last = (stage.lasts for stage in stages)
    for number, lasts in enumerate(ending, 1):
        if not lasts.steps and not lasts.epochs:
            raise ConfigError(
                f"stage {number} does not say how long it lasts: pass steps= or epochs=, which only"
                " the last stage lacks",
                field="stages",
            )
        if lasts.steps and not stages[number].lasts.change:
            raise ConfigError(
                f'stage {number + 1} begins within an epoch: pass change="unread" for the data that'
                ' the epoch had not delivered, or change="restart" for all data',
                field="change",
            )
    if last.steps or last.epochs:
        raise ConfigError(
            "the last stage goes on until the loop ends: leave out its steps= and epochs=",
            field="stages",
        )


def _in_run(job: JobToOpen, first: JobToOpen) -> JobToOpen:
    """Return the job of a later stage as a part of the run that begins with the `first`."""
    of_run = {name: asdict(first.request)[name] for name in ("job_id", "incarnation", "topology")}
    request = replace(job.request, **of_run)
    return replace(job, request=request, endpoint=first.endpoint, is_named=first.is_named)


def _urls_of(request: OpenJob) -> dict[str, tuple[str, ...]]:
    if request.mixture is None:
        return {"": request.source.urls}
    return {of.name: of.source.urls for of in request.mixture.sources}


def _shown(name: str, value: object) -> str:
    """Return a text for an option that is the same on every rank."""
    is_short = value is None or isinstance(value, bool | int | float | str)
    return f"{name}={value!r:.40}" if is_short and name != "dataset" else name
