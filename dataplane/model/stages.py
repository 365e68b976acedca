"""The former stages of a run, as clients and plans read their list: which of them the next epoch
counts.
"""

from __future__ import annotations

from collections.abc import Sequence

from dataplane.model.config import Stage


def first_counted(stages: Sequence[Stage]) -> int:
    """Return the number of the first stage whose samples the next epoch of a run leaves out; the
    number of stages if there is none. A stage that ended within its first epoch goes on with what
    the stage before it had left.
    """
    begin = len(stages)
    for number, stage in enumerate(stages):
        goes_on = begin < number and stage.epoch == stages[number - 1].next_epoch
        start = begin if goes_on else number
        begin = start if stage.unread and (stage.cursor or goes_on) else len(stages)
    return begin
