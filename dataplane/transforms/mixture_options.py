"""Parse and check a user's description of a mixture of datasets. Pure: a trainer links it."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import numbers
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple, TypeVar

from dataplane.base.units import meant, one_of, whole, whole_from
from dataplane.model.config import check_source_count
from dataplane.model.errors import ConfigError
from dataplane.model.records import Exhausted, MixUnit, View
from dataplane.rpc.messages import DatasetSource, MixtureAsked, ScheduledWeights, SourceAsked
from dataplane.transforms.options import split_of_text

Urls = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

_LENGTH_MAX = (1 << 62) - 1
_PASSES_MAX = (1 << 31) - 1
_STEP_MAX = (1 << 40) - 1
_SCHEDULED_MAX, _ENTRIES_MAX = 1 << 16, 4096
_NAMED_MAX = 20
_PAIR = 2
_OPTIONS = ("where", "sample", "split", "limit", "map", "resizes", "per_epoch")
_NUMBERS = {"weight": float, "passes": float, "max_passes": int, "mean_length": float}
_NUMBERS |= {"sample": float, "limit": int}
_ON_COMMAND_LINES = (*_NUMBERS, "format", "where", "split", "map")
_LENGTH = re.compile(
    r"(?P<count>\d[\d_]*(?:\.\d+)?)\s*(?P<power>[KMBT]?)\s*(?P<unit>tokens|samples|batches)",
    re.IGNORECASE | re.ASCII,
)
_POWERS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_UNITS_IN_WORDS = {"tokens": MixUnit.TOKENS, "samples": MixUnit.SAMPLES, "batches": MixUnit.BATCH}
_NEXT_OPTION = re.compile(f",(?=(?:{'|'.join(_ON_COMMAND_LINES)})=)")


_T = TypeVar("_T")
_OF_LOADER = dict.fromkeys(("seed", "shuffle", "batch_size"), "pass it to DataLoader")
_MEANT = {
    **dict.fromkeys(
        ("iterate_over_all", "stopping_strategy", "stop_strategy", "stop_on_empty_dataset"),
        'use exhausted="stop", "renormalise" or "cycle"',
    ),
    **dict.fromkeys(
        ("weights", "probabilities", "proportions", "datasets", "streams"),
        "give Mixture({name: Source(url, weight=…), …})",
    ),
    **_OF_LOADER,
}


def _own_arguments(ways: Mapping[str, str]) -> Callable[[type[_T]], type[_T]]:
    """Have a class refuse unknown arguments with a TypeError that says what to use: one of these
    ways, or the argument that was meant.
    """

    def checked(kind: type[_T]) -> type[_T]:
        init: Callable[..., None] = kind.__init__
        known = [*inspect.signature(init).parameters][1:]

        @functools.wraps(init)
        def checked_init(*args: Any, **kwargs: Any) -> None:
            for name in kwargs:
                if name not in known:
                    way = f": {ways[name]}" if name in ways else meant(name, known)
                    raise TypeError(
                        f"{kind.__name__}() has no argument {name!r}{way} (docs/mixtures.md; "
                        "docs/migrate/names.md for the arguments of other loaders)"
                    )
            init(*args, **kwargs)

        kind.__init__ = checked_init  # type: ignore[method-assign]
        return kind

    return checked


@_own_arguments(_OF_LOADER)
@dataclass(frozen=True, slots=True)
class Source:
    """One dataset of a mixture, with its share.

    `weight` is the source's share; only its proportion to other weights counts. Instead, `passes`
    sets passes per epoch relative to other sources: a source with 2 is read twice as often as a
    source with 1. An epoch reads a source at most `max_passes` times, by default once. With
    exhausted="cycle", there is no limit by default. `mean_length` is the mean number of tokens of a
    sample, for unit="tokens". All other options replace the loader's options of the same name for
    this source.
    """

    urls: Urls
    weight: float | None = None
    passes: float | None = None
    max_passes: int | None = None
    mean_length: float | None = None
    format: str | None = None
    where: str | None = None
    sample: float | None = None
    split: Sequence[object] | None = None
    limit: int | None = None
    map: str | Callable[..., Any] | None = None
    resizes: bool | None = None
    per_epoch: bool | None = None

    def own_options(self) -> dict[str, object]:
        """Return the loader's options that this source overrides, with the given values."""
        given = {name: getattr(self, name) for name in _OPTIONS}
        return {name: value for name, value in given.items() if value is not None}


class MixStep(NamedTuple):
    """The first step that may have samples by the new weights: an epoch, and a step in it, both
    0-based.
    """

    epoch: int
    step: int


