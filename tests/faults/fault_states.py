"""The states in which a run is struck: how one gets there with real processes, and how the work is let finish."""

from __future__ import annotations

import re
import signal
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from kernels import Cell, Home, Kernel, eventually, listening
from strikes import command, kill, ranks_of, send

RANKS = 2
_SOON_S = 20.0
_CHILD = re.compile(r"^child (\d+)$", re.MULTILINE)

# a grandchild in a session of its own: only the run's mark in its environment identifies it
_BEGIN = """\
import os, pathlib, signal, subprocess, time
import torch.distributed as dist
away = subprocess.Popen(["sleep", "3600"], start_new_session=True)
print("child", away.pid, flush=True)
print("weighs", int(weights.sum()), flush=True)
go = pathlib.Path("go")
"""
_LOOP = """\
count = 0
while not go.exists():
    print("line", count, flush=True)
    count += 1
    time.sleep(0.02)
"""
RUNNING = f"{_BEGIN}{_LOOP}print('done', count)"
COLLECTIVE = f"""{_BEGIN}print('waits', flush=True)
if rank == 0:
{textwrap.indent(_LOOP, "    ")}dist.barrier()
print('done', count if rank == 0 else 0)"""
STOPPING = f"""{_BEGIN}
def save(number, frame):
    print("saving", flush=True)
    while not go.exists():
        time.sleep(0.02)
    print("saved", flush=True)
    raise SystemExit(0)

signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
while True:
    time.sleep(0.02)"""
QUEUED = """\
for count in range(50):
    print("line", count)
print("weighs", int(weights.sum()))
print("done", 50)"""
# large enough to be sent in a memory file
WEIGHTS = "import numpy; weights = numpy.ones(300_000)"


@dataclass
class Situation:
    """A run in its state.

    Args:
        cell: Where it was started.
        run_id: The run.
        ranks: Pids of the ranks that work: its own, or those of the run ahead of it.
        ahead: The cell and id of the run that has the slots while it waits.
        held: A rank that SIGSTOP keeps from starting.
        doomed: Pids that must be gone at the end.
        sockets: Listening sockets that must be gone at the end, by inode.
        survivors: Ranks that the fault does not hit by itself.
        saves: Its ranks handle the signal that they were stopped with.
    """

    cell: Cell
    run_id: str
    ranks: list[int]
    ahead: tuple[Cell, str] | None = None
    held: int | None = None
    doomed: set[int] = field(default_factory=set)
    sockets: set[int] = field(default_factory=set)
    survivors: list[int] = field(default_factory=list)
    saves: bool = False

    @property
    def kernel(self) -> Kernel:
        return self.cell.kernel

    @property
    def victim(self) -> int:
        """The rank that a fault of one rank hits."""
        return next(pid for pid in reversed(self.ranks) if pid != self.held)

    @property
    def victims_rank(self) -> int:
        return self.ranks.index(self.victim)


class Stage:
    """One home for the whole table, with a pool whose slots one run fills, and two notebooks.

    Args:
        home: With `SGPU_CPU_SLOTS` of `RANKS`.
    """

    def __init__(self, home: Home) -> None:
        self.home = home
        self._subject: Kernel | None = None
        self._spare: Kernel | None = None
        self._neighbour: Kernel | None = None
        self._cases = 0

    @property
    def go(self) -> Path:
        """The file for which the work waits."""
        return self.home.work / "go"

    @property
    def kernel(self) -> Kernel:
        """The notebook whose run is struck; another one when it was killed."""
        if self._subject is None:
            self._subject, self._spare = self._spare or Kernel(self.home, wait=False), None
            self._subject.ready()
            settle(self._subject)
        return self._subject

    @property
    def neighbour(self) -> Kernel:
        """Another notebook of the same user."""
        if self._neighbour is None:
            self._neighbour = Kernel(self.home)
            settle(self._neighbour)
        return self._neighbour

    def warm(self) -> None:
        """Have both notebooks connected and a group standing by."""
        for kernel in (self.kernel, self.neighbour):
            kernel.check(f"%%distributed -n {RANKS} --ui none\npass")

    def prepare_spare(self) -> None:
        """The notebook is about to be killed: have another one start meanwhile."""
        if self._spare is None:
            self._spare = Kernel(self.home, wait=False)

    def killed(self) -> None:
        """The notebook is dead."""
        if self._subject is not None:
            self._subject.close()
            self._subject = None

    def close(self) -> None:
        for kernel in (self._subject, self._spare, self._neighbour):
            if kernel is not None:
                kernel.close()

    # ------------------------------------------------------------ into a state

    def start(self, kernel: Kernel, body: str, options: str) -> tuple[Cell, str]:
        """Start a run and return its cell and id when the pool has it."""
        self._cases += 1
        name = f"case-{self._cases}"
        cell = kernel.start(f"%%distributed -n {RANKS} --name {name} {options}\n{body}")
        return cell, eventually(lambda: self.home.run_named(name), _SOON_S, "the pool's taking of the run")

    def printed(self, run_id: str, text: str, ranks: tuple[int, ...] = (0, 1)) -> None:
        """Wait until these ranks have printed `text`."""
        eventually(
            lambda: all(text in self.home.log(run_id, rank) for rank in ranks),
            _SOON_S,
            lambda: f"{text!r} of ranks {ranks}: {[self.home.log(run_id, rank) for rank in ranks]}",
        )

    def working(self, cell: Cell, run_id: str) -> Situation:
        """A run whose ranks are in their cell."""
        ranks = eventually(lambda: ranks_of(self.home, run_id), 5, "the ranks' start")
        children = [int(pid) for rank in range(RANKS) for pid in _CHILD.findall(self.home.log(run_id, rank))]
        assert len(children) == RANKS, children
        sockets = set(listening(ranks))
        assert sockets, "ranks of gloo listen"
        return Situation(cell, run_id, ranks, doomed={*ranks, *children}, sockets=sockets)

    def finish(self, situation: Situation) -> None:
        """Let everything that waits go on."""
        self.go.touch()
        if situation.held is not None:
            send(signal.SIGCONT, situation.held)

    @contextmanager
    def clean(self) -> Iterator[None]:
        self.go.unlink(missing_ok=True)
        try:
            yield
        except BaseException:
            # a failed case must not disturb the next one
            self.go.touch()
            kill(*self.home.rank_pids())
            for kernel in (self._subject, self._neighbour):
                if kernel is not None:
                    kernel.interrupt()
            raise


