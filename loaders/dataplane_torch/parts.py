"""The part of each batch that a rank gets: the columns of its pipeline stage, and its part of each
sequence. The trainer selects the part, so the job's spec, batches, state and order do not depend on
it, and all stages share the batches that the node makes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from msgspec import Struct

from dataplane.base.units import meant, whole
from dataplane.model.errors import ConfigError
from dataplane.model.records import ColumnSpec, Kind, Topology

_SIDES: Final = (".is_null", ".length")
"""Suffixes of columns that a loader adds to another column, whose stages they share."""
_AXIS: Final = 1


class RankParts(Struct, frozen=True):
    """The part of one rank. `columns` are the columns of its stage; None means all columns. Of the
    columns in `sequences`, the rank gets part `cp_rank` of `cp_size` equal parts of the second
    axis.
    """

    columns: tuple[str, ...] | None = None
    sequences: tuple[str, ...] = ()
    cp_rank: int = 0
    cp_size: int = 1

    def chosen(self, specs: Sequence[ColumnSpec]) -> frozenset[str]:
        """Return the names of the columns to deliver.

        Raises:  ConfigError: an argument names a column that the job does not have, or that has no
        sequence to divide.
        """
        by_name = {spec.name: spec for spec in specs}
        for argument, names in (
            ("columns_by_stage", self.columns or ()),
            ("sequence_part", self.sequences),
        ):
            for name in names:
                if name not in by_name:
                    raise ConfigError(
                        f"{argument} names {name!r}, but the columns of the batches are "
                        f"{', '.join(by_name)}{meant(name, by_name)}",
                        field=argument,
                    )
        for name in self.sequences:
            self._check_sequence(by_name[name])
        return frozenset(name for name in by_name if self.has(name))

    def cut(self, name: str, whole_tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a tensor, as a view.

        Shapes:  whole_tensor: [B, T, …].   result: [B, T / cp_size, …].
        Raises:  ConfigError: T is not a multiple of cp_size.
        """
        if self.cp_size == 1 or name not in self.sequences:
            return whole_tensor
        length = whole_tensor.shape[_AXIS]
        self._check_length(name, length)
        part = length // self.cp_size
        return whole_tensor.narrow(_AXIS, self.cp_rank * part, part)

    def length(self, name: str, whole_length: int) -> int:
        """Return the length of this rank's part of a sequence."""
        return whole_length // self.cp_size if name in self.sequences else whole_length

    def has(self, name: str) -> bool:
        """Return whether this rank gets a column."""
        if self.columns is None or name in self.columns:
            return True
        return any(name == f"{column}{side}" for column in self.columns for side in _SIDES)

    def _check_sequence(self, spec: ColumnSpec) -> None:
        if spec.kind is Kind.FIXED and spec.shape:
            self._check_length(spec.name, spec.shape[0])
        elif spec.kind is not Kind.PADDED:
            raise ConfigError(
                f"sequence_part names {spec.name!r}, which has no sequence: it takes parts of "
                'lists of a fixed size and of padded lists (lists="padded")',
                field="sequence_part",
            )

    def _check_length(self, name: str, length: int) -> None:
        if length % self.cp_size:
            raise ConfigError(
                f"sequence_part: the sequences of {name!r} have {length} values here, which "
                f"{self.cp_size} context-parallel ranks cannot share equally. Store sequences of "
                "one length that can be divided, or leave sequence_part= out and pad each batch "
                "in the loop before you divide it",
                field="sequence_part",
            )


def parts_of(
    topology: Topology,
    columns_by_stage: Mapping[int, Sequence[str]] | None,
    sequence_part: Sequence[str] | None,
) -> RankParts:
    """Return the part of a rank.

    Raises:  ConfigError: the arguments are invalid, or name stages that do not exist.
    """
    sequences = () if sequence_part is None else _names("sequence_part", sequence_part)
    return RankParts(
        columns=_of_stage(topology, columns_by_stage),
        sequences=sequences,
        cp_rank=topology.cp_rank,
        cp_size=topology.cp_size,
    )


def _of_stage(
    topology: Topology, given: Mapping[int, Sequence[str]] | None
) -> tuple[str, ...] | None:
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"columns_by_stage={given!r:.80}: pass a dict of column names by stage, as in "
            '{0: ["tokens"], -1: ["labels"]}; -1 is the last stage',
            field="columns_by_stage",
        )
    found: dict[str, None] = {}
    stages = topology.pp_size
    for stage, names in given.items():
        number = whole(stage)
        if number is None or not -stages <= number < stages:
            raise ConfigError(
                f"columns_by_stage names stage {stage!r:.80}, but the stages are 0 to "
                f"{stages - 1}, or -{stages} to -1 from the last (from {topology.source}). Use 0 "
                "and -1 for the first and the last stage of any number of stages",
                field="columns_by_stage",
            )
        of_stage = _names(f"columns_by_stage[{stage}]", names)
        if number % stages == topology.pp_rank:
            found |= dict.fromkeys(of_stage)
    return tuple(found)


def _names(argument: str, given: object) -> tuple[str, ...]:
    names = [] if isinstance(given, str | bytes) or not isinstance(given, Sequence) else given
    if names is not given or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"{argument}={given!r:.80}: pass a list of column names",
            field=argument.partition("[")[0],
        )
    return tuple(names)
