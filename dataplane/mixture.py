"""What a job that mixes several datasets is, with every default filled in."""

from __future__ import annotations

from dataclasses import dataclass, field

from dataplane.model import Exhausted, View


@dataclass(frozen=True, slots=True)
class SourceSpec:
    """One source of a mixture. `share` is its share of the samples in units of 2**-32, and
    `passes_max` how often one epoch may read it, 0 for no limit.
    """

    name: str
    fingerprint: str
    share: int
    passes_max: int = 0
    window: int = 1
    ramp: int = 0
    view: View = field(default_factory=View)


@dataclass(frozen=True, slots=True)
class MixtureSpec:
    """The datasets that a job mixes. `length` is that of an epoch in samples, 0 for one that
    follows from `exhausted`; `batch` consecutive samples are of one source. `source_column` is the
    column that names the source of each sample by its index; "" for none.
    """

    sources: tuple[SourceSpec, ...]
    exhausted: Exhausted = Exhausted.STOP
    length: int = 0
    batch: int = 1
    source_column: str = ""
