"""Why a login failed, in words that help: from what ssh and the other machine wrote."""

from __future__ import annotations

import re

from sgpu_magic.errors import KeyRefused, PoolError, PoolIdle
from sgpu_magic.ssh.machines import Machine

_SHOWN_CHARS = 400
# what ssh says, the step that fails, what that means, and what helps; {login} is the command for a terminal
_OF_SSH = (
    (
        r"REMOTE HOST IDENTIFICATION HAS CHANGED|Host key for .* has changed",
        "host key",
        "the machine has another host key than the one that you have accepted before. If you know that it was "
        "reinstalled, remove the old key ({old_key}) and run `{login}` once in a terminal; otherwise somebody may "
        "stand between",
        True,
    ),
    (
        r"Host key verification failed|No \S+ host key is known",
        "host key",
        "you have not accepted the machine's host key yet. Run `{login}` once in a terminal, and compare the key that "
        "it shows",
        True,
    ),
    (
        r"Permission denied|Too many authentication failures|no mutual signature",
        "key",
        "it does not admit you without a question. Run `{login}` once in a terminal to see what it asks for: a key "
        "with a passphrase needs `ssh-add`, a machine that asks for a password needs `ssh-copy-id {words}`, and one "
        "that asks for a code at each login needs a connection of your own that others can use (ControlMaster in "
        "~/.ssh/config)",
        True,
    ),
    (
        r"Could not resolve hostname",
        "name",
        "its name is unknown here. Is it a Host of ~/.ssh/config, and is the network or VPN up?",
        False,
    ),
    (
        r"Connection refused",
        "port",
        "nothing listens at its ssh port. Is the machine up, and the port right?",
        False,
    ),
    (
        r"timed out|No route to host|Network is unreachable|Connection closed by|Connection reset|kex_exchange",
        "port",
        "it does not answer. Is it up, and does the network or VPN reach it? `{login}` in a terminal tells more",
        False,
    ),
)
_OF_MACHINE = {
    "space": ("disk", "there is not enough space for sgpu-magic: {0}. Free some there"),
    "disk": (
        "disk",
        "sgpu-magic can't be unpacked there: {0}. Its folder must be writable, and your quota not used up",
    ),
    "damaged": ("link", "{0}. Run the cell again"),
    "install": (
        "packages",
        "what sgpu-magic needs can't be installed there: {0}. Install it there yourself, or see in a terminal "
        "(`{login}`) why the machine's pip or uv can't",
    ),
    "pool": ("pool", "{0}"),
}


def failure_of_ssh(machine: Machine, errors: str, dropped: str) -> PoolError:
    """Return the error for a login that ended before anything of this package ran.

    Args:
        machine: The machine.
        errors: What ssh wrote to its standard error.
        dropped: What came on its standard output.
    """
    address = machine.address
    login = f"ssh {address.shell_words}"
    begin = f"{machine.title} can't be reached over `{login}`: "
    for pattern, step, text, is_final in _OF_SSH:
        if re.search(pattern, errors):
            words = text.format(login=login, words=address.shell_words, old_key=_old_key(errors))
            end = "" if words.endswith("?") else "."
            kind = KeyRefused if is_final else PoolError
            return _at(step, kind(f"{begin}{words}{end} ssh says: {_last_line(errors)}"))
    said = _last_line(errors) or _last_line(dropped)
    said = f" It says: {said}" if said else " It says nothing."
    text = f"{begin}the login ended before /bin/sh had run there.{said} `{login} true` shows what happens."
    return _at("shell", PoolError(text))


def failure_of_silence(machine: Machine, waited_s: float) -> PoolError:
    """Return the error for a login that neither ends nor goes on; arguments as in `failure_of_ssh`."""
    login = f"ssh {machine.address.shell_words}"
    text = (
        f"{machine.title} can't be reached over `{login}`: there was no sign of /bin/sh within {waited_s:.0f} s. Does "
        f"`{login} true` end by itself in a terminal? A menu, a question or a slow file system at login would hold it."
    )
    return _at("shell", PoolError(text))


def failure_of_machine(machine: Machine, word: str, text: str, seen: list[str]) -> PoolError:
    """Return the error for a machine on which a step failed.

    Args:
        machine: The machine.
        word: Which kind of failure.
        text: The details.
        seen: The Pythons that were found and can't be used, each with the reason.
    """
    name, address = machine.name, machine.address
    login = f"ssh {address.shell_words}"
    begin = f"{machine.title} can't be started on {address.host}: "
    if word == "no-python":
        found = "; ".join(seen) if seen else "there is none on its path"
        text = f"{begin}no Python of version 3.11 or newer with torch was found ({found}). Install torch into one"
        if not machine.is_node:
            text += f", or name another one: `sgpu pool add {name} {address.url} --replace --python /path/to/python`"
        return _at("python", PoolError(f"{text}."))
    if word == "idle":
        return PoolIdle(f"no pool runs on {address.host}; the next run with `--pool {name}` starts one.")
    if word == "used":
        return PoolError(f"nothing was removed from {address.host}: {text}")
    step, words = _OF_MACHINE.get(word, ("machine", "{0}"))
    words = words.format(text, login=login).rstrip(".")
    return _at(step, PoolError(f"{begin}{words}."))


def _old_key(errors: str) -> str:
    """Return where ssh has found the host key that it expected, as it says itself: a command, or a file and line."""
    match = re.search(r"(?P<command>ssh-keygen -f .+ -R .+)|Offending \S+ key in (?P<place>.+:\d+)", errors)
    if match is None:
        return "in ~/.ssh/known_hosts"
    return f"`{match['command'].strip()}`" if match["command"] else match["place"]


def _at(step: str, error: PoolError) -> PoolError:
    error.step = step
    return error


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    return lines[-1][-_SHOWN_CHARS:] if lines else ""
