"""What a process did, as started / completed / failed lines on its log."""

from __future__ import annotations

import logging


class Trace:
    """One room's voice. Facts are keyword arguments and appear as `name=value`."""

    def __init__(self, room: str) -> None:
        self._log = logging.getLogger(f"dataplane.{room}")

    def started(self, what: str, **facts: object) -> None:
        """Something began that may take a while."""
        self._say(logging.DEBUG, "started", what, facts)

    def completed(self, what: str, **facts: object) -> None:
        """It ended well."""
        self._say(logging.DEBUG, "completed", what, facts)

    def noted(self, what: str, **facts: object) -> None:
        """Something that a person who runs the service wants to know."""
        self._say(logging.INFO, "noted", what, facts)

    def failed(self, what: str, **facts: object) -> None:
        """It ended badly, and somebody will see an error or a delay."""
        self._say(logging.WARNING, "failed", what, facts)

    def _say(self, level: int, verb: str, what: str, facts: dict[str, object]) -> None:
        if self._log.isEnabledFor(level):
            told = " ".join(f"{name}={value}" for name, value in facts.items())
            self._log.log(level, "%s %s %s", verb, what, told)
