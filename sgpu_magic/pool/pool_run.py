"""One run of the pool: its submission, its clients, its event log, and the state of its group of ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import Any

from msgspec.structs import replace

from sgpu_magic.pool.run_log import RunLog
from sgpu_magic.pool.scheduling.run import ScheduledRun
from sgpu_magic.pool.server import ConnectedClient
from sgpu_magic.wire.attachments import FilePayload, SharedPayload
from sgpu_magic.wire.base import RunState
from sgpu_magic.wire.client import Submit
from sgpu_magic.wire.devices import Lease
from sgpu_magic.wire.node import Launch
from sgpu_magic.wire.rank_events import Failure
from sgpu_magic.wire.run import RunSpec

# the fields that `Submit` and `Launch` have in common
_SUBMITTED = tuple({*Submit.__struct_fields__} & {*Launch.__struct_fields__})


class GroupState(Enum):
    """The state of a run's group of ranks.

    `RunState` is what the run's followers see. This is what the engine has done for the run, and decides what may be
    ordered from it next.
    """

    ABSENT = auto()
    """No group is ordered: the run waits for devices, or for other ones after its node was lost."""
    ORDERED = auto()
    """Ordered from the engine, which may still acquire the devices."""
    LAUNCHED = auto()
    """The engine has taken the devices; the ranks are started, run, or end."""
    EXITED = auto()
    """All its processes have exited; files may still be in transfer."""


_NEXT: Mapping[GroupState, frozenset[GroupState]] = {
    GroupState.ABSENT: frozenset((GroupState.ORDERED,)),
    GroupState.ORDERED: frozenset((GroupState.LAUNCHED, GroupState.EXITED)),
    GroupState.LAUNCHED: frozenset((GroupState.EXITED,)),
    # restarted on its lease, before or after the devices were taken; or requeued
    GroupState.EXITED: frozenset((GroupState.ORDERED, GroupState.LAUNCHED, GroupState.ABSENT)),
}


def submitted_fields(message: Submit | Launch) -> dict[str, Any]:
    """Return what the submission and each launch of a run have in common, by field."""
    return {name: getattr(message, name) for name in _SUBMITTED}


class PoolRun:
    """A run from its submission until its ranks have exited.

    Args:
        submit: The client's message; the run's `spec` may change later.
        frames: Its raw frames; emptied at launch, unless the run may be launched again.
        owner: The client whose death ends the run; None when the client is dead or the run was detached.
        state: The state in which an earlier service left it.

    Attributes:
        scheduled: The scheduler's view of it, which only the scheduler changes.
        watchers: Clients that only follow it.
        log: Its event log; None until the run is accepted.
        submitted_at: Monotonic time of its submission, maybe to an earlier service.
        placed_at: Monotonic time at which its group was launched; None before.
        attempt: How often its group was restarted.
        restart_after: Why the previous group failed, while a restart waits for its ranks to exit; else None.
        ended_as: The state in its final event; None before. The scheduler learns of it next.
        adopted: An earlier service launched it; its notebook has not reconnected.
        lost_node: Why its ranks were lost with their node; None otherwise, and once the run is requeued.
        is_on_line: It came over its session's line, over which its owner gets the agent's events.
        payload_released: Its payload's memory is no longer read.
        drops_output: The disk failed for so long that output and samples are dropped.
    """

    def __init__(
        self, submit: Submit, frames: Sequence[bytes], owner: ConnectedClient | None, state: RunState = RunState.QUEUED
    ) -> None:
        self.scheduled = ScheduledRun(submit.spec, state)
        self.submit = submit
        self.frames = frames
        self.owner = owner
        self.watchers: list[ConnectedClient] = []
        self.log: RunLog | None = None
        self.submitted_at = time.monotonic() - max(0.0, time.time() - self.spec.submitted_at)
        self.placed_at: float | None = None
        self.attempt = 0
        self.restart_after: Failure | None = None
        self.ended_as: RunState | None = None
        self.adopted = False
        self.lost_node: str | None = None
        self.is_on_line = False
        self.payload_released = False
        self.drops_output = False
        self._group = GroupState.ABSENT
        # the payload's memory file, held open here because the notebook may exit; -1 when it is not held
        self._held_fd = -1

    # ------------------------------------------------------------ what the scheduler knows

    @property
    def run_id(self) -> str:
        return self.scheduled.run_id

    @property
    def spec(self) -> RunSpec:
        return self.scheduled.spec

    @property
    def state(self) -> RunState:
        return self.scheduled.state

    @property
    def lease(self) -> Lease | None:
        return self.scheduled.lease

    @property
    def is_session(self) -> bool:
        return self.scheduled.is_session

    # ------------------------------------------------------------ its group of ranks

    @property
    def group(self) -> GroupState:
        return self._group

    @property
    def has_group(self) -> bool:
        """Whether a group was ordered, and the run was not requeued since."""
        return self._group is not GroupState.ABSENT

    def order_group(self) -> None:
        """Record that its group was ordered from the engine: a first one, or another one on the devices that it has."""
        self._move_group(GroupState.ORDERED if self.placed_at is None else GroupState.LAUNCHED)

    def launch_group(self, placed_at: float) -> None:
        """Record that the engine has taken the devices, at a monotonic time."""
        self._move_group(GroupState.LAUNCHED)
        self.placed_at = placed_at

    def exit_group(self) -> None:
        """Record that all processes of its group have exited, if it has a group."""
        if self.has_group:
            self._move_group(GroupState.EXITED)

    def requeue(self) -> None:
        """Record that it waits for other devices."""
        self._move_group(GroupState.ABSENT)
        self.placed_at = None
        self.lost_node = None

    def _move_group(self, state: GroupState) -> None:
        if state is not self._group and state not in _NEXT[self._group]:
            raise RuntimeError(f"run {self.run_id}: its group went from {self._group.name} to {state.name}")
        self._group = state

    @property
    def ended(self) -> bool:
        """Whether its final event was written."""
        return self.ended_as is not None

    @property
    def may_restart(self) -> bool:
        """Whether its group is being restarted, or may be, on the devices that it holds."""
        return self.restart_after is not None or (not self.ended and self.attempt < self.spec.retries)

    # ------------------------------------------------------------ its clients

    @property
    def followers(self) -> list[ConnectedClient]:
        return [*self.watchers, self.owner] if self.owner is not None else self.watchers

    def detach(self) -> None:
        """Keep the run going when its notebook exits; the notebook becomes a watcher."""
        self.scheduled.spec = replace(self.spec, detach=True)
        if self.owner is not None:
            self.watchers.append(self.owner)
            self.owner = None

    # ------------------------------------------------------------ its payload

    def hold_payload(self) -> None:
        """Keep the payload's memory, freed when the notebook exits, until an agent has it; OSError if it is gone."""
        source = self.submit.payload.source
        if isinstance(source, SharedPayload) and self._held_fd < 0 and (self.placed_at is None or self.spec.retries):
            self._held_fd = os.open(f"/proc/{source.pid}/fd/{source.fd}", os.O_RDONLY | os.O_CLOEXEC)
            self.move_payload(SharedPayload(pid=os.getpid(), fd=self._held_fd, size=source.size))

    def move_payload(self, source: SharedPayload | FilePayload) -> None:
        """Record the payload's new location."""
        self.submit = replace(self.submit, payload=replace(self.submit.payload, source=source))

    def release_payload(self) -> None:
        """Close the payload's memory file: an agent holds it, or it is no longer needed."""
        if self._held_fd >= 0:
            os.close(self._held_fd)
            self._held_fd = -1
