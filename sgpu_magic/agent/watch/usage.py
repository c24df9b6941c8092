"""CPU time and memory of ranks and what they have started, from one look at /proc for all runs of the agent.

Linux; elsewhere nothing is known.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

# processes whose parents are believed unseen for so many looks: they change when a parent dies
_BELIEVED_LOOKS = 30
_PROC = "/proc"


@dataclass(frozen=True)
class TreeUse:
    """What a process and the living ones below it use.

    Args:
        pids: All of them.
        cpu_s: CPU time that they, and children of theirs that have ended, have used so far.
        rss_bytes: Resident memory. Pages that several share, such as a notebook's payload or the libraries that all
            ranks were forked with, count for each: telling them apart (PSS) takes milliseconds for each process.
    """

    pids: frozenset[int]
    cpu_s: float
    rss_bytes: int


@dataclass(slots=True)
class _Process:
    parent: int
    ticks: int
    pages: int


class ProcessTable:
    """Looks at processes. Only those that are new, or below a rank, are read at each look.

    Args:
        clock: Seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: dict[int, _Process] = {}
        self._trees: dict[int, TreeUse] = {}
        self._looked_at = float("-inf")
        self._looks = 0

    def trees(self, roots: Collection[int], max_age_s: float = 0.0) -> Mapping[int, TreeUse]:
        """Return what each of these processes uses; without those that are gone.

        Args:
            roots: None is to be below another.
            max_age_s: What was seen so many seconds ago may be told again.
        """
        now = self._clock()
        if now - self._looked_at > max_age_s or any(root not in self._trees for root in roots):
            # who asked before asks again: one look serves all
            self._look({*roots, *self._trees})
            self._looked_at = now
        return {root: self._trees[root] for root in roots if root in self._trees}

    def _look(self, roots: Iterable[int]) -> None:
        try:
            living = {int(name) for name in os.listdir(_PROC) if name.isdigit()}
        except OSError:
            living = set[int]()
        self._looks += 1
        if self._looks % _BELIEVED_LOOKS == 0:
            self._known.clear()
        for pid in self._known.keys() - living:
            del self._known[pid]
        for pid in living - self._known.keys():
            self._read(pid)
        children: dict[int, list[int]] = {}
        for pid, process in self._known.items():
            children.setdefault(process.parent, []).append(pid)
        self._trees = {}
        for root in roots:
            found = [(pid, process) for pid in _below(root, children) if (process := self._read(pid)) is not None]
            if any(pid == root for pid, _ in found):
                self._trees[root] = TreeUse(
                    pids=frozenset(pid for pid, _ in found),
                    cpu_s=sum(process.ticks for _, process in found) / _TICKS_PER_S,
                    rss_bytes=sum(process.pages for _, process in found) * _PAGE_BYTES,
                )

    def _read(self, pid: int) -> _Process | None:
        # the built-in open() would make of each file three system calls more
        try:
            file = os.open(f"{_PROC}/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
            try:
                text = os.read(file, 1024)
            finally:
                os.close(file)
            # the command in parentheses may hold anything; the state is the first field after it, see proc(5)
            fields = text[text.rindex(b")") + 2 :].split(None, 22)
            # with the time of children that were waited for, so that a tree's time never goes back
            ticks = int(fields[11]) + int(fields[12]) + int(fields[13]) + int(fields[14])
            process = self._known[pid] = _Process(int(fields[1]), ticks, int(fields[21]))
        except (OSError, ValueError, IndexError):
            self._known.pop(pid, None)
            return None
        return process


def _below(root: int, children: Mapping[int, list[int]]) -> Iterator[int]:
    waiting = [root]
    while waiting:
        pid = waiting.pop()
        yield pid
        waiting += children.get(pid, ())


_TICKS_PER_S = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
