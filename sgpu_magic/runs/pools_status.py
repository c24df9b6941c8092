"""Several pools at one look, as `%sgpu_status` and `sgpu pool status` show them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from sgpu_magic.client.pools import Asked, Pools
from sgpu_magic.client.pools_file import LOCAL
from sgpu_magic.views.pool_tables import away_html, away_text, status_html, status_text
from sgpu_magic.wire.pool_status import PoolStatus

RECENT = 20
NOT_RUNNING = "not running; the first run in it starts it"


def ask(pools: Pools, name: str = "", *, start: bool, recent: int = RECENT) -> list[Asked]:
    """Ask one pool, or all that are listed.

    Args:
        pools: This process's.
        name: Which; "" is all of them.
        start: Start the local one if it alone is asked and does not run.
        recent: So many of the newest runs.

    Raises:
        SgpuError: The one pool that is asked can't be reached, or there is none of that name.
    """
    entries = pools.entries() if name != LOCAL else ()
    if name and name != LOCAL:
        pools.named(name)
        entries = tuple(entry for entry in entries if entry.name == name)
    if entries:
        answers = pools.asked(entries, local=not name, recent=recent, again=bool(name))
        if name and answers[0].problem:
            # said as any other error where it alone is wanted
            pools.named(name).status(1, timeout_s=0.1)
        return answers
    return [Asked(LOCAL, None, pools.local.status(recent, start=start))]


def text_of(answers: Sequence[Asked], notices: Mapping[str, str]) -> str:
    """Return the pools as text; `notices` is what each wants to be known, by its name."""
    parts = [
        status_text(_titled(answer, answer.status), notice=notices.get(answer.name, ""))
        if answer.status is not None
        else away_text(_title(answer), answer.problem or NOT_RUNNING)
        for answer in answers
    ]
    return "\n\n".join(parts)


def html_of(answers: Sequence[Asked], notices: Mapping[str, str]) -> str:
    """Return the pools as tables with inline style; as `text_of`."""
    parts = [
        status_html(_titled(answer, answer.status), notice=notices.get(answer.name, ""))
        if answer.status is not None
        else away_html(_title(answer), answer.problem or NOT_RUNNING)
        for answer in answers
    ]
    return parts[0] if len(parts) == 1 else "".join(f'<div style="margin-bottom:8px">{part}</div>' for part in parts)


def _title(answer: Asked) -> str:
    return answer.name if answer.entry is None else f"{answer.name} ({answer.entry.kind})"


def _titled(answer: Asked, status: PoolStatus) -> PoolStatus:
    return status if answer.entry is None else msgspec.structs.replace(status, pool=_title(answer))
