"""The stages of a run whose recipe changes: the list of stages in the job's spec, made from a saved
state, and the sentence that describes the effect of a change.
"""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import Struct, structs

from dataplane.client.state import RowsDigest, RunState
from dataplane.model.changes import Ahead, first_counted
from dataplane.model.config import Fact, JobSpec, MixtureSpec, SourceSpec, Stage
from dataplane.model.errors import ConfigError, SpecMismatch
from dataplane.model.records import ColumnOptions, DatasetIdentity, MixHistory, View
from dataplane.model.typed import complete
from dataplane.rpc.messages import JobOpened

_Struct = TypeVar("_Struct", bound=Struct)
RESTART, UNREAD, FINISH = "restart", "unread", "finish"
"""The values of `change`: the first epoch of the new stage has all data, or only unread data; or
the new stage begins after the end of the present epoch.
"""
CHANGES = (RESTART, UNREAD, FINISH)
STAGES_MAX = 500
"""The most former stages of a run: its states name each."""
Named = tuple[tuple[str, tuple[str, ...]], ...]
"""Urls of datasets, by the names of sources; the name is "" without a mixture."""


def stages_with(
    state: RunState, change: str, before: Named = (), *, planned: bool = False
) -> tuple[Stage, ...]:
    """Return the stages of a run that continues from this state with another recipe. The datasets
    of the state were at the urls `before`. Pass `planned` if the run's schedule says so.

    Raises:  ConfigError: there is no such change, or the run has too many stages.
    """
    if change not in CHANGES:
        raise ConfigError(
            f'change={change!r:.80}: pass "restart" (the new recipe begins an epoch with all of '
            'its data), "unread" (one with what the interrupted epoch had not delivered, and all '
            'that is new), or "finish" (it begins after the rest of the interrupted epoch)',
            field="change",
        )
    if len(state.stages) >= STAGES_MAX:
        raise ConfigError(
            f"this run already has {STAGES_MAX} former stages, the most: go on with the recipe of "
            "its state, or start a new run (load no state)",
            field="change",
        )
    ended = Stage(
        state.spec_digest,
        state.epoch,
        state.cursor,
        state.sample_count,
        state.dataset,
        "" if state.digest is None else state.digest.value,
        unread=change == UNREAD,
        spec=_spec(state),
        before=before,
        global_batch=state.global_batch,
        planned=planned,
    )
    return (*state.stages, ended)


def has_begun(state: RunState) -> bool:
    """Whether a state's epoch has a rest that can be finished: it was begun, or has only what an
    earlier stage left.
    """
    is_reduced = any(stage.unread for stage in state.stages[-1:])
    return bool(state.cursor) or (is_reduced and state.epoch == state.stages[-1].next_epoch)


def follows(state: RunState, job: JobOpened) -> tuple[RunState, str]:
    """Return the state at which the new stage of this job begins, after a run that had reached
    `state`; and a sentence about the changes and their effect.
    """
    stage = job.spec.stages[-1]
    epoch, number = stage.next_epoch, len(job.spec.stages) + 1
    digest = None if state.digest is None else RowsDigest(epoch=epoch, base=state.digest.value)
    begin = structs.replace(RunState.of(job, epoch, 0), digest=digest)
    what = "; ".join(problem.sentence for problem in state.problems(job, dataset_moved=False))
    ended = (
        f"all {stage.epoch} epochs before it are complete, and epoch {epoch} has all of the data"
    )
    if not stage.cursor and any(earlier.cursor for earlier in job.spec.stages):
        has = "has all of the data"
        if first_counted(job.spec.stages) < len(job.spec.stages):
            has = "still has only what was not delivered before, and what is new"
        ended = f"epoch {epoch} had not begun, and {has}"
    elif stage.cursor:
        first = "all of the data"
        if stage.unread:
            first = f"what epoch {stage.epoch} had not delivered, and what is new"
        ended = (
            f"epoch {stage.epoch} ended after {stage.cursor} of {stage.sample_count} samples, which"
            f" stay delivered, and epoch {epoch} has {first}"
        )
    ended = f"{ended[0].upper()}{ended[1:]}"
    if len(job.gone) < len(state.gone):
        ended += (
            f". {len(state.gone) - len(job.gone)} of the {len(state.gone)} rows and shards that"
            " were taken out are of shards that are not in this dataset"
        )
    return begin, f"stage {number} of this run begins with epoch {epoch}: {what}. {ended}"


