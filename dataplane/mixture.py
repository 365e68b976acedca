"""The spec of a job that mixes several datasets, with every default filled in."""

from __future__ import annotations

from msgspec import Struct, field
from msgspec.structs import replace

from dataplane.errors import ConfigError
from dataplane.model import Exhausted, View
from dataplane.weights import MixHistory, ScheduledShares, ShareChange, Unsigned

SOURCES_MAX = 1024


def check_source_count(count: int) -> None:
    """Raises:  ConfigError: a mixture cannot have so many sources."""
    if not 1 <= count <= SOURCES_MAX:
        raise ConfigError(
            f"a mixture of {count} sources: 1 to {SOURCES_MAX} are possible. One source may have"
            " any number of urls",
            field="sources",
        )


class SourceSpec(Struct, frozen=True):
    """One source of a mixture. `share` is its share of the samples in units of 2**-32 when the job
    begins, and `passes_max` how often one epoch may read it, 0 for no limit.
    """

    name: str
    fingerprint: str
    share: Unsigned
    passes_max: Unsigned = 0
    window: Unsigned = 1
    ramp: Unsigned = 0
    view: View = field(default_factory=View)


class MixtureSpec(Struct, frozen=True):
    """The datasets that a job mixes. `length` is that of an epoch in samples, 0 for one that
    follows from `exhausted`; `batch` consecutive samples are of one source. `source_column` is the
    column that names the source of each sample by its index; "" for none. `tokens` is the length as
    it was asked for, if that was in tokens: `length` then follows from the first shares. `schedule`
    has the shares that were asked for in advance, and `changes` are those of the job, from where
    each takes effect.
    """

    sources: tuple[SourceSpec, ...]
    exhausted: Exhausted = Exhausted.STOP
    length: Unsigned = 0
    batch: Unsigned = 1
    source_column: str = ""
    tokens: Unsigned = 0
    schedule: tuple[ScheduledShares, ...] = ()
    changes: tuple[ShareChange, ...] = ()

    @property
    def shares(self) -> tuple[int, ...]:
        """The shares with which the job begins."""
        return tuple(source.share for source in self.sources)

    @property
    def history(self) -> MixHistory:
        """All shares of the job."""
        return MixHistory((ShareChange(0, 0, self.shares), *self.changes), self.length)

    def with_history(self, history: MixHistory) -> MixtureSpec:
        """The same mixture with other shares."""
        first, *changes = history.changes
        pairs = zip(self.sources, first.shares, strict=True)
        sources = tuple(replace(source, share=share) for source, share in pairs)
        return replace(self, sources=sources, length=history.length, changes=tuple(changes))
