"""`.sgpuignore`: which files of a folder do not go along. Its patterns are those of `.gitignore`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

FILE = ".sgpuignore"

# a pattern with `!` in the file brings them back
_ALWAYS = (".git/", "__pycache__/", ".ipynb_checkpoints/", "/.sgpuignore")


@dataclass(frozen=True, slots=True)
class _Rule:
    """One line.

    Args:
        pattern: Matches the whole name below the folder, with `/` between.
        excludes: False for one that begins with `!`.
        only_folders: It ends with `/`.
    """

    pattern: re.Pattern[str]
    excludes: bool
    only_folders: bool


class IgnoreRules:
    """The lines of one file; the last that fits a name decides (https://git-scm.com/docs/gitignore).

    Args:
        lines: Of the file; none where there is no file.
    """

    def __init__(self, lines: Iterable[str] = ()) -> None:
        self._rules = [rule for line in (*_ALWAYS, *lines) if (rule := _rule(line)) is not None]

    def excludes(self, name: str, *, folder: bool) -> bool:
        """Whether a file or folder stays here. What lies in an excluded folder is not asked for.

        Args:
            name: Below the folder, with `/` between.
            folder: It is one.
        """
        excluded = False
        for rule in self._rules:
            if (folder or not rule.only_folders) and rule.pattern.fullmatch(name):
                excluded = rule.excludes
        return excluded


def _rule(line: str) -> _Rule | None:
    line = line.rstrip("\n")
    # a blank at the end counts only behind a backslash
    while line.endswith(" ") and not line.endswith("\\ "):
        line = line[:-1]
    if not line or line.startswith("#"):
        return None
    excludes = not line.startswith("!")
    line = line[1:] if not excludes else line
    only_folders = line.endswith("/")
    line = line.rstrip("/")
    if not line:
        return None
    anchored = "/" in line
    expression = _expression(line.lstrip("/"))
    return _Rule(re.compile(expression if anchored else f"(?:.*/)?{expression}", re.DOTALL), excludes, only_folders)


def _expression(pattern: str) -> str:
    """Return a glob as a regular expression: `*` and `?` stop at `/`, `**` does not."""
    made, at = "", 0
    while at < len(pattern):
        if pattern.startswith("**/", at) and (at == 0 or pattern[at - 1] == "/"):
            made, at = f"{made}(?:.*/)?", at + 3
        elif pattern.startswith("**", at) and at + 2 == len(pattern) and (at == 0 or pattern[at - 1] == "/"):
            made, at = f"{made}.*", at + 2
        elif pattern[at] == "*":
            made, at = f"{made}[^/]*", at + 1
        elif pattern[at] == "?":
            made, at = f"{made}[^/]", at + 1
        elif pattern[at] == "[" and (end := pattern.find("]", at + 2)) > 0:
            inner = pattern[at + 1 : end].replace("\\", "\\\\").replace("[", "\\[")
            made, at = f"{made}[{'^' + inner[1:] if inner[0] in '!^' else inner}]", end + 1
        elif pattern[at] == "\\" and at + 1 < len(pattern):
            made, at = made + re.escape(pattern[at + 1]), at + 2
        else:
            made, at = made + re.escape(pattern[at]), at + 1
    return made
