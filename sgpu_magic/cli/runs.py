"""`sgpu runs`: the pools' runs; `cancel`, `detach` and `stacks` for one run."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import PurePath
from typing import NamedTuple

import msgspec

from sgpu_magic.cli.json_form import omitted_pools, run_row, running_s
from sgpu_magic.cli.json_records import RunList, encode
from sgpu_magic.cli.main import CommandParser, add_json, note, positive, terminal_width
from sgpu_magic.client import ledger
from sgpu_magic.client.find_run import check_prefix, pool_of
from sgpu_magic.client.ledger import seconds_of
from sgpu_magic.client.pool import Pool
from sgpu_magic.client.pools import Pools, PoolStatusReply
from sgpu_magic.client.pools_file import LOCAL
from sgpu_magic.config import Settings, load_settings
from sgpu_magic.errors import PoolError
from sgpu_magic.formatting import format_elapsed, format_money
from sgpu_magic.views import ansi
from sgpu_magic.views.stacks import stacks_text
from sgpu_magic.views.units import BETWEEN, TIMES, aligned, cut
from sgpu_magic.wire.base import CancelReason, RunKind, RunState, short
from sgpu_magic.wire.costs import cost_so_far
from sgpu_magic.wire.devices import ANY, CPU, type_label
from sgpu_magic.wire.pool_status import RunSummary

_ALL = 1_000_000_000
_RECENT = 20
# `timed-out` is one word in a shell
_STATES = {state.value.replace(" ", "-"): state for state in RunState}
_MAX_REMARK = 100
_LEAST_NAME = 8
# Columns that are left out if they are empty, or do not fit in a terminal; the first is kept longest. For each, the
# length to which names may be cut for it, None if they may not.
_OPTIONAL: Mapping[str, int | None] = {"pool": 12, "cost": 12, "notebook": None}
_ALL_SIMULATED = "All GPUs in this list are simulated on CPU."


class RunFilter(msgspec.Struct, frozen=True):
    """Which runs a list has.

    Args:
        states: Only runs in one of these states; empty for any.
        notebook: Only runs of notebooks whose path ends with this, or matches it as a pattern; None for any.
        since: Only runs submitted at this time or later, seconds since the epoch; None for any.
    """

    states: frozenset[RunState] = frozenset()
    notebook: str | None = None
    since: float | None = None

    @property
    def is_set(self) -> bool:
        """Whether it leaves out any runs."""
        return self != RunFilter()

    def accepts(self, run: RunSummary) -> bool:
        """Whether a list has the run."""
        if self.states and run.state not in self.states:
            return False
        if self.notebook is not None and not (run.notebook and PurePath(run.notebook).match(self.notebook)):
            return False
        return self.since is None or run.submitted_at >= self.since


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


def recent(settings: Settings, limit: int | None, name: str, wanted: RunFilter) -> RecentRuns:
    """Return the newest runs.

    The local pool's runs come from the pool if it is running, else from the ledger's file.

    Args:
        settings: The settings.
        limit: Maximum number of runs; None for all.
        name: Only this pool; "" for all.
        wanted: Only these runs.

    Raises:
        PoolError: The ledger can't be read, or the named pool can't be reached.
        UsageError: There is no pool of that name.
    """
    # all runs have to be seen to find the newest that a filter accepts
    number = _ALL if limit is None or wanted.is_set else limit
    status, local_problem = None, None
    with closing(Pools(settings)) as pools:
        if name not in ("", LOCAL):
            status = pools.get(name).status(number)
            runs = () if status is None else filter(wanted.accepts, status.runs)
            return RecentRuns([ListedRun(name, run) for run in runs][:limit], several=True)
        remote = pools.ask_status(() if name else pools.entries(), local=False, recent=number)
        try:
            status = pools.local.status(recent=number, start=False)
        except PoolError as error:
            local_problem = error.message
    local = ledger.recent_runs(settings, number) if status is None else status.runs
    listed = [ListedRun(LOCAL, run) for run in local]
    listed += [ListedRun(each.name, run) for each in remote if each.status is not None for run in each.status.runs]
    if remote:
        listed.sort(key=lambda found: -found.run.submitted_at)
    listed = [found for found in listed if wanted.accepts(found.run)]
    omitted = [each for each in remote if each.problem]
    return RecentRuns(listed[:limit], bool(remote), omitted, local_problem)


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


# ---------------------------------------------------------------- the list


def runs_table(
    runs: Sequence[RunSummary], now: float, pools: Mapping[str, str] | None = None, width: int | None = None
) -> str:
    """Return the runs as aligned text, with failures and reasons to wait below their runs.

    Args:
        runs: The runs, newest first.
        now: The current time, seconds since the epoch.
        pools: Pool of each run by its id; adds a column.
        width: Characters of a line; names are cut, and columns that do not fit are left out. None for no limit.
    """
    times_seen = Counter(short(run.run_id) for run in runs)
    # where all GPUs are simulated, a line says so once
    simulated = [run.simulated for run in runs if run.device_type not in (ANY, CPU)]
    says_once = bool(simulated) and all(simulated)
    columns: dict[str, list[str]] = {
        "run": [short(run.run_id) if times_seen[short(run.run_id)] == 1 else run.run_id for run in runs],
        "pool": [pools[run.run_id] for run in runs] if pools else [],
        "name": [_name(run) for run in runs],
        "state": [run.state.value for run in runs],
        "submitted": [_when(run.submitted_at, now) for run in runs],
        "duration": [_duration(run, now) for run in runs],
        "devices": [_devices(run, says_simulated=not says_once) for run in runs],
        "cost": [_cost(run, now) for run in runs],
        "notebook": [PurePath(run.notebook).name for run in runs],
    }
    fitted = _fitted(columns, width)
    right = tuple(at for at, head in enumerate(fitted) if head in ("duration", "cost"))
    head, *rows = aligned([tuple(fitted), *zip(*fitted.values(), strict=True)], right=right)
    indent = " " * (max(map(len, fitted["run"])) + len(BETWEEN))
    longest = _MAX_REMARK if width is None else width - len(indent)
    lines = [head]
    for run, row in zip(runs, rows, strict=True):
        remark = _remark(run)
        lines += [row, f"{indent}{cut(remark, longest)}"] if remark else [row]
    return "\n".join([*lines, _ALL_SIMULATED] if says_once else lines)


def _fitted(columns: Mapping[str, Sequence[str]], width: int | None) -> dict[str, Sequence[str]]:
    """Return the columns that fit into a line, with names cut to what is left; empty optional ones are left out."""
    filled = {head: cells for head, cells in columns.items() if head not in _OPTIONAL or any(cells)}
    if width is None:
        return filled
    widths = {head: max(len(head), *map(len, cells)) for head, cells in filled.items()}
    kept = [head for head in filled if head not in _OPTIONAL]
    for head, least_name in _OPTIONAL.items():
        name_width = min(widths["name"], least_name or widths["name"])
        if head in filled and _line_width(widths | {"name": name_width}, [*kept, head]) <= width:
            kept.append(head)
    others = _line_width(widths | {"name": 0}, kept)
    longest_name = max(_LEAST_NAME, width - others)
    names = [cut(name, longest_name) for name in filled["name"]]
    return {head: names if head == "name" else cells for head, cells in filled.items() if head in kept}


def _line_width(widths: Mapping[str, int], heads: Sequence[str]) -> int:
    return sum(widths[head] for head in heads) + len(BETWEEN) * (len(heads) - 1)


def _name(run: RunSummary) -> str:
    return ansi.plain(f"session {run.name}".rstrip() if run.kind is RunKind.SESSION else run.name)


def _when(at: float, now: float) -> str:
    """Return `14:05` for today, `Nov 29 14:05` for this year, else `2025-11-29`."""
    then, today = time.localtime(at), time.localtime(now)
    if then[:3] == today[:3]:
        return time.strftime("%H:%M", then)
    return time.strftime("%b %d %H:%M" if then.tm_year == today.tm_year else "%Y-%m-%d", then)


def _duration(run: RunSummary, now: float) -> str:
    duration_s = running_s(run, now)
    return "-" if duration_s is None else format_elapsed(duration_s)


def _devices(run: RunSummary, *, says_simulated: bool) -> str:
    if run.device_type == ANY:
        return str(run.ranks)
    kind = run.device_type if run.device_type == CPU else type_label(run.device_type)
    return f"{run.ranks} {TIMES} {kind}" + (" (simulated)" if run.simulated and says_simulated else "")


def _cost(run: RunSummary, now: float) -> str:
    cost = cost_so_far(run, now)
    return "" if cost is None else format_money(cost, run.currency)


def _remark(run: RunSummary) -> str:
    in_session = f"in session {short(run.session)}" if run.session else ""
    return ansi.plain(run.waiting_for or run.failure.strip().partition("\n")[0] or in_session)


def _list_options(parser: CommandParser) -> None:
    parser.add_argument("--pool", default="", metavar="NAME", help="only this pool (default: all)")
    parser.add_argument(
        "--state",
        action="append",
        choices=tuple(_STATES),
        metavar="STATE",
        help=f"only this state: {', '.join(_STATES)}",
    )
    parser.add_argument("--notebook", metavar="NAME", help="only of this notebook: its name, path or pattern")
    parser.add_argument("--since", metavar="2h", help="only runs submitted in this time: 30m, 2h, 7d, 4w")
    how_many = parser.add_mutually_exclusive_group()
    how_many.add_argument(
        "-n", dest="number", type=positive, default=_RECENT, metavar="N", help="how many to show (default: 20)"
    )
    how_many.add_argument("--all", action="store_true", help="show all")
    add_json(parser)
    parser.does(_list)


def _list(options: argparse.Namespace) -> str:
    now = time.time()
    wanted = RunFilter(
        states=frozenset(_STATES[word] for word in options.state or ()),
        notebook=options.notebook,
        since=None if options.since is None else now - seconds_of(options.since),
    )
    found = recent(load_settings(), None if options.all else options.number, options.pool, wanted)
    if found.local_problem is not None:
        note(f"this list is from the ledger's file, because {found.local_problem}")
    if options.json:
        rows = tuple(run_row(run, pool, now) for pool, run in found.listed)
        return encode(RunList(runs=rows, omitted=omitted_pools(found.omitted)))
    for answer in found.omitted:
        note(f"{answer.name} is left out: {answer.problem}")
    if not found.listed:
        return "no run matches" if wanted.is_set else "no runs yet"
    pool_of_run = {run.run_id: pool for pool, run in found.listed} if found.several else None
    return runs_table([run for _, run in found.listed], now, pool_of_run, terminal_width())


def _one_options(parser: CommandParser) -> None:
    parser.add_argument("run", metavar="RUN", help="ID of the run, or its first digits")
    parser.does(lambda options: of_one(load_settings(), options.command, options.run))


COMMANDS = {"runs": _list_options, **dict.fromkeys(_OF_ONE, _one_options)}
