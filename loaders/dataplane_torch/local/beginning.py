"""Begin a pass over a user's Dataset, at its start or where a saved pass stopped."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sized
from typing import Any

import torch
from msgspec.structs import replace

from dataplane_torch.local.progress import PassState, SamplerState, WorkerState
from dataplane_torch.local.sampling import (
    GeneratorStates,
    Places,
    default_generator,
    epochs_of,
    explicit_generators,
    generator_states,
    load_generators,
    load_samplers,
    names_of,
    shares_of,
    stands_as,
)
from dataplane_torch.torch_private.iteration import (
    PassNames,
    index_sampler,
    is_iterable,
    told_length,
)


class PassPlace:
    """A pass's position. It outlives the pass, so that it can be saved after the loop was left."""

    def __init__(self, loader: Any, worker_count: int) -> None:
        self.is_iterable = is_iterable(loader)
        self.worker_count = worker_count
        self.batch_size = loader.batch_size
        self.length = None if self.is_iterable else _length(loader.dataset)
        self.samplers = None if self.is_iterable else names_of(index_sampler(loader))
        self.shares = {} if self.is_iterable else shares_of(index_sampler(loader))
        self.has_default_generator = loader.generator is None
        self.step = 0
        self.is_finished = False
        self.next_worker = 0
        self.base_seed = 0
        self.len_called = told_length(loader)
        self.sampler = SamplerState()
        self.workers = [WorkerState() for _ in range(max(1, worker_count))]

    def state(self) -> PassState:
        """Return the present state."""
        if self.is_finished and self.has_default_generator:
            # Save the present state too, from which the next pass draws unless other code draws
            # from the generator first.
            generators = {**self.sampler.generators, **default_generator()}
            self.sampler = replace(self.sampler, generators=generators)
        return PassState(
            is_iterable=self.is_iterable,
            worker_count=self.worker_count,
            batch_size=self.batch_size,
            length=self.length,
            step=self.step,
            is_finished=self.is_finished,
            next_worker=self.next_worker,
            base_seed=self.base_seed,
            len_called=self.len_called,
            sampler=self.sampler,
            workers=tuple(self.workers),
            samplers=self.samplers,
            shares=self.shares,
        )


