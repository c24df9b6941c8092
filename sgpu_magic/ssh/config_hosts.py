"""The hosts that the user's ssh configuration names, as suggestions for pools."""

from __future__ import annotations

import glob
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

# `Host a b`, `host = a`, `Include conf.d/*`
_LINE = re.compile(r"\s*(?P<key>[A-Za-z]+)(?:\s*=\s*|\s+)(?P<value>.+?)\s*")


def config_hosts(ssh_command: str = "ssh") -> tuple[str, ...]:
    """Return the names after `Host` without patterns, in order; hosts whose user is `git` are left out.

    A file that can't be read has none.

    Args:
        ssh_command: The user's ssh, whose option `-F` names another file than `~/.ssh/config`.
    """
    names: dict[str, bool] = {}
    section: list[str] = []
    for key, value in _lines(_config_path(ssh_command), set()):
        if key in ("host", "match"):
            section = _words(value) if key == "host" else []
            for name in section:
                names.setdefault(name, True)
        elif key == "user" and value == "git":
            names |= dict.fromkeys(section, False)
    return tuple(name for name, is_machine in names.items() if is_machine and not set(name) & set("*?!"))


def _config_path(ssh_command: str) -> Path:
    try:
        words = shlex.split(ssh_command)
    except ValueError:
        words = []
    if "-F" in words[:-1]:
        return Path(words[words.index("-F") + 1])
    return Path(os.path.expanduser("~/.ssh/config"))


def _lines(path: Path, read: set[Path]) -> Iterator[tuple[str, str]]:
    """Yield the lines of a file and of those that it includes, each once: the keyword in lower case, and the rest."""
    if path in read:
        return
    read.add(path)
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return
    for line in text.splitlines():
        if (match := _LINE.fullmatch(line)) is None:
            continue
        key, value = match["key"].lower(), match["value"]
        if key != "include":
            yield key, value
            continue
        for word in _words(value):
            # relative to the folder of the user's configuration
            pattern = os.path.join(os.path.expanduser("~/.ssh"), os.path.expanduser(word))
            for each in sorted(glob.glob(pattern)):
                yield from _lines(Path(each), read)


def _words(value: str) -> list[str]:
    try:
        return shlex.split(value, comments=True)
    except ValueError:
        return value.split()
