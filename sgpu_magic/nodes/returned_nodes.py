"""Agents that come to a pool service with runs: of an earlier service, or runs that were given up meanwhile.

Which nodes have runs is written down: a pool service that is started again waits for them before it judges a run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from sgpu_magic.files.whole_file import write_whole
from sgpu_magic.nodes.run_on_nodes import nodes_of
from sgpu_magic.wire.node import HeldRun


@dataclass(slots=True)
class HeldRunParts:
    """A run that agents of an earlier service hold.

    Args:
        nodes: Of each part of its lease.
        parts: What is held of it, by part.
    """

    nodes: tuple[str, ...]
    parts: dict[int, HeldRun] = field(default_factory=dict[int, HeldRun])

    @property
    def attempt(self) -> int:
        return max(held.launch.attempt for held in self.parts.values())

    @property
    def missing(self) -> set[str]:
        """Nodes whose part nobody has shown."""
        return {node for index, node in enumerate(self.nodes) if index not in self.parts}

    @property
    def whole(self) -> HeldRun:
        """As one agent would hold it."""
        held = list(self.parts.values())
        going = [one.state for one in held if not one.state.is_final]
        first = held[0]
        return msgspec.structs.replace(
            first,
            launch=msgspec.structs.replace(first.launch, part=None),
            state=going[0] if going else first.state,
            started_s=max(one.started_s for one in held),
            gone=all(one.gone for one in held),
            locks=0,
        )


class HeldParts:
    """What the nodes that have come hold, until the pool takes it over."""

    def __init__(self) -> None:
        self.runs: dict[str, HeldRunParts] = {}

    def add(self, node: str, held: Iterable[HeldRun]) -> list[tuple[str, str]]:
        """A node holds these. Returns (node, run) where there is only a part of an attempt that is over."""
        stale: list[tuple[str, str]] = []
        # sessions first: what runs in them has their nodes
        for one in sorted(held, key=lambda one: bool(one.launch.spec.session)):
            spec = one.launch.spec
            run_id = spec.run_id
            index = one.launch.part.index if one.launch.part is not None else 0
            run = self.runs.get(run_id)
            if run is None or run.attempt < one.launch.attempt:
                stale += [] if run is None else [(run.nodes[part], run_id) for part in run.parts]
                run = self.runs[run_id] = HeldRunParts(nodes_of(one.launch.lease))
            elif run.attempt > one.launch.attempt:
                stale.append((node, run_id))
                continue
            run.parts[index] = one
        return stale

    @property
    def awaited(self) -> set[str]:
        """Nodes that must have more of these runs."""
        return {node for run in self.runs.values() for node in run.missing}

    def node_lost(self, node: str) -> None:
        """A node that had come is gone again."""
        for run_id, run in list(self.runs.items()):
            for index, own in enumerate(run.nodes):
                if own == node:
                    run.parts.pop(index, None)
            if not run.parts:
                del self.runs[run_id]


class StaleRuns:
    """Runs that were given up while their node was away: it is used again once they are gone from it."""

    def __init__(self) -> None:
        self._of: dict[str, set[str]] = {}

    def add(self, node: str, run_id: str) -> None:
        self._of.setdefault(node, set()).add(run_id)

    def gone(self, node: str, run_id: str) -> bool:
        """The run is gone from the node. True when it was one of these, and the last there."""
        runs = self._of.get(node)
        if runs is None or run_id not in runs:
            return False
        runs.discard(run_id)
        if runs:
            return False
        del self._of[node]
        return True

    def holds(self, node: str, run_id: str) -> bool:
        """Whether this is one of these, and not gone yet."""
        return run_id in self._of.get(node, ())

    def has(self, node: str) -> bool:
        """Whether the node is not to be used yet."""
        return node in self._of

    def node_lost(self, node: str) -> None:
        self._of.pop(node, None)


class BusyNodes:
    """A file of node ids.

    Args:
        path: The file; its directory is there.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written = self._read()

    @property
    def known(self) -> frozenset[str]:
        """As last written, by this service or the one before."""
        return self._written

    def write(self, nodes: Iterable[str]) -> None:
        """Write down which have runs now. A full disk is of no account: nodes that come by themselves are heard."""
        new = frozenset(nodes)
        if new == self._written:
            return
        self._written = new
        with contextlib.suppress(OSError):
            write_whole(self._path, msgspec.json.encode(sorted(new)))

    def _read(self) -> frozenset[str]:
        try:
            return frozenset(msgspec.json.decode(self._path.read_bytes(), type=list[str]))
        except (OSError, msgspec.DecodeError):
            return frozenset()
