"""Parse and print the values of settings as people write them: sizes, durations, counts, paths."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from msgspec import Struct

from dataplane.model.errors import ConfigError

if TYPE_CHECKING:
    from dataplane.base.machine import Machine

Value = str | int | float | bool
_Choice = TypeVar("_Choice", bound=StrEnum)

PREFIX = "DATAPLANE_"
SECONDS_MAX = 2e6
"""23 days, the longest timeout of poll(2): milliseconds in 31 bits."""
IMPORT_PATH_VARIABLE = "DATAPLANE_IMPORT_PATH"
"""The sys.path of the trainer that started this node, as JSON."""

_BYTES_OF = {"": 1, "b": 1}
_BYTES_OF |= {f"{letter}b": 1000 ** (i + 1) for i, letter in enumerate("kmgt")}
_BYTES_OF |= {f"{letter}ib": 1024 ** (i + 1) for i, letter in enumerate("kmgt")}
_SECONDS_OF = {"": 1.0, "ms": 0.001, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0}
_MINUTE_S, _HOUR_S = 60.0, 3600.0
_SWITCHES = {"1": True, "true": True, "yes": True, "on": True}
_SWITCHES |= {"0": False, "false": False, "no": False, "off": False}


class ValueKind(Struct, frozen=True):
    """One kind of value. `parse` takes text or a value that TOML parsed, and raises ValueError."""

    allowed: str
    metavar: str
    parse: Callable[[object], Value]
    show: Callable[[Value], str] = str


def meant(given: str, known: Iterable[str]) -> str:
    """Guess which known name was misspelt, and return the end of an error message: "; did you mean
    'x'?", or "" if no name is similar.
    """
    from difflib import get_close_matches  # slow to import, and needed only in errors

    near = get_close_matches(given, known, 1)
    return f"; did you mean {near[0]!r}?" if near else ""


def some_of(names: Sequence[str], most: int = 10) -> str:
    """Join the first names, for a message, and say how many more there are: "a, b and 5 more"."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def clipped(text: str, most: int) -> str:
    """Return at most about `most` characters of a message: up to the end of a clause in the second
    half, so that no advice is cut in the middle, or else of a word.
    """
    if len(text) <= most:
        return text
    clause = re.match(rf".{{{most // 2},{most}}}(?=[:;.] )", text)
    return clause[0] if clause else (text[: most + 1].rpartition(" ")[0] or text[:most]) + " …"


def show_bytes(value: Value) -> str:
    """Format a size: 4194304 -> "4 MiB"; a number that is not a multiple of 1024 stays in bytes."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if isinstance(value, int) and value and value % 1024**power == 0:
            return f"{value // 1024**power} {unit}"
    return f"{value} B"


def show_time(seconds: float) -> str:
    """Return a rounded duration for people: "40 s", "3 min" or "1.5 h"."""
    if seconds < _MINUTE_S:
        return f"{math.ceil(seconds)} s"
    if seconds < _HOUR_S:
        return f"{math.ceil(seconds / _MINUTE_S)} min"
    return f"{seconds / _HOUR_S:.1f} h"


def flag_of(setting: str) -> str:
    """Return the command-line flag of this setting."""
    return "--" + setting.replace("_", "-")


def variable_of(setting: str) -> str:
    """Return the environment variable of this setting."""
    return PREFIX + setting.upper()


def raise_to(setting: str, size: int) -> str:
    """Return advice for an error: how to raise a node's budget to at least this many bytes."""
    unit, name = (1 << 20, "MiB") if size > 1 << 20 else (1 << 10, "KiB")
    enough = f"{-(-size // unit)}{name}"
    return f"raise {setting} to {enough} or more ({ways_to_set(setting, enough)})"


def ways_to_set(setting: str, value: str) -> str:
    """List, as text, all places where a node's setting may be set."""
    return (
        f"{variable_of(setting)}={value} in the environment of whatever starts the node, "
        f"`dataplane serve {flag_of(setting)} {value}`, or {setting} in dataplane.toml"
    )


class Setting(Struct, frozen=True):
    """One setting, as a row of the table of settings. `default` is computed from the machine and
    the environment.
    """

    name: str
    kind: ValueKind
    meaning: str
    default: Callable[[Machine, Mapping[str, str]], Value]

    @property
    def flag(self) -> str:
        return flag_of(self.name)

    @property
    def variable(self) -> str:
        return variable_of(self.name)


def fixed(value: Value) -> Callable[[Machine, Mapping[str, str]], Value]:
    """Return a function for a default that is the same on every machine."""
    return lambda _machine, _environ: value


