"""How cells share a session: what they wait for there, what they get, and when it ends. Pure.

- Cells in a session's own ranks take turns, first come, first served; `--fresh` ones begin at once beside them.
- None holds devices: the session does, until its own ranks and all new processes on them are gone.
- A session that ends takes its cells along: those that wait end here, those in its ranks by the agent, and the
  fresh ones are stopped.
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
    """Whether cells may still be given to it."""
    return not (session.gone or session.state.is_final or session.state is RunState.CANCELLING)


def refusal(spec: RunSpec, session: Run | None) -> str:
    """Why the session will never take this cell; "" when it will."""
    if session is None or not is_session(session):
        return f"there is no session {short(spec.session)} in this pool. Begin one with %sgpu_connect."
    name, ranks, asked = named(session.spec), session.spec.placement.ranks, spec.placement.ranks
    if not is_open(session):
        has = "has ended" if session.state.is_final else "is ending"
        why = f": {session.reason}" if session.reason else ""
        return f"{name} {has}{why}. Begin another with %sgpu_connect."
    if spec.fresh:
        if spec.only:
            return "--ranks names ranks that stay, and --fresh starts new ones. Leave one of them out."
        if asked > ranks:
            return (
                f"{name} has {ranks} ranks, and the run asks for {asked} new ones on its devices. Use --gpus {ranks} "
                "or fewer, or end the session with %sgpu_disconnect and connect with more."
            )
        return ""
    if asked != ranks:
        return (
            f"{name} has {ranks} ranks, and the run is made for {asked}. Leave --gpus out, name some of them with "
            "--ranks, or start new processes with --fresh."
        )
    if strange := [rank for rank in spec.only if not 0 <= rank < ranks]:
        has = "rank 0" if ranks == 1 else f"ranks 0 to {ranks - 1}"
        return f"{name} has {has}, and the cell names {', '.join(map(str, strange))}. Mend --ranks."
    return ""


def on_nodes(spec: RunSpec) -> str:
    """Why a pool of many nodes does not take the session; "" when it does."""
    if spec.placement.nodes <= 1 and spec.placement.strategy != SPREAD:
        return ""
    asks = f"--nodes {spec.placement.nodes}" if spec.placement.nodes > 1 else "--placement spread"
    return (
        f"the ranks of {named(spec)} stay on one node, and {asks} asks for more. Leave it out, or run the cell without "
        "a session (%%distributed with the same options)."
    )


def too_large(want: Want, stock: Stock) -> str:
    """Why a session that several nodes could hold can't be placed."""
    sizes = stock.sizes(want.line, want.min_memory_bytes)
    node = max(sizes, key=sizes.__getitem__)
    return (
        f"a session's ranks are all on one node, and no node of this pool has {amount(want.ranks, want.line)}: the "
        f"largest, {stock.host(node)}, has {sizes[node]}. Connect with --gpus {sizes[node]} or fewer, run cells "
        "without a session to take several nodes, or choose another pool with --pool."
    )


def named(spec: RunSpec) -> str:
    """`session work`, or its id where it has no name."""
    return f"session {spec.name or short(spec.run_id)}"


def obstacle(table: RunTable, cell: Run, session: Run) -> str:
    """What a waiting cell of an open session waits for, "" when it may begin; asked in order of submission."""
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
    """The session's lease as a cell gets it: whole, or its first part for fewer new processes."""
    ranks = spec.placement.ranks
    if ranks >= lease.ranks:
        return lease
    slots = min(lease.cpu_slots, ranks)
    return msgspec.structs.replace(lease, ranks=ranks, uuids=lease.uuids[:ranks], cpu_slots=slots)


def waited_in_vain(cell: Run, why: str) -> str:
    """What to tell of a cell whose time in the queue is over."""
    if cell.spec.wait_s:
        return f"it has waited for {span(cell.spec.wait_s)}: {why}. Wait longer with --wait."
    return f"{why}, and the run was not to wait. Let it queue with --wait 10m."


def quiet_until(table: RunTable, session: Run) -> float | None:
    """When the session ends because nothing ran in it; None while something does, or it never ends so."""
    if session.quiet_since is None or session.spec.idle_s is None or session.state is not RunState.RUNNING:
        return None
    if session.paused or table.cells_of(session.run_id):
        return None
    return session.quiet_since + session.spec.idle_s


def ends_as(session: Run) -> RunState:
    """What becomes of its cells that wait: cancelled with it, else failed."""
    ending = session.stopping_as or session.state
    return RunState.CANCELLED if ending is RunState.CANCELLED else RunState.FAILED


def end_of_cell(cell: Run, session: Run) -> str:
    """Why a cell ends with its session: it has not begun, or has processes of its own on the session's devices."""
    why = f": {session.reason}" if session.reason else ""
    ended = " ended before it could begin" if cell.lease is None else ", whose devices it has, ended"
    return f"{named(session.spec)}{ended}{why}"


def on_its_devices(cells: Sequence[Run]) -> bool:
    """Whether new processes use the session's devices."""
    return any(cell.spec.fresh and cell.lease is not None for cell in cells)
