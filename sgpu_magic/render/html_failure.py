"""Why a run failed, and where its ranks wait, as static HTML."""

from __future__ import annotations

from html import escape

from sgpu_magic.protocol.states import FailureKind, RunState
from sgpu_magic.render import ansi
from sgpu_magic.render.failure import cell_excerpt, last_part, traceback_body
from sgpu_magic.render.html_style import BAD, LINE, PRE, SOFT, WARN
from sgpu_magic.render.text import culprits_last_words, ending_stacks, failure_sentence, stall_lines
from sgpu_magic.render.view import RunView

_MAX_EXCERPT_CHARS = 12_000
_MAX_WHOLE_CHARS = 40_000


def failure_html(view: RunView) -> str:
    """Return the culprit with the cell's own lines, "" for a run that has not failed."""
    failure = view.failure
    if failure is None or view.state is RunState.SUCCEEDED:
        return ""
    whole = ""
    if failure.kind is FailureKind.USER_CODE:
        where = [f"on rank {failure.rank}" if failure.rank is not None else "", escape(failure.host)]
        name = escape(last_part(failure.type_name) or "error")
        lines = [f'<b style="font-weight:600;color:{BAD}">{name}</b> {" · ".join(filter(None, where))}']
        excerpt, left_out = ([], False) if view.error_follows else cell_excerpt(failure)
        lines += [_traceback_line(line) for line in _cut(excerpt, _MAX_EXCERPT_CHARS)]
        if not excerpt and failure.message:
            lines.append(escape(ansi.plain(failure.message)[:_MAX_EXCERPT_CHARS]))
        if left_out:
            body = "\n".join(_traceback_line(line) for line in _cut(traceback_body(failure), _MAX_WHOLE_CHARS))
            whole = (
                f'<details style="padding:0 12px 6px;font-size:12px"><summary style="cursor:pointer;{SOFT}">'
                f'the whole traceback</summary><pre style="{PRE};padding:4px 0 0">{body}</pre></details>'
            )
    else:
        sentence = ansi.plain(failure_sentence(view))[:_MAX_EXCERPT_CHARS]
        lines = [escape(sentence), *(escape(line) for line in culprits_last_words(view))]
        if not view.error_follows:
            lines += [_traceback_line(line) for line in _cut(traceback_body(failure), _MAX_EXCERPT_CHARS)]
    lines += [escape(line, quote=False) for line in _cut(ending_stacks(view), _MAX_EXCERPT_CHARS)]
    newline = "\n"
    return (
        f'<div style="border-bottom:1px solid {LINE};border-left:3px solid {BAD}">'
        f'<pre style="{PRE};padding-left:9px">{newline.join(lines)}</pre>{whole}</div>'
    )


def stall_html(view: RunView) -> str:
    """Return where the ranks of a run wait in which nothing moves, "" while it moves."""
    newline = "\n"
    lines = [escape(line, quote=False) for line in _cut(stall_lines(view), _MAX_EXCERPT_CHARS)]
    if not lines:
        return ""
    lines[0] = f'<b style="font-weight:600;color:{WARN}">{lines[0]}</b>'
    return (
        f'<div style="border-bottom:1px solid {LINE};border-left:3px solid {WARN}">'
        f'<pre style="{PRE};padding-left:9px">{newline.join(lines)}</pre></div>'
    )


def _traceback_line(line: str) -> str:
    line = ansi.plain(line)
    safe = escape(line, quote=False)
    if line.startswith("--"):
        return f'<span style="color:{BAD}">{safe}</span>'
    name, colon, rest = safe.partition(":")
    if colon and name and name[0].isalpha() and name.replace(".", "").replace("_", "").isalnum():
        return f'<span style="color:{BAD}">{name}</span>:{rest}'
    return safe


def _cut(lines: list[str], most: int) -> list[str]:
    """Return the beginning and the end of `lines`, together at most about `most` characters."""
    if sum(map(len, lines)) + len(lines) <= most:
        return lines
    joined = "\n".join(lines)
    return [*joined[: most // 2].split("\n"), "...", *joined[-most // 2 :].split("\n")]
