"""In which of several pools a run is that is named by the first digits of its id."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sgpu_magic.client.local_pool import find_pool
from sgpu_magic.client.pool import Pool
from sgpu_magic.client.pools import Asked, Pools
from sgpu_magic.client.pools_file import LOCAL
from sgpu_magic.config import Settings
from sgpu_magic.errors import RunUnknown
from sgpu_magic.wire.ids import short
from sgpu_magic.wire.pool_status import RunSummary

# so many of each pool's newest runs are looked through; an older one is asked for by name
_NEWEST = 300
_MOST_LISTED = 8


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
        if _knows(lambda pool=pool: pool.attach(run)[0].close()):
            return pool
    return None


def _knows(ask: Callable[[], object]) -> bool:
    try:
        ask()
    except RunUnknown:
        return False
    return True


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
