"""Ports for servers that are told theirs: none of those that the system gives to connections.

One that was found with `bind(0)` can be taken when the server begins, or begins again: any connection of any process
may have been given it meanwhile. ipykernel then stays alive and never answers.
"""

from __future__ import annotations

import random
import socket

# above those that Ray gives to its workers, below those of connections on Linux and macOS
_PORTS = range(20_000, 32_768)
# not the tests' own sequence: some begin it anew
_random = random.SystemRandom()


def free_ports(count: int) -> list[int]:
    """Ports that nobody has at the moment."""
    found: list[int] = []
    while len(found) < count:
        port = _random.choice(_PORTS)
        if port not in found and _is_free(port):
            found.append(port)
    return found


def free_port() -> int:
    """One of them."""
    return free_ports(1)[0]


def _is_free(port: int) -> bool:
    with socket.socket() as tried:
        try:
            tried.bind(("", port))
        except OSError:
            return False
    return True