def _scaled(given: object, scale: dict[str, float] | dict[str, int]) -> float:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e\d+)?)\s*([a-z]*)\s*", str(given).lower())
    if match is None or match[2] not in scale:
        raise ValueError(given)
    number = int(match[1]) if match[1].isdecimal() else float(match[1])
    return number * scale[match[2]]


def _bytes_or_none(given: object) -> int:
    size = _scaled(given, _BYTES_OF)
    if size != int(size):
        raise ValueError(given)
    return int(size)


def _bytes(given: object) -> int:
    size = _bytes_or_none(given)
    if size < 1:
        raise ValueError(given)
    return size


def _seconds(given: object) -> float:
    seconds = float(_scaled(given, _SECONDS_OF))
    if not 0 < seconds <= SECONDS_MAX:
        raise ValueError(given)
    return seconds


def _count_or_none(given: object) -> int:
    count = _scaled(given, {"": 1})
    if count != int(count) or not 0 <= count <= 4096:
        raise ValueError(given)
    return int(count)


def _count(given: object) -> int:
    count = _count_or_none(given)
    if not count:
        raise ValueError(given)
    return count


def _switch(given: object) -> bool:
    if isinstance(given, bool):
        return given
    if not isinstance(given, str) or given.lower() not in _SWITCHES:
        raise ValueError(given)
    return _SWITCHES[given.lower()]


def text(given: object) -> str:
    """Return the value if it is a text without control characters.

    Raises:  ValueError: the value is something else.
    """
    if not isinstance(given, str) or not given or not given.isprintable():
        raise ValueError(given)
    return given


def whole(given: object) -> int | None:
    """Return a whole number of any type, including numpy's, as an int; None for all other values
    and for bools.
    """
    if isinstance(given, bool):
        return None
    try:
        return operator.index(given)  # type: ignore[arg-type]
    except TypeError:
        return None


def whole_from(name: str, given: object, least: int, most: int, said: str = "") -> int:
    """Return an argument that must be a whole number from `least` to `most`. Errors show it as
    `said`, or as "name=value".

    Raises:  ConfigError: the argument is something else.
    """
    number = whole(given)
    if number is None or not least <= number <= most:
        said = said or f"{name}={given!r:.80}"
        raise ConfigError(f"{said}: pass a whole number from {least} to {most}", field=name)
    return number


def one_of(name: str, given: object, choices: type[_Choice], said: str = "") -> _Choice:
    """Return the choice that an argument names. Errors show the argument as `said`, or as
    "name=value".

    Raises:  ConfigError: the argument names none of the choices.
    """
    for choice in choices:
        if isinstance(given, str) and given == choice.value:
            return choice
    names = ", ".join(choice.value for choice in choices)
    raise ConfigError(f"{said or f'{name}={given!r:.80}'}: choose one of {names}", field=name)


def _folder(given: object) -> str:
    return str(Path(text(given)).expanduser().absolute())


def _words(given: object) -> str:
    """Parse words to one text, with a space between two words."""
    words = given.split() if isinstance(given, str) else given
    if not isinstance(words, (list, tuple)) or any(" " in text(word) for word in words):
        raise ValueError(given)
    return " ".join(map(str, words))


def _file_or_none(given: object) -> str:
    return "" if given == "" else _folder(given)


def choice(*names: str, metavar: str) -> ValueKind:
    """Return the kind of a setting whose value is one of these words."""

    def parse(given: object) -> str:
        word = text(given).lower()
        if word not in names:
            raise ValueError(given)
        return word

    return ValueKind(f"{', '.join(names[:-1])} or {names[-1]}", metavar, parse)


BYTES = ValueKind('a number of bytes, or a size such as "512MiB"', "SIZE", _bytes, show_bytes)
BYTES_OR_NONE = ValueKind(f"{BYTES.allowed}, or 0", "SIZE", _bytes_or_none, show_bytes)
SECONDS = ValueKind(
    'seconds above 0, or with a unit: "30s", "500ms", "2min", up to 23 days',
    "TIME",
    _seconds,
    lambda value: f"{value:g} s",
)
COUNT = ValueKind("a whole number from 1 to 4096", "N", _count)
COUNT_OR_NONE = ValueKind("a whole number from 0 to 4096", "N", _count_or_none)
SWITCH = ValueKind("true or false", "BOOL", _switch, lambda value: str(value).lower())
FOLDER = ValueKind("the path of a folder", "DIR", _folder)
WORDS = ValueKind("words separated by spaces, or a list of them in a TOML file", "WORDS", _words)
FILE_OR_NONE = ValueKind('the path of a file, or "" for none', "FILE", _file_or_none)
