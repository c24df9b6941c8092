"""Which nodes have runs, written down: a pool service that is started again waits for them before it judges a run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

import msgspec


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
            draft = self._path.with_suffix(".new")
            draft.write_bytes(msgspec.json.encode(sorted(new)))
            os.replace(draft, self._path)

    def _read(self) -> frozenset[str]:
        try:
            return frozenset(msgspec.json.decode(self._path.read_bytes(), type=list[str]))
        except (OSError, msgspec.DecodeError):
            return frozenset()
