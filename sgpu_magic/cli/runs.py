"""`sgpu runs`, `cancel`, `detach`, `stacks` and `port-forward`, which name a run by the first digits of its id."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from sgpu_magic.cli.arguments import Parser, note, positive, rank
from sgpu_magic.client import ledger
from sgpu_magic.client.find_run import check_prefix, pool_of
from sgpu_magic.client.forwarding import LOOPBACK, Forwarder
from sgpu_magic.client.link import PoolLink
from sgpu_magic.client.pool import Pool
from sgpu_magic.client.pools import Asked, Pools
from sgpu_magic.client.pools_file import LOCAL
from sgpu_magic.config import Settings, load_settings
from sgpu_magic.errors import PoolError, UsageError
from sgpu_magic.views.stacks import stacks_text
from sgpu_magic.views.units import TIMES, aligned, format_clock
from sgpu_magic.wire.costs import cost_so_far, format_money
from sgpu_magic.wire.ids import short
from sgpu_magic.wire.pool_status import RunSummary
from sgpu_magic.wire.states import RunKind

_MAX_FAILURE = 100
_ALL = 1_000_000_000
_RECENT = 20
_MOST_PORT = 65535


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
        runs = ledger.recent_runs(settings, limit)
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


def _list_options(parser: Parser) -> None:
    parser.add_argument("--pool", default="", metavar="NAME", help="of this pool only (default: all)")
    how_many = parser.add_mutually_exclusive_group()
    how_many.add_argument("-n", dest="number", type=positive, default=_RECENT, metavar="N", help="how many (20)")
    how_many.add_argument("--all", action="store_true", help="all of them")
    parser.does(_list)


def _list(options: argparse.Namespace) -> int:
    table, where = recent(load_settings(), None if options.all else options.number, options.pool)
    sys.stdout.write(f"{table}\n")
    if where:
        note(where)
    return 0


def _of_one(do: Callable[[Settings, str], str]) -> Callable[[Parser], None]:
    """Return what adds the options of a command that takes a run."""

    def add(parser: Parser) -> None:
        parser.add_argument("run", metavar="RUN")
        parser.does(lambda options: do(load_settings(), options.run))

    return add


# ---------------------------------------------------------------- ports


def forward(pool: Pool, run: str, ports: str, rank: int) -> int:
    """Forward a port until the run ends or the command is interrupted.

    Args:
        pool: The run's.
        run: The first digits of its id.
        ports: `[LOCAL:]PORT`.
        rank: On whose node.

    Returns:
        0: the run ended, or the command was interrupted. 1: the pool ended.

    Raises:
        UsageError: The ports can't be meant, or there is no such run of this user.
        PoolError: No pool runs, or it does not answer.
    """
    local, remote = read_ports(ports)
    return asyncio.run(_forward(pool.link(), check_prefix(run), rank, (local, remote)))


async def _forward(link: PoolLink, run: str, rank: int, ports: tuple[int | None, int]) -> int:
    local, remote = ports
    forwarder = Forwarder(link, run, rank, remote, note)
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    try:
        run_id, here, problem = await forwarder.begin(local)
        sys.stdout.write(f"http://{LOOPBACK}:{here} leads to port {remote} of rank {rank} of run {short(run_id)}\n")
        sys.stdout.flush()
        if problem:
            note(f"{problem} yet; connections are made as soon as something does.")
        serving = loop.create_task(forwarder.serve())
        waiting = loop.create_task(stopped.wait())
        await asyncio.wait((serving, waiting), return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if not serving.done():
            serving.cancel()
            return 0
        note(f"{serving.result().rstrip('.')}: port {here} is free again.")
        return 1 if link.lost.is_set() else 0
    finally:
        await forwarder.close()


def read_ports(text: str) -> tuple[int | None, int]:
    """Read `[LOCAL:]PORT`; the port here is None when it is left out, 0 for any that is free.

    Raises:
        UsageError: These are no ports.
    """
    local, colon, remote = text.rpartition(":")
    if not _is_port(remote, least=1) or (colon and not _is_port(local, least=0)):
        raise UsageError(
            f"{text!r} are no ports: write the port in the run, as in 8265, or LOCAL:PORT, as in 9000:8265."
        )
    return (int(local) if colon else None), int(remote)


def _is_port(text: str, least: int) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 5 and least <= int(text) <= _MOST_PORT


def _forward_options(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("ports", metavar="[LOCAL:]PORT", help="the port in the run, and the one here if it differs")
    parser.add_argument("--rank", type=rank, default=0, metavar="N", help="on the node of this rank (0)")
    parser.does(_do_forward)


def _do_forward(options: argparse.Namespace) -> int:
    with pool_of(load_settings(), options.run, "whose ports could be reached") as pool:
        return forward(pool, options.run, options.ports, options.rank)


COMMANDS = {
    "runs": _list_options,
    "cancel": _of_one(cancel),
    "detach": _of_one(detach),
    "stacks": _of_one(stacks),
    "port-forward": _forward_options,
}
