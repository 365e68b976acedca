"""Conversion of our errors to gRPC statuses and back.

The status code is for proxies, dashboards and other people's clients. Our own clients read the
Error message in the trailing metadata, which has class, message and nouns.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from dataplane.model import errors
from dataplane.model.errors import DataplaneError, Noun
from dataplane.rpc.convert import error_from_proto, error_to_proto
from dataplane.rpc.v1 import types_pb2

ERROR_KEY = "dataplane-error-bin"

# Keep errors small: gRPC drops trailing metadata over 8 KiB, which loses the whole error. On the
# wire, values of "-bin" keys grow by a third.
_ERROR_BYTES_MAX = 4096
_DETAILS_LENGTH_MAX = 512
_NOUNS_MAX = 8
_CONNECTING, _HUNG_UP = "failed to connect", ("Socket closed", "Connection reset by peer")
_NOT_TRUSTED = "CERTIFICATE_VERIFY_FAILED"
_NOT_AT_THIS_TIME = ("certificate has expired", "certificate is not yet valid")

# The code of an error is that of its nearest listed base class: for a LeaseFenced, which is not
# listed, the code of LeaseError.
_CODES: dict[type[DataplaneError], grpc.StatusCode] = {
    errors.ConfigError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.AccessDenied: grpc.StatusCode.PERMISSION_DENIED,
    errors.ClosedError: grpc.StatusCode.UNAVAILABLE,
    errors.PeerLost: grpc.StatusCode.UNAVAILABLE,
    errors.LeaseError: grpc.StatusCode.ABORTED,
    errors.ShardNotFound: grpc.StatusCode.NOT_FOUND,
    errors.StoreDenied: grpc.StatusCode.PERMISSION_DENIED,
    errors.StoreThrottled: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.StoreError: grpc.StatusCode.UNAVAILABLE,
    errors.TruncatedRead: grpc.StatusCode.DATA_LOSS,
    errors.DatasetChangedError: grpc.StatusCode.ABORTED,
    errors.CorruptShard: grpc.StatusCode.DATA_LOSS,
    errors.DataStallError: grpc.StatusCode.DEADLINE_EXCEEDED,
    DataplaneError: grpc.StatusCode.INTERNAL,
}


def code_of(error: DataplaneError) -> grpc.StatusCode:
    """Return the status code with which an error is sent."""
    return next(_CODES[cls] for cls in type(error).__mro__ if cls in _CODES)


def trailer_of(error: DataplaneError) -> tuple[tuple[str, bytes], ...]:
    """Return the trailing metadata of an error, cut to the size limit of headers."""
    wire = error_to_proto(error).SerializeToString()
    for length in (1024, 256, 32):
        if len(wire) > _ERROR_BYTES_MAX:
            wire = error_to_proto(_cut(error, length)).SerializeToString()
    return ((ERROR_KEY, wire),)


def details_of(error: DataplaneError) -> str:
    """Return one line for clients that do not read the trailing metadata."""
    return f"{type(error).__name__}: {_short(str(error), _DETAILS_LENGTH_MAX)}"


def error_of(failure: grpc.aio.AioRpcError, peer: str) -> DataplaneError:
    """Return the error behind a failed call: the error that the peer sent, or an error about the
    connection.
    """
    sent = _sent(failure.trailing_metadata() or ())
    if sent is not None:
        return sent
    code, details = failure.code(), failure.details() or "no details"
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        if _NOT_TRUSTED in details and any(one in details for one in _NOT_AT_THIS_TIME):
            return errors.PeerLost(
                f"the certificate of what answers at {peer} is not valid now, by the clock of this "
                f"host: renew it there, or set the clock ({details})",
                peer=peer,
            )
        if _NOT_TRUSTED in details:
            return errors.PeerLost(
                f"what answers at {peer} has a certificate that is not trusted here, or for "
                f"another name: give --tls-ca the CA of the coordinator, and address it by "
                f"a name that its certificate has ({details})",
                peer=peer,
            )
        if _CONNECTING in details and any(one in details for one in _HUNG_UP):
            return errors.PeerLost(
                f"{peer} hangs up at once: if it runs, it expects TLS (--tls-ca) or a certificate "
                f"of a client (--tls-cert, --tls-key) that it trusts, or it has no place for "
                f"another connection, which its log then says ({details})",
                peer=peer,
            )
        return errors.PeerLost(f"nobody answers at {peer}: {details}", peer=peer)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return errors.PeerLost(f"no answer from {peer} in time: {details}", peer=peer)
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return errors.VersionMismatch(
            f"{peer} does not know this call: it is not a Dataplane service, or has another "
            f"version ({details})",
            peer=peer,
        )
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return errors.ConfigError(f"{peer} refused the size of a message: {details}", peer=peer)
    return DataplaneError(f"{peer} failed with {code.name}: {details}", peer=peer)


def _sent(metadata: Iterable[tuple[str, str | bytes]]) -> DataplaneError | None:
    for key, value in metadata:
        if key == ERROR_KEY:
            message = types_pb2.Error()
            try:
                message.ParseFromString(cast(bytes, value))
                return error_from_proto(message)
            except (DecodeError, ValueError):
                return None
    return None


def _cut(error: DataplaneError, length: int) -> DataplaneError:
    nouns: dict[str, Noun] = {}
    for name, noun in list(error.nouns.items())[:_NOUNS_MAX]:
        nouns[name] = _short(noun, length // 4) if isinstance(noun, str) else noun
    return errors.rebuild(type(error).__name__, _short(str(error), length), nouns)


def _short(text: str, length: int) -> str:
    half = length // 2
    return text if len(text) <= length else f"{text[:half]} … {text[-half:]}"
