"""Which run is meant by the first digits of an id: its pool of several, its directory here."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Generator, Sequence

from sgpu_magic.client import ledger
from sgpu_magic.client.local_pool import find_pool
from sgpu_magic.client.pool import Pool
from sgpu_magic.client.pools import Asked, Pools
from sgpu_magic.client.pools_file import LOCAL
from sgpu_magic.config import Settings
from sgpu_magic.errors import PoolError, RunUnknown, UsageError
from sgpu_magic.system.byte_sizes import format_bytes
from sgpu_magic.wire.ids import is_valid_id, short
from sgpu_magic.wire.pool_status import RunSummary

# so many of each pool's newest runs are looked through; an older one is asked for by name
_NEWEST = 300
_MOST_LISTED = 8
_PREFIX = re.compile(r"[0-9a-f]{1,8}")


def pool_with(pools: Pools, settings: Settings, run: str, *, going_on: bool = False, start: bool = True) -> Pool:
    """Return the pool that has a run; the local one where no other is listed. Takes 2 s at most.

    Args:
        pools: This process's.
        settings: Where the local one lives.
        run: The first digits of its id; "" is the newest run that goes on, else the newest.
        going_on: Only runs that have not ended.
        start: A local pool is started when there is none and no other is listed.

    Raises:
        RunUnknown: No pool that answers has it, or more than one run's id begins like that.
        UsageError: The list of pools can't be read.
    """
    entries = pools.entries()
    if not entries and len(pools.made()) == 1:
        return pools.local
    with_local = start or find_pool(settings) is not None or pools.local.connected is not None
    answers = pools.asked(entries, local=with_local, recent=_NEWEST)
    rows = [(answer.name, row) for answer in answers if answer.status is not None for row in answer.status.runs]
    rows = [(name, row) for name, row in rows if not (going_on and row.state.is_final)]
    if not run:
        rows.sort(key=lambda found: (found[1].state.is_final, -found[1].submitted_at))
        return pools.of(rows[0][0]) if rows else pools.local
    matching = [(name, row) for name, row in rows if row.run_id.startswith(run)]
    if len(matching) == 1:
        return pools.of(matching[0][0])
    if matching:
        raise RunUnknown(_ambiguous(run, matching))
    older = _pool_of_an_older(pools, answers, run) if not going_on else None
    if older is not None:
        return older
    raise RunUnknown(_nowhere(run, answers, going_on=going_on))


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
        yield pool_with(pools, settings, prefix, going_on=going_on, start=False)
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
        listed = ", ".join(found[:_MOST_LISTED]) + (", ..." if len(found) > _MOST_LISTED else "")
        raise UsageError(f"{prefix!r} begins the ids of {len(found)} runs: {listed}. Give more digits.")
    return found[0]


def _check_not_removed(settings: Settings, prefix: str) -> None:
    """Raise UsageError if the ledger has a run of that prefix: its directory was there once."""
    for run in ledger.recent_runs(settings, None):
        if run.run_id.startswith(prefix):
            raise UsageError(
                f"what run {short(run.run_id)} printed and returned is no longer kept, only that it was: `sgpu runs "
                f"--all`. Of ended runs the newest {settings.keep_runs:,} are kept, for {settings.keep_days:g} days "
                f"and within {format_bytes(settings.keep_bytes)} (settings keep_runs, keep_days, keep_bytes)."
            )


def with_silent(text: str, answers: Sequence[Asked]) -> str:
    """Return a message with what could not be asked."""
    silent = [answer for answer in answers if answer.problem]
    if not silent:
        return text
    names = ", ".join(answer.name for answer in silent)
    return f"{text} Not asked, because it can't be reached: {names}."


def _pool_of_an_older(pools: Pools, answers: Sequence[Asked], run: str) -> Pool | None:
    """Ask the pools that had too many newer runs to tell, one after the other."""
    for answer in answers:
        if answer.status is None or len(answer.status.runs) < _NEWEST:
            continue
        pool = pools.of(answer.name)
        with contextlib.suppress(RunUnknown):
            pool.attach(run)[0].close()
            return pool
    return None


def _ambiguous(run: str, matching: Sequence[tuple[str, RunSummary]]) -> str:
    listed = ", ".join(
        f"{row.run_id if len(run) >= 4 else short(row.run_id)} ({name})" for name, row in matching[:_MOST_LISTED]
    )
    more = ", ..." if len(matching) > _MOST_LISTED else ""
    return f"{run!r} begins the ids of {len(matching)} runs: {listed}{more}. Give more digits."


def _nowhere(run: str, answers: Sequence[Asked], *, going_on: bool) -> str:
    asked = [answer.name for answer in answers if not answer.problem] or [LOCAL]
    goes_on = " that goes on" if going_on else ""
    text = (
        f"no run{goes_on} has an id that begins with {run!r} in the pool{'s' * (len(asked) > 1)} {', '.join(asked)}. "
        "%sgpu_status and `sgpu runs` list them."
    )
    return with_silent(text, answers)
