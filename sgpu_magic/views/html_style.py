"""Colours, fonts and boxes of the static HTML: inline style only, the theme's colours where it has some."""

from __future__ import annotations

from html import escape

from sgpu_magic.views import ansi

# greys that are right on light and dark alike need no theme; the rest asks JupyterLab, then VS Code
LINE = "rgba(128,128,128,.28)"
PANEL = "rgba(128,128,128,.07)"
SANS = "font-family:var(--jp-ui-font-family,var(--vscode-font-family,system-ui,sans-serif))"
MONO = "font-family:var(--jp-code-font-family,ui-monospace,'DejaVu Sans Mono',Menlo,monospace)"
SOFT = "opacity:.68"
FAINT = "opacity:.55"
ACCENT = "var(--jp-brand-color1,var(--vscode-textLink-foreground,#1e88e5))"
GOOD = "var(--jp-success-color1,var(--vscode-testing-iconPassed,#2e9e44))"
BAD = "var(--jp-error-color1,var(--vscode-errorForeground,#d9403c))"
WARN = "var(--jp-warn-color0,var(--vscode-editorWarning-foreground,#c77800))"

PRE = f"margin:0;padding:6px 12px;{MONO};font-size:12px;line-height:1.5;white-space:pre-wrap;overflow-wrap:anywhere"
BOX = f"border:1px solid {LINE};border-radius:6px;overflow:hidden;{SANS};font-size:13px;line-height:1.45;margin:2px 0"


def safe(text: str) -> str:
    """Return a text of whatever origin as HTML.

    JupyterLab takes what stands between two dollar signs of one text for mathematics, sums of money too: each sign is
    a text of its own here.
    """
    return escape(ansi.plain(text)).replace("$", "<span>$</span>")
