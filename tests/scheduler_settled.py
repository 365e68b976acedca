"""Events for a scheduler of which each effect is carried out at once, or begun."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from dataplane.scheduler import events
from dataplane.scheduler.scheduler import Scheduler

Do = Callable[[events.Effect], Iterable[events.Event]]


def tell(scheduler: Scheduler, event: events.Event, now: float, do: Do) -> None:
    """Tell the scheduler of an event, and of all that `do` says has happened at once, until it has
    nothing left to decide.
    """
    todo = deque([event, events.Settled()])
    while todo:
        for effect in scheduler.decide(todo.popleft(), now):
            todo.extend(do(effect))
        if not todo and not scheduler.is_settled:
            todo.append(events.Settled())
