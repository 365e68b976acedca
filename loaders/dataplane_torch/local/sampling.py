"""A sampler's batches of indices, with the sampler's position after each of them.

If a sampler has a state, the state is saved. Any other sampler runs again from the start of the
pass, with its generators restored to that moment, so that it draws the same indices.

Invariants:
1. A resumed pass draws what the interrupted pass would have drawn, for samplers that have a state,
   or that are functions of a torch.Generator, including the default one.
2. A resumed pass leaves torch's default generator as it was.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import inspect
import itertools
import math
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    DistributedSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from dataplane.base.units import whole
from dataplane.model.errors import ConfigError
from dataplane_torch.local.progress import SamplerState, is_stateful, load_state

GeneratorStates = dict[str, torch.Tensor]

_DEFAULT = "torch"
_SELF_SEEDED = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


class Places:
    """The position of an index sampler during a pass. `iterator` is the sampler's iterator;
    `made_with` are the states of generators before the iterator was made. The states of samplers
    are saved after every `every` draws.
    """

    def __init__(
        self,
        index_sampler: Any,
        generator: torch.Generator | None,
        every: int,
        state: SamplerState | None,
        iterator: Iterator[Any],
        made_with: GeneratorStates,
    ) -> None:
        self._index_sampler, self._generator, self._every = index_sampler, generator, every
        self._is_ahead = False
        # A generator object has not run yet, so it has not drawn. Any other iterator may have drawn
        # when it was made.
        self._made_with = {} if inspect.isgenerator(iterator) else _all_encoded(made_with)
        # Save the present states too: many samplers draw only when their first index is requested.
        self._generators = generator_states(index_sampler, generator)
        self._encoded: dict[str, str] | None = None
        self._epochs = set_epochs_of(index_sampler)
        self._drawn = 0 if state is None else state.drawn
        self._missing = deque(() if state is None else state.missing)
        self._iterator = iterator
        if state is not None:
            self._iterator = load_state(self._iterator, (state.states or {}).get("iterator"))
            skip = state.drawn if state.states is None else state.skip
            skipped = sum(1 for _ in itertools.islice(self._iterator, skip))
            if skipped < skip:
                raise ConfigError(
                    f"the state was taken after {self._drawn} batches of an epoch, and the sampler "
                    f"of this loader gives {self._drawn - skip + skipped}: pass the same sampler, "
                    "or resume from another checkpoint",
                    field="sampler",
                )
            if state.states is not None and self._drawn >= step_count(index_sampler):
                self._come_to_the_end(state)
            self._draw_seed()
        self._states = self._states_now()
        self._states_at = self._drawn

    def walk(self) -> Iterator[Any]:
        """Yield the indices of each batch. This is a generator, which is faster than a class with
        `__next__`.
        """
        while self._missing:
            yield self._missing.popleft()
        if not self._drawn and not self._is_ahead:
            self._generators = generator_states(self._index_sampler, self._generator)
            self._encoded = None
            self._epochs = set_epochs_of(self._index_sampler)
        every = self._every if self._states is not None else 0
        for index in self._iterator:
            self._drawn += 1
            if every and self._drawn % every == 0:
                self._states, self._states_at = self._states_now(), self._drawn
            yield index
        self._states, self._states_at = self._states_now(), self._drawn  # for the next pass

    def place(self) -> SamplerState:
        """Return the position after the draws so far. Before the first draw, make a shuffle draw
        its seed now, so that later draws of the training loop do not change it: a resumed pass will
        draw the same seed.
        """
        if not self._drawn and not self._is_ahead:
            self._generators = generator_states(self._index_sampler, self._generator)
            self._encoded = None
            self._draw_seed()
        if self._encoded is None:
            self._encoded = _all_encoded(self._generators)
        return SamplerState(
            self._drawn,
            skip=0 if self._states is None else self._drawn - self._states_at,
            states=self._states,
            generators=self._encoded,
            epochs=self._epochs,
            missing=tuple(self._missing),
            made_with=self._made_with,
        )

    def _seeds_itself(self) -> bool:
        parts = _parts(self._index_sampler).values()
        return any(
            type(part) in _SELF_SEEDED and getattr(part, "generator", None) is None
            for part in parts
        ) and not any(is_stateful(part) for part in parts)

    def draw_first(self) -> None:
        """Draw the first index now, while torch's default generator has the right state. Do nothing
        if a sampler has a state or a generator of its own, which would then be ahead.
        """
        is_own = self._states is not None or _generators(self._index_sampler, self._generator)
        if not (self._drawn or self._is_ahead or is_own):
            self._draw_ahead()

    def _draw_seed(self) -> None:
        if self._generator is None and self._seeds_itself():
            self._draw_ahead()

    def _draw_ahead(self) -> None:
        self._is_ahead = True
        with contextlib.suppress(StopIteration):
            self._iterator = itertools.chain([next(self._iterator)], self._iterator)

    def _come_to_the_end(self, state: SamplerState) -> None:
        """Load a state that was taken after the last batch. Some samplers reset their state with
        the last batch, and some only at one more request: if a request gives another batch, the
        iterator has begun the next pass, so load the state again and end this pass.
        """
        if next(self._iterator, None) is not None:
            self._iterator = iter(())
            load_samplers(self._index_sampler, state, same_epoch=False)

    def _states_now(self) -> dict[str, dict[str, Any]] | None:
        parts = {**_parts(self._index_sampler), "iterator": self._iterator}
        states = {
            name: copy.deepcopy(part.state_dict())  # the sampler may change its dict later
            for name, part in parts.items()
            if is_stateful(part)
        }
        return states or None


def step_count(index_sampler: Any) -> float:
    """Return how many batches a pass has; infinity if unknown."""
    try:
        return len(index_sampler)
    except Exception:  # noqa: BLE001 - the user's method is missing, or exists but only raises
        return math.inf


def epochs_of(index_sampler: Any) -> dict[str, int]:
    """Return the current epochs of a loader's samplers."""
    epochs = {name: _epoch_of(part) for name, part in _parts(index_sampler).items()}
    return {name: epoch for name, epoch in epochs.items() if epoch is not None}