@_own_arguments(_MEANT)
class Mixture:
    """Several datasets that one loader mixes. Pass a Mixture to DataLoader in place of a url.

    - `sources`: a dict from names to sources or, with `temperature`, to urls.
    - `temperature`: shares in proportion to n^(1/temperature), where n is a source's number of
      samples. With 1, shares are in proportion to n; larger values give more equal shares.
    - `unit`: the unit of weights: "samples", "tokens" or "batch". With "tokens", a source with
      longer samples gets fewer samples; lengths are estimated from the bytes of columns, or given
      by mean_length. With "batch", each global batch comes from one source.
    - `exhausted`: what happens when a source was read max_passes times. "stop" ends the epoch.
      "renormalise" continues with the other sources, until all are read. "cycle" reads the source
      again, until each source was read at least once.
    - `length`: the length of an epoch in `unit`, such as 10_000 or "10B tokens". The next epoch
      continues with the next samples of each source.
    - `source_column`: the name of an int32 column with the index of each sample's source.
    - `schedule`: other weights from given steps on, [(1000, {"web": 0.5, "code": 0.5}), …]. Steps
      count over all epochs. Weights apply from the next round on (1,024 samples of each lane).

    Raises:  ConfigError: a name, weight or number is invalid.
    """

    def __init__(
        self,
        sources: Mapping[str, Source | Urls],
        *,
        unit: str = "samples",
        exhausted: str = "stop",
        length: int | str | None = None,
        temperature: float | None = None,
        source_column: str | None = None,
        schedule: Iterable[tuple[int, Mapping[str, float]]] = (),
    ) -> None:
        if not isinstance(sources, Mapping) or not sources:
            raise ConfigError(
                f"a Mixture needs a dict of names and sources, not {sources!r:.80}", field="sources"
            )
        check_source_count(len(sources))
        self.sources = {name: _source(name, given) for name, given in sources.items()}
        self.unit = one_of("unit", unit, MixUnit)
        self.exhausted = one_of("exhausted", exhausted, Exhausted)
        self.length = _count("length", _counted(length, self.unit), _LENGTH_MAX)
        self.temperature, self.source_column = temperature, _column(source_column)
        self._check_weights()
        self.schedule = _schedule(tuple(self.sources), schedule)

    def __repr__(self) -> str:
        return f"Mixture({', '.join(self.sources)})"

    def asked(
        self, urls: Mapping[str, tuple[str, ...]], views: Mapping[str, View], form: str = ""
    ) -> MixtureAsked:
        """Return the message that requests the mixture. `urls` and `views` are those of the
        sources, with absolute urls; `form` is the format of sources that do not name their own.
        """
        return MixtureAsked(
            tuple(
                SourceAsked(
                    name,
                    DatasetSource(urls[name], source.format or form),
                    float(source.weight or 0),
                    float(source.passes or 0),
                    _count("max_passes", source.max_passes, _PASSES_MAX),
                    float(source.mean_length or 0),
                    views[name],
                )
                for name, source in self.sources.items()
            ),
            self.unit,
            self.exhausted,
            self.length,
            float(self.temperature or 0),
            self.source_column,
            self.schedule,
        )

    def _check_weights(self) -> None:
        said = {
            name: [one for one in (source.weight, source.passes) if one is not None]
            for name, source in self.sources.items()
        }
        for name, source in self.sources.items():
            given = {"weight": source.weight, "passes": source.passes}
            given |= {"mean_length": source.mean_length}
            for field, value in given.items():
                _check_number(name, field, value)
            _count("max_passes", source.max_passes, _PASSES_MAX, f"source {name!r}: ")
        if self.temperature is not None:
            _check_number("", "temperature", self.temperature)
            if any(said.values()):
                raise ConfigError(
                    "temperature= says how much of each source is read: leave out weights and"
                    " passes, or the temperature",
                    field="temperature",
                )
            return
        passes = [source.passes is not None for source in self.sources.values()]
        if any(len(each) != 1 for each in said.values()) or len(set(passes)) > 1:
            raise ConfigError(
                "say how much of each source is read in exactly one way: a weight for each, such as"
                ' {"web": Source(url, weight=0.7), …}, or passes for each, or temperature=1 for'
                " all in proportion to their samples",
                field="weight",
            )
        if self.unit is MixUnit.TOKENS and any(passes):
            raise ConfigError(
                'passes count samples: leave out unit="tokens", or give weights', field="unit"
            )


def source_of_text(text: str) -> tuple[str, Source]:
    """Parse the text of a command line, such as "web=s3://bucket/web/,weight=0.7": a name, a url,
    and arguments of Source.

    Raises:  ConfigError: the text has another form.
    """
    whole, *parts = _NEXT_OPTION.split(text)
    name, mark, url = whole.partition("=")
    given: dict[str, Any] = {}
    try:
        if not mark or not name or not url or "://" in name:
            raise ValueError
        for part in parts:
            option, _, value = part.partition("=")
            given[option] = _NUMBERS.get(option, str)(value)
    except ValueError as error:
        raise ConfigError(
            f"source {text!r:.200}: write NAME=URL,weight=0.7; other options are"
            f" {', '.join(f'{one}=' for one in _ON_COMMAND_LINES[1:])}",
            field="source",
        ) from error
    if "split" in given:
        given["split"] = split_of_text(given["split"])
    return name, Source(url, **given)


