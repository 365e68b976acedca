"""The codec of all sockets and pipes: messages are Structs, and MessagePack on the wire.

A message is an array: the name of its class, then its fields in their order. Both sides have one
version, so a class may change in any way. Processes of several versions meet only when a trainer
says Hello to a node. So that each can say which versions there are, `ToNode`, `Hello`, `FromNode`,
`Welcome` and `SentError` keep their names and fields: new fields come last and have defaults, and
an older version passes over those that it does not know.
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
"""Characters of a text beside one that cannot be sent."""


class Message(Struct, frozen=True, array_like=True, tag=True):
    """A message, or a part of one."""


class SentError(Message, frozen=True):
    """An error: its class, its message, and its nouns in JSON. Never a pickle."""

    name: str
    message: str
    nouns: dict[str, str]

    @classmethod
    def of(cls, error: DataplaneError) -> SentError:
        """An error as it is sent."""
        nouns = {name: json.dumps(noun) for name, noun in error.nouns.items()}
        # Names of files and errors of others may have what UTF-8 has not: lone surrogates.
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
    # To msgspec, one of several bodies is a Struct; an `Envelope` has the error itself.
    Failure = SentError


class Envelope(Message, frozen=True):
    """A message around one of several bodies. Errors are among those as `Failure`."""

    def __post_init__(self) -> None:
        body = cast(Any, self).body
        if type(body) is SentError:
            force_setattr(self, "body", body.error)


def encode(value: object) -> bytes:
    """The wire bytes of a message.

    Raises:  ConfigError: a text in it cannot be sent.
    """
    try:
        return _ENCODER.encode(value)
    except UnicodeEncodeError as error:
        raise not_sent(error) from error


def not_sent(error: UnicodeEncodeError) -> ConfigError:
    """The error about a text that cannot be sent."""
    start = max(0, error.start - _SHOWN_AROUND)
    return ConfigError(
        f"{error.object[start : error.end + _SHOWN_AROUND]!r} has half of a surrogate pair, "
        "which is not a character: pass text that UTF-8 can encode"
    )


def decode(cls: type[T], wire: bytes) -> T:
    """The inverse of `encode`.

    Raises:  ConfigError: the bytes are not such a message.
    """
    try:
        return cast(T, _decoder(cast(Any, cls)).decode(wire))
    # Those of msgspec are ValueErrors only in its newer versions.
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ConfigError(f"not a {cls.__name__} message: {error}") from error


@functools.cache
def _decoder(cls: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(complete(cls), dec_hook=_read)


def _write(value: Any) -> Any:
    """The form in which a value is sent that msgspec does not know."""
    if isinstance(value, DataplaneError):
        return SentError.of(value)
    if isinstance(value, numbers.Integral):  # of numpy
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    raise TypeError(f"{type(value)} cannot be sent")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_write)


def _read(cls: type, sent: Any) -> Any:
    """The error in a field, which is the only type that msgspec does not know."""
    if not issubclass(cls, DataplaneError):
        raise TypeError(f"{cls} cannot be sent")
    return msgspec.convert(sent, complete(SentError)).error