def ahead(state: RunState, job: JobOpened) -> str:
    """Return a sentence about the stage that follows when the epoch of `state` is finished; "" if
    none does.
    """
    if job.finishing is None:
        return ""
    spec, dataset, count = job.finishing.spec, job.finishing.dataset, job.finishing.sample_count
    own = structs.replace(job, spec=spec, dataset=dataset, sample_count=count)
    what = "; ".join(problem.sentence for problem in state.problems(own, dataset_moved=False))
    return (
        f"epoch {state.epoch} goes on to its end with the recipe of the state. Stage"
        f" {len(spec.stages) + 1} of this run begins with epoch {state.epoch + 1}: {what}"
    )


def recipe_of(spec: JobSpec, dataset: DatasetIdentity) -> str:
    """Return 16 hex digits over what a state that is resumed without a `change` must agree with."""
    text = json.dumps([spec.facts(), dataset.layout], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def check_ahead(expected: Ahead | None, spec: JobSpec, dataset: DatasetIdentity) -> None:
    """Check that a loader's own job is the one with which the run was to go on, if that is known.

    Raises:  SpecMismatch: it is another one.
    """
    if expected is not None and recipe_of(spec, dataset) != expected.recipe:
        raise SpecMismatch(
            "this state was saved while an epoch was finished with a former recipe, and this"
            " loader has neither that recipe nor the one that followed it: give it the options and"
            " shards of one of them, or pass change= (docs/training.md) to go on with others",
            field="change",
        )


def check_epoch(epoch: int, stage: Stage) -> None:
    """Check that an epoch does not lie before the end of a former stage.

    Raises:  ConfigError: the epoch lies before that end.
    """
    if epoch < stage.epoch:
        raise ConfigError(
            f"epoch {epoch} belongs to a former stage of this run: the recipe was changed in epoch "
            f"{stage.epoch}. Choose epoch {stage.next_epoch} or a later one. To read epoch {epoch},"
            " use a loader with the recipe of that time, and load a state that was saved then",
            field="epoch",
        )


def _spec(state: RunState) -> JobSpec | None:
    """Return the spec of a state's job; None if the state has only the beginning of long values."""
    facts: dict[str, Fact] = {**state.options, **state.values}
    if any(isinstance(fact, str) and fact.endswith("…") for fact in facts.values()):
        return None
    try:
        return _filled(
            JobSpec,
            facts,
            fingerprint="",
            column_options=_filled(ColumnOptions, facts),
            view=_filled(View, facts),
            mixture=None if state.mix is None else _mixture(facts, state.mix),
        )
    except (ValueError, KeyError, TypeError, msgspec.ValidationError):
        return None  # for example, an option of a later version


def _mixture(facts: Mapping[str, Fact], mix: MixHistory) -> MixtureSpec:
    names = _parsed(facts["sources"])
    passes = _parsed(facts.get("max_passes", "")) or [0] * len(names)
    views = _parsed(facts.get("source_views", "")) or [{}] * len(names)
    shares = mix.changes[0].shares
    sources = tuple(
        SourceSpec(name, "", share, most, view=msgspec.convert(view, complete(View)))
        for name, share, most, view in zip(names, shares, passes, views, strict=True)
    )
    own = {
        name.removeprefix("mixture."): fact
        for name, fact in facts.items()
        if name.startswith("mixture.")
    }
    own.setdefault("length", mix.length)
    return structs.replace(
        _filled(MixtureSpec, own, sources=sources), changes=tuple(mix.changes[1:])
    )


def _filled(cls: type[_Struct], facts: Mapping[str, Fact], **given: Any) -> _Struct:
    """Return a Struct whose fields have the values in `facts`."""
    plain = dict(given)
    for field in structs.fields(cls):
        if field.name in plain or field.name not in facts:
            continue
        fact = facts[field.name]
        is_text = field.type is str or isinstance(field.type, enum.EnumMeta)
        value = json.loads(fact) if isinstance(fact, str) and not is_text else fact
        plain[field.name] = msgspec.convert(value, complete(field.type))
    return cls(**plain)


def _parsed(fact: Fact) -> Any:
    return json.loads(fact) if isinstance(fact, str) and fact else []