class Beginning:
    """The steps of both kinds of pass before and after torch's own constructor. `loaded_in` are the
    epochs to which the samplers were set when `resume` was loaded.
    """

    def __init__(
        self,
        loader: Any,
        worker_count: int,
        resume: PassState | None,
        loaded_in: Mapping[str, int],
    ) -> None:
        self.place = PassPlace(loader, worker_count)
        self._places: Places | None = None
        self._made_with: GeneratorStates = {}
        # Keep no reference to the loader: the loader may refer to the pass, and a cycle would delay
        # the end of the workers, which end when both are freed.
        self._index_sampler, self._generator = index_sampler(loader), loader.generator
        self._every, self._persists = loader.snapshot_every_n_steps, loader.persistent_workers
        self.resume = resume
        self._epochs: dict[str, int] | None = None
        self._is_started = self._has_new_epoch = self._is_aside = False
        if resume is not None:
            resume.check(self.place.state())
            self._has_new_epoch = epochs_of(self._index_sampler) != loaded_in
        # Continue only an unfinished pass. The state of a finished pass sets only generators and
        # samplers, and the next pass begins at its start.
        self.goes_on = None if resume is None or resume.is_finished else resume

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        """Run torch's own constructor, and `places`, within this block. A resumed pass repeats
        draws that were made before, so torch's default generator is restored afterwards, unless it
        had the state with which the next pass would have begun.
        """
        resume = self.resume
        if resume is None:
            self.remember()
            yield
            return
        goes_on = self.goes_on is not None and not self._has_new_epoch
        load_samplers(self._index_sampler, resume.sampler, same_epoch=goes_on)
        is_next = resume.is_finished and stands_as(resume.sampler)
        self._is_aside = not is_next
        with torch.random.fork_rng(devices=[], enabled=self._is_aside):
            if resume.is_finished:
                load_generators(self._index_sampler, self._generator, resume.sampler.generators)
            self.remember()
            yield

    @property
    def is_anew(self) -> bool:
        """Whether this pass begins in the same way as with torch's constructor."""
        return self.goes_on is None and (self.resume is None or not self._persists)

    def remember(self) -> None:
        """Remember the generators' states before torch makes an iterator of the samplers, which may
        draw.
        """
        self._made_with = generator_states(self._index_sampler, self._generator)

    def places(self, torch_pass: PassNames) -> Places | None:
        """Set torch's seeds, and return the indices from the place where the pass begins or
        continues; None for an iterable dataset, which does not use indices.
        """
        place, goes_on = self.place, self.goes_on
        iterator = torch_pass.indices
        if goes_on is not None:
            torch_pass.base_seed = goes_on.base_seed
            torch_pass.yielded_count = place.step = goes_on.step
            place.len_called = goes_on.len_called
            if len(goes_on.workers) == len(place.workers):
                place.next_worker = goes_on.next_worker
            iterator = self._iterator_of(goes_on.sampler)
        elif self.resume is not None and self._persists:
            # Keep the seed: persistent workers get no new seed, so no seed is drawn between two
            # passes.
            torch_pass.base_seed = self.resume.base_seed
            iterator = self._iterator_of(self.resume.sampler)
        place.base_seed = torch_pass.base_seed
        if place.is_iterable:
            return None
        state = None if goes_on is None else goes_on.sampler
        places = Places(
            self._index_sampler, self._generator, self._every, state, iterator, self._made_with
        )
        if self._is_aside:
            # Request the first index now, before torch's default generator is restored: most
            # shuffles draw from the generator at that request.
            places.draw_first()
        self._places = places
        torch_pass.indices = places.walk()
        return places

    def begun(self) -> None:
        """Note the samplers' epochs once the first indices are drawn, which may change them."""
        if not self.place.is_iterable and not self._is_started:
            self._epochs = epochs_of(self._index_sampler)
            if self._has_new_epoch and self.goes_on is not None:
                # Compare with the state's epochs, so that `has_new_epoch` finds an epoch that was
                # set after the state was loaded.
                self._epochs |= self.goes_on.sampler.epochs

    def has_new_epoch(self) -> bool:
        """Return whether the samplers' epoch was set after the pass began: some frameworks call
        set_epoch() after iter(). Only the first call, for the first batch, checks this.
        """
        begun_in, self._epochs, self._is_started = self._epochs, None, True
        return begun_in is not None and begun_in != epochs_of(self._index_sampler)

    def forget_resumed(self, torch_pass: PassNames) -> None:
        """Begin at the start of the epoch to which the samplers were set, instead of resuming."""
        if self.goes_on is not None and not self._persists:
            # Draw a new base seed: `places` has replaced the seed that torch's constructor drew by
            # the seed of the resumed pass.
            seed = torch.empty((), dtype=torch.int64).random_(generator=self._generator)
            torch_pass.base_seed = int(seed.item())
        self.resume = self.goes_on = None
        self._is_aside = False
        self.remember()
        torch_pass.indices = iter(self._index_sampler)
        torch_pass.yielded_count = self.place.step = self.place.next_worker = 0

    def _iterator_of(self, state: SamplerState) -> Iterator[Any]:
        """Make the samplers' iterator from a saved state, with the generators in the states that
        they had then. Afterwards, the generators have their states at the iterator's first request.
        """
        load_generators(self._index_sampler, self._generator, state.made_with or state.generators)
        self.remember()
        iterator: Iterator[Any] = iter(self._index_sampler)
        if state.made_with:
            load_generators(self._index_sampler, self._generator, state.generators)
        return iterator

    def finish(self) -> None:
        """Record that the pass has ended."""
        place = self.place
        place.is_finished = True
        generators = explicit_generators(self._index_sampler, self._generator)
        reached = place.sampler if self._places is None else self._places.place()
        place.sampler = replace(reached, generators=generators, made_with={})


def _length(dataset: object) -> int | None:
    length = None
    with contextlib.suppress(Exception):  # the __len__ of some users only raises
        length = len(dataset) if isinstance(dataset, Sized) else None
    return length
