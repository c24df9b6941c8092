"""Which nodes have an agent of the pool, and the package that is brought to those that have none.

An agent is started when a run needs one, and ended some time after the last one.
"""

from __future__ import annotations

import io
import time
import zipfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import msgspec

from sgpu_magic.files.whole_file import write_whole
from sgpu_magic.nodes.ray.driver import EndAgents, NodeFacts, StartAgent, ToCluster
from sgpu_magic.nodes.ray.uplink import AgentOrder
from sgpu_magic.system.secure_sockets import KeyPair, new_key_pair

# its actor is given up after a minute
_COME_S = 90.0
_Keys = dict[str, tuple[str, str]]


class NodeKeys:
    """A key pair for each node, kept: a pool service that is started again knows its agents by them.

    Args:
        path: A file of mode 0600; its directory is there.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._pairs = msgspec.json.decode(path.read_bytes(), type=_Keys)
        except (OSError, msgspec.DecodeError):
            self._pairs: _Keys = {}

    def of(self, node: str) -> KeyPair:
        """The node's pair; made when it has none.

        Raises:
            OSError: It can't be written down.
        """
        if node not in self._pairs:
            pair = new_key_pair()
            self._write({**self._pairs, node: (pair.public, pair.secret)})
        return KeyPair(*self._pairs[node])

    @property
    def nodes(self) -> Mapping[str, str]:
        """Node by public key."""
        return {public: node for node, (public, _) in self._pairs.items()}

    def forget_others(self, nodes: Collection[str]) -> None:
        """Nodes that the cluster has no more never come again: Ray gives no id twice."""
        left = {node: pair for node, pair in self._pairs.items() if node in nodes}
        if left != self._pairs:
            self._write(left)

    def _write(self, pairs: _Keys) -> None:
        write_whole(self._path, msgspec.json.encode(pairs))
        self._pairs = pairs


class NodeAgents:
    """Orders actors, and knows which are on their way.

    Args:
        keys: The nodes' keys.
        order: Makes the order for a node.
        send: To the process that speaks to Ray.
        idle_s: Seconds without a run after which an agent is to leave.
    """

    def __init__(
        self,
        keys: NodeKeys,
        order: Callable[[str, KeyPair], AgentOrder],
        send: Callable[[ToCluster], None],
        idle_s: float,
    ) -> None:
        self._keys = keys
        self._order = order
        self._send = send
        self._idle_s = idle_s
        # seconds of a monotonic clock
        self._starting: dict[str, float] = {}
        self._leaving: set[str] = set()
        # seconds of the caller's clock
        self._idle_since: dict[str, float] = {}

    @property
    def leaving(self) -> Collection[str]:
        """Nodes whose agents were told to end and have not yet."""
        return self._leaving

    def need(self, node: NodeFacts, package: str) -> None:
        """A run will be there.

        Args:
            node: Where.
            package: The version of our own package.
        """
        self._idle_since.pop(node.node, None)
        if node.node not in self._starting:
            self._starting[node.node] = time.monotonic()
            pair = self._keys.of(node.node)
            self._send(StartAgent(order=self._order(node.node, pair), ship=node.version != package))

    def came(self, node: str) -> None:
        """Its agent has said its first word."""
        self._starting.pop(node, None)

    def gone(self, node: str) -> None:
        """Its agent is over, or could not be started."""
        self._starting.pop(node, None)
        self._leaving.discard(node)
        self._idle_since.pop(node, None)

    def retire(self, there: Collection[str], busy: Collection[str], now: float) -> None:
        """Let go of nodes that had no run for long.

        Args:
            there: Nodes that have an agent.
            busy: Those that have a run, or will have one.
            now: Seconds of a monotonic clock.
        """
        for node in busy:
            self._idle_since.pop(node, None)
        idle = [node for node in there if node not in busy and node not in self._leaving]
        over = [node for node in idle if now - self._idle_since.setdefault(node, now) >= self._idle_s]
        if over:
            self._leaving.update(over)
            self._send(EndAgents(nodes=tuple(over)))

    def late(self, now: float) -> list[str]:
        """Nodes whose agents were ordered long ago and have not come; they count as gone."""
        late = [node for node, since in self._starting.items() if now - since > _COME_S]
        for node in late:
            self.gone(node)
        return late

    def connected(self) -> None:
        """The process that speaks to Ray is a new one: what was ordered may not have arrived."""
        self._starting.clear()
        if self._leaving:
            self._send(EndAgents(nodes=tuple(self._leaving)))


_NOT_SHIPPED = ("labextension", "__pycache__")
# of every file: the same package is the same archive, byte for byte
_THEN = (1980, 1, 1, 0, 0, 0)


def package_archive() -> bytes:
    """Return the archive; it has `sgpu_magic/` at its top."""
    here = Path(__file__).parents[2]
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(here.rglob("*")):
            if path.is_file() and not any(part in _NOT_SHIPPED for part in path.relative_to(here).parts):
                info = zipfile.ZipInfo(str(path.relative_to(here.parent)), _THEN)
                info.compress_type = zipfile.ZIP_DEFLATED
                info.external_attr = 0o644 << 16
                archive.writestr(info, path.read_bytes())
    return data.getvalue()
