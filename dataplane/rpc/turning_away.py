"""Lets the kernel turn hosts away from a listening socket: it drops their packets, so that to them
nobody listens there.

Connections that they have stay open. Those that the socket accepts from others meanwhile inherit
its filter, which lets all of their packets pass.

Source: socket(7), SO_ATTACH_FILTER; Documentation/networking/filter.rst
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import socket
import struct
from collections.abc import Sequence

_ATTACH_FILTER, _DETACH_FILTER = 26, 27
_HOSTS_MAX = 32
_LOAD, _LOAD_BYTE, _SHIFT_RIGHT, _IS, _RETURN = 0x20, 0x30, 0x74, 0x15, 0x06
_IP_HEADER = 0xFFF00000
_SOURCE_4, _SOURCE_6 = _IP_HEADER + 12, _IP_HEADER + 8
_DROP, _PASS = (_RETURN, 0, 0, 0), (_RETURN, 0, 0, 0xFFFFFFFF)

_Instruction = tuple[int, int, int, int]


def turn_away(listener: socket.socket, hosts: Sequence[str]) -> None:
    """Turn these away and nobody else: addresses, or networks of 64 bits of IPv6. The last 32 of
    them count. Nobody is turned away where the kernel cannot do that.
    """
    with contextlib.suppress(OSError):
        if not hosts:
            listener.setsockopt(socket.SOL_SOCKET, _DETACH_FILTER, 0)
            return
        program = b"".join(struct.pack("=HBBI", *one) for one in _program(hosts[-_HOSTS_MAX:]))
        memory = ctypes.create_string_buffer(program, len(program))
        told = struct.pack("@HP", len(program) // 8, ctypes.addressof(memory))
        listener.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, told)


def _program(hosts: Sequence[str]) -> list[_Instruction]:
    networks = [ipaddress.ip_network(host) for host in hosts]
    v4: list[_Instruction] = [(_LOAD, 0, 0, _SOURCE_4)]
    v6: list[_Instruction] = []
    for network in networks:
        packed = network.network_address.packed
        first = int.from_bytes(packed[:4])
        if network.version == 4:
            v4 += [(_IS, 0, 1, first), _DROP]
        else:
            second = int.from_bytes(packed[4:8])
            v6 += [(_LOAD, 0, 0, _SOURCE_6), (_IS, 0, 3, first)]
            v6 += [(_LOAD, 0, 0, _SOURCE_6 + 4), (_IS, 0, 1, second), _DROP]
    v4.append(_PASS)
    version: list[_Instruction] = [(_LOAD_BYTE, 0, 0, _IP_HEADER), (_SHIFT_RIGHT, 0, 0, 4)]
    return [*version, (_IS, 0, len(v4), 4), *v4, *v6, _PASS]