def set_epochs_of(index_sampler: Any) -> dict[str, int]:
    """Return the current epochs, except of torch's samplers whose set_epoch() was never called."""
    parts, epochs = _parts(index_sampler), epochs_of(index_sampler)
    return {name: epoch for name, epoch in epochs.items() if _was_called(parts[name].set_epoch)}


class _SetEpoch:
    """The set_epoch() of a sampler that torch made. This object does not refer to the sampler,
    since a reference cycle would keep the dataset alive after its loader was dropped.
    """

    def __init__(self) -> None:
        self.epoch, self.was_called = 0, False

    def __call__(self, epoch: int) -> None:
        self.epoch, self.was_called = epoch, True


def make_epoch_settable(sampler: Any) -> None:
    """Give a sampler that torch made a set_epoch() like that of a DistributedSampler. A call does
    not change the order, but shows that the pass whose state was loaded is over.
    """
    sampler.set_epoch = _SetEpoch()


def _was_called(set_epoch: object) -> bool:
    return not isinstance(set_epoch, _SetEpoch) or set_epoch.was_called


def explicit_generators(index_sampler: Any, generator: torch.Generator | None) -> dict[str, str]:
    """Return the states of the generators that a loader and its samplers were given, as base64."""
    generators = _generators(index_sampler, generator)
    return _all_encoded({name: known.get_state() for name, known in generators.items()})


def load_samplers(index_sampler: Any, state: SamplerState, *, same_epoch: bool) -> None:
    """Restore the states of samplers, and with `same_epoch` their epochs: a DistributedSampler has
    no other state.
    """
    for name, part in _parts(index_sampler).items():
        load_state(part, (state.states or {}).get(name))
        if same_epoch and name in state.epochs and _epoch_of(part) is not None:
            part.set_epoch(state.epochs[name])


