"""The address of a machine behind ssh, and the command that logs in to it."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence

import msgspec

# a name of a Host in the user's ssh configuration may have other characters than a host name; none begins an option
_ADDRESS = re.compile(
    r"ssh://(?:(?P<user>[A-Za-z0-9_][A-Za-z0-9_.+-]*)@)?"
    r"(?P<host>\[[0-9A-Fa-f:.]+(?:%[\w.-]+)?\]|[A-Za-z0-9_][A-Za-z0-9_.-]*)(?::(?P<port>[0-9]{1,5}))?/?"
)
_OPTIONS = (
    # nothing can be asked where nobody sees the question
    "BatchMode=yes",
    "RequestTTY=no",
    "RemoteCommand=none",
    "PermitLocalCommand=no",
    "ClearAllForwardings=yes",
    "EscapeChar=none",
)
# `node[01-16]`
_RANGE = re.compile(r"\[(?P<first>[0-9]{1,6})-(?P<last>[0-9]{1,6})\]")
_MOST_MACHINES = 1000
_SETTINGS_S = 10.0
# runs under any login shell: sh, bash, zsh, fish, csh
_REMOTE_COMMAND = "exec /bin/sh -s"


class SshAddress(msgspec.Struct, frozen=True):
    """Where to log in.

    Args:
        host: A host name, an IP address, or the name of a Host in the user's ssh configuration.
        user: The user there; "" for what ssh chooses.
        port: The port; 0 for what ssh chooses.
    """

    host: str
    user: str = ""
    port: int = 0

    @property
    def destination(self) -> str:
        """The destination as ssh takes it, without the port."""
        return f"{self.user}@{self.host}" if self.user else self.host

    @property
    def url(self) -> str:
        """The address as `parse_address` reads it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"ssh://{f'{self.user}@' if self.user else ''}{host}{f':{self.port}' if self.port else ''}"

    @property
    def name(self) -> str:
        """The address without `ssh://`."""
        return self.url.removeprefix("ssh://")

    @property
    def shell_words(self) -> str:
        """The words after `ssh` with which a person logs in."""
        return f"-p {self.port} {self.destination}" if self.port else self.destination


def parse_address(text: str) -> SshAddress | None:
    """Return the parts of `ssh://[user@]host[:port]`; None if it is none."""
    match = _ADDRESS.fullmatch(text)
    if match is None or (match["port"] and not 0 < int(match["port"]) < 65536):
        return None
    return SshAddress(match["host"].strip("[]"), match["user"] or "", int(match["port"] or 0))


def parse_addresses(text: str) -> tuple[SshAddress, ...]:
    """Return the machines of `ssh://a,me@b:2222,node[01-16]`, the range spelled out; () if it is none.

    No machine may be named twice.
    """
    if not text.startswith("ssh://"):
        return ()
    words = [word for part in text.removeprefix("ssh://").rstrip("/").split(",") for word in _spelled_out(part)]
    found = [parse_address(f"ssh://{word}") for word in words]
    addresses = tuple(address for address in found if address is not None)
    return addresses if len(set(addresses)) == len(found) else ()


def _spelled_out(word: str) -> Sequence[str]:
    if (match := _RANGE.search(word)) is None:
        return (word,)
    first, last = match["first"], match["last"]
    numbers = range(int(first), min(int(last), int(first) + _MOST_MACHINES) + 1)
    return [f"{word[: match.start()]}{number:0{len(first)}}{word[match.end() :]}" for number in numbers]


def resolved(address: SshAddress, ssh_command: str) -> SshAddress:
    """Return the address as another machine can use it: with what this user's ssh configuration says of it.

    Args:
        address: The machine.
        ssh_command: As in `login_command`.

    Raises:
        OSError: There is no ssh.
        ValueError: It refuses its configuration.
    """
    found = ssh_settings(address, ssh_command)
    port = int(found.get("port", "22"))
    return SshAddress(found.get("hostname", address.host), found.get("user", address.user), 0 if port == 22 else port)


def ssh_settings(address: SshAddress, ssh_command: str) -> Mapping[str, str]:
    """Return what ssh would use for a machine, by the lower-case names of its configuration; as `resolved`."""
    command = [*_words(ssh_command), "-G", *_port(address), "--", address.destination]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_SETTINGS_S)
    if done.returncode:
        raise ValueError((done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1])
    return {name: value for name, _, value in (line.partition(" ") for line in done.stdout.splitlines())}


def login_command(address: SshAddress, ssh_command: str) -> Sequence[str]:
    """Return the command whose standard input and output are those of a POSIX shell on the machine.

    Args:
        address: The machine.
        ssh_command: The user's ssh, perhaps with options, as a shell would read it.

    Raises:
        ValueError: The command has an open quotation, or is empty.
    """
    options = [word for option in _OPTIONS for word in ("-o", option)]
    return [*_words(ssh_command), "-T", *options, *_port(address), "--", address.destination, _REMOTE_COMMAND]


def _words(ssh_command: str) -> Sequence[str]:
    if not (words := shlex.split(ssh_command)):
        raise ValueError("it is empty")
    return words


def _port(address: SshAddress) -> Sequence[str]:
    return ["-p", str(address.port)] if address.port else []
