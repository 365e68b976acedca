"""The whole resume state of a loader: small, plain, and the same on every rank.

A state belongs to a job: its dataset, options and seed. It can be loaded by a loader with an equal
spec digest, and also by a loader with equal options over the same dataset at another location,
since the digest covers the dataset's urls. See plan/views.py for a dataset's identity.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Struct, field, structs

from dataplane.base.units import whole
from dataplane.model.changes import NO_GAPS, Ahead, EpochSteps, Gaps, TakenOut, resizes
from dataplane.model.config import ORDER_VERSION, Fact, JobSpec, Stage, sparse, text_of
from dataplane.model.errors import ConfigError, SpecMismatch, VersionMismatch
from dataplane.model.ledger import PLACE_MAX, LedgerMark, Schedule
from dataplane.model.records import DatasetIdentity, MixHistory, ShareChange
from dataplane.model.typed import complete
from dataplane.rpc.messages import JobOpened

# -- digest ------------------------------------------------------------------------------------
#
# The digest of the rows that a run has read: one value, by which two runs can be compared.
#
# 1. The digest depends only on the input of the plan: for each epoch the range of positions, and
#    everything that decides which rows are at these positions, and in which global batches. The
#    rows themselves are not computed, so a state costs the same after any number of steps.
# 2. The digest is the same on every rank and for any number of ranks, and does not depend on where
#    a run was interrupted: a pass that continues a previous pass extends the previous range.
# 3. No range contains skipped positions.

_HEX_DIGITS = 16


class RowsDigest(Struct, frozen=True):
    """The digest so far. `base` covers all ranges before the present one, which are the positions
    from `begin` to `end` of an epoch. `order` identifies everything that decides their rows. `base`
    and `order` are 16 hex digits, or "".
    """

    order: str = ""
    epoch: int = 0
    begin: int = 0
    end: int = 0
    base: str = ""

    @property
    def value(self) -> str:
        """Return the digest: 16 hex digits, or "" if there were no steps."""
        if self.begin == self.end:
            return self.base
        text = f"{self.base}:{self.order}:{self.epoch}:{self.begin}:{self.end}"
        return hashlib.blake2b(text.encode(), digest_size=_HEX_DIGITS // 2).hexdigest()

    def continued(self, order: str, epoch: int, cursor: int) -> RowsDigest:
        """Return the digest of a pass that begins here."""
        if (self.order, self.epoch, self.end) == (order, epoch, cursor):
            return self
        return RowsDigest(order, epoch, cursor, cursor, self.value)

    def reached(self, cursor: int, gaps: Gaps = NO_GAPS) -> RowsDigest:
        """Return the digest when everything up to this cursor of the epoch, except `gaps`, is
        consumed.
        """
        digest = self
        for begin, end in gaps.pieces(gaps.live(self.end), gaps.live(cursor)):
            digest = digest.continued(self.order, self.epoch, begin)
            digest = structs.replace(digest, end=end)
        return digest

    def to_dict(self, epoch: int, cursor: int) -> dict[str, Any]:
        """Return the form for a state at this place. At the start of an epoch, the range of the
        previous epoch is complete.
        """
        at = self.continued(self.order, epoch, cursor)
        order = "" if at.begin == at.end else at.order
        return {"value": at.value, "order": order, "begin": at.begin, "base": at.base}

    @classmethod
    def from_dict(cls, saved: object, epoch: int, cursor: int) -> RowsDigest:
        """Invert `to_dict`.

        Raises:  ConfigError: `saved` is not a digest.
        """
        stored = _converted("digest", saved, _SavedDigest)
        digest = cls(stored.order, epoch, stored.begin, cursor, stored.base)
        # Begin a new range if the value does not match, because somebody has changed the state's
        # position by hand.
        is_same = digest.value == stored.value
        return digest if is_same else cls("", epoch, cursor, cursor, stored.value)


class _SavedDigest(Struct, frozen=True):
    """A digest, as `RowsDigest.to_dict` returns it."""

    value: str
    order: str
    begin: int
    base: str


# -- mix state ---------------------------------------------------------------------------------
#
# The form in which a state has the weights of a mixture: plain values, the same on every rank.


def mix_to_dict(mix: MixHistory, asked: str) -> dict[str, Any]:
    """Convert weights for a state. `asked` identifies the weights that the loader was given."""
    changes = [[change.epoch, change.position, list(change.shares)] for change in mix.changes]
    saved: dict[str, Any] = {"digest": mix.digest, "asked": asked, "changes": changes}
    return {**saved, "length": mix.length} if mix.length else saved


def mix_from_dict(saved: object) -> tuple[MixHistory | None, str]:
    """Invert `mix_to_dict`; None and "" if the state has no weights.

    Raises:  ConfigError: `saved` is damaged.
    """
    if saved is None:
        return None, ""
    stored = _converted("mixture", saved, _SavedMix)
    mix = MixHistory(tuple(ShareChange(*change) for change in stored.changes), stored.length)
    with _naming_damage("mixture"):
        if not stored.changes or stored.digest != mix.digest:
            raise ValueError("the digest is not that of its weights")
    return mix, stored.asked


_Count = Annotated[int, msgspec.Meta(ge=0, lt=PLACE_MAX)]


class _SavedMix(Struct, frozen=True):
    """Weights, as `mix_to_dict` returns them."""

    digest: str
    asked: str
    changes: tuple[tuple[_Count, _Count, tuple[_Count, ...]], ...]
    length: _Count = 0


STATE_VERSION = 2
STAGES_MAX = 1000
"""The most former stages that a state may have."""
_FROM_THE_DATASET = frozenset({"lanes", "window", "ramp"})
_SHARES = frozenset({"sample", "split_from", "split_to"})
_ROWS = _SHARES | {"where", "limit", "pack"}
_ABOUT_ROWS = _ROWS | {"dataset"}
_SHOWN_LENGTH_MAX = 400
_ENTRIES_SHOWN = 20
_BY_MAP = ", or the module of map= was changed"
_OLD_SHARDS = (
    "give the loader the shards that the dataset had when the state was saved, such as a list of "
    "their urls"
)
_CHANGE = (
    'to go on from here with another recipe or other shards, load it with change="restart", '
    'change="unread" or change="finish" (docs/training.md)'
)


class RunState(Struct, frozen=True):
    """The position of a run: all ranks together have consumed `cursor` samples of `epoch`.

    `options` are the job's options that differ from their default (see `JobSpec.facts`). `values`
    has the texts of options that are only hashes in `options`, by name. `pixels` names the
    software that decoded the images; "" without images or if unknown. `in_last_step` means that the
    state is the start of an epoch, but was taken in the last step of the epoch before. `digest`
    covers the rows of all steps so far, if they are known. `mix` are the weights of a mixture, and
    `asked_weights` identifies those that its loader was given. `mark` identifies the last entry of
    the job's ledger on which the run depends. `stages` are the former stages of the run. With
    `global_batch`, a former stage is read to the end of its epoch; 0 if it is unknown. `gone` is
    what the loader removed. `ahead` is the recipe with which the run goes on after the epoch, and
    `schedule` what is left of a schedule of stages.
    """

    spec_digest: str
    epoch: int
    cursor: int
    sample_count: int
    options: Mapping[str, Fact]
    dataset: DatasetIdentity
    pixels: str = ""
    in_last_step: bool = False
    digest: RowsDigest | None = None
    mix: MixHistory | None = None
    asked_weights: str = ""
    mark: LedgerMark | None = None
    values: Mapping[str, str] = field(default_factory=dict)
    stages: tuple[Stage, ...] = ()
    global_batch: int = 0
    gone: tuple[TakenOut, ...] = ()
    ahead: Ahead | None = None
    schedule: Schedule | None = None

    @classmethod
    def of(cls, job: JobOpened, epoch: int, cursor: int) -> RunState:
        """Return the state of this job at this place."""
        spec = job.spec
        return cls(
            job.digest, epoch, cursor, job.sample_count, spec.facts(), job.dataset, job.pixels,
            asked_weights=spec.asked_weights, mark=job.mark, values=spec.values(),
            stages=spec.stages, global_batch=spec.global_batch, gone=job.gone,
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """Return the state as plain values for saving. Without a mixture they take less than a
        kilobyte as JSON, and up to two kilobytes more for each long option.
        """
        saved: dict[str, Any] = {
            "version": STATE_VERSION,
            "spec_digest": self.spec_digest,
            "epoch": self.epoch,
            "cursor": self.cursor,
            "sample_count": self.sample_count,
            "order": ORDER_VERSION,
            "options": dict(self.options),
            "dataset": {"content": self.dataset.content, "layout": self.dataset.layout},
        }
        if self.values:
            saved["values"] = dict(self.values)
        if self.pixels:
            saved["pixels"] = self.pixels
        if self.in_last_step:
            saved["in_last_step"] = True
        if self.digest is not None:
            saved["digest"] = self.digest.to_dict(self.epoch, self.cursor)
        if self.mix is not None:
            saved["mixture"] = mix_to_dict(self.mix, self.asked_weights)
        if self.mark is not None:
            saved["ledger"] = {"entry": self.mark.seq, "head": self.mark.hash}
        if self.global_batch:
            saved["global_batch"] = self.global_batch
        if self.gone:
            saved["taken_out"] = [list(structs.astuple(row)) for row in self.gone]
        stages = {"ahead": sparse(self.ahead), "stages": sparse(self.stages)}
        stages["schedule"] = sparse(self.schedule)
        return saved | {name: value for name, value in stages.items() if value}

    @property
    def ended(self) -> int | None:
        """The epoch in whose last step the state was taken; None if it was not in a last step."""
        return self.epoch - 1 if self.in_last_step and not self.cursor else None

    def normalised(self, spec: JobSpec, gaps: Gaps = NO_GAPS) -> RunState:
        """Return the same position in canonical form: the end of an epoch becomes the start of the
        next one. `gaps` are the skipped positions of the epoch.
        """
        steps = EpochSteps.of(spec, self.sample_count, cursor=self.cursor, gaps=gaps)
        if not self.cursor or steps.count:
            return self
        return structs.replace(self, epoch=self.epoch + 1, cursor=0, in_last_step=True)

    @classmethod
    def from_dict(cls, saved: object) -> RunState:
        """Invert `to_dict`; unknown keys are ignored.

        Raises:  ConfigError: `saved` is not a loader's state.  VersionMismatch: the state has
        another version, or its samples have another version of the order.
        """
        if not isinstance(saved, Mapping):
            raise ConfigError(
                f"a loader's state is a dict, as state_dict() returns it, not {saved!r:.80}"
            )
        if saved.get("source") in ("map", "iterable"):
            raise ConfigError(
                "this is the state of a loader over a torch Dataset, and this loader reads urls: "
                "load it into a loader over that Dataset",
                field="state_dict",
            )
        version = _number(saved, "version")
        if version != STATE_VERSION:
            raise _other_version("this state", STATE_VERSION, version)
        digest = saved.get("spec_digest")
        if not isinstance(digest, str) or not digest:
            raise ConfigError(
                "this is not a loader's state: it has no spec_digest", key="spec_digest"
            )
        epoch, cursor, count = (_number(saved, key) for key in ("epoch", "cursor", "sample_count"))
        if cursor > count:
            raise ConfigError(
                f"this state is damaged: cursor {cursor} of {count} samples", key="cursor"
            )
        in_last_step = _converted("in_last_step", saved.get("in_last_step", False), bool)
        if in_last_step > epoch:
            raise ConfigError(
                f"this state is damaged: in_last_step is {in_last_step}, and epoch {epoch}",
                key="in_last_step",
            )
        order = _number(saved, "order")
        if order != ORDER_VERSION:
            raise _other_version("the order of this state's samples", ORDER_VERSION, order)
        rows = saved.get("digest")
        mix, asked = mix_from_dict(saved.get("mixture"))
        mark = _converted("ledger", saved.get("ledger"), _SavedMark | None)
        return cls(
            digest, epoch, cursor, count,
            _converted("options", saved.get("options"), dict[str, Fact]),
            _converted("dataset", saved.get("dataset"), DatasetIdentity),
            _converted("pixels", saved.get("pixels", ""), str),
            in_last_step,
            None if rows is None else RowsDigest.from_dict(rows, epoch, cursor), mix, asked,
            None if mark is None else LedgerMark(mark.entry, mark.head),
            _converted("values", saved.get("values", {}), dict[str, str]),
            _stages(saved, epoch),
            _number(saved, "global_batch") if "global_batch" in saved else 0, _gone(saved),
            _converted("ahead", saved.get("ahead"), Ahead | None),
            _converted("schedule", saved.get("schedule"), Schedule | None),
        )  # fmt: skip

    def check(self, job: JobOpened, *, dataset_moved: bool = False) -> bool:
        """Check that this job may resume from here. `dataset_moved` accepts a dataset whose ETags
        differ if names, sizes, blocks and schema do not. Return whether that was needed.

        Raises:  SpecMismatch: the job would read other samples, or in another order or form; names
        each option that differs, with both values.
        """
        is_same = self.dataset == job.dataset or not resizes(job.spec)
        if self.spec_digest == job.digest and self._has_as_many(job) and is_same:
            return False
        problems = self.problems(job, dataset_moved=dataset_moved)
        if problems:
            sentences = "; ".join(problem.sentence for problem in problems)
            advice = ", and ".join(dict.fromkeys(problem.advice for problem in problems))
            raise SpecMismatch(
                f"this state does not fit this loader: {sentences}. To resume, {advice}; {_CHANGE}",
                field=problems[0].field,
                expected=problems[0].expected,
                found=problems[0].found,
            )
        return self.dataset != job.dataset

    def problems(self, job: JobOpened, *, dataset_moved: bool) -> list[_Problem]:
        """Return why this job would read other samples, or in another order or form."""
        problems = [*self._dataset_problems(job, dataset_moved), *self._option_problems(job.spec)]
        if any(problem.field in _ROWS for problem in problems):
            # Drop the problem of the dataset: a different choice of rows also changes the number of
            # samples.
            problems = [problem for problem in problems if problem.field != "dataset"]
        if any(problem.field in _ABOUT_ROWS for problem in problems):
            # Drop problems of options whose defaults depend on the dataset.
            problems = [problem for problem in problems if problem.field not in _FROM_THE_DATASET]
        return problems

    def _has_as_many(self, job: JobOpened) -> bool:
        # Do not compare the number of samples if it may differ between epochs: with a mixture it
        # depends on the weights, and the first epoch after change="unread" lacks delivered samples.
        is_reduced = any(stage.unread for stage in self.stages[-1:])
        return is_reduced or self.mix is not None or self.sample_count == job.sample_count

    def _dataset_problems(self, job: JobOpened, dataset_moved: bool) -> Iterator[_Problem]:
        by_map = _BY_MAP if resizes(job.spec) else ""
        if not self._has_as_many(job):
            counts = str(self.sample_count), str(job.sample_count)
            yield _Problem(
                "dataset",
                *counts,
                f"the dataset had {counts[0]} samples and now has {counts[1]}"
                + (f": its shards were changed{by_map}" if by_map else ""),
                _OLD_SHARDS,
            )
        elif self.dataset.content == job.dataset.content:
            return
        elif self.dataset.layout != job.dataset.layout:
            yield _Problem(
                "dataset",
                self.dataset.layout,
                job.dataset.layout,
                "the dataset is a different one: it has as many samples, but other shards (their "
                "names below their common folder, their order, sizes, blocks, or schema)" + by_map
                if self.mix is None
                else "a source of the mixture is a different one: it has other shards (their names "
                "below their common folder, their order, sizes, blocks, or schema)" + by_map,
                _OLD_SHARDS,
            )
        elif not dataset_moved:
            yield _Problem(
                "etags",
                self.dataset.content,
                job.dataset.content,
                "the dataset was copied or rewritten: its shards have the same names, sizes and "
                "blocks, but other ETags (of local files: modification times)",
                "pass DataLoader(..., dataset_moved=True) if you know that they were only copied",
            )

    def _option_problems(self, spec: JobSpec) -> Iterator[_Problem]:
        options, facts = spec.options(), spec.facts()
        for name in [*options, *sorted(self.options.keys() - options.keys())]:
            value, default = options.get(name, ("unknown to this version of dataplane", None))
            saved = self.options.get(name, default)
            current = facts.get(name, value)
            if saved != current:
                before = self.values.get(name, saved) if _is_hash(saved) else saved
                now = text_of(value) if _is_hash(current) else current
                if name in _SHARES:
                    texts = _share(before), _share(now)
                else:
                    texts = _apart(_shown(before), _shown(now))
                yield _Problem(name, *texts, f"{name}: {texts[0]} in the state, {texts[1]} here")


class _Problem(Struct, frozen=True):
    """One reason why a state does not match, and what the user can do."""

    field: str
    expected: str
    found: str
    sentence: str
    advice: str = "give the loader the options it had when the state was saved"


def _other_version(what: str, expected: int, found: int) -> VersionMismatch:
    return VersionMismatch(
        f"{what} has version {found}, and this dataplane reads version {expected}: resume with the "
        "dataplane that saved the state, or begin at the start of an epoch without the state, with "
        "set_epoch()",
        expected=expected,
        found=found,
    )


def _is_hash(fact: object) -> bool:
    return isinstance(fact, str) and fact.startswith("#")


def _share(value: object) -> str:
    """Format a share that is given in units of 2**-32."""
    return f"{value / 2**32:.9g}" if isinstance(value, int) and value else "not given"


def _shown(value: object) -> str:
    return str(value) if value not in ((), "") else "not given"


def _apart(before: str, now: str) -> tuple[str, str]:
    """Shorten two long texts to their differences. Of lists, show only entries that the other list
    lacks; of other texts, only the part around the first difference.
    """
    if max(len(before), len(now)) <= _SHOWN_LENGTH_MAX:
        return before, now
    lists = _list(before), _list(now)
    if lists[0] is not None and lists[1] is not None:
        only = [entry for entry in lists[0] if entry not in lists[1]]
        others = [entry for entry in lists[1] if entry not in lists[0]]
        if only or others:
            equal = len(lists[0]) - len(only)
            return _entries(only, equal), _entries(others, equal)
    if before.endswith("…") and now.startswith(before[:-1]):
        return f"another value with the same first {len(before) - 1} characters", f"{now[:40]}…"
    pairs = enumerate(zip(before, now, strict=False))
    at = next((i for i, (old, new) in pairs if old != new), min(len(before), len(now)))
    start = max(0, at - _SHOWN_LENGTH_MAX // 2)
    end = start + _SHOWN_LENGTH_MAX
    cut = [
        ("…" if start else "") + text[start:end] + ("…" if len(text) > end else "")
        for text in (before, now)
    ]
    return cut[0], cut[1]


def _list(text: str) -> list[Any] | None:
    try:
        decoded = json.loads(text)
    except ValueError:
        return None
    return decoded if isinstance(decoded, list) else None


def _entries(entries: list[Any], equal: int) -> str:
    shown = ", ".join(json.dumps(entry) for entry in entries[:_ENTRIES_SHOWN])
    more = len(entries) - _ENTRIES_SHOWN
    return (
        (shown or "nothing") + (f" and {more} more" * (more > 0)) + f" besides {equal} equal ones"
    )


class _SavedMark(Struct, frozen=True):
    """A LedgerMark, as a state has it."""

    entry: _Count
    head: str


def _gone(saved: Mapping[str, Any]) -> tuple[TakenOut, ...]:
    names = TakenOut.__struct_fields__
    rows = _converted("taken_out", saved.get("taken_out", []), tuple[list[str | int | None], ...])
    named = [dict(zip(names, row, strict=False)) for row in rows]
    taken: tuple[TakenOut, ...] = _converted("taken_out", named, tuple[TakenOut, ...])
    return taken


def _converted(key: str, stored: object, kind: Any) -> Any:
    """Return the value of a key of a state as this type."""
    with _naming_damage(key):
        return msgspec.convert(_plain(stored), complete(kind))


@contextlib.contextmanager
def _naming_damage(key: str) -> Iterator[None]:
    """Raise the errors of a value in a state as ConfigErrors that name its key."""
    try:
        yield
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"this state is damaged: its {key} is invalid ({error}). Resume from another "
            "checkpoint",
            key=key,
        ) from error


def _stages(saved: Mapping[object, object], epoch: int) -> tuple[Stage, ...]:
    stored = saved.get("stages", [])
    with _naming_damage("stages"):
        if isinstance(stored, Sequence) and len(stored) > STAGES_MAX:
            raise ValueError(f"{len(stored)} stages are more than {STAGES_MAX}")
        stages: tuple[Stage, ...] = _converted("stages", stored, tuple[Stage, ...])
        places = [(stage.epoch, stage.cursor) for stage in stages]
        if places != sorted(places):
            raise ValueError("they are not in order")
        for stage in stages:
            _check_stage(stage)
        if stages and epoch < stages[-1].next_epoch:
            raise ValueError(f"epoch {epoch} lies before the end of the last one")
    return stages


def _check_stage(stage: Stage) -> None:
    if not stage.cursor <= stage.sample_count < PLACE_MAX or stage.epoch >= PLACE_MAX:
        raise ValueError(
            f"one ended at cursor {stage.cursor} of {stage.sample_count} samples of epoch"
            f" {stage.epoch}"
        )
    if stage.spec is not None and stage.spec.stages:
        raise ValueError("the spec of one has stages of its own")


def _plain(value: Any) -> Any:
    """Return nested values with plain whole numbers instead of numpy's or torch's."""
    if isinstance(value, Mapping):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    if isinstance(value, str):
        return str(value)
    number = whole(value)
    return value if number is None else number


def _number(saved: Mapping[object, object], key: str) -> int:
    value = whole(saved.get(key))
    if value is None or not 0 <= value < PLACE_MAX:
        raise ConfigError(
            f"this is not a loader's state: its {key} is {saved.get(key)!r:.80}, not a count",
            key=key,
        )
    return value
