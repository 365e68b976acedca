"""The position of a pass over a user's Dataset: state_dict() saves it, load_state_dict() reads it.

The state of a map-style dataset is its sampler's position, for any number of workers. An iterable
dataset is iterated by each worker separately, so its state has one entry per worker.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, Protocol, TypeGuard, TypeVar

import msgspec
from msgspec import Struct, field, structs

from dataplane.base.units import whole
from dataplane.model.errors import ConfigError, VersionMismatch
from dataplane.model.ledger import PLACE_MAX
from dataplane.model.typed import complete
from dataplane_torch.torch_private.iteration import DatasetFetcher

_Any = TypeVar("_Any")


class Stateful(Protocol):
    """A dataset, an iterator of one, or a sampler whose state is saved with the loader's.

    Source:  torchdata.stateful_dataloader.Stateful.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the present position."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from this position."""
        ...


def is_stateful(given: object) -> TypeGuard[Stateful]:
    """Return whether an object has both methods of `Stateful`. An isinstance() check of the
    protocol would take ten times as long.
    """
    return hasattr(given, "state_dict") and hasattr(given, "load_state_dict")


def state_of(given: object) -> dict[str, Any] | None:
    """Return the state of an object; None if it has no state_dict()."""
    return given.state_dict() if is_stateful(given) else None


def load_state(given: _Any, state: dict[str, Any] | None) -> _Any:
    """Load a state into an object, if it can have one, and return the object."""
    if state is not None and is_stateful(given):
        given.load_state_dict(state)
    return given


def skip_samples(fetcher: DatasetFetcher, count: int) -> None:
    """Read and drop `count` samples of the iterable dataset of one of torch's fetchers."""
    for _ in range(count):
        try:
            next(fetcher.dataset_iter)
        except StopIteration:
            fetcher.ended = True
            return


VERSION: Final = 1
_Count = Annotated[int, msgspec.Meta(ge=0, lt=PLACE_MAX)]
_Epoch = Annotated[int, msgspec.Meta(gt=-PLACE_MAX, lt=PLACE_MAX)]
_Seed = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class WorkerState(Struct, frozen=True, forbid_unknown_fields=True):
    """The state of one worker's dataset after `fetched` batches of this pass, and the number of
    batches to skip from there. `dataset` and `iterator` are the states that these objects return
    themselves; None for an object without a state.
    """

    dataset: Any = None
    iterator: Any = None
    is_ended: bool = False
    fetched: _Count = 0
    skip: _Count = 0

    @property
    def has_state(self) -> bool:
        """Whether the dataset itself returned a state."""
        return self.dataset is not None or self.iterator is not None


class SamplerState(Struct, frozen=True, forbid_unknown_fields=True):
    """A sampler's state after `drawn` batches.

    `states` are the states of its parts, `skip` draws earlier; None if no part has a state.
    `generators` are the states of generators when the pass began, or when it had ended. `epochs`
    are the epochs to which its parts were set. `missing` are indices that were drawn but whose
    batches were not yielded, as with in_order=False. `made_with` are the generators' states before
    the sampler's iterator was made; empty if the iterator is a generator object, which has not run
    yet.
    """

    drawn: _Count = 0
    skip: _Count = 0
    states: dict[str, Any] | None = None
    generators: dict[str, str] = field(default_factory=dict)
    epochs: dict[str, _Epoch] = field(default_factory=dict)
    missing: tuple[Any, ...] = ()
    made_with: dict[str, str] = field(default_factory=dict)


