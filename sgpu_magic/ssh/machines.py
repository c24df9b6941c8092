"""The machine of a pool, and several machines of one: a client sends them to the first, which logs in to the others."""

from __future__ import annotations

import base64
import binascii
import hashlib

import msgspec

from sgpu_magic.ssh.address import SshAddress
from sgpu_magic.wire.decoding import JsonDecoder

MACHINES_FILE = "machines.json"
"""File in the state directory of such a pool, with its `Machines` as JSON."""

AGENTS_FILE = "agents-run"
"""File there while the pool's agents run on the machines, also after its service was killed."""


class Machine(msgspec.Struct, frozen=True):
    """A machine that a pool uses, as a user lists it.

    Args:
        name: The pool's name.
        address: Where to log in.
        ssh_command: The user's ssh.
        python: Path of the Python there; "" for one that is found.
        prologue: Shell commands to run there before anything else, such as `module load`.
        wheels: A folder here with wheels for a machine without a network; "" for none.
        is_node: Whether it is a further node of a pool; then `name` is the node's.
    """

    name: str
    address: SshAddress
    ssh_command: str = "ssh"
    python: str = ""
    prologue: str = ""
    wheels: str = ""
    is_node: bool = False

    @property
    def title(self) -> str:
        """What it is, for messages: `the pool box`."""
        return f"the {'node' if self.is_node else 'pool'} {self.name}"


class Machines(msgspec.Struct, frozen=True):
    """The machines of a pool.

    Args:
        addresses: Where to log in, the first machine first.
        python: As in `Machine`, the same for all.
        prologue: Likewise.
    """

    addresses: tuple[SshAddress, ...]
    python: str = ""
    prologue: str = ""

    @property
    def name(self) -> str:
        """A name for the pool's directories, the same for every client that lists the same machines."""
        return f"hosts-{hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:8]}"


_decoder = JsonDecoder[Machines](Machines)


def to_word(machines: Machines) -> str:
    """Return the machines as one word without blanks, for the far end of a login."""
    return base64.urlsafe_b64encode(msgspec.json.encode(machines)).decode("ascii")


def from_word(word: str) -> Machines:
    """Return the machines that `to_word` has written.

    Raises:
        msgspec.DecodeError: It has not.
    """
    try:
        data = base64.urlsafe_b64decode(word)
    except (binascii.Error, ValueError) as error:
        raise msgspec.DecodeError(str(error)) from None
    return from_json(data)


def from_json(data: bytes) -> Machines:
    """Return the machines of a file; errors as `from_word`."""
    return _decoder.decode(data)
