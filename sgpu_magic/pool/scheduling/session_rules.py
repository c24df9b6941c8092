"""How cells share a session: what they wait for, what they get, and when the session ends. Pure.

- Cells in a session's own ranks take turns, first come, first served; `--fresh` cells start at once beside them.
- Cells hold no devices: the session does, until its own ranks and all `--fresh` processes on them are gone.
- When a session ends, its cells end too: the scheduler ends the waiting ones and stops the fresh ones, the agent ends
  those in the session's ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from sgpu_magic.pool.scheduling.capacity import SPREAD, Stock, Want, amount
from sgpu_magic.pool.scheduling.run import Run, span
from sgpu_magic.wire.devices import Lease
from sgpu_magic.wire.record import short
from sgpu_magic.wire.run import RunSpec
from sgpu_magic.wire.states import RunKind, RunState

if TYPE_CHECKING:
    from sgpu_magic.pool.scheduling.run_table import RunTable

_RESTART_OR_KILL = "interrupt again within 5 s, or %sgpu_restart --rank {ranks}, kills {it}"


def is_session(run: Run) -> bool:
    return run.spec.kind is RunKind.SESSION


def is_open(session: Run) -> bool:
    """Whether the session accepts cells."""
    return not (session.gone or session.state.is_final or session.state is RunState.CANCELLING)


def refusal(spec: RunSpec, session: Run | None) -> str:
    """Return why the session will never accept this cell; "" when it will."""
    if session is None or not is_session(session):
        return f"there is no session {short(spec.session)} in this pool. Start one with %sgpu_connect."
    name, ranks, asked = named(session.spec), session.spec.placement.ranks, spec.placement.ranks
    if not is_open(session):
        has = "has ended" if session.state.is_final else "is ending"
        why = f": {session.reason}" if session.reason else ""
        return f"{name} {has}{why}. Start another with %sgpu_connect."
    if spec.fresh:
        if spec.only:
            return "--ranks names existing ranks, and --fresh starts new ones. Leave one of them out."
        if asked > ranks:
            return (
                f"{name} has {ranks} ranks, and the run asks for {asked} new ones on its devices. Use --gpus {ranks} "
                "or fewer, or end the session with %sgpu_disconnect and connect with more."
            )
        return ""
    if asked != ranks:
        return (
            f"{name} has {ranks} ranks, and the run asks for {asked}. Leave --gpus out, name some of them with "
            "--ranks, or start new processes with --fresh."
        )
    if strange := [rank for rank in spec.only if not 0 <= rank < ranks]:
        has = "rank 0" if ranks == 1 else f"ranks 0 to {ranks - 1}"
        return f"{name} has {has}, and the cell names {', '.join(map(str, strange))}. Correct --ranks."
    return ""


def on_nodes(spec: RunSpec) -> str:
    """Return why a pool of many nodes does not accept the session; "" when it does."""
    if spec.placement.nodes <= 1 and spec.placement.strategy != SPREAD:
        return ""
    asks = f"--nodes {spec.placement.nodes}" if spec.placement.nodes > 1 else "--placement spread"
    return (
        f"the ranks of {named(spec)} are all on one node, and {asks} asks for more. Leave it out, or run the cell "
        "without a session (%%distributed with the same options)."
    )


def too_large(want: Want, stock: Stock) -> str:
    """Return why a session that would fit only on several nodes can't be placed."""
    sizes = stock.sizes(want.line, want.min_memory_bytes)
    node = max(sizes, key=sizes.__getitem__)
    return (
        f"a session's ranks are all on one node, and no node of this pool has {amount(want.ranks, want.line)}: the "
        f"largest, {stock.host(node)}, has {sizes[node]}. Connect with --gpus {sizes[node]} or fewer, run cells "
        "without a session to take several nodes, or choose another pool with --pool."
    )


def named(spec: RunSpec) -> str:
    """Return `session` and its name, or its short ID if it has none."""
    return f"session {spec.name or short(spec.run_id)}"


def obstacle(table: RunTable, cell: Run, session: Run) -> str:
    """Return what a cell of an open session waits for; "" when it may start. Call it in order of submission."""
    if session.lease is None:
        return f"its session waits for devices: {session.told[1] if session.told is not None else 'it is queued'}"
    if session.state is not RunState.RUNNING:
        return "its session's ranks are starting"
    if session.paused:
        return session.paused
    if cell.spec.fresh:
        return ""
    others = (other for other in table.cells_of(cell.spec.session) if other.spec.in_session)
    inside = next((other for other in others if other.lease is not None), None)
    return "" if inside is None else _busy_with(inside)


def _busy_with(cell: Run) -> str:
    run, ranks = short(cell.run_id), cell.unstopped
    if ranks:
        listed = ", ".join(map(str, ranks))
        one = len(ranks) == 1
        still = f"rank {listed} still runs" if one else f"ranks {listed} still run"
        kills = _RESTART_OR_KILL.format(ranks=",".join(map(str, ranks)), it="it" if one else "them")
        return f"{still} {run}, which was interrupted: {kills}"
    if cell.state is RunState.CANCELLING:
        return f"run {titled(cell)} is being stopped in its session"
    if cell.state.is_final:
        return f"run {titled(cell)} is ending in its session"
    return f"run {titled(cell)} is still running in its session"


def titled(run: Run) -> str:
    return f"{short(run.run_id)} ({run.spec.name})" if run.spec.name else short(run.run_id)


def share(lease: Lease, spec: RunSpec) -> Lease:
    """Return a cell's part of the session's lease: all of it, or its first devices for fewer `--fresh` ranks."""
    ranks = spec.placement.ranks
    if ranks >= lease.ranks:
        return lease
    slots = min(lease.cpu_slots, ranks)
    return msgspec.structs.replace(lease, ranks=ranks, uuids=lease.uuids[:ranks], cpu_slots=slots)


def waited_in_vain(cell: Run, why: str) -> str:
    """Return the message for a cell whose waiting time is over."""
    if cell.spec.wait_s:
        return f"it has waited for {span(cell.spec.wait_s)}: {why}. Wait longer with --wait."
    return f"{why}, and the run does not wait. Queue it with --wait 10m."


def quiet_until(table: RunTable, session: Run) -> float | None:
    """Return when the session ends for being idle; None while it has cells or is paused, or without an idle limit."""
    if session.quiet_since is None or session.spec.idle_s is None or session.state is not RunState.RUNNING:
        return None
    if session.paused or table.cells_of(session.run_id):
        return None
    return session.quiet_since + session.spec.idle_s


def ends_as(session: Run) -> RunState:
    """Return the final state of its waiting cells: cancelled if the session is, else failed."""
    ending = session.stopping_as or session.state
    return RunState.CANCELLED if ending is RunState.CANCELLED else RunState.FAILED


def end_of_cell(cell: Run, session: Run) -> str:
    """Return why a cell ends with its session: a waiting cell, or one with its own processes on its devices."""
    why = f": {session.reason}" if session.reason else ""
    ended = " ended before the run could start" if cell.lease is None else ", whose devices it uses, ended"
    return f"{named(session.spec)}{ended}{why}"


def on_its_devices(cells: Sequence[Run]) -> bool:
    """Whether `--fresh` cells use the session's devices."""
    return any(cell.spec.fresh and cell.lease is not None for cell in cells)
