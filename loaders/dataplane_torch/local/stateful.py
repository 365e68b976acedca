"""Objects whose position can be saved: those with state_dict() and load_state_dict()."""

from __future__ import annotations

from typing import Any, Protocol, TypeGuard, TypeVar

from dataplane_torch.torch_private.iteration import DatasetFetcher

_Any = TypeVar("_Any")


class Stateful(Protocol):
    """A dataset, an iterator of one, or a sampler whose state is saved with the loader's.

    Source:  torchdata.stateful_dataloader.Stateful.
    """

    def state_dict(self) -> dict[str, Any]:
        """Where it stands."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""
        ...


def is_stateful(given: object) -> TypeGuard[Stateful]:
    """Whether it has both methods. A check of the protocol would take ten times as long."""
    return hasattr(given, "state_dict") and hasattr(given, "load_state_dict")


def state_of(given: object) -> dict[str, Any] | None:
    """Its state, or None if it has no state_dict()."""
    return given.state_dict() if is_stateful(given) else None


def load_state(given: _Any, state: dict[str, Any] | None) -> _Any:
    """The same, standing where `state` says, if it can."""
    if state is not None and is_stateful(given):
        given.load_state_dict(state)
    return given


def skip_samples(fetcher: DatasetFetcher, count: int) -> None:
    """Draw and drop `count` samples of the iterable dataset of one of torch's fetchers."""
    for _ in range(count):
        try:
            next(fetcher.dataset_iter)
        except StopIteration:
            fetcher.ended = True
            return
