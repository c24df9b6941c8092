"""`sgpu runs`, `cancel`, `detach` and `stacks`, and how a run is named: by the first digits of its id."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections import Counter
from collections.abc import Generator, Mapping, Sequence

from sgpu_magic.client.local_pool import find_pool
from sgpu_magic.client.pool import Pool
from sgpu_magic.client.pools import Asked, Pools
from sgpu_magic.client.pools_file import LOCAL
from sgpu_magic.commands import ledger_file
from sgpu_magic.config import Settings
from sgpu_magic.errors import PoolError, UsageError
from sgpu_magic.render import ansi
from sgpu_magic.render.stacks import stacks_text
from sgpu_magic.render.units import TIMES, format_clock
from sgpu_magic.runs import finding
from sgpu_magic.system.byte_sizes import format_bytes
from sgpu_magic.wire.ids import is_valid_id, short
from sgpu_magic.wire.metering import cost_so_far
from sgpu_magic.wire.pool_status import RunSummary
from sgpu_magic.wire.prices import format_money
from sgpu_magic.wire.states import RunKind

_PREFIX = re.compile(r"[0-9a-f]{1,8}")
_MAX_LISTED = 8
_MAX_FAILURE = 100
_ALL = 1_000_000_000


def recent(settings: Settings, limit: int | None, name: str = "") -> tuple[str, str]:
    """Return the table of the newest runs, and a sentence about where it is from ("" when there is none).

    From the pool when one runs, else from the ledger's file.

    Args:
        settings: Where they lie.
        limit: How many; None for all.
        name: Of this pool only; "" is all of them.

    Raises:
        PoolError: The ledger can't be read, or the one pool can't be asked.
        UsageError: There is no pool of that name.
    """
    if name not in ("", LOCAL):
        return _of_one_pool(settings, limit, name), ""
    note = ""
    runs: Sequence[RunSummary] | None = None
    pools = Pools(settings)
    recent = _ALL if limit is None else limit
    elsewhere: list[Asked] = []
    try:
        elsewhere = pools.asked(() if name else pools.entries(), local=False, recent=recent)
        answer = pools.local.status(recent=recent, start=False)
        runs = None if answer is None else answer.runs
    except PoolError as error:
        note = f"this list is from the ledger's file, because {error.message}"
    finally:
        pools.close()
    if runs is None:
        runs = ledger_file.recent_runs(settings, limit)
    if not elsewhere:
        return runs_table(runs, time.time()), note
    silent = [f"{each.name} is left out: {each.problem}" for each in elsewhere if each.problem]
    return _of_all_pools(runs, elsewhere, limit), " ".join(filter(None, [note, *silent]))


def _of_one_pool(settings: Settings, limit: int | None, name: str) -> str:
    pools = Pools(settings)
    try:
        status = pools.named(name).status(_ALL if limit is None else limit)
    finally:
        pools.close()
    runs = () if status is None else status.runs
    return runs_table(runs[:limit], time.time(), {run.run_id: name for run in runs})


def _of_all_pools(local: Sequence[RunSummary], elsewhere: Sequence[Asked], limit: int | None) -> str:
    """Return one table of the newest runs of all pools, each with its pool."""
    told = [(LOCAL, run) for run in local]
    told += [(each.name, run) for each in elsewhere if each.status is not None for run in each.status.runs]
    told.sort(key=lambda found: -found[1].submitted_at)
    told = told[:limit]
    pool_of = {run.run_id: name for name, run in told}
    return runs_table([run for _, run in told], time.time(), pool_of)


def cancel(settings: Settings, run: str) -> str:
    """Cancel a run by the first digits of its id and return a sentence. Never starts a pool.

    Raises:
        PoolError: No pool runs, or it does not answer.
        UsageError: No run, or more than one, has an id like that.
    """
    prefix = check_prefix(run)
    with pool_of(settings, prefix, "that could be cancelled", going_on=True) as pool:
        return pool.cancel(prefix, "cancelled by `sgpu cancel`")


def detach(settings: Settings, run: str) -> str:
    """Let a run go on without its notebook and return a sentence. Never starts a pool.

    Raises:
        PoolError: No pool runs, or it does not answer.
        UsageError: No run, or more than one, has an id like that.
    """
    prefix = check_prefix(run)
    with pool_of(settings, prefix, "that could be detached", going_on=True) as pool:
        return pool.detach(prefix)


def stacks(settings: Settings, run: str) -> str:
    """Return where every rank of a run is. Never starts a pool.

    Raises:
        PoolError: No pool runs, or it does not answer.
        UsageError: No run that goes on, or more than one, has an id like that.
    """
    prefix = check_prefix(run)
    with pool_of(settings, prefix, "whose ranks could be looked at", going_on=True) as pool:
        answer = pool.stacks(prefix)
    return stacks_text(answer.run_id, answer.stacks, answer.cell)


@contextlib.contextmanager
def pool_of(settings: Settings, run: str, wish: str, *, going_on: bool = False) -> Generator[Pool]:
    """Return the pool that has a run, closed at the end. Never starts a pool.

    Args:
        settings: Where pools are.
        run: The first digits of its id.
        wish: What the run is wanted for, the end of a sentence.
        going_on: It must not have ended.

    Raises:
        PoolError: No pool runs.
        RunUnknown: No pool that answers has such a run.
        UsageError: That is no beginning of an id.
    """
    prefix = check_prefix(run)
    pools = Pools(settings)
    try:
        if not pools.entries() and find_pool(settings) is None:
            raise PoolError(f"no local pool is running, so no run is going on {wish}.")
        yield finding.pool_with(pools, settings, prefix, going_on=going_on, start=False)
    finally:
        pools.close()


def check_prefix(text: str) -> str:
    """Return `text` as the beginning of a run id.

    Raises:
        UsageError: It can't be one.
    """
    prefix = text.strip().lower()
    if _PREFIX.fullmatch(prefix) is None:
        raise UsageError(
            f"{text[:40]!r} is no run: give the first digits of its id (0-9, a-f), as `sgpu runs` lists them."
        )
    return prefix


def find_directory(settings: Settings, text: str) -> str:
    """Return the id of the one run with a directory whose id begins with `text`.

    Raises:
        UsageError: No run, or more than one, has an id like that.
    """
    prefix = check_prefix(text)
    try:
        names = os.listdir(settings.runs_path)
    except FileNotFoundError:
        names = []
    found = sorted(name for name in names if is_valid_id(name) and name.startswith(prefix))
    if not found:
        _check_not_removed(settings, prefix)
        raise UsageError(
            f"no run on this machine has an id that begins with {prefix!r}. `sgpu runs --all` lists them; "
            f"their directories are in {settings.runs_path}."
        )
    if len(found) > 1:
        listed = ", ".join(found[:_MAX_LISTED]) + (", ..." if len(found) > _MAX_LISTED else "")
        raise UsageError(f"{prefix!r} begins the ids of {len(found)} runs: {listed}. Give more digits.")
    return found[0]


def _check_not_removed(settings: Settings, prefix: str) -> None:
    """Raise UsageError if the ledger has a run of that prefix: its directory was there once."""
    for run in ledger_file.recent_runs(settings, None):
        if run.run_id.startswith(prefix):
            raise UsageError(
                f"what run {short(run.run_id)} printed and returned is no longer kept, only that it was: `sgpu runs "
                f"--all`. Of ended runs the newest {settings.keep_runs:,} are kept, for {settings.keep_days:g} days "
                f"and within {format_bytes(settings.keep_bytes)} (settings keep_runs, keep_days, keep_bytes)."
            )


def runs_table(runs: Sequence[RunSummary], now: float, pools: Mapping[str, str] | None = None) -> str:
    """Return the runs as aligned text.

    Args:
        runs: Newest first.
        now: Seconds since the epoch.
        pools: The pool of each by its id, where there are several.
    """
    if not runs:
        return "no runs yet"
    times_seen = Counter(short(run.run_id) for run in runs)
    rows = [("run", "name", "ranks", "state", "submitted", "for", "cost", "")]
    for run in runs:
        shown = short(run.run_id) if times_seen[short(run.run_id)] == 1 else run.run_id
        submitted = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.submitted_at))
        since = _duration(run, now)
        rows.append((shown, _named(run), _ranks(run), run.state.value, submitted, since, _cost(run, now), _remark(run)))
    if not any(row[6] for row in rows[1:]):
        # nothing has a price here
        rows = [(*row[:6], row[7]) for row in rows]
    right = (5, 6) if len(rows[0]) == 8 else (5,)
    if pools:
        rows = [
            (row[0], pool, *row[1:])
            for row, pool in zip(rows, ["pool", *(pools[run.run_id] for run in runs)], strict=True)
        ]
        right = tuple(column + 1 for column in right)
    return "\n".join(aligned(rows, right=right))


def aligned(rows: Sequence[tuple[str, ...]], right: tuple[int, ...] = ()) -> list[str]:
    """Return the rows with their columns below each other, those in `right` at the right."""
    rows = [tuple(ansi.plain(cell) for cell in row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "   ".join(
            cell.rjust(width) if at in right else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _named(run: RunSummary) -> str:
    return f"session {run.name}".rstrip() if run.kind is RunKind.SESSION else run.name


def _ranks(run: RunSummary) -> str:
    if run.device_type == "any":
        return str(run.ranks)
    kind = run.device_type if run.device_type == "cpu" else run.device_type.upper()
    return f"{run.ranks} {TIMES} {kind}" + (" (simulated on cpu)" if run.simulated else "")


def _duration(run: RunSummary, now: float) -> str:
    if run.state.is_final and run.ended_at is None:
        # its pool died with it, and nobody saw when
        return "-"
    since = run.submitted_at if run.started_at is None else run.started_at
    return format_clock((now if run.ended_at is None else run.ended_at) - since)


def _cost(run: RunSummary, now: float) -> str:
    cost = cost_so_far(run, now)
    return "" if cost is None else format_money(cost, run.currency)


def _remark(run: RunSummary) -> str:
    in_session = f"in session {short(run.session)}" if run.session else ""
    text = run.failure.strip().partition("\n")[0] or run.waiting_for or in_session
    return text if len(text) <= _MAX_FAILURE else text[:_MAX_FAILURE] + " ..."
