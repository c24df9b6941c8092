"""`%sgpu_env`: a kernel's packages, as text and as HTML."""

from __future__ import annotations

from dataclasses import dataclass

from sgpu_magic.views.html_style import BAD, LINE, PANEL, SANS, SOFT, WARN
from sgpu_magic.views.tables import Row, aligned, safe, table

_MOST_ROWS = 400


@dataclass(frozen=True, slots=True)
class EnvironmentReport:
    """What `%sgpu_env` shows.

    Args:
        title: Python and its version.
        facts: Short texts beside the title.
        lines: Sentences that nobody has to act on.
        pending: What is installed but not used yet, with the remedy.
        broken: What will not work, with the remedy.
        compared_to: What the differences are to, "" when nothing was compared.
        differences: Rows of package, its version here, its version there, and a remark.
    """

    title: str
    facts: tuple[str, ...]
    lines: tuple[str, ...] = ()
    pending: tuple[str, ...] = ()
    broken: tuple[str, ...] = ()
    compared_to: str = ""
    differences: tuple[Row, ...] = ()


def environment_text(report: EnvironmentReport) -> str:
    """Return the report as text."""
    lines = [" · ".join((report.title, *report.facts)), *report.lines, *report.pending, *report.broken]
    if report.compared_to:
        lines += ["", _headline(report)]
        if report.differences:
            lines += aligned([_heads(report), *report.differences[:_MOST_ROWS]])
            lines += _more(report)
    return "\n".join(lines)


def environment_html(report: EnvironmentReport) -> str:
    """Return the report as HTML with inline style."""
    parts = [
        f'<div style="padding:6px 12px;background:{PANEL};border-bottom:1px solid {LINE}">'
        f'<b style="font-weight:600">{safe(report.title)}</b> '
        f'<span style="{SOFT}">{safe(" · ".join(report.facts))}</span></div>'
    ]
    parts += [f'<div style="padding:3px 12px">{safe(line)}</div>' for line in report.lines]
    parts += [f'<div style="padding:3px 12px;color:{WARN}">{safe(line)}</div>' for line in report.pending]
    parts += [f'<div style="padding:3px 12px;color:{BAD}">{safe(line)}</div>' for line in report.broken]
    if report.compared_to:
        parts.append(f'<div style="padding:6px 12px 3px">{safe(_headline(report))}</div>')
        if report.differences:
            parts.append(table(_heads(report), report.differences[:_MOST_ROWS]))
            parts += [f'<div style="padding:3px 12px;{SOFT}">{safe(line)}</div>' for line in _more(report)]
    return (
        f'<div style="display:inline-block;min-width:420px;max-width:100%;border:1px solid {LINE};'
        f'border-radius:6px;overflow:auto;{SANS};font-size:13px;line-height:1.45">{"".join(parts)}</div>'
    )


def _headline(report: EnvironmentReport) -> str:
    if not report.differences:
        return f"no difference to {report.compared_to}"
    count = len(report.differences)
    return f"{count} difference{'s' * (count > 1)} to {report.compared_to}"


def _heads(report: EnvironmentReport) -> Row:
    return ("package", "here", report.compared_to, "")


def _more(report: EnvironmentReport) -> list[str]:
    more = len(report.differences) - _MOST_ROWS
    return [f"and {more} more"] if more > 0 else []