def load_generators(
    index_sampler: Any, generator: torch.Generator | None, states: Mapping[str, str]
) -> None:
    """Restore the states of generators, including torch's default generator.

    Raises:  ConfigError: a generator's state is damaged.
    """
    standing = {**_generators(index_sampler, generator), _DEFAULT: torch.default_generator}
    for name, known in standing.items():
        if name in states:
            _set_state(known, states[name])


def default_generator() -> dict[str, str]:
    """Return the state of torch's default generator, as base64."""
    return {_DEFAULT: _encoded(torch.get_rng_state())}


def stands_as(state: SamplerState) -> bool:
    """Return whether torch's default generator has the saved state; True if none was saved."""
    return state.generators.get(_DEFAULT, "") in {"", _encoded(torch.get_rng_state())}


def generator_states(index_sampler: Any, generator: torch.Generator | None) -> GeneratorStates:
    """Return the present states of the generators from which a loader's samplers may draw."""
    generators = _generators(index_sampler, generator)
    if generator is None:
        generators = {**generators, _DEFAULT: torch.default_generator}
    return {name: known.get_state() for name, known in generators.items()}


def _all_encoded(states: GeneratorStates) -> dict[str, str]:
    return {name: _encoded(state) for name, state in states.items()}


def _epoch_of(part: Any) -> int | None:
    """Return the epoch to which a sampler was set, stored as torch's DistributedSampler does."""
    set_epoch = getattr(part, "set_epoch", None)
    epoch = getattr(set_epoch if isinstance(set_epoch, _SetEpoch) else part, "epoch", None)
    return epoch if callable(set_epoch) and type(epoch) is int else None


def _parts(index_sampler: Any) -> dict[str, Any]:
    """Return an index sampler and the samplers inside it: the sampler from which a BatchSampler
    draws, and any sampler between the two, such as Accelerate's wrapper of a BatchSampler.
    """
    parts = {"index_sampler": index_sampler}
    for name in ("batch_sampler", "sampler"):
        outer = next(reversed(parts.values()))
        inner = getattr(outer, name, None)
        if inner is not None and not is_stateful(outer):
            parts[name] = inner
    return parts


def names_of(index_sampler: Any) -> str:
    """Name the classes of an index sampler, outermost first: "BatchSampler over RandomSampler"."""
    return " over ".join(type(part).__name__ for part in _parts(index_sampler).values())


def shares_of(index_sampler: Any) -> dict[str, int]:
    """Return the number of replicas among which a user's sampler divides its indices, and how many
    it draws. The latter is left out if it may depend on the epoch, which is not set yet.
    """
    parts = _parts(index_sampler)
    counts = (
        whole(getattr(part, name, None))
        for part in parts.values()
        for name in ("num_replicas", "num_processes")
    )
    replicas = next((count for count in counts if count is not None), None)
    shares = {} if replicas is None else {"replicas": replicas}
    inner = next(reversed(parts.values()))
    is_plain = isinstance(inner, DistributedSampler) or not hasattr(inner, "set_epoch")
    draws = step_count(inner) if is_plain else math.inf
    return shares if draws == math.inf else {**shares, "draws": int(draws)}


def _generators(
    index_sampler: Any, generator: torch.Generator | None
) -> dict[str, torch.Generator]:
    generators: dict[str, torch.Generator] = {}
    candidates = {"loader": generator}
    for name, part in _parts(index_sampler).items():
        candidates[name] = getattr(part, "generator", None)
    for name, candidate in candidates.items():
        if isinstance(candidate, torch.Generator) and all(
            candidate is not known for known in generators.values()
        ):
            generators[name] = candidate
    return generators


def _encoded(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _set_state(generator: torch.Generator, state: str) -> None:
    try:
        decoded = np.frombuffer(base64.b64decode(state), np.uint8).copy()
        generator.set_state(torch.from_numpy(decoded))
    except (RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"this state's generators are damaged: {error}", field="state_dict"
        ) from error
