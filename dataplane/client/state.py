"""The whole resume state of a loader: small, plain, and the same on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dataplane.config import JobSpec
from dataplane.errors import ConfigError, SpecMismatch, VersionMismatch
from dataplane.model import End

STATE_VERSION = 1


@dataclass(frozen=True, slots=True)
class State:
    """Where a run stands: `cursor` samples of `epoch` are consumed, by all ranks together."""

    spec_digest: str
    epoch: int
    cursor: int
    sample_count: int

    def to_dict(self) -> dict[str, int | str]:
        """As it is saved."""
        return {
            "version": STATE_VERSION,
            "spec_digest": self.spec_digest,
            "epoch": self.epoch,
            "cursor": self.cursor,
            "sample_count": self.sample_count,
        }

    @classmethod
    def from_dict(cls, saved: object) -> State:
        """What `to_dict` gave; keys that it does not know are left to others.

        Raises:  ConfigError: it is no such state.  VersionMismatch: it was saved by a newer one.
        """
        if not isinstance(saved, Mapping):
            raise ConfigError(
                f"a loader's state is a dict, as state_dict() gives it, and not {saved!r:.80}"
            )
        version = _number(saved, "version")
        if version > STATE_VERSION:
            raise VersionMismatch(
                f"this state has version {version}, and this dataplane knows versions up to "
                f"{STATE_VERSION}: resume with the dataplane that saved it, or a newer one",
                expected=STATE_VERSION,
                found=version,
            )
        digest = saved.get("spec_digest")
        if not isinstance(digest, str) or not digest:
            raise ConfigError("this is no loader's state: it has no spec_digest", key="spec_digest")
        epoch, cursor, count = (_number(saved, key) for key in ("epoch", "cursor", "sample_count"))
        if cursor > count:
            raise ConfigError(
                f"this state is damaged: cursor {cursor} of {count} samples", key="cursor"
            )
        return cls(digest, epoch, cursor, count)

    def check(self, digest: str, sample_count: int, spec: JobSpec) -> None:
        """That a job of this digest may go on from here.

        Raises:  SpecMismatch: it would walk other samples, or in another order or form.
        """
        if (self.spec_digest, self.sample_count) == (digest, sample_count):
            return
        if self.sample_count != sample_count:
            raise SpecMismatch(
                f"this state is of a dataset of {self.sample_count} samples, and this loader's has "
                f"{sample_count}: other urls, or the shards have changed",
                field="sample_count",
                expected=self.sample_count,
                found=sample_count,
            )
        raise SpecMismatch(
            f"this state was saved with another seed, shuffle, lanes, window, end, columns, lists, "
            f"fill_null, transforms, stack or content of the {sample_count} samples (digest "
            f"{self.spec_digest}, not {digest}); this loader has {spec}: make the loader as it was "
            "then",
            field="spec_digest",
            expected=self.spec_digest,
            found=digest,
        )


def _number(saved: Mapping[object, object], key: str) -> int:
    value = saved.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 62:
        raise ConfigError(
            f"this is no loader's state: its {key} is {value!r:.80}, not a count", key=key
        )
    return value


def consumed(sample_count: int, cursor: int, global_batch: int, steps: int) -> int:
    """Samples consumed by all ranks, `steps` steps after `cursor`."""
    return min(sample_count, cursor + steps * global_batch)


def step_count(sample_count: int, global_batch: int, end: End) -> int:
    """Steps of a whole epoch; the same on every rank."""
    if end is End.DROP:
        return sample_count // global_batch
    return -(-sample_count // global_batch)
