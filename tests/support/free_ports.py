"""Free ports for servers with a given port, outside the range that the system assigns to connections.

A port found with `bind(0)` may be taken by the time the server starts or restarts, since the system may have assigned
it to a connection of any process. ipykernel then stays alive and never answers.
"""

from __future__ import annotations

import random
import socket

# above those that Ray gives to its workers, below those of connections on Linux and macOS
_PORTS = range(20_000, 32_768)
# not the tests' own sequence: some begin it anew
_random = random.SystemRandom()


def free_ports(count: int) -> list[int]:
    """Return ports that are free at the moment."""
    found: list[int] = []
    while len(found) < count:
        port = _random.choice(_PORTS)
        if port not in found and _is_free(port):
            found.append(port)
    return found


def free_port() -> int:
    """Return a port that is free at the moment."""
    return free_ports(1)[0]


def _is_free(port: int) -> bool:
    with socket.socket() as tried:
        try:
            tried.bind(("", port))
        except OSError:
            return False
    return True
