"""`sgpu runs`: the pools' runs; `cancel`, `detach` and `stacks` for one run."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import NamedTuple

import msgspec

from sgpu_magic.cli.json_form import omitted_pools, run_row
from sgpu_magic.cli.json_records import RunList, encode
from sgpu_magic.cli.main import CommandParser, add_json, note, positive
from sgpu_magic.client import ledger
from sgpu_magic.client.find_run import check_prefix, pool_of
from sgpu_magic.client.pool import Pool
from sgpu_magic.client.pools import Pools, PoolStatusReply
from sgpu_magic.client.pools_file import LOCAL
from sgpu_magic.config import Settings, load_settings
from sgpu_magic.errors import PoolError
from sgpu_magic.formatting import clipped, format_money
from sgpu_magic.views.pool_tables import run_duration
from sgpu_magic.views.stacks import stacks_text
from sgpu_magic.views.units import TIMES, aligned
from sgpu_magic.wire.base import CancelReason, RunKind, short
from sgpu_magic.wire.costs import cost_so_far
from sgpu_magic.wire.pool_status import RunSummary

_MAX_FAILURE = 100
_ALL = 1_000_000_000
_RECENT = 20


class ListedRun(NamedTuple):
    """A run and the name of its pool."""

    pool: str
    run: RunSummary


class RecentRuns(msgspec.Struct, frozen=True):
    """Runs of one or several pools.

    Args:
        listed: The runs, newest first.
        several: Other pools than one were asked, so that a list names each run's pool.
        omitted: The answers of pools that could not be asked.
        local_problem: Why the local pool did not answer, so that its ledger was read instead; None if it did.
    """

    listed: Sequence[ListedRun]
    several: bool = False
    omitted: Sequence[PoolStatusReply] = ()
    local_problem: str | None = None


def recent(settings: Settings, limit: int | None, name: str = "") -> RecentRuns:
    """Return the newest runs.

    The local pool's runs come from the pool if it is running, else from the ledger's file.

    Args:
        settings: The settings.
        limit: Maximum number of runs; None for all.
        name: Only this pool; "" for all.

    Raises:
        PoolError: The ledger can't be read, or the named pool can't be reached.
        UsageError: There is no pool of that name.
    """
    number = _ALL if limit is None else limit
    status, local_problem = None, None
    with closing(Pools(settings)) as pools:
        if name not in ("", LOCAL):
            status = pools.named(name).status(number)
            runs = () if status is None else status.runs[:limit]
            return RecentRuns([ListedRun(name, run) for run in runs], several=True)
        elsewhere = pools.asked(() if name else pools.entries(), local=False, recent=number)
        try:
            status = pools.local.status(recent=number, start=False)
        except PoolError as error:
            local_problem = error.message
    local = ledger.recent_runs(settings, limit) if status is None else status.runs
    listed = [ListedRun(LOCAL, run) for run in local]
    listed += [ListedRun(each.name, run) for each in elsewhere if each.status is not None for run in each.status.runs]
    if elsewhere:
        listed.sort(key=lambda found: -found.run.submitted_at)
    omitted = [each for each in elsewhere if each.problem]
    return RecentRuns(listed[:limit], bool(elsewhere), omitted, local_problem)


def of_one(settings: Settings, command: str, run: str) -> str:
    """Execute a command on an active run and return its message. Never starts a pool.

    Args:
        settings: The settings.
        command: `cancel`, `detach` or `stacks`.
        run: Prefix of the run's id.

    Raises:
        PoolError: No pool is running, or it does not answer.
        UsageError: No active run or several match.
    """
    prefix = check_prefix(run)
    wish, do = _OF_ONE[command]
    with pool_of(settings, prefix, wish, only_active=True) as pool:
        return do(pool, prefix)


def _stacks(pool: Pool, run: str) -> str:
    answer = pool.stacks(run)
    return stacks_text(answer.run_id, answer.stacks, answer.cell)


_OF_ONE: Mapping[str, tuple[str, Callable[[Pool, str], str]]] = {
    "cancel": ("that could be cancelled", lambda pool, run: pool.cancel(run, CancelReason.COMMAND)),
    "detach": ("that could be detached", lambda pool, run: pool.detach(run)),
    "stacks": ("whose stacks could be shown", _stacks),
}


def runs_table(runs: Sequence[RunSummary], now: float, pools: Mapping[str, str] | None = None) -> str:
    """Return the runs as aligned text.

    Args:
        runs: The runs, newest first.
        now: The current time, seconds since the epoch.
        pools: Pool of each run by its id; adds a column.
    """
    if not runs:
        return "no runs yet"
    times_seen = Counter(short(run.run_id) for run in runs)
    columns: dict[str, list[str]] = {
        "run": [short(run.run_id) if times_seen[short(run.run_id)] == 1 else run.run_id for run in runs],
        "pool": [pools[run.run_id] for run in runs] if pools else [],
        "name": [f"session {run.name}".rstrip() if run.kind is RunKind.SESSION else run.name for run in runs],
        "ranks": [_ranks(run) for run in runs],
        "state": [run.state.value for run in runs],
        "submitted": [_date(run.submitted_at) for run in runs],
        # the end of a run is unknown if its pool died with it
        "for": ["-" if run.state.is_final and run.ended_at is None else run_duration(run, now) for run in runs],
        "cost": [_cost(run, now) for run in runs],
        "": [_remark(run) for run in runs],
    }
    # omit the pool where there is only one, and the cost if no run has a price
    columns = {head: cells for head, cells in columns.items() if any(cells) or head not in ("pool", "cost")}
    right = tuple(at for at, head in enumerate(columns) if head in ("for", "cost"))
    return "\n".join(aligned([tuple(columns), *zip(*columns.values(), strict=True)], right=right))


def _date(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at))


def _ranks(run: RunSummary) -> str:
    if run.device_type == "any":
        return str(run.ranks)
    kind = run.device_type if run.device_type == "cpu" else run.device_type.upper()
    return f"{run.ranks} {TIMES} {kind}" + (" (simulated on cpu)" if run.simulated else "")


def _cost(run: RunSummary, now: float) -> str:
    cost = cost_so_far(run, now)
    return "" if cost is None else format_money(cost, run.currency)


def _remark(run: RunSummary) -> str:
    in_session = f"in session {short(run.session)}" if run.session else ""
    return clipped(run.waiting_for or run.failure.strip().partition("\n")[0] or in_session, _MAX_FAILURE)


def _list_options(parser: CommandParser) -> None:
    parser.add_argument("--pool", default="", metavar="NAME", help="only this pool (default: all)")
    how_many = parser.add_mutually_exclusive_group()
    how_many.add_argument(
        "-n", dest="number", type=positive, default=_RECENT, metavar="N", help="how many to show (default: 20)"
    )
    how_many.add_argument("--all", action="store_true", help="show all")
    add_json(parser)
    parser.does(_list)


def _list(options: argparse.Namespace) -> str:
    found = recent(load_settings(), None if options.all else options.number, options.pool)
    if found.local_problem is not None:
        note(f"this list is from the ledger's file, because {found.local_problem}")
    now = time.time()
    if options.json:
        rows = tuple(run_row(run, pool, now) for pool, run in found.listed)
        return encode(RunList(runs=rows, omitted=omitted_pools(found.omitted)))
    for answer in found.omitted:
        note(f"{answer.name} is left out: {answer.problem}")
    pool_of_run = {run.run_id: pool for pool, run in found.listed} if found.several else None
    return runs_table([run for _, run in found.listed], now, pool_of_run)


def _one_options(parser: CommandParser) -> None:
    parser.add_argument("run", metavar="RUN", help="ID of the run, or its first digits")
    parser.does(lambda options: of_one(load_settings(), options.command, options.run))


COMMANDS = {"runs": _list_options, **dict.fromkeys(_OF_ONE, _one_options)}
