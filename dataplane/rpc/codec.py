"""The codec of all sockets and pipes: messages are Structs, and MessagePack on the wire.

A message is an array: the name of its class, then its fields in order. Both sides have the same
version, so a class may change in any way. Processes of different versions meet only when a trainer
sends Hello to a node. So that both can still report their versions, `ToNode`, `Hello`, `FromNode`,
`Welcome` and `SentError` keep their names and fields: new fields come last and have defaults, and
an older version ignores fields that it does not know.
"""

from __future__ import annotations

import functools
import json
import numbers
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec
from msgspec import Struct
from msgspec.structs import force_setattr

from dataplane.model import errors
from dataplane.model.errors import ConfigError, DataplaneError
from dataplane.model.typed import complete

T = TypeVar("T")

_SHOWN_AROUND = 20
"""The number of characters that an error shows on each side of a character that cannot be sent."""


class Message(Struct, frozen=True, array_like=True, tag=True):
    """A message, or a part of one."""


class SentError(Message, frozen=True):
    """An error: its class, its message, and its nouns in JSON. Never a pickle."""

    name: str
    message: str
    nouns: dict[str, str]

    @classmethod
    def of(cls, error: DataplaneError) -> SentError:
        """Return an error in the form in which it is sent."""
        nouns = {name: json.dumps(noun) for name, noun in error.nouns.items()}
        # Escape lone surrogates, which UTF-8 cannot encode: file names and foreign error messages
        # may contain them.
        message = str(error).encode(errors="backslashreplace").decode()
        return cls(type(error).__name__, message, nouns)

    @property
    def error(self) -> DataplaneError:
        """The error that was sent."""
        nouns = {name: json.loads(noun) for name, noun in self.nouns.items()}
        return errors.rebuild(self.name, self.message, nouns)


if TYPE_CHECKING:
    Failure = DataplaneError
else:
    # Use a Struct as the type for msgspec, which only decodes unions of Structs. `Envelope` then
    # replaces the SentError by the error itself.
    Failure = SentError


class Envelope(Message, frozen=True):
    """A message around one of several bodies. The body of an error is declared as `Failure`."""

    def __post_init__(self) -> None:
        body = cast(Any, self).body
        if type(body) is SentError:
            force_setattr(self, "body", body.error)


def encode(value: object) -> bytes:
    """Return the wire bytes of a message.

    Raises:  ConfigError: a text in the message cannot be sent.
    """
    try:
        return _ENCODER.encode(value)
    except UnicodeEncodeError as error:
        raise not_sent(error) from error


def not_sent(error: UnicodeEncodeError) -> ConfigError:
    """Return the error about a text that cannot be sent."""
    start = max(0, error.start - _SHOWN_AROUND)
    return ConfigError(
        f"{error.object[start : error.end + _SHOWN_AROUND]!r} has half of a surrogate pair, "
        "which is not a character: pass text that UTF-8 can encode"
    )


def decode(cls: type[T], wire: bytes) -> T:
    """Return the message of this class that `encode` made these bytes of.

    Raises:  ConfigError: the bytes are not such a message.
    """
    try:
        return cast(T, _decoder(cast(Any, cls)).decode(wire))
    # Catch MsgspecError too: in older versions of msgspec it is not a ValueError.
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ConfigError(f"not a {cls.__name__} message: {error}") from error


@functools.cache
def _decoder(cls: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(complete(cls), dec_hook=_read)


def _write(value: Any) -> Any:
    """Return the form in which to send a value of a type that msgspec does not know."""
    if isinstance(value, DataplaneError):
        return SentError.of(value)
    if isinstance(value, numbers.Integral):  # a numpy integer
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    raise TypeError(f"{type(value)} cannot be sent")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_write)


def _read(cls: type, sent: Any) -> Any:
    """Return the error in a field: errors are the only decoded type that msgspec does not know."""
    if not issubclass(cls, DataplaneError):
        raise TypeError(f"{cls} cannot be sent")
    return msgspec.convert(sent, complete(SentError)).error
