"""The stop path of ranks: TERM to those that handle it, interrupt, release, TERM, grace, KILL.

An interrupt does not reach a rank that waits in a collective, and a lost connection does not affect one that computes,
so ranks get both in quick succession. The order decides what the user sees: `KeyboardInterrupt` after a cancel,
"released from all_reduce" after a peer's failure. NCCL's collectives end without an error when they are aborted, so a
rank that uses them interrupts itself before it aborts them; otherwise its next line would compute with invalid data.

A rank whose code has a handler for SIGTERM, for example to save a checkpoint, gets only SIGTERM, once, and the grace to
exit by itself. No rank is interrupted or released meanwhile, since the handler may need collectives. Then the other
ranks have a moment to exit by themselves too, before the stop path continues.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path

from sgpu_magic.agent.failures import RankOutcomes
from sgpu_magic.agent.ranks.group import RankProcess, RunRanks
from sgpu_magic.wire.rank_events import Failure

# a cell in Python gets this long to end with KeyboardInterrupt before the connections are shut down
_LEAD_S = 0.03
# pause between two steps of the stop path when there is no grace
_RUNG_S = 0.3
# time for the exit handlers of ranks that have reported
EXIT_HANDLERS_S = 5.0
_ESTABLISHED = "01"


class Terminator:
    """Stops the ranks of one run that have not reported.

    Args:
        run_ranks: The ranks.
        reports: The ranks' reports.
        later: Schedules a call after some seconds, which is dropped when the run is gone.
        killed: Called when ranks were sent SIGKILL.
        finishing: The ranks whose cell has ended, and that are finishing what it started.

    Attributes:
        begun: Whether the ranks were told to stop.
        released: Whether connections between them were shut down.
    """

    def __init__(
        self,
        run_ranks: RunRanks,
        reports: RankOutcomes,
        later: Callable[[float, Callable[[], None]], None],
        killed: Callable[[], None],
        finishing: Collection[int] = (),
    ) -> None:
        self._run_ranks = run_ranks
        self._reports = reports
        self._later = later
        self._killed = killed
        self._finishing = finishing
        self._loop = asyncio.get_running_loop()
        self.begun = False
        self.released = False
        # ranks that were alive when the stop began, and when that was by the wall clock
        self._stopped: frozenset[int] = frozenset()
        self._began_at = 0.0
        self._termed: set[int] = set()
        self._grace_over = 0.0
        self._proceed: Callable[[], None] | None = None

    def begin(self, grace_s: float, *, interrupt_first: bool, waited: Callable[[], None]) -> None:
        """Stop the ranks; call `waited` when they have had time to react.

        Args:
            grace_s: Seconds for ranks that handle TERM; with 0 they are treated like the others.
            interrupt_first: Whether ranks are interrupted before they are released, rather than after.
            waited: Called when the ranks have had time to react.
        """
        if not self.begun:
            self.begun = True
            self._stopped = frozenset(process.rank for process in self._unreported() if not process.is_ending())
            self._began_at = time.time()
        self.await_handlers(grace_s, lambda: self._press(interrupt_first, waited))

    def caused(self, failure: Failure) -> bool:
        """Whether the failure followed the stop: its rank was alive when that began, and failed later."""
        return failure.rank in self._stopped and failure.at > self._began_at

    def await_handlers(self, grace_s: float, proceed: Callable[[], None]) -> None:
        """Send SIGTERM to ranks that handle it; call `proceed` when they have ended or the grace is over."""
        if grace_s > 0:
            for process in self._unreported():
                if process.rank not in self._termed and process.alive and _handles_term(process):
                    self._termed.add(process.rank)
                    process.signal(signal.SIGTERM)
        if not self._handling():
            proceed()
            return
        self._grace_over = self._loop.time() + grace_s
        self._proceed = proceed
        self._later(grace_s, self._go_on)

    def any_handles_term(self) -> bool:
        """Whether a rank that has not reported has a handler for SIGTERM."""
        return any(process.alive and _handles_term(process) for process in self._unreported())

    def reported(self) -> None:
        """Handle a rank's report or exit."""
        if self._proceed is None or self._handling():
            return
        if self._unreported():
            # ranks without a handler may have received the stop through a collective and be about to exit
            self._later(_RUNG_S, self._go_on)
        else:
            self._go_on()

    def end(self, grace_s: float, finish_s: float, cut_off: Callable[[], None]) -> None:
        """Let ranks that have reported exit; send SIGTERM to the others, and SIGKILL after `grace_s` seconds.

        If ranks got SIGTERM before, only the rest of their grace remains.

        Args:
            grace_s: Seconds for ranks that have not reported.
            finish_s: Seconds for ranks that are finishing what their cell started; 0 if their time is over.
            cut_off: Called before ranks that have not finished within `finish_s` are killed.
        """
        self._run_ranks.group.request_exit()
        unreported = self._unreported()
        ending = unreported if finish_s else [*unreported, *self._still_finishing()]
        for process in ending:
            process.signal(signal.SIGTERM, whole_session=True)
        if unreported and self._termed:
            grace_s = max(0.0, self._grace_over - self._loop.time())
        self._later(grace_s if ending else EXIT_HANDLERS_S, lambda: self._kill(but=self._still_finishing()))

        def cut() -> None:
            if self._still_finishing():
                cut_off()
            self._kill()

        self._later(max(finish_s, grace_s, EXIT_HANDLERS_S), cut)

    # ------------------------------------------------------------ internals

    def _unreported(self) -> list[RankProcess]:
        return [process for process in self._run_ranks.ranks if not self._reports.has_reported(process.rank)]

    def _still_finishing(self) -> list[RankProcess]:
        return [process for process in self._run_ranks.ranks if process.rank in self._finishing and process.alive]

    def _handling(self) -> bool:
        return any(process.rank in self._termed and process.alive for process in self._unreported())

    def _go_on(self) -> None:
        proceed, self._proceed = self._proceed, None
        if proceed is not None:
            proceed()

    def _press(self, interrupt_first: bool, waited: Callable[[], None]) -> None:
        def release() -> None:
            self._release(interrupt=not interrupt_first)

        first, second = (self._interrupt, release) if interrupt_first else (release, self._interrupt)
        first()
        self._later(_LEAD_S, second)
        self._later(_RUNG_S, waited)

    def _interrupt(self) -> None:
        for process in [*self._unreported(), *self._still_finishing()]:
            process.signal(signal.SIGINT)

    def _release(self, *, interrupt: bool) -> None:
        if not self._reports.complete:
            self.released = True
            group = self._run_ranks.group
            # of every rank, participating or not: connections exist between any two, and both ends must be shut down
            group.release(connections_between(group.pids), interrupt=interrupt)

    def kill_unreported(self) -> None:
        """Send SIGKILL to the ranks that have not reported."""
        for process in self._unreported():
            process.signal(signal.SIGKILL, whole_session=True)
        self._killed()

    def _kill(self, but: Sequence[RankProcess] = ()) -> None:
        for process in self._run_ranks.ranks:
            if process not in but:
                process.signal(signal.SIGKILL, whole_session=True)
        self._killed()


