"""Changes by a rule that are no fault: (file, the line, the line after it, why nobody can tell)."""

from __future__ import annotations

EQUAL: tuple[tuple[str, str, str, str], ...] = ()
