"""Free ports for servers with a given port, outside the range that the system assigns to connections.

A port found with `bind(0)` may be taken by the time the server starts or restarts, since the system may have assigned
it to a connection of any process. ipykernel then stays alive and never answers. Each test process has a range of its
own, because it is up to a second from the choice of a port until its server binds it.
"""

from __future__ import annotations

import os
import random
import socket
from collections import deque

# above those that Ray gives to its workers, below those of connections on Linux and macOS
_PORTS = range(20_000, 32_768)
_RANGES = 8
# in the order in which they were chosen
_chosen: deque[int] = deque(maxlen=200)
# not the global generator: some tests reseed it
_random = random.SystemRandom()


def free_ports(count: int) -> list[int]:
    """Return ports that are free at the moment."""
    of_this_process = _PORTS[int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _RANGES :: _RANGES]
    found: list[int] = []
    while len(found) < count:
        port = _random.choice(of_this_process)
        if port not in _chosen and _is_free(port):
            _chosen.append(port)
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
