"""Adding pools to `pools.toml` and removing them, with what a person has written there left as it is."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

from sgpu_magic.client.pools_file import LOCAL, PoolEntry, parse, pools_path, read_text, unknown_pool
from sgpu_magic.errors import UsageError
from sgpu_magic.files.kept_folders import locked
from sgpu_magic.files.whole_file import write_whole

_HEADER = re.compile(r"\s*\[\s*(?P<name>[A-Za-z0-9_-]+|\"[^\"]*\"|'[^']*')\s*\]\s*(?:#.*)?")
_PART = re.compile(r"\s*\[\[?\s*(?P<name>[A-Za-z0-9_-]+|\"[^\"]*\"|'[^']*')\s*\.")
_ANY_HEADER = re.compile(r"\s*\[")
_BEGINS = "# The pools of `--pool`; `sgpu pool add` and `sgpu pool remove` write this file, and so may you.\n"


def add_pool(entry: PoolEntry, path: Path | None = None, *, replace: bool = False) -> None:
    """Write a pool into the file.

    Args:
        entry: The pool.
        path: The file; None is `pools_path()`.
        replace: One of that name makes room for it.

    Raises:
        UsageError: There is one of that name, or the file can't be read or written.
    """
    path = pools_path() if path is None else path

    def change(text: str) -> str:
        names = [each.name for each in parse(text, path)]
        if entry.name in names:
            if not replace:
                raise UsageError(
                    f"there is a pool named {entry.name!r} already in {path}. Remove it with `sgpu pool remove "
                    f"{entry.name}`, or give the new one another name."
                )
            text = _without(text, entry.name)
        text = text.rstrip("\n") + "\n\n" if text.strip() else _BEGINS + "\n"
        return text + _table(entry)

    _changed(path, change)


def remove_pool(name: str, path: Path | None = None) -> PoolEntry:
    """Take a pool out of the file, and return what it was.

    Raises:
        UsageError: There is none of that name, or the file can't be read or written.
    """
    path = pools_path() if path is None else path
    removed: list[PoolEntry] = []

    def change(text: str) -> str:
        entries = parse(text, path)
        removed.extend(entry for entry in entries if entry.name == name)
        if name == LOCAL:
            raise UsageError("the local pool is this machine's own and can't be removed; `sgpu pool stop` ends it.")
        if not removed:
            raise unknown_pool(name, [entry.name for entry in entries])
        return _without(text, name)

    _changed(path, change)
    return removed[0]


# ---------------------------------------------------------------- within


def _table(entry: PoolEntry) -> str:
    lines = [f"[{entry.name}]", f"address = {json.dumps(entry.address)}", f"key = {json.dumps(entry.key)}"]
    if entry.reserved:
        lines.append("reserved = true")
    if entry.types:
        lines.append(f"types = [{', '.join(json.dumps(kind) for kind in entry.types)}]")
    if entry.prices:
        prices = ", ".join(f"{json.dumps(kind)} = {price!r}" for kind, price in entry.prices.items())
        lines.append(f"prices = {{{prices}}}")
    return "\n".join(lines) + "\n"


def _without(text: str, name: str) -> str:
    """Return the text without a pool's tables; what a person wrote above the next one stays with that."""
    kept: list[str] = []
    dropping = False
    for line in text.splitlines(keepends=True):
        if _ANY_HEADER.match(line):
            dropping = name in (_named(_HEADER, line), _named(_PART, line))
        elif dropping and line.lstrip().startswith("#"):
            # a comment below the values: of what comes next
            dropping = False
            kept.append("\n")
        if not dropping:
            kept.append(line)
    return "".join(kept)


def _named(pattern: re.Pattern[str], line: str) -> str | None:
    match = pattern.match(line)
    return None if match is None else match["name"].strip("\"'")


def _changed(path: Path, change: Callable[[str], str]) -> None:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # two that write at once do not lose each other's pools
        with locked(path.parent):
            old = read_text(path)
            new = change(old)
            before = {entry.name for entry in parse(old, path)}
            after = {entry.name for entry in parse(new, path)}
            if len(before ^ after) > 1:
                raise UsageError(f"{path} is written in a way that can't be changed from here. Edit it by hand.")
            # a link stays one: what it leads to is replaced
            write_whole(path.resolve(), new.encode())
    except OSError as error:
        raise UsageError(f"the list of pools {path} can't be written: {error}.") from error