def settle(kernel: Kernel) -> None:
    """Give a new notebook what the table's cells read, its link to the pool, and all threads that it will have."""
    kernel.check(WEIGHTS)
    kernel.check("%sgpu_status")
    # pyzmq starts a thread of its own with the first large message
    kernel.check("print('x' * 200_000)")
    # record the level while the pool is alive: a notebook without a pool holds less
    kernel.home.has_settled(kernel.pid)


def _queued(stage: Stage, options: str) -> Situation:
    cell, ahead = stage.start(stage.neighbour, RUNNING, options.replace("--detach", ""))
    stage.printed(ahead, "line 2")
    situation = stage.working(cell, ahead)
    own = options if "--detach" in options else ""
    situation.cell, situation.run_id = stage.start(stage.kernel, QUEUED, own)
    situation.ahead = cell, ahead
    assert stage.home.ledger()[situation.run_id].state == "queued"
    # the ledger is written before the notebook is notified
    waits = situation.cell
    waits.until(lambda: waits.idle or "queued" in waits.reply.text, _SOON_S, "the cell shows that it is queued")
    return situation


def _starting(stage: Stage, options: str) -> Situation:
    """One rank of the group that stands ready is stopped, so that the group is never complete."""
    ranks = eventually(lambda: _whole_group(stage.home), _SOON_S, "a group that stands by")
    send(signal.SIGSTOP, ranks[-1])
    cell, run_id = stage.start(stage.kernel, RUNNING, options)
    eventually(lambda: stage.home.ledger()[run_id].state == "starting", _SOON_S, "the state `starting`")
    return Situation(cell, run_id, ranks, held=ranks[-1], doomed=set(ranks), sockets=set(listening(ranks)))


def _whole_group(home: Home) -> list[int]:
    """The standby ranks in rank order when they have joined."""
    pids = sorted(home.standby_pids())
    return pids if len(pids) == RANKS and all(listening([pid]) for pid in pids) else []


def _running(stage: Stage, options: str) -> Situation:
    cell, run_id = stage.start(stage.kernel, RUNNING, options)
    stage.printed(run_id, "line 2")
    return stage.working(cell, run_id)


def _collective(stage: Stage, options: str) -> Situation:
    cell, run_id = stage.start(stage.kernel, COLLECTIVE, options)
    stage.printed(run_id, "waits")
    stage.printed(run_id, "line 2", (0,))
    return stage.working(cell, run_id)


def _stopping(stage: Stage, options: str) -> Situation:
    """Cancelled by the command, with handlers of SIGTERM that take their time."""
    grace = "" if "--grace" in options else "--grace 60s"
    cell, run_id = stage.start(stage.kernel, STOPPING, f"{options} {grace}")
    stage.printed(run_id, "ready")
    situation = stage.working(cell, run_id)
    command(stage.home, "cancel", run_id[:8])
    stage.printed(run_id, "saving")
    situation.saves = True
    return situation


STATES: dict[str, Callable[[Stage, str], Situation]] = {
    "queued": _queued,
    "starting": _starting,
    "running": _running,
    "in-a-collective": _collective,
    "stopping": _stopping,
}
