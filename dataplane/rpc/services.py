"""The methods of a gRPC service, read from its descriptor: only the proto files list them."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

from msgspec import Struct

from dataplane.rpc.bounds import ELEMENTS_MAX
from dataplane.rpc.convert import decode, encode, value_class
from dataplane.rpc.v1 import coordinator_pb2

REQUEST_BYTES_MAX = 4 << 20
RESPONSE_BYTES_MAX = 64 << 20


class Method(Struct, frozen=True):
    """One unary method. Its requests and answers are values of membership.py and sharing.py."""

    name: str
    path: str
    python_name: str
    read_request: Callable[[bytes], Any]
    read_response: Callable[[bytes], Any]
    write: Callable[[Any], bytes] = encode


COORDINATOR: str = coordinator_pb2.DESCRIPTOR.services_by_name["Coordinator"].full_name


def coordinator_methods() -> tuple[Method, ...]:
    """Return every method of the coordinator's service."""
    service = coordinator_pb2.DESCRIPTOR.services_by_name["Coordinator"]
    return tuple(
        Method(
            name=method.name,
            path=f"/{service.full_name}/{method.name}",
            python_name=re.sub(r"(?<!^)(?=[A-Z])", "_", method.name).lower(),
            read_request=functools.partial(
                decode, value_class(method.input_type), elements_max=ELEMENTS_MAX
            ),
            read_response=functools.partial(decode, value_class(method.output_type)),
        )
        for method in service.methods
    )
