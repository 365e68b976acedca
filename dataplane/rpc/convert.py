"""Conversion of the coordinator's requests and answers to protobuf and back, by descriptors.

When a class is first sent or received, its converter is made from the fields of the class and the
message's descriptor. So a field is named in only two places: the proto file and the frozen value.
Other messages have no protobuf form: see codec.py.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import math
import operator
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

from google.protobuf.message import DecodeError as _DecodeError
from google.protobuf.message import Message
from msgspec import Struct

from dataplane.model import changes, config, errors, ledger, records
from dataplane.rpc import codec, membership, sharing
from dataplane.rpc.bounds import VALUES_MAX, check_values
from dataplane.rpc.v1 import coordinator_pb2, sharing_pb2, types_pb2

T = TypeVar("T")
_Convert = Callable[[Any], Any]
_Class = Any  # a class; not `type[object]`, which mypy considers unhashable
Descriptor = Any
FieldDescriptor = Any
_BYTES = 2
"""The wire type of fields that are preceded by their length."""
_OF_BYTES = {9, 12}
"""The field types of strings and bytes, which are never packed."""
_FIELDS_AN_ELEMENT = 16
_FIELDS_A_TURN, _PARTS_A_TURN, _TURN_PAUSE_S = 500, 50, 0.001

_SHARED: dict[str, type] = {
    "Topology": records.Topology,
    "DatasetIdentity": records.DatasetIdentity,
    "MixHistory": records.MixHistory,
    "ShareChange": records.ShareChange,
    "LedgerEntry": ledger.LedgerEntry,
    "LedgerMark": ledger.LedgerMark,
    "LedgerPosition": ledger.LedgerPosition,
    "ReplacedRow": changes.ReplacedRow,
    "Tombstone": records.Tombstone,
}
# Values that are encoded by codec.py and sent as bytes, so that a new option needs no change of the
# proto files.
_OPAQUE = {"JobSpec": config.JobSpec}
# Large messages with many receivers: convert each value once for all receivers.
_FOR_MANY = {"JobNodes"}
_FOR_MANY_MAX = 64


def encode(value: object) -> bytes:
    """Return the wire bytes of a value.

    Raises:  ConfigError: a text in the value cannot be sent.
    """
    cls: _Class = type(value)
    try:
        if isinstance(value, errors.DataplaneError):
            return error_to_proto(value).SerializeToString()
        return _message_class(cls)(**_writer(cls)(value)).SerializeToString()
    except UnicodeEncodeError as error:
        raise codec.not_sent(error) from error


def decode(cls: type[T], wire: bytes, elements_max: float = math.inf) -> T:
    """Return the value of this class that `encode` made these bytes of.

    Raises:  ConfigError: the bytes are not such a message, or its lists together have more than
    `elements_max` elements: an element takes far more memory and time than the two bytes that are
    enough to send it.
    """
    message = _message_class(cast(_Class, cls))()
    if len(wire) > elements_max:
        _check_elements(wire, message.DESCRIPTOR, elements_max)
    try:
        message.ParseFromString(wire)
    except _DecodeError as error:
        raise errors.ConfigError(f"not a {cls.__name__} message: {error}") from error
    try:
        return cast(T, _reader(cast(_Class, cls))(message))
    except (KeyError, TypeError, ValueError) as error:  # an invalid enum or noun
        raise errors.ConfigError(f"not a {cls.__name__} message: {error!r}") from error


def _check_elements(wire: bytes, descriptor: Descriptor, most: float) -> None:
    """Count the elements of a message. This is done before parsing, since protobuf's parser holds
    the interpreter lock; the count pauses to let other threads run, so call it in a thread. Bytes
    that are not a message are left to the parser.

    Source:  protobuf.dev/programming-guides/encoding.
    Raises:  ConfigError: there are more than `most` elements.
    """
    count, fields, parts = 0, 0, [(0, len(wire), descriptor)]
    with contextlib.suppress(IndexError):
        while parts:
            at, end, kind = parts.pop()
            known = _fields_by_number(kind)
            while at < end:
                tag, at = _varint(wire, at)
                length, at = _value_length(wire, at, tag & 7)
                field = known.get(tag >> 3)
                fields += 1
                if not fields % _FIELDS_A_TURN:
                    time.sleep(_TURN_PAUSE_S)  # let other threads take the interpreter lock
                if field is not None and tag & 7 == _BYTES and field.message_type is not None:
                    parts.append((at, min(at + length, end), field.message_type))
                    count += 1
                elif field is not None and field.is_repeated:
                    is_packed = tag & 7 == _BYTES and field.type not in _OF_BYTES
                    count += length if is_packed else 1
                at += length
                if count > most or fields > _FIELDS_AN_ELEMENT * most:
                    raise errors.ConfigError(
                        f"a {descriptor.name} message has more than {most} elements in lists: "
                        "name fewer urls, sources or columns"
                    )


@functools.cache
def _fields_by_number(descriptor: Descriptor) -> Mapping[int, FieldDescriptor]:
    return dict(descriptor.fields_by_number)


def _value_length(wire: bytes, at: int, wire_type: int) -> tuple[int, int]:
    """Return the length and the start of a value.   Raises:  IndexError: there is no value."""
    if wire_type == 0:
        return _varint(wire, at)[1] - at, at
    if wire_type == _BYTES:
        return _varint(wire, at)
    return {1: 8, 5: 4}.get(wire_type, len(wire)), at


def _varint(wire: bytes, at: int) -> tuple[int, int]:
    """Return a number, and the offset behind it.   Raises:  IndexError: the number has no end."""
    byte = wire[at]
    if byte < 0x80:
        return byte, at + 1
    number, shift = byte & 0x7F, 7
    while byte >= 0x80:
        at += 1
        byte = wire[at]
        number |= (byte & 0x7F) << shift
        shift += 7
    return number, at + 1


def error_to_proto(error: errors.DataplaneError) -> Message:
    """Return the message for an error: class name, message and nouns."""
    sent = codec.SentError.of(error)
    return types_pb2.Error(name=sent.name, message=sent.message, nouns=sent.nouns)


def error_from_proto(message: Any) -> errors.DataplaneError:
    """Return the error that was sent."""
    return codec.SentError(message.name, message.message, dict(message.nouns)).error


def _field_names(cls: _Class) -> Sequence[str]:
    """Return the fields, in order, of a Struct, or of a dataclass that users construct."""
    return cls.__struct_fields__ if issubclass(cls, Struct) else tuple(cls.__dataclass_fields__)


@functools.cache
def _message_class(cls: _Class) -> type[Message]:
    name = "Error" if issubclass(cls, errors.DataplaneError) else cls.__name__
    for module in (types_pb2, coordinator_pb2, sharing_pb2):
        found = getattr(module, name, None)
        if found is not None:
            return cast("type[Message]", found)
    raise TypeError(f"no proto file defines {name}")


def value_class(descriptor: Descriptor) -> _Class:
    """Return the class whose values are sent as messages of this type or numbers of this enum."""
    if descriptor.name == "Error":
        return errors.DataplaneError
    if descriptor.name in _SHARED:
        return _SHARED[descriptor.name]
    is_of_coordinator = descriptor.file is coordinator_pb2.DESCRIPTOR
    return getattr(membership if is_of_coordinator else sharing, descriptor.name)


@functools.cache
def _writer(cls: _Class) -> Callable[[Any], dict[str, Any]]:
    """Return a function that converts a value to the arguments of its message's constructor. Nested
    messages become dicts, and None stays None, which leaves the field unset.
    """
    by_name = _message_class(cls).DESCRIPTOR.fields_by_name
    converts = [
        (name, _field_writer(by_name[name], cls.__annotations__[name]))
        for name in _field_names(cls)
    ]
    plain = [name for name, convert in converts if convert is _same]
    others = [(name, convert) for name, convert in converts if convert is not _same]

    def write(value: Any) -> dict[str, Any]:
        fields = {name: getattr(value, name) for name in plain}
        for name, convert in others:
            part = getattr(value, name)
            fields[name] = None if part is None else convert(part)
        return fields

    return write


def _field_writer(field: FieldDescriptor, annotation: str) -> _Convert:
    if annotation in _OPAQUE:
        return codec.encode
    convert = _part_writer(field)
    if field.is_repeated and convert is not _same:
        return lambda values: [convert(value) for value in values]
    return convert


def _part_writer(field: FieldDescriptor) -> _Convert:
    if field.message_type is not None:
        if field.message_type.name == "Error":
            return error_to_proto
        cls = value_class(field.message_type)
        return _once(cls) if field.message_type.name in _FOR_MANY else _writer(cls)
    if field.enum_type is not None:
        numbers = field.enum_type.values_by_name
        prefix = _enum_prefix(field)
        return lambda value: numbers[prefix + value.name].number
    return _same


def _once(cls: _Class) -> _Convert:
    """Return a function that converts a value, and remembers the messages of the last values."""
    write, message_class = _writer(cls), _message_class(cls)
    made: OrderedDict[int, tuple[Any, Message]] = OrderedDict()

    def convert(value: Any) -> Message:
        known = made.get(id(value))
        if known is None:  # a known id means the same object: `made` keeps the object alive
            known = made[id(value)] = (value, message_class(**write(value)))
            if len(made) > _FOR_MANY_MAX:
                made.popitem(last=False)
        return known[1]

    return convert


def _same(value: Any) -> Any:
    return value


def _enum_prefix(field: FieldDescriptor) -> str:
    first: str = field.enum_type.values[0].name
    return first.removesuffix("UNSPECIFIED")


@functools.cache
def _reader(cls: _Class) -> Callable[[Any], Any]:
    """Return a function that makes the value of a message."""
    if issubclass(cls, errors.DataplaneError):
        return error_from_proto
    by_name = _message_class(cls).DESCRIPTOR.fields_by_name
    names = _field_names(cls)
    reads = [_field_reader(by_name[name], cls.__annotations__[name]) for name in names]
    if len(names) > 1 and all(isinstance(read, operator.attrgetter) for read in reads):
        together = operator.attrgetter(*names)
        return lambda message: cls(*together(message))
    return lambda message: cls(*[read(message) for read in reads])


def _field_reader(field: FieldDescriptor, annotation: str) -> Callable[[Any], Any]:
    name = field.name
    if annotation in _OPAQUE:
        return lambda message: _decoded(_OPAQUE[annotation], getattr(message, name))
    convert = _part_reader(field)
    if field.is_repeated:
        if convert is _same:
            return lambda message: tuple(getattr(message, name))
        return lambda message: tuple(_converted(convert, getattr(message, name)))
    if annotation.endswith("| None"):
        return lambda message: convert(getattr(message, name)) if message.HasField(name) else None
    if convert is _same:
        return operator.attrgetter(name)
    return lambda message: convert(getattr(message, name))


def _decoded(cls: _Class, wire: bytes) -> Any:
    check_values(cls.__name__, wire, VALUES_MAX)
    return codec.decode(cls, wire)


def _converted(convert: _Convert, parts: Sequence[Any]) -> list[Any]:
    """Return the values of these parts. Outside the main thread, pause between many parts, so that
    other threads can run.
    """
    if len(parts) <= _PARTS_A_TURN or threading.current_thread() is threading.main_thread():
        return [convert(part) for part in parts]
    values: list[Any] = []
    for at in range(0, len(parts), _PARTS_A_TURN):
        values += map(convert, parts[at : at + _PARTS_A_TURN])
        time.sleep(_TURN_PAUSE_S)
    return values


def _part_reader(field: FieldDescriptor) -> _Convert:
    if field.message_type is not None:
        return _reader(value_class(field.message_type))
    if field.enum_type is not None:
        members: Mapping[int, enum.Enum] = _enum_members(field)
        return lambda number: members[number]
    return _same


def _enum_members(field: FieldDescriptor) -> Mapping[int, enum.Enum]:
    enum_type = field.enum_type
    cls: type[enum.Enum] = value_class(enum_type)
    values = enum_type.values_by_name
    prefix = _enum_prefix(field)
    members = {values[prefix + member.name].number: member for member in cls}
    return {0: next(iter(cls)), **members}
