"""Frozen values to protobuf messages and back, by the descriptors themselves.

One converter a class is made on first use from the dataclass's fields and the message's
descriptor, so that a field is named in two places only: the proto file, and the frozen value.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from google.protobuf.message import DecodeError as _DecodeError
from google.protobuf.message import Message

from dataplane import config, errors, model
from dataplane.rpc import membership, messages, tasks
from dataplane.rpc.v1 import coordinator_pb2, local_pb2, types_pb2, worker_pb2

T = TypeVar("T")
_Convert = Callable[[Any], Any]
_Class = Any  # a class: mypy holds that `type[object]` has no hash
Descriptor = Any
FieldDescriptor = Any

_MODULES = (types_pb2, coordinator_pb2, local_pb2, worker_pb2)
_VALUES = {
    "coordinator.proto": membership,
    "local.proto": messages,
    "worker.proto": tasks,
}
_SHARED: dict[str, type] = {
    "JobSpec": config.JobSpec,
    "Topology": model.Topology,
    "Region": model.Region,
    "ColumnSpec": model.ColumnSpec,
}
_ENVELOPE = "body"


def encode(value: object) -> bytes:
    """The wire bytes of a value."""
    return to_proto(value).SerializeToString()


def decode(cls: type[T], wire: bytes) -> T:
    """The value that `encode` was given.

    Raises:  ConfigError: the bytes are not such a message.
    """
    message = _message_class(cast(_Class, cls))()
    try:
        message.ParseFromString(wire)
    except _DecodeError as error:
        raise errors.ConfigError(f"not a {cls.__name__} message: {error}") from error
    try:
        return from_proto(cls, message)
    except (KeyError, TypeError, ValueError) as error:  # an enum or a noun that is none
        raise errors.ConfigError(f"not a {cls.__name__} message: {error!r}") from error


def to_proto(value: object) -> Message:
    """The protobuf message that says the same."""
    if isinstance(value, errors.DataplaneError):
        return error_to_proto(value)
    cls: _Class = type(value)
    message = _message_class(cls)()
    for name, is_set, put in _writers(cls):
        field_value = getattr(value, name)
        if is_set(field_value):
            put(message, field_value)
    return message


def from_proto(cls: type[T], message: Message) -> T:
    """The value that says the same as this message."""
    if issubclass(cls, errors.DataplaneError):
        return cast(T, error_from_proto(message))
    readers = _readers(cast(_Class, cls))
    return cls(**{name: read(message) for name, read in readers})


def error_to_proto(error: errors.DataplaneError) -> Message:
    """An error as class name, message and nouns."""
    nouns = {name: json.dumps(noun) for name, noun in error.nouns.items()}
    return types_pb2.Error(name=type(error).__name__, message=str(error), nouns=nouns)


def error_from_proto(message: Any) -> errors.DataplaneError:
    """The error that crossed the wire."""
    nouns = {name: json.loads(noun) for name, noun in message.nouns.items()}
    return errors.rebuild(message.name, message.message, nouns)


@functools.cache
def _message_class(cls: _Class) -> type[Message]:
    name = "Error" if issubclass(cls, errors.DataplaneError) else cls.__name__
    for module in _MODULES:
        found = getattr(module, name, None)
        if found is not None:
            return cast("type[Message]", found)
    raise TypeError(f"no proto file defines {name}")


def _value_class(descriptor: Descriptor) -> type[Any]:
    if descriptor.name == "Error":
        return errors.DataplaneError
    if descriptor.name in _SHARED:
        return _SHARED[descriptor.name]
    room = _VALUES[descriptor.file.name.rpartition("/")[2]]
    return cast(type, getattr(room, descriptor.name))


@functools.cache
def _writers(cls: _Class) -> tuple[tuple[str, Callable[[Any], bool], Callable[..., None]], ...]:
    by_name = _message_class(cls).DESCRIPTOR.fields_by_name
    return tuple(
        (field.name, _is_set, _envelope_writer(cls))
        if field.name == _ENVELOPE
        else (field.name, _is_set, _writer(by_name[field.name]))
        for field in dataclasses.fields(cls)
    )


def _is_set(value: Any) -> bool:
    return value is not None


def _envelope_writer(cls: type) -> Callable[[Any, Any], None]:
    fields = {
        _value_class(field.message_type): field.name
        for field in _message_class(cls).DESCRIPTOR.oneofs_by_name[_ENVELOPE].fields
    }

    def write(message: Any, value: Any) -> None:
        kind = errors.DataplaneError if isinstance(value, errors.DataplaneError) else type(value)
        getattr(message, fields[kind]).CopyFrom(to_proto(value))

    return write


def _writer(field: FieldDescriptor) -> Callable[[Any, Any], None]:
    name, convert = field.name, _scalar_to_proto(field)
    if field.is_repeated:
        return lambda message, values: getattr(message, name).extend(map(convert, values))
    if field.message_type is not None:
        return lambda message, value: getattr(message, name).CopyFrom(convert(value))
    return lambda message, value: setattr(message, name, convert(value))


def _scalar_to_proto(field: FieldDescriptor) -> _Convert:
    if field.message_type is not None:
        if field.message_type.name == "FillNull":
            return lambda pair: types_pb2.FillNull(column=pair[0], value=pair[1])
        return to_proto
    if field.enum_type is not None:
        numbers = field.enum_type.values_by_name
        prefix = _enum_prefix(field)
        return lambda value: numbers[prefix + value.name].number
    return _same


def _same(value: Any) -> Any:
    return value


def _enum_prefix(field: FieldDescriptor) -> str:
    first: str = field.enum_type.values[0].name
    return first.removesuffix("UNSPECIFIED")


@functools.cache
def _readers(cls: _Class) -> tuple[tuple[str, Callable[[Any], Any]], ...]:
    by_name = _message_class(cls).DESCRIPTOR.fields_by_name
    hints = typing.get_type_hints(cls)
    return tuple(
        (field.name, _envelope_reader(cls))
        if field.name == _ENVELOPE
        else (field.name, _reader(by_name[field.name], _optional(hints[field.name])))
        for field in dataclasses.fields(cls)
    )


def _optional(hint: Any) -> bool:
    return isinstance(hint, types.UnionType) and type(None) in typing.get_args(hint)


def _envelope_reader(cls: type) -> Callable[[Any], Any]:
    kinds = {
        field.name: _value_class(field.message_type)
        for field in _message_class(cls).DESCRIPTOR.oneofs_by_name[_ENVELOPE].fields
    }

    def read(message: Any) -> Any:
        name = message.WhichOneof(_ENVELOPE)
        if name is None:
            raise errors.ConfigError(f"an empty {cls.__name__} message")
        return from_proto(kinds[name], getattr(message, name))

    return read


def _reader(field: FieldDescriptor, optional: bool) -> Callable[[Any], Any]:
    name, convert = field.name, _scalar_from_proto(field)
    if field.is_repeated:
        return lambda message: tuple(map(convert, getattr(message, name)))
    if optional:
        return lambda message: convert(getattr(message, name)) if message.HasField(name) else None
    return lambda message: convert(getattr(message, name))


def _scalar_from_proto(field: FieldDescriptor) -> _Convert:
    if field.message_type is not None:
        if field.message_type.name == "FillNull":
            return lambda pair: (pair.column, pair.value)
        return functools.partial(from_proto, _value_class(field.message_type))
    if field.enum_type is not None:
        members: Mapping[int, enum.Enum] = _enum_members(field)
        return lambda number: members[number]
    return _same


def _enum_members(field: FieldDescriptor) -> Mapping[int, enum.Enum]:
    cls = cast("type[enum.Enum]", getattr(model, field.enum_type.name))
    values = field.enum_type.values_by_name
    prefix = _enum_prefix(field)
    members = {values[prefix + member.name].number: member for member in cls}
    return {0: next(iter(cls)), **members}
