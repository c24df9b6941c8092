"""Which network interface has an address, asked of the kernel (rtnetlink) without a name look-up."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct
import sys
from collections.abc import Iterator

LOOPBACK = "lo" if sys.platform == "linux" else "lo0"

# linux/rtnetlink.h, linux/if_addr.h
_RTM_GETADDR, _RTM_NEWADDR, _DONE = 22, 20, 3
_REQUEST_DUMP = 0x301
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_HEADER = struct.Struct("=IHHII")
_ADDRESS = struct.Struct("=BBBBI")
_ATTRIBUTE = struct.Struct("=HH")
_REPLY_BYTES = 1 << 16


def interface_of(address: str) -> str:
    """Return the interface's name, "" when none of this machine has the address, or nobody can tell."""
    try:
        wanted = ipaddress.ip_address(address)
    except ValueError:
        return ""
    if wanted.is_loopback:
        # all of 127.0.0.0/8 is there, whatever is written down
        return LOOPBACK
    with contextlib.suppress(OSError, AttributeError):
        for index, found in _addresses():
            if found == wanted.packed:
                return socket.if_indextoname(index)
    return ""


def _addresses() -> Iterator[tuple[int, bytes]]:
    """(interface's index, packed address) of each address of this machine. Linux only."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as link:
        link.bind((0, 0))
        body = _ADDRESS.pack(socket.AF_UNSPEC, 0, 0, 0, 0)
        link.send(_HEADER.pack(_HEADER.size + len(body), _RTM_GETADDR, _REQUEST_DUMP, 1, 0) + body)
        while True:
            reply = link.recv(_REPLY_BYTES)
            at = 0
            while at + _HEADER.size <= len(reply):
                size, kind, _, _, _ = _HEADER.unpack_from(reply, at)
                if kind != _RTM_NEWADDR:
                    # the end of the list, or an error
                    return
                yield from _attributes(reply[at + _HEADER.size : at + size])
                at += _aligned(size)


def _attributes(body: bytes) -> Iterator[tuple[int, bytes]]:
    _, _, _, _, index = _ADDRESS.unpack_from(body)
    at = _ADDRESS.size
    while at + _ATTRIBUTE.size <= len(body):
        size, kind = _ATTRIBUTE.unpack_from(body, at)
        if size < _ATTRIBUTE.size:
            return
        if kind in (_IFA_ADDRESS, _IFA_LOCAL):
            yield index, body[at + _ATTRIBUTE.size : at + size]
        at += _aligned(size)


def _aligned(size: int) -> int:
    return (size + 3) & ~3
