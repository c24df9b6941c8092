"""One line for what only moves names between a notebook and a session: `%sgpu_push` and `%sgpu_pull`."""

from __future__ import annotations

from sgpu_magic.system.byte_sizes import format_bytes
from sgpu_magic.views.heading import names_text, returned_bytes, session_text
from sgpu_magic.views.html_style import SANS, SOFT, safe
from sgpu_magic.views.units import count_of, format_ranks
from sgpu_magic.views.view import RunView
from sgpu_magic.wire.records import OutputName
from sgpu_magic.wire.states import RunKind, RunState


def is_quiet(view: RunView) -> bool:
    """Whether a line is all that is to be said of it: it is a push or a pull that has not gone wrong."""
    badly = view.is_final and view.state is not RunState.SUCCEEDED
    return view.spec.kind in (RunKind.PUSH, RunKind.PULL) and not badly and not view.left


def quiet_line(view: RunView) -> str:
    """Return `sent cfg, loader (1.2 MB) to 4 ranks of session work`, `brought history (1.2 kB) from rank 0 ...`."""
    over = view.state is RunState.SUCCEEDED
    if view.spec.kind is RunKind.PUSH:
        shipped = view.spec.shipped
        what = f"{names_text(shipped.names)} ({format_bytes(shipped.total_bytes)})"
        line = f"{'sent' if over else 'sending'} {what} to {_ranks(view)} of {session_text(view)}"
    else:
        size = f" ({format_bytes(returned_bytes(view))})" if over else ""
        line = f"{'brought' if over else 'bringing'} {_origins(view)} of {session_text(view)}{size}"
    waits = "" if over else view.waiting_for
    return " · ".join([line, *([waits] if waits else []), *view.notes])


def quiet_html(view: RunView) -> str:
    """Return the same as HTML."""
    return f'<div style="{SANS};font-size:12px;{SOFT};padding:1px 0">{safe(quiet_line(view))}</div>'


def _ranks(view: RunView) -> str:
    return format_ranks(view.rank_numbers) if view.spec.only else count_of(view.ranks, "rank")


def _origins(view: RunView) -> str:
    """Return `history from rank 0 and loss from 4 ranks`."""
    origins: dict[str, list[OutputName]] = {}
    for output in view.spec.outputs:
        of = _ranks(view) if output.all_ranks else format_ranks(view.rank_numbers[:1])
        origins.setdefault(of, []).append(output)
    return " and ".join(f"{names_text([each.name for each in names])} from {of}" for of, names in origins.items())