def weights_of(names: Sequence[str], given: object, field: str) -> tuple[float, ...]:
    """Return the weights of sources with these names, in their order.

    Raises:  ConfigError: there is not one weight for each, or all are 0.
    """
    example = ", ".join(f"{name!r}: …" for name in names[:_NAMED_MAX])
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"{field}: expected weights by source name, got {given!r:.80}: give {{{example}}}",
            field=field,
        )
    known = frozenset(names)
    unknown = next((name for name in given if name not in known), None)
    missing = next((name for name in names if name not in given), None)
    if unknown is not None or missing is not None:
        wrong = (
            f"{missing!r} is missing" if unknown is None else f"there is no source {unknown!r:.80}"
        )
        raise ConfigError(
            f"{field}: {wrong}. Give a weight for each of the sources"
            f" {', '.join(map(repr, names[:_NAMED_MAX]))}; 0 for a source that is not read",
            field=field,
        )
    for name in names:
        _check_number(name, "weight", given[name], field)
    if not any(given.values()):
        raise ConfigError(f"{field}: all weights are 0, so there is nothing to read", field=field)
    return tuple(float(given[name]) for name in names)


def _schedule(names: Sequence[str], given: object) -> tuple[ScheduledWeights, ...]:
    advice = 'give [(1000, {"web": 0.6, "code": 0.4}), …], with rising steps from 1 on'
    if isinstance(given, str | Mapping) or not isinstance(given, Iterable):
        raise ConfigError(f"schedule={given!r:.80}: {advice}", field="schedule")
    schedule: list[ScheduledWeights] = []
    for entry in given:
        if len(schedule) == min(_ENTRIES_MAX, _SCHEDULED_MAX // len(names)):
            raise ConfigError(
                f"a schedule of more than {len(schedule)} entries for {len(names)} sources is too"
                f" long: at most {_ENTRIES_MAX} entries and {_SCHEDULED_MAX} weights are allowed."
                " Change weights less often",
                field="schedule",
            )
        if not isinstance(entry, Sequence) or isinstance(entry, str) or len(entry) != _PAIR:
            raise ConfigError(f"schedule: invalid entry {entry!r:.80}: {advice}", field="schedule")
        step, least = whole(entry[0]), schedule[-1].step + 1 if schedule else 1
        if step is None or not least <= step <= _STEP_MAX:
            after = f" after step {schedule[-1].step}" if schedule else ""
            raise ConfigError(f"schedule: step {entry[0]!r:.80}{after}: {advice}", field="schedule")
        schedule.append(
            ScheduledWeights(step, weights_of(names, entry[1], f"schedule, step {step}"))
        )
    return tuple(schedule)


def _source(name: object, given: object) -> Source:
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{name!r:.80} is not a name for a source", field="sources")
    return given if isinstance(given, Source) else Source(given)  # type: ignore[arg-type]


def _column(given: object) -> str:
    if given is not None and not isinstance(given, str):
        raise ConfigError(
            f'source_column={given!r:.80}: pass the name of a new column, such as "source"',
            field="source_column",
        )
    return given or ""


def _count(field: str, given: object, most: int, whose: str = "") -> int:
    if given is None:
        return 0
    return whole_from(field, given, 1, most, f"{whose}{field}={given!r:.80}")


def _counted(length: object, unit: MixUnit) -> object:
    """Parse a count such as "10B tokens"; return anything else unchanged.

    Raises:  ConfigError: the text is invalid, or counts something else than `unit`.
    """
    if not isinstance(length, str):
        return length
    parts = _LENGTH.fullmatch(length.strip())
    count = Fraction(parts["count"].replace("_", "")) if parts else Fraction(0)
    count *= _POWERS[parts["power"].upper()] if parts else 1
    if parts is None or count.denominator > 1:
        raise ConfigError(
            f'length={length!r:.80}: write a whole number, such as 10_000, or a text: "10B tokens"'
            " (K, M, B or T), of tokens, samples or batches",
            field="length",
        )
    of = _UNITS_IN_WORDS[parts["unit"].lower()]
    if of is not unit:
        raise ConfigError(
            f"length={length!r:.80} with unit={unit.value!r}: the length of a mixture is in its"
            f" unit: pass unit={of.value!r}, too",
            field="length",
        )
    return int(count)


def _check_number(name: str, field: str, value: object, where: str = "") -> None:
    if value is None and not where:
        return
    # Accept numpy's numbers, too.
    number, least = math.nan, 0 if field == "weight" else 5e-324
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):
            number = float(value)
    most = _PASSES_MAX if field == "passes" else math.inf
    if math.isfinite(number) and least <= number <= most:
        return
    whose = f"{where}: " if where else ""
    whose += f"source {name!r}: " if name else ""
    kind = "0 or more" if field == "weight" else "more than 0"
    kind += f", and {most} at most" if math.isfinite(most) else ""
    raise ConfigError(f"{whose}{field}={value!r:.80}: pass a number, {kind}", field=field)
