"""The transport to a pool on a machine that the user logs in to with ssh."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence

import zmq

from sgpu_magic.client.bulk_connection import BulkConnection
from sgpu_magic.client.network_transport import NetworkTransport
from sgpu_magic.client.send_queue import SendQueue
from sgpu_magic.errors import PoolError
from sgpu_magic.ssh.address import SshAddress, resolved
from sgpu_magic.ssh.login import FarProgram, Login
from sgpu_magic.ssh.machines import Machine, Machines, to_word
from sgpu_magic.wire.files import BULK_CHUNK_BYTES
from sgpu_magic.wire.pool_status import Hello

_RELAY = "sgpu_magic.client.ssh.relay"
# the first login may have to install packages
_HELLO_TIMEOUT_S = 1800.0
# no answer to the pings of that time: the machine here slept, or the network changed
_DEAD_S = 25.0
_MOST_MESSAGES = 64


class SshTransport(NetworkTransport):
    """Transport to the pool of a machine, over the standard streams of one login after the other.

    Args:
        machine: The machine, or the first of several.
        others: The others.
        hello: The greeting, sent first on each connection.
        timeout_s: Silence after which the pool counts as lost, in seconds.
        on_step: Called with each step of a login, a few words, and after the last one with "".
        starts: Start the machine's pool if none runs.
    """

    hello_timeout_s = _HELLO_TIMEOUT_S

    def __init__(
        self,
        machine: Machine,
        others: Sequence[SshAddress],
        hello: Hello,
        timeout_s: float,
        on_step: Callable[[str], None],
        *,
        starts: bool,
    ) -> None:
        words = f"ssh {machine.address.shell_words}"
        super().__init__(machine.name, f"the pool {machine.name} (`{words}`)", hello, timeout_s, _DEAD_S)
        self._machine = machine
        self._on_step = on_step
        self._other_machines = others
        self._starts = starts
        # the machine that answered first: behind a name there may be several
        self._host = ""

    @property
    def chunk_bytes(self) -> int:
        # others overtake it
        return BULK_CHUNK_BYTES

    def lost_message(self) -> str:
        if self._silent_s > self._timeout_s:
            return super().lost_message()
        return f"the link to {self.title} ended: the pool there was stopped or restarted. Run the cell again."

    def mute(self) -> PoolError:
        return PoolError(
            f"{self.title} does not answer. End it with `sgpu pool stop --force` there; the next run starts a new one."
        )

    def _connected(self, outgoing: SendQueue) -> SshConnection:
        shown = False

        def on_line(word: str, text: str) -> None:
            nonlocal shown
            if word == "step":
                shown = True
                self._on_step(f"{self._machine.name}: {text}")

        try:
            login = Login(self._machine, self._program(), on_line, lambda: self._has_ended(outgoing))
        finally:
            if shown:
                self._on_step("")
        if self._host and login.host != self._host:
            login.close()
            raise PoolError(
                f"{self.title} leads to the machine {login.host} now, and the pool is on {self._host}: several "
                "machines share that name. Use the name of one of them."
            )
        self._host = login.host
        # a pool that has ended meanwhile is not started again, and ends this link
        self._starts = False
        return SshConnection(login)

    def _program(self) -> FarProgram:
        machines = program_words(self._machine, self._other_machines)
        if self._starts:
            return FarProgram(_RELAY, ("start", *machines))
        return FarProgram(_RELAY, ("find", *machines), prepares="never")


def program_words(machine: Machine, others: Sequence[SshAddress]) -> tuple[str, ...]:
    """Return the words that tell the first of several machines which they are; none for one machine.

    Raises:
        PoolError: There is no ssh here that says what it would use for them.
    """
    if not others:
        return ()
    try:
        addresses = tuple(resolved(address, machine.ssh_command) for address in (machine.address, *others))
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise PoolError(f"`{machine.ssh_command} -G` fails: {error}. Fix your ssh configuration.") from None
    return (to_word(Machines(addresses, machine.python, machine.prologue)),)


class SshConnection:
    """One login as a connection. Used by the link's thread only.

    Args:
        login: The login, whose relay is ready.
    """

    address = ""

    def __init__(self, login: Login) -> None:
        self._login = login
        self._stream = login.stream
        self._alive = True
        self._received: list[Sequence[bytes]] = []

    def send(self, parts: Sequence[bytes]) -> None:
        self._stream.put(parts)
        self._flush()

    def send_bulk(self, parts: Sequence[bytes]) -> None:
        self._stream.put(parts, can_wait=True)
        self._flush()

    def received(self) -> Sequence[Sequence[bytes]]:
        messages, self._received = self._received, []
        return messages

    def wait(self, outgoing: SendQueue, bulk: BulkConnection, timeout_ms: int) -> tuple[bool, bool]:
        poller = zmq.Poller()
        poller.register(self._login.reading, zmq.POLLIN)
        poller.register(outgoing.fileno(), zmq.POLLIN)
        if self._stream.has_unsent:
            poller.register(self._login.writing, zmq.POLLOUT)
        ready = dict(poller.poll(timeout_ms))
        self._login.drain_errors()
        if self._login.reading in ready:
            try:
                self._received += self._stream.receive(_MOST_MESSAGES)
            except OSError:
                self._alive = False
        self._flush()
        return self._alive, bool(self._received)

    def close(self, linger_ms: int = 0) -> None:
        until = time.monotonic() + linger_ms / 1000
        while self._alive and self._stream.has_unsent and time.monotonic() < until:
            poller = zmq.Poller()
            poller.register(self._login.writing, zmq.POLLOUT)
            poller.poll(50)
            self._flush()
        self._login.close()

    def _flush(self) -> None:
        if self._alive:
            try:
                self._stream.send()
            except OSError:
                self._alive = False
