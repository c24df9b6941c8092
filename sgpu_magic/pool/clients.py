"""Who is connected to the service."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from sgpu_magic.pool.authorized_clients import AuthorizedClient

_MOST_ANSWERS = 256


@dataclass(eq=False, slots=True)
class ConnectedClient:
    """One process that said hello.

    Args:
        identity: Its ZeroMQ identity; another one each time that a client of another machine comes back.
        pid: Its process.
        pidfd: Readable when it is dead; None where the system has none, and of a client of another machine.
        user: Who it is to the pool.
        same_host: It is on the service's machine, and sees its files.
        admin: It may end what is not its own.
        instance: Of a client of another machine: the same in all its connections.
        key: Its public key, "" on the service's machine.
        heard_at: When it was last heard, monotonic seconds; of clients of other machines.
        behind: Something that was meant for it was dropped, since it reads too slowly.
        unsent: Answers that its connection has not taken, of a client of this machine.
        answers: Of the newest requests that must be done only once: what they were answered, None before.
    """

    identity: bytes
    pid: int
    pidfd: int | None = None
    user: str = ""
    same_host: bool = True
    admin: bool = False
    instance: str = ""
    key: str = ""
    heard_at: float = field(default_factory=time.monotonic)
    behind: bool = False
    unsent: deque[Sequence[bytes]] = field(default_factory=deque["Sequence[bytes]"])
    answers: dict[int, Sequence[bytes] | None] = field(default_factory=dict[int, "Sequence[bytes] | None"])

    @property
    def authorized(self) -> AuthorizedClient:
        return AuthorizedClient(self.user, self.admin)

    def may_see(self, user: str) -> bool:
        """Whether the content of this user's runs is its business: who is on the service's machine owns all files."""
        return self.same_host or self.user == user

    def may_end(self, user: str) -> bool:
        return self.admin or self.may_see(user)

    def is_new(self, request: int) -> bool:
        """Whether this request was not seen before; from now on it was."""
        if request in self.answers:
            return False
        self.answers[request] = None
        while len(self.answers) > _MOST_ANSWERS:
            del self.answers[next(iter(self.answers))]
        return True
