"""The memory of a rank and its children, in which pages that they share count once.

The pages of a forked child, such as a DataLoader's worker, are its parent's until one of the two writes to them, and
the resident memory of each contains them. The system's proportional set size (PSS, see proc_pid_smaps(5)) shows which
share is counted more than once. Reading it walks all pages of a process, so it is read in a thread, and infrequently.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from sgpu_magic.agent.faults import call_in_background
from sgpu_magic.agent.ranks.run_processes import TreeUse
from sgpu_magic.system.processes import number_in

# measurements use at most this share of a core
_EFFORT = 0.02
_SHORTEST_PAUSE_S = 2.0


class _Measured(NamedTuple):
    share: float
    seconds: float


class SharedPages:
    """Corrects the memory of ranks with children. Used in the loop's thread."""

    def __init__(self) -> None:
        self._shares: dict[int, float] = {}
        self._measuring: dict[int, asyncio.Future[_Measured]] = {}
        self._due: dict[int, float] = {}

    def counted_once(self, trees: Mapping[int, TreeUse]) -> dict[int, TreeUse]:
        """Return the usages with memory in which shared pages count once, by rank.

        A rank's memory is that of its own process until the first measurement, and never less.
        """
        for known in (self._shares, self._due):
            for ended in known.keys() - trees.keys():
                del known[ended]
        return {pid: self._corrected(pid, tree) for pid, tree in trees.items()}

    def _corrected(self, pid: int, tree: TreeUse) -> TreeUse:
        if len(tree.pids) < 2:
            return tree
        now = time.monotonic()
        if pid not in self._measuring and now >= self._due.get(pid, 0.0):
            call = self._measuring[pid] = call_in_background(lambda: _measure(tree.pids), "sgpu-memory")
            call.add_done_callback(lambda done: self._measured(pid, done))
        together = int(tree.rss_bytes * self._shares.get(pid, 0.0))
        return msgspec.structs.replace(tree, rss_bytes=max(tree.own_rss_bytes, together))

    def _measured(self, pid: int, call: asyncio.Future[_Measured]) -> None:
        del self._measuring[pid]
        self._shares[pid], seconds = call.result()
        self._due[pid] = time.monotonic() + max(_SHORTEST_PAUSE_S, seconds / _EFFORT)


def _measure(pids: Collection[int]) -> _Measured:
    """Return the share of these processes' resident memory that remains if shared pages count once."""
    began = time.thread_time()
    resident = proportional = 0
    for pid in pids:
        path = Path(f"/proc/{pid}/smaps_rollup")
        found = number_in(path, "Rss:"), number_in(path, "Pss:")
        if found[0] is not None and found[1] is not None:
            resident += found[0]
            proportional += found[1]
    return _Measured(proportional / resident if resident else 1.0, time.thread_time() - began)
