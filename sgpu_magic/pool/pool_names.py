"""What a served pool may be called, and where it may listen."""

from __future__ import annotations

import re

from sgpu_magic.errors import UsageError

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,39}")
_LISTEN = re.compile(r"tcp://(?:\*|\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+):(?P<port>[0-9]{1,5}|\*)")


def checked_name(name: str) -> str:
    """Return the name.

    Raises:
        UsageError: It can't be a pool's.
    """
    if _NAME.fullmatch(name) is None or name.lower() == "local":
        raise UsageError(
            f"{name[:40]!r} can't be a pool's name: it begins with a letter, has letters, digits, - and _, 40 of them "
            "at most, and is not `local`."
        )
    return name


def checked_listen(listen: str) -> str:
    """Return the address.

    Raises:
        UsageError: Nothing can listen there.
    """
    match = _LISTEN.fullmatch(listen)
    if match is None or (match["port"] != "*" and int(match["port"]) > 65535):
        raise UsageError(f"--listen takes tcp://ADDRESS:PORT, such as tcp://0.0.0.0:8700, not {listen[:80]!r}.")
    return listen
