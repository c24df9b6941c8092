"""What a pool keeps of its door for nodes: its key pair and its port, the same for every service of the pool."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from urllib.parse import urlsplit

from sgpu_magic.errors import UsageError
from sgpu_magic.system.secure_sockets import KeyPair, new_key_pair, read_key_pair, write_key_pair

_ANYWHERE = ("0.0.0.0", "[::]", "*")


class DoorState:
    """Files in a private directory.

    Args:
        path: The directory.

    Raises:
        UsageError: The key can't be read or written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.pair = self._pair()
        self._host, self._port = "", 0

    def address(self, listen: str) -> str:
        """Where to listen: the setting, with the port of last time where it has none.

        Raises:
            UsageError: It is not `tcp://host:port`.
        """
        host, port = _split(listen)
        if port == 0:
            with contextlib.suppress(OSError, ValueError):
                port = int((self.path / "door-port").read_text())
        return f"tcp://{host}:{port}"

    def keep_port(self, address: str) -> None:
        """Write down where it listens now."""
        self._host, self._port = _split(address)
        draft = self.path / "door-port.part"
        draft.write_text(str(self._port))
        os.replace(draft, self.path / "door-port")

    def reached_at(self, host: str) -> str:
        """The door's address for nodes, which reach this machine at `host` unless it listens at one address only."""
        if self._host not in _ANYWHERE:
            return f"tcp://{self._host}:{self._port}"
        return f"tcp://[{host}]:{self._port}" if ":" in host else f"tcp://{host}:{self._port}"

    def _pair(self) -> KeyPair:
        path = self.path / "door.key"
        try:
            return read_key_pair(path)
        except FileNotFoundError:
            pair = new_key_pair()
            write_key_pair(path, pair)
            return pair


def _split(address: str) -> tuple[str, int]:
    parts = urlsplit(address)
    try:
        if parts.scheme == "tcp" and parts.hostname and parts.port is not None:
            return (f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname), parts.port
    except ValueError:
        pass
    raise UsageError(
        f"the setting ray_node_listen is {address!r}; it must be tcp://address:port, with port 0 for any that is free."
    )
