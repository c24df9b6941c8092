"""Finds a run by the first digits of its id: its pool among several, or its directory on this machine."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Generator, Sequence

from sgpu_magic.client import ledger
from sgpu_magic.client.pool import Pool
from sgpu_magic.client.pools import Pools
from sgpu_magic.client.pools_file import LOCAL
from sgpu_magic.client.this_machine import find_pool
from sgpu_magic.config import Settings
from sgpu_magic.errors import PoolError, RunUnknown, UsageError
from sgpu_magic.formatting import format_bytes, plural
from sgpu_magic.wire.base import SHORT_LENGTH, is_valid_id, short

# number of each pool's newest runs that are searched; older ones are requested by id
NEWEST_RUNS = 300
_MOST_LISTED = 8
# a misspelled id is compared with so many of the newest ones: among more, some would be similar by chance
_SUGGESTED_FROM = 30
_PREFIX = re.compile(r"[0-9a-f]{1,8}")


def pool_with(pools: Pools, settings: Settings, run: str, *, only_active: bool = False, start: bool = True) -> Pool:
    """Return the pool that has a run; the local pool if no other is listed. Waits at most 2 s for remote pools.

    Args:
        pools: The process's pools.
        settings: Settings, with the local pool's directories.
        run: The first digits of its id; "" means the newest active run, else the newest run.
        only_active: Consider only active runs.
        start: Search the local pool even if it is not running.

    Raises:
        RunUnknown: No pool that answers has the run, or several runs match.
        UsageError: The list of pools can't be read.
    """
    entries = pools.entries()
    if not entries and len(pools.used_pools()) == 1:
        return pools.local
    with_local = start or find_pool(settings) is not None or pools.local.connected is not None
    answers = pools.ask_status(entries, local=with_local, recent=NEWEST_RUNS)
    known = [(answer.name, row) for answer in answers if answer.status is not None for row in answer.status.runs]
    rows = [(name, row) for name, row in known if not (only_active and row.state.is_final)]
    if not run:
        rows.sort(key=lambda found: (found[1].state.is_final, -found[1].submitted_at))
        return pools.used_pool(rows[0][0]) if rows else pools.local
    matching = [(name, row) for name, row in rows if row.run_id.startswith(run)]
    # one pool may be listed under several names
    if len({row.run_id for _, row in matching}) == 1:
        return pools.used_pool(matching[0][0])
    if matching:
        ids = [f"{row.run_id if len(run) >= 4 else short(row.run_id)} ({name})" for name, row in matching]
        raise RunUnknown(_ambiguous(run, ids))
    # query the pools whose list of runs was truncated, one after the other
    for answer in answers if not only_active else ():
        if answer.status is not None and len(answer.status.runs) >= NEWEST_RUNS:
            with contextlib.suppress(RunUnknown):
                pools.used_pool(answer.name).attach(run)[0].close()
                return pools.used_pool(answer.name)
    asked = [answer.name for answer in answers if not answer.problem] or [LOCAL]
    silent = ", ".join(answer.name for answer in answers if answer.problem)
    what = "active run" if only_active else "run"
    raise RunUnknown.of_unknown_name(
        f"no {what} has an id that begins with {run!r} in the {plural(len(asked), 'pool')} {', '.join(asked)}."
        + (f" Not asked, because it can't be reached: {silent}." if silent else ""),
        run,
        similar_to(run, [row.run_id for _, row in rows]),
        otherwise="%sgpu_status and `sgpu runs` list the runs.",
    )


@contextlib.contextmanager
def pool_of(settings: Settings, run: str, wish: str, *, only_active: bool = False) -> Generator[Pool]:
    """Yield the pool that has a run, and close it afterwards. Never starts a pool.

    Args:
        settings: The process's settings.
        run: The first digits of the run's id.
        wish: What the run is wanted for, as the end of a sentence in the error message.
        only_active: Consider only active runs.

    Raises:
        PoolError: No pool is running.
        RunUnknown: No pool that answers has such a run.
        UsageError: `run` can't be the beginning of an id.
    """
    prefix = check_prefix(run)
    with contextlib.closing(Pools(settings)) as pools:
        if not pools.entries() and find_pool(settings) is None:
            raise PoolError(f"no local pool is running, so there is no run {wish}.")
        yield pool_with(pools, settings, prefix, only_active=only_active, start=False)


def similar_to(prefix: str, run_ids: Sequence[str]) -> list[str]:
    """Return the beginnings of ids that a misspelled beginning can be meant for: those of its length, or longer."""
    length = max(len(prefix), SHORT_LENGTH)
    return [run_id[:length] for run_id in run_ids[:_SUGGESTED_FROM]] if len(prefix) >= SHORT_LENGTH else []


def check_prefix(text: str, listed: str = ", as `sgpu runs` lists them", option: str = "") -> str:
    """Return `text` normalized as the beginning of a run id.

    Args:
        text: The digits as they were given.
        listed: Where the user finds them, for the error message.
        option: The option or argument that they were given for, with `: ` at its end, for the error message.

    Raises:
        UsageError: It can't be the beginning of an id.
    """
    prefix = text.strip().lower()
    if _PREFIX.fullmatch(prefix) is None:
        raise UsageError(f"{option}{text[:40]!r} is not a run's id: give its first digits (0-9, a-f){listed}.")
    return prefix


def find_directory(settings: Settings, text: str) -> str:
    """Return the id of the local run directory whose id begins with `text`.

    Raises:
        UsageError: No directory, or more than one, matches.
    """
    prefix = check_prefix(text)
    found = sorted(path.name for path in settings.runs_path.glob(f"{prefix}*") if is_valid_id(path.name))
    if not found:
        for run in ledger.recent_runs(settings, None):
            if run.run_id.startswith(prefix):
                raise UsageError(
                    f"the output and results of run {short(run.run_id)} are no longer kept; `sgpu runs --all` still "
                    f"lists it. Of ended runs the newest {settings.keep_runs:,} are kept, for {settings.keep_days:g} "
                    f"days and within {format_bytes(settings.keep_bytes)} (settings keep_runs, keep_days, keep_bytes)."
                )
        newest = [run.run_id for run in ledger.recent_runs(settings, NEWEST_RUNS)]
        raise UsageError.of_unknown_name(
            f"no run on this machine has an id that begins with {prefix!r}.",
            prefix,
            similar_to(prefix, newest),
            otherwise=f"`sgpu runs --all` lists them; their directories are in {settings.runs_path}.",
        )
    if len(found) > 1:
        raise UsageError(_ambiguous(prefix, found))
    return found[0]


def _ambiguous(run: str, ids: Sequence[str]) -> str:
    listed = ", ".join(ids[:_MOST_LISTED]) + (", ..." if len(ids) > _MOST_LISTED else "")
    return f"{run!r} matches {len(ids)} runs: {listed}. Give more digits."
