"""The stores that commands read. If one does not answer, the command waits and tells the user."""

from __future__ import annotations

from rich.markup import escape

from dataplane.commands import output
from dataplane.store.connect import Stores
from dataplane.store.outage import Outage, Outages

WAIT_S = 60.0
"""Shorter than a run's wait: a person is at the screen and can retry."""


def _tell(outage: Outage) -> None:
    if outage.is_over:
        away_s = outage.until - outage.since
        said = f"{escape(outage.store)} answers again, after {away_s:.0f} s"
    else:
        said = (
            f"[yellow]waiting for {escape(outage.store)}:[/] {escape(outage.error)}. "
            f"Trying again for up to {WAIT_S:g} s; Ctrl-C stops"
        )
    output.stderr().print(said, soft_wrap=True)


STORES = Stores(WAIT_S, observe=Outages(_tell).note)
