"""The address of a machine behind ssh, and the command that logs in to it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

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
    "ConnectTimeout=30",
)
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
    def shell_words(self) -> str:
        """The words after `ssh` with which a person logs in."""
        return f"-p {self.port} {self.destination}" if self.port else self.destination


def parse_address(text: str) -> SshAddress | None:
    """Return the parts of `ssh://[user@]host[:port]`; None if it is none."""
    match = _ADDRESS.fullmatch(text)
    if match is None or (match["port"] and not 0 < int(match["port"]) < 65536):
        return None
    return SshAddress(match["host"].strip("[]"), match["user"] or "", int(match["port"] or 0))


def login_command(address: SshAddress, ssh_command: str) -> Sequence[str]:
    """Return the command whose standard input and output are those of a POSIX shell on the machine.

    Args:
        address: The machine.
        ssh_command: The user's ssh, perhaps with options, as a shell would read it.

    Raises:
        ValueError: The command has an open quotation, or is empty.
    """
    if not (words := shlex.split(ssh_command)):
        raise ValueError("it is empty")
    options = [word for option in _OPTIONS for word in ("-o", option)]
    port = ["-p", str(address.port)] if address.port else []
    return [*words, "-T", *options, *port, "--", address.destination, _REMOTE_COMMAND]
