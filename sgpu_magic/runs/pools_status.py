"""The status of several pools in one view, for `%sgpu_status` and `sgpu pool status`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from sgpu_magic.client.pools import Asked, Pools
from sgpu_magic.client.pools_file import LOCAL
from sgpu_magic.views.html_style import SANS, SOFT, safe
from sgpu_magic.views.pool_tables import away_html, away_text, status_html, status_text

RECENT = 20
NOT_RUNNING = "not running; the first run in it starts it"


def ask(pools: Pools, name: str = "", *, start: bool, recent: int = RECENT) -> list[Asked]:
    """Ask one pool, or all listed pools, for their status.

    Args:
        pools: The process's pools.
        name: The pool; "" means all.
        start: Start the local pool if it is not running and is the only one asked.
        recent: Number of newest runs to include.

    Raises:
        SgpuError: The only pool asked can't be reached, or there is no pool of that name.
    """
    entries = pools.entries() if name != LOCAL else ()
    if name and name != LOCAL:
        pools.named(name)
        entries = tuple(entry for entry in entries if entry.name == name)
    if entries:
        answers = pools.asked(entries, local=not name, recent=recent, again=bool(name))
        if name and answers[0].problem:
            # raise the error, since only this pool was requested
            pools.named(name).status(1, timeout_s=0.1)
        return answers
    return [Asked(LOCAL, None, pools.local.status(recent, start=start))]


def drawn(answers: Sequence[Asked], notices: Mapping[str, str], remark: str = "") -> dict[str, str]:
    """Render the pools as text and as HTML tables with inline styles.

    Args:
        answers: The pools' answers.
        notices: The pools' notices by name; of a pool without a status why it has none, where that is known.
        remark: A sentence below all pools, "" for none.
    """
    texts: list[str] = []
    tables: list[str] = []
    for answer in answers:
        title = answer.name if answer.entry is None else f"{answer.name} ({answer.entry.kind})"
        notice = notices.get(answer.name, "")
        if answer.status is None:
            why = answer.problem or notice or NOT_RUNNING
            texts.append(away_text(title, why))
            tables.append(away_html(title, why, is_problem=bool(answer.problem)))
        else:
            status = answer.status if answer.entry is None else msgspec.structs.replace(answer.status, pool=title)
            texts.append(status_text(status, notice=notice))
            tables.append(status_html(status, notice=notice))
    html = "".join(f'<div style="margin-bottom:8px">{each}</div>' for each in tables) if len(tables) > 1 else tables[0]
    if remark:
        texts.append(remark)
        html += f'<div style="{SANS};font-size:12px;{SOFT};padding:3px 0">{safe(remark)}</div>'
    return {"text/plain": "\n\n".join(texts), "text/html": html}