def _handles_term(process: RankProcess) -> bool:
    """Whether the user's code handles SIGTERM: ranks start with the default action. False without /proc."""
    return process.pid is not None and catches(process.pid, signal.SIGTERM) is True


def catches(pid: int, number: int) -> bool | None:
    """Whether the process has a handler for the signal; None where the system can't tell."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False if Path("/proc/self/status").exists() else None
    except OSError:
        return False
    for line in status.splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return None


# ---------------------------------------------------------------- sockets


def connections_between(pids: Iterable[int]) -> dict[int, tuple[int, ...]]:
    """Return, for each process, its descriptors that are connected to another one of `pids`.

    SIGINT does not interrupt a gloo collective, and `abort` does not release it. Losing its connections does: every
    rank then gets a RuntimeError within milliseconds. Only connections between two ranks of the run are returned;
    listeners and the user's own connections are left alone.
    """
    owner = {inode: (pid, fd) for pid in pids for inode, fd in _sockets_of(pid).items()}
    ends = {(local, remote): inode for local, remote, inode in _tcp_connections()}
    found: dict[int, list[int]] = {}
    for (local, remote), inode in ends.items():
        if inode in owner and ends.get((remote, local)) in owner:
            pid, fd = owner[inode]
            found.setdefault(pid, []).append(fd)
    return {pid: tuple(fds) for pid, fds in found.items()}


def _sockets_of(pid: int) -> dict[str, int]:
    """Return the process's socket descriptors by inode."""
    found: dict[str, int] = {}
    with contextlib.suppress(OSError):
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{descriptor}")
                if target.startswith("socket:["):
                    found[target[8:-1]] = int(descriptor)
    return found


def _tcp_connections() -> Iterator[tuple[str, str, str]]:
    """Yield (local address, remote address, inode) of this machine's TCP connections. Source: proc(5)."""
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), open(f"/proc/self/net/{name}", encoding="ascii") as file:
            for line in list(file)[1:]:
                fields = line.split()
                if fields[3] == _ESTABLISHED:
                    yield fields[1], fields[2], fields[9]
