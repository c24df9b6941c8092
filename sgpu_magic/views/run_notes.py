"""What a run is called, where its session is, and the notes that a session's events leave. No I/O."""

from __future__ import annotations

from typing import Protocol

from sgpu_magic.views.units import format_ranks
from sgpu_magic.wire import ids
from sgpu_magic.wire.events import GroupRenewed, RanksRestarted, SessionMoved
from sgpu_magic.wire.states import RunKind


class Named(Protocol):
    """What was submitted, or a row of the ledger."""

    @property
    def run_id(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> RunKind: ...


def run_name(spec: Named) -> str:
    """Return `train_digits` for a cell, `train(...)` for a call, `session work` for a session."""
    match spec.kind:
        case RunKind.SESSION:
            return f"session {spec.name or ids.short(spec.run_id)}"
        case RunKind.CALL if spec.name and "(" not in spec.name:
            return f"{spec.name}(...)"
        case kind:
            return spec.name or f"{kind}"


def stop_words(spec: Named) -> tuple[str, str]:
    """Return the reason why its view's button ends it, and what to say to who has pressed it."""
    if spec.kind is RunKind.SESSION:
        return "Disconnect was pressed", f"{run_name(spec)} is being disconnected"
    return "Cancel was pressed", f"run {ids.short(spec.run_id)} is being stopped"


class SessionState:
    """A session's cells and ranks.

    Attributes:
        cells: Cells that have run in it so far, those under way included.
        running: The names of those under way.
        dead: Ranks that are dead and wait for `%sgpu_restart`.
        idle_at: When its last cell ended, seconds since the epoch; None while one runs, and before the first.
    """

    def __init__(self) -> None:
        self.cells = 0
        self.running: tuple[str, ...] = ()
        self.dead: tuple[int, ...] = ()
        self.idle_at: float | None = None

    def moved(self, body: SessionMoved, at: float) -> None:
        """Take where it is; `at` is when that was."""
        if body.running:
            self.idle_at = None
        elif body.cells and (self.running or body.cells != self.cells):
            self.idle_at = at
        self.cells, self.running, self.dead = body.cells, body.running, body.dead

    def restarted(self, body: RanksRestarted) -> None:
        """These ranks live again."""
        self.dead = tuple(rank for rank in self.dead if rank not in body.ranks)


def renewal_note(body: GroupRenewed) -> str:
    """Return what became of the process groups, and of what hangs on them."""
    kept = body.lost or "models in DDP and FSDP, and groups of your own, go on"
    return f"the process groups were connected anew: {body.reason}; {kept}"


def restart_note(body: RanksRestarted) -> str:
    """Return `rank 2 is a new process (4711): its variables are lost`."""
    pids = ", ".join(str(pid) for pid in body.pids)
    one = len(body.ranks) == 1
    what = f"is a new process ({pids})" if one else f"are new processes ({pids})"
    return f"{format_ranks(body.ranks)} {what}" + (f": {body.lost}" if body.lost else "")


def restart_command(ranks: tuple[int, ...]) -> str:
    """Return `%sgpu_restart --rank 2`."""
    return f"%sgpu_restart --rank {','.join(map(str, ranks))}"


def unstopped_note(ranks: tuple[int, ...]) -> str:
    """Return which ranks still run a cell that was to stop, and what to do."""
    one = len(ranks) == 1
    it, has, runs = ("it", "has", "runs") if one else ("them", "have", "run")
    return (
        f"{format_ranks(ranks)} {has} not stopped and still {runs} this cell: the session's next cell waits for {it}. "
        f"Interrupt again within 5 s to kill {it}, or {restart_command(ranks)}, which starts {it} anew"
    )
