"""Why a login failed, in words that help: from what ssh and the other machine wrote."""

from __future__ import annotations

import re

from sgpu_magic.client.ssh.address import SshAddress
from sgpu_magic.errors import KeyRefused, PoolError, PoolIdle

_SHOWN_CHARS = 400
# what ssh says, what that means, and what helps; {login} is the command for a terminal
_OF_SSH = (
    (
        r"REMOTE HOST IDENTIFICATION HAS CHANGED|Host key for .* has changed",
        "the machine has another host key than the one that you have accepted before. If you know that it was "
        "reinstalled, remove the old key with `ssh-keygen -R {host}` and run `{login}` once in a terminal; otherwise "
        "somebody may stand between",
        True,
    ),
    (
        r"Host key verification failed|No \S+ host key is known",
        "you have not accepted the machine's host key yet. Run `{login}` once in a terminal, and compare the key that "
        "it shows",
        True,
    ),
    (
        r"Permission denied|Too many authentication failures|no mutual signature",
        "it does not admit you without a question. Run `{login}` once in a terminal to see what it asks for: a key "
        "with a passphrase needs `ssh-add`, a machine that asks for a password needs `ssh-copy-id {words}`, and one "
        "that asks for a code at each login needs a connection of your own that others can use (ControlMaster in "
        "~/.ssh/config)",
        True,
    ),
    (
        r"Could not resolve hostname",
        "its name is unknown here. Is it a Host of ~/.ssh/config, and is the network or VPN up?",
        False,
    ),
    (
        r"Connection refused",
        "nothing listens at its ssh port. Is the machine up, and the port right?",
        False,
    ),
    (
        r"timed out|No route to host|Network is unreachable|Connection closed by|Connection reset|kex_exchange",
        "it does not answer. Is it up, and does the network or VPN reach it? `{login}` in a terminal tells more",
        False,
    ),
)
_OF_MACHINE = {
    "space": "there is not enough space for sgpu-magic: {0}. Free some there",
    "disk": "sgpu-magic can't be unpacked there: {0}. Its folder must be writable, and your quota not used up",
    "damaged": "{0}. Run the cell again",
    "install": "what sgpu-magic needs can't be installed there: {0}. Install it there yourself, or see in a terminal "
    "(`{login}`) why the machine's pip or uv can't",
    "pool": "{0}",
}


def failure_of_ssh(name: str, address: SshAddress, errors: str, dropped: str) -> PoolError:
    """Return the error for a login that ended before anything of this package ran.

    Args:
        name: The pool's name.
        address: The machine.
        errors: What ssh wrote to its standard error.
        dropped: What came on its standard output.
    """
    login = f"ssh {address.shell_words}"
    begin = f"the pool {name} can't be reached over `{login}`: "
    for pattern, text, is_final in _OF_SSH:
        if re.search(pattern, errors):
            words = text.format(login=login, host=address.host, words=address.shell_words)
            end = "" if words.endswith("?") else "."
            return (KeyRefused if is_final else PoolError)(f"{begin}{words}{end} ssh says: {_last_line(errors)}")
    said = _last_line(errors) or _last_line(dropped)
    said = f" It says: {said}" if said else " It says nothing."
    return PoolError(f"{begin}the login ended before /bin/sh had run there.{said} `{login} true` shows what happens.")


def failure_of_machine(name: str, address: SshAddress, word: str, text: str, seen: list[str]) -> PoolError:
    """Return the error for a machine on which a step failed.

    Args:
        name: The pool's name.
        address: The machine.
        word: Which kind of failure.
        text: The details.
        seen: The Pythons that were found and can't be used, each with the reason.
    """
    login = f"ssh {address.shell_words}"
    if word == "no-python":
        found = "; ".join(seen) if seen else "there is none on its path"
        return PoolError(
            f"the pool {name} can't be started on {address.host}: no Python of version 3.11 or newer with torch was "
            f'found ({found}). Install torch into one, or name another one: `python = "/path/to/python"` in the '
            f"pool's table of pools.toml."
        )
    if word == "idle":
        return PoolIdle(f"no pool runs on {address.host}; the next run with `--pool {name}` starts one.")
    words = _OF_MACHINE.get(word, "{0}").format(text, login=login)
    return PoolError(f"the pool {name} can't be started on {address.host}: {words.rstrip('.')}.")


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    return lines[-1][-_SHOWN_CHARS:] if lines else ""
