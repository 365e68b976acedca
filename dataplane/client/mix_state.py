"""The weights of a mixture in the form of a state: plain values, the same on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dataplane.errors import ConfigError
from dataplane.ledger import PLACE_MAX
from dataplane.units import whole
from dataplane.weights import MixHistory, ShareChange


def mix_to_dict(mix: MixHistory, asked: str) -> dict[str, Any]:
    """Convert weights for a state. `asked` names the weights that the loader was given."""
    changes = [[each.epoch, each.position, list(each.shares)] for each in mix.changes]
    saved: dict[str, Any] = {"digest": mix.digest, "asked": asked, "changes": changes}
    return {**saved, "length": mix.length} if mix.length else saved


def mix_from_dict(saved: object) -> tuple[MixHistory | None, str]:
    """Invert `mix_to_dict`; None and "" if the state has no weights.

    Raises:  ConfigError: it is damaged.
    """
    if saved is None:
        return None, ""
    try:
        if not isinstance(saved, Mapping):
            raise TypeError
        changes = tuple(
            ShareChange(_number(epoch), _number(position), tuple(map(_number, shares)))
            for epoch, position, shares in saved["changes"]
        )
        mix, asked = MixHistory(changes, _number(saved.get("length", 0))), saved["asked"]
        if changes and isinstance(asked, str) and saved["digest"] == mix.digest:
            return mix, asked
    except (KeyError, TypeError, ValueError):
        pass
    raise ConfigError(
        f"this state is damaged: its mixture is {saved!r:.160}. Resume from another checkpoint",
        key="mixture",
    )


def _number(given: object) -> int:
    found = whole(given)
    if found is None or not 0 <= found < PLACE_MAX:
        raise ValueError(given)
    return found
