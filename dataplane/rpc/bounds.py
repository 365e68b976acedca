"""Limits on the length of names that a peer sends, since they are stored, logged and shown."""

from __future__ import annotations

from dataplane.errors import ConfigError

NAME_LENGTH_MAX = 256
URLS_MAX = 64
"""Of a dataset, as a node tells them to the coordinator."""
_SHOWN_LENGTH = 40


def check_name(field: str, name: str, *, needed: bool = True, most: int = NAME_LENGTH_MAX) -> None:
    """Check one name of a message.

    Raises:  ConfigError: it is too long, or needed and not given; names the field.
    """
    if len(name) > most or (needed and not name):
        least = "1 to " if needed else ""
        shown = f" ({name[:_SHOWN_LENGTH]!r} …)" if name else ""
        raise ConfigError(
            f"{field} has {len(name)} characters{shown}: {least}{most}"
            f"{' are needed' if needed else ' at most'}",
            field=field,
        )