class PassState(Struct, frozen=True):
    """A pass after `step` batches. `worker_count` is 0 if the trainer itself loads.

    `length` is the length of the dataset; None if it has no length or is iterable. `samplers` names
    the classes that draw the indices; None for iterable datasets. `shares` says how many replicas
    a sampler divides its indices among, and how many it draws, if the sampler says so.
    """

    is_iterable: bool
    worker_count: _Count
    batch_size: _Count | None
    length: _Count | None
    step: _Count
    is_finished: bool
    next_worker: _Count
    base_seed: _Seed
    len_called: _Count | None
    sampler: SamplerState
    workers: tuple[WorkerState, ...]
    samplers: str | None = None
    shares: dict[str, _Count] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Convert the state to plain values. All of it can be saved as JSON, except perhaps the
        contents of the user's own states.
        """
        sampler = {**structs.asdict(self.sampler), "missing": list(self.sampler.missing)}
        if not self.sampler.made_with:
            del sampler["made_with"]
        saved = {
            "version": VERSION,
            "source": "iterable" if self.is_iterable else "map",
            **{name: _plain(getattr(self, name)) for name in _PLAIN},
            "samplers": self.samplers,
            "sampler": sampler,
            "workers": [structs.asdict(worker) for worker in self.workers],
            **({"shares": self.shares} if self.shares else {}),
        }
        return {**saved, "checksum": _checksum(saved)}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> PassState:
        """Invert `to_dict`.

        Raises:  ConfigError: `given` is not such a state.  VersionMismatch: its version is newer.
        """
        if not isinstance(given, Mapping):
            raise ConfigError(f"{given!r:.80} is not the state of a DataLoader", field="state_dict")
        version = _plain(given.get("version"))
        is_ours = isinstance(version, int) and version >= 0
        if given.get("source") not in ("map", "iterable") or not is_ours:
            raise ConfigError(
                "this is not the state of a DataLoader over a torch Dataset"
                + (
                    ", but of a loader over urls: load it into a loader over the same urls"
                    if "spec_digest" in given
                    else f": it has no source and version of ours, but {', '.join(map(str, given))}"
                ),
                field="state_dict",
            )
        if version > VERSION:
            raise VersionMismatch(
                f"this state has version {version}, and this dataplane knows versions up to "
                f"{VERSION}: resume with the dataplane that saved it, or a newer one",
                expected=VERSION,
                found=version,
            )
        try:
            own = {
                name: _plain(given[name]) for name in (*_PLAIN, "samplers", "sampler", "workers")
            }
            own |= {"is_iterable": given["source"] == "iterable"}
            own |= {"shares": _plain(given.get("shares", {}))}
            read = msgspec.convert(own, complete(cls))
        except (KeyError, ValueError, RecursionError) as error:
            raise ConfigError(f"this state is damaged: {error}", field="state_dict") from error
        for name, value, is_right in _claims(read):
            if not is_right:
                raise ConfigError(
                    f"this state is damaged: {name} is {value!r:.80}", field="state_dict"
                )
        if given.get("checksum", (made := read.to_dict()["checksum"])) != made:
            raise ConfigError(
                "this state is damaged: its values do not have its checksum. Resume from another "
                "checkpoint; if you changed it on purpose, remove its checksum",
                field="state_dict",
            )
        return read

    def check(self, now: PassState) -> None:
        """Check that a pass that begins as `now` can continue from this state.

        Raises:  ConfigError: the pass cannot continue; says what differs, and what to do.
        """
        if self.is_iterable != now.is_iterable:
            kinds = {True: "an iterable dataset", False: "a map-style dataset"}
            raise ConfigError(
                f"this is the state of a loader over {kinds[self.is_iterable]}, and this loader "
                f"has {kinds[now.is_iterable]}: pass the dataset that the state was taken with",
                field="dataset",
            )
        if self.batch_size != now.batch_size:
            raise ConfigError(
                f"the state was taken with batch_size={self.batch_size}, and this loader has "
                f"{now.batch_size}: the state counts batches, so pass the same",
                field="batch_size",
            )
        if self.length != now.length and self.sampler.states is None:
            raise ConfigError(
                f"the dataset had {self.length} samples when the state was taken, and has "
                f"{now.length} now, which changes their order: pass the unchanged dataset",
                field="dataset",
            )
        # Compare samplers only in the middle of an epoch: another sampler may draw the next epoch.
        is_under_way = self.step > 0 and not self.is_finished
        if is_under_way and self.samplers != now.samplers:
            raise ConfigError(
                f"the state was taken in the middle of an epoch drawn by {self.samplers}, and this "
                f"loader draws by {now.samplers}: some samples would repeat, others be skipped. "
                "Pass the same shuffle and sampler",
                field="sampler",
            )
        if is_under_way:
            self._check_shares(now)
        have_states = any(worker.has_state for worker in self.workers)
        if max(1, self.worker_count) != max(1, now.worker_count) and (
            self.is_iterable or have_states
        ):
            raise ConfigError(
                f"the state was taken with num_workers={self.worker_count}, and this loader has "
                f"{now.worker_count}: the state has a position for each worker, so pass the same "
                "number (a map-style dataset without state_dict() may have any number)",
                field="num_workers",
            )

    def _check_shares(self, now: PassState) -> None:
        """Check that the sampler divides the epoch as it did. States of older versions, and
        samplers that do not say it, have no shares. A sampler with a state knows its own length.

        Raises:  ConfigError.
        """
        for name, noun in (("replicas", "replicas"), ("draws", "indices")):
            was, is_now = self.shares.get(name), now.shares.get(name)
            is_own = name == "draws" and self.sampler.states is not None
            if was is None or is_now is None or was == is_now or is_own:
                continue
            raise ConfigError(
                f"the state was taken with {was} {noun} of the sampler, and the sampler has "
                f"{is_now} now: some samples would repeat, others be skipped. Resume on as many "
                "ranks as before, or load the state of a finished epoch; a loader over urls "
                "resumes on any number of ranks",
                field="sampler",
            )


def _claims(state: PassState) -> Iterator[tuple[str, object, bool]]:
    """Yield (name, value, whether the value is valid) of fields that depend on others."""
    sampler = state.sampler
    yield "next_worker", state.next_worker, state.next_worker < max(1, state.worker_count)
    yield "skip", sampler.skip, sampler.skip <= sampler.drawn
    for index in sampler.missing if state.batch_size is not None else ():
        yield "missing", index, isinstance(index, list | tuple)
    reached = state.step + len(sampler.missing)
    is_drawn = state.is_iterable or state.is_finished or reached <= sampler.drawn
    yield "drawn", sampler.drawn, is_drawn
    for worker in state.workers:
        yield "a worker", worker, worker.skip <= state.step
    count = len(state.workers)
    yield "the number of workers", count, count == max(1, state.worker_count)


_PLAIN: Final = (
    *("worker_count", "batch_size", "length", "step", "is_finished"),
    *("next_worker", "base_seed", "len_called"),
)

_OTHERS: Final = ("samplers", "sampler", "workers")
_USERS: Final = {"states", "missing", "dataset", "iterator"}
"""The fields with states of users' objects, which may change when they are saved."""


def _plain(value: Any) -> Any:
    """Return nested values with ints for all whole numbers, numpy's included, but those of users
    unchanged.
    """
    if isinstance(value, Mapping):
        return {name: of if name in _USERS else _plain(of) for name, of in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    number = whole(value)
    return value if number is None else number


def _checksum(saved: Mapping[str, Any]) -> str:
    """Return 16 hex digits over our own fields of a state."""
    ours: list[Any] = [
        {name: value for name, value in part.items() if name not in _USERS}
        for part in (saved["sampler"], *saved["workers"])
    ]
    ours += [len(saved["sampler"]["missing"]), [saved[name] for name in (*_PLAIN, "samplers")]]
    ours += [saved["shares"]] if "shares" in saved else []
    return hashlib.blake2b(
        json.dumps(ours, sort_keys=True, default=int).encode(), digest_size=8
    ).hexdigest()
