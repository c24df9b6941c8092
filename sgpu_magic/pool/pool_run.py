"""A run as the service holds it."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from sgpu_magic.pool.run_log import RunLog
from sgpu_magic.pool.server import ConnectedClient
from sgpu_magic.wire.attachments import SharedPayload
from sgpu_magic.wire.client import Submit
from sgpu_magic.wire.devices import Lease
from sgpu_magic.wire.run import RunSpec
from sgpu_magic.wire.states import RunState


@dataclass(eq=False, slots=True)
class PoolRun:
    """From its submission until its ranks are gone.

    Args:
        submit: What the client sent.
        frames: Its raw frames; emptied once launched, unless the run may have to be launched again.
        owner: The client whose death ends it; None when that is dead or the run was detached.
        watchers: Clients that only follow it.
        log: None until the run is accepted.
        state: What the scheduler moved it to.
        submitted_at: Monotonic time of its submission.
        placed_at: Monotonic time of its lease; None before.
        attempt: How often its group was started again.
        restarting: The group failed, and is started again as soon as its ranks are gone.
        ordered: Its ranks were ordered from the engine, which says when they are gone.
        processes_gone: No process of it is left, and files of it are still on their way.
        ended: Its last word was said.
        adopted: An earlier service launched it; its notebook has not come back yet.
        lost_node: Why ranks of it were lost with their node; "" when none were, or since it waits for another.
        payload_over: Nobody reads its payload's memory any more.
        held_fd: The payload's memory file, held here because the notebook may go; -1 when not.
        lease: What it has; None before.
        hourly: What that costs in an hour; None without a price, and of what runs in a session.
        metered_at: Wall-clock time at which its meter began; None before, and of what runs in a session.
        metered_clock: The same on the monotonic clock.
        metered_s: Seconds that it was on meter before it lost a node and waited again.
    """

    submit: Submit
    frames: Sequence[bytes]
    owner: ConnectedClient | None
    watchers: list[ConnectedClient] = field(default_factory=list[ConnectedClient])
    log: RunLog | None = None
    state: RunState = RunState.QUEUED
    placed_at: float | None = None
    attempt: int = 0
    restarting: bool = False
    ordered: bool = False
    processes_gone: bool = False
    ended: bool = False
    adopted: bool = False
    lost_node: str = ""
    payload_over: bool = False
    held_fd: int = -1
    lease: Lease | None = None
    hourly: float | None = None
    metered_at: float | None = None
    metered_clock: float | None = None
    metered_s: float = 0.0
    submitted_at: float = field(init=False)

    def __post_init__(self) -> None:
        # an earlier service may have taken it
        self.submitted_at = time.monotonic() - max(0.0, time.time() - self.spec.submitted_at)

    @property
    def run_id(self) -> str:
        return self.submit.spec.run_id

    @property
    def spec(self) -> RunSpec:
        return self.submit.spec

    @property
    def may_start_again(self) -> bool:
        """Its group is started again, or may be: on the devices that it has."""
        return self.restarting or (not self.ended and self.attempt < self.spec.retries)

    @property
    def followers(self) -> list[ConnectedClient]:
        return [*self.watchers, self.owner] if self.owner is not None else self.watchers

    def detach(self) -> None:
        """It goes on when its notebook is gone; that only watches from now on."""
        self.submit = msgspec.structs.replace(self.submit, spec=msgspec.structs.replace(self.spec, detach=True))
        if self.owner is not None:
            self.watchers.append(self.owner)
            self.owner = None

    def hold_payload(self) -> None:
        """Keep the payload's memory, which else goes with the notebook, until an agent has it.

        Raises:
            OSError: It is gone already.
        """
        payload = self.submit.payload
        source = payload.source
        if isinstance(source, SharedPayload) and self.held_fd < 0 and (self.placed_at is None or self.spec.retries):
            self.held_fd = os.open(f"/proc/{source.pid}/fd/{source.fd}", os.O_RDONLY | os.O_CLOEXEC)
            own = SharedPayload(pid=os.getpid(), fd=self.held_fd, size=source.size)
            self.submit = msgspec.structs.replace(self.submit, payload=msgspec.structs.replace(payload, source=own))

    def let_payload_go(self) -> None:
        """The agent holds it, or nobody needs it."""
        if self.held_fd >= 0:
            os.close(self.held_fd)
            self.held_fd = -1
