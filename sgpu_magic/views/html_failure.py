"""Why a run failed, and where its ranks wait, as static HTML."""

from __future__ import annotations

import re
from html import escape

from sgpu_magic.views.failure_form import FormLine, cut_lines, failure_form
from sgpu_magic.views.html_memory import memory_html
from sgpu_magic.views.html_style import BAD, LINE, PRE, SOFT, WARN
from sgpu_magic.views.text import stall_lines
from sgpu_magic.views.view import RunView
from sgpu_magic.wire.states import FailureKind, RunState

_MAX_EXCERPT_CHARS = 12_000
_MAX_WHOLE_CHARS = 40_000
_NAMED = re.compile(r"[A-Za-z][\w.]*:")


def failure_html(view: RunView) -> str:
    """Return the culprit with the cell's own lines, "" for a run that has not failed."""
    failure = view.failure
    if failure is None or view.state is RunState.SUCCEEDED:
        return ""
    form = failure_form(view, failure, _MAX_EXCERPT_CHARS, _MAX_WHOLE_CHARS)
    lines = [_form_line(line, failure.kind) for line in form.lines]
    whole = ""
    if form.whole:
        body = "\n".join(_form_line(line, failure.kind) for line in form.whole)
        whole = (
            f'<details style="padding:0 12px 6px;font-size:12px"><summary style="cursor:pointer;{SOFT}">'
            f'the whole traceback</summary><pre style="{PRE};padding:4px 0 0">{body}</pre></details>'
        )
    newline = "\n"
    return (
        f'<div style="border-bottom:1px solid {LINE};border-left:3px solid {BAD}">'
        f'<pre style="{PRE};padding-left:9px">{newline.join(lines)}</pre>{whole}{memory_html(view)}</div>'
    )


def stall_html(view: RunView) -> str:
    """Return where the ranks of a run wait in which nothing moves, "" while it moves."""
    newline = "\n"
    lines = [escape(line, quote=False) for line in cut_lines(stall_lines(view), _MAX_EXCERPT_CHARS)]
    if not lines:
        return ""
    lines[0] = f'<b style="font-weight:600;color:{WARN}">{lines[0]}</b>'
    return (
        f'<div style="border-bottom:1px solid {LINE};border-left:3px solid {WARN}">'
        f'<pre style="{PRE};padding-left:9px">{newline.join(lines)}</pre></div>'
    )


def _form_line(line: FormLine, failure: FailureKind) -> str:
    safe = escape(line.text, quote=False)
    match line.kind:
        case "title" if failure is FailureKind.USER_CODE:
            name, _, where = safe.partition(" ")
            return f'<b style="font-weight:600;color:{BAD}">{name}</b> {where}'
        case "culprit":
            return f'<span style="color:{BAD}">{safe}</span>'
        case "error" if _NAMED.match(safe):
            name, _, rest = safe.partition(":")
            return f'<span style="color:{BAD}">{name}</span>:{rest}'
        case _:
            return safe
