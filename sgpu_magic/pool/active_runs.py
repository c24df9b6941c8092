"""The runs that the pool holds: each one's followers, event log and ledger row, written in one place.

A `PoolRun` is the scheduler's run, with what the service has of it besides.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from sgpu_magic.files.disk_room import disk_room, why_no_run
from sgpu_magic.pool.billing import Billing
from sgpu_magic.pool.ledger import Ledger
from sgpu_magic.pool.run_log import RunLog
from sgpu_magic.pool.scheduling.run import Run
from sgpu_magic.pool.server import ConnectedClient, EventFeed, Offer
from sgpu_magic.wire.attachments import FilePayload, InlinePayload, SharedPayload
from sgpu_magic.wire.client import Accepted, Submit
from sgpu_magic.wire.devices import Lease
from sgpu_magic.wire.events import EventBody, Noted, PayloadReleased, RunEnded, Submitted
from sgpu_magic.wire.failures import Failure
from sgpu_magic.wire.node import RunEvent
from sgpu_magic.wire.record import Record
from sgpu_magic.wire.run import RunSpec
from sgpu_magic.wire.states import FailureKind, RunState

_CUT_SHORT = (
    "the disk has taken no event for so long that output, displays and samples are left out until it does; the ranks' "
    "logs have the output if they could be written"
)
# a disk that took nothing is tried again after so long
_WRITE_AGAIN_S = 1.0

Send = Callable[[ConnectedClient, Record, Sequence[bytes]], None]


class PoolRun(Run):
    """A run from its submission until its ranks are gone.

    What the scheduler knows of it (`Run`) the scheduler alone changes, in answer to what it is told.

    Args:
        submit: What the client sent; the run's `spec` may change later.
        frames: Its raw frames; emptied once launched, unless the run may have to be launched again.
        owner: The client whose death ends it; None when that is dead or the run was detached.
        state: Where an earlier service left it.

    Attributes:
        watchers: Clients that only follow it.
        log: None until the run is accepted.
        submitted_at: Monotonic time of its submission.
        placed_at: Monotonic time of its lease; None before.
        attempt: How often its group was started again.
        failed: Of what the group failed that is started again as soon as its ranks are gone; None when none is.
        ordered: Its ranks were ordered from the engine, which says when they are gone.
        processes_gone: No process of it is left, and files of it are still on their way.
        ended_as: The state that its last word said; None while that is to come. The scheduler hears of it next.
        adopted: An earlier service launched it; its notebook has not come back yet.
        lost_node: Why ranks of it were lost with their node; "" when none were, or since it waits for another.
        payload_over: Nobody reads its payload's memory any more.
        cut_short: Its disk took nothing for so long that output and samples of it are left out.
    """

    def __init__(
        self, submit: Submit, frames: Sequence[bytes], owner: ConnectedClient | None, state: RunState = RunState.QUEUED
    ) -> None:
        super().__init__(submit.spec, state)
        self.submit = submit
        self.frames = frames
        self.owner = owner
        self.watchers: list[ConnectedClient] = []
        self.log: RunLog | None = None
        # an earlier service may have taken it
        self.submitted_at = time.monotonic() - max(0.0, time.time() - self.spec.submitted_at)
        self.placed_at: float | None = None
        self.attempt = 0
        self.failed: Failure | None = None
        self.ordered = False
        self.processes_gone = False
        self.ended_as: RunState | None = None
        self.adopted = False
        self.lost_node = ""
        self.payload_over = False
        self.cut_short = False
        # the payload's memory file, held here because the notebook may go; -1 when not
        self._held_fd = -1

    @property
    def ended(self) -> bool:
        """Its last word was said."""
        return self.ended_as is not None

    @property
    def may_start_again(self) -> bool:
        """Its group is started again, or may be: on the devices that it has."""
        return self.failed is not None or (not self.ended and self.attempt < self.spec.retries)

    @property
    def followers(self) -> list[ConnectedClient]:
        return [*self.watchers, self.owner] if self.owner is not None else self.watchers

    def detach(self) -> None:
        """It goes on when its notebook is gone; that only watches from now on."""
        self.spec = msgspec.structs.replace(self.spec, detach=True)
        if self.owner is not None:
            self.watchers.append(self.owner)
            self.owner = None

    def hold_payload(self) -> None:
        """Keep the payload's memory, which else goes with the notebook, until an agent has it.

        Raises:
            OSError: It is gone already.
        """
        source = self.submit.payload.source
        if isinstance(source, SharedPayload) and self._held_fd < 0 and (self.placed_at is None or self.spec.retries):
            self._held_fd = os.open(f"/proc/{source.pid}/fd/{source.fd}", os.O_RDONLY | os.O_CLOEXEC)
            self.take_payload_from(SharedPayload(pid=os.getpid(), fd=self._held_fd, size=source.size))

    def take_payload_from(self, source: SharedPayload | FilePayload) -> None:
        """The payload is at another place now."""
        payload = msgspec.structs.replace(self.submit.payload, source=source)
        self.submit = msgspec.structs.replace(self.submit, payload=payload)

    def let_payload_go(self) -> None:
        """The agent holds it, or nobody needs it."""
        if self._held_fd >= 0:
            os.close(self._held_fd)
            self._held_fd = -1


class ActiveRuns:
    """All runs of the service.

    Args:
        ledger: Where each has its row.
        runs_path: Where each has its directory.
        send: Sends an answer to a client.
        offer: Sends an event to a client, if its connection takes it now.
        billing: Knows what they cost.

    Attributes:
        feed: Sends events to who follows runs.
        settled: It is known which runs of an earlier service go on.
        resubmittable: Runs that only waited in the queue of an earlier service, until they are submitted again.
        on_forgotten: Called with the id of each run that goes on no longer.
        on_written: Called with each run whose events are on disk again after they were not for a while.
    """

    def __init__(self, ledger: Ledger, runs_path: Path, send: Send, offer: Offer, billing: Billing) -> None:
        self._ledger = ledger
        self.billing = billing
        self._runs_path = runs_path
        self._send = send
        self.on_forgotten: Callable[[str], None] = lambda _: None
        self.on_written: Callable[[PoolRun], None] = lambda _: None
        self.feed = EventFeed(offer, self.log_of)
        self.settled = False
        self.resubmittable: dict[str, RunSpec] = {}
        self._going: dict[str, PoolRun] = {}
        # the ranks are gone, but the payload's memory is still being copied
        self._copying: dict[str, PoolRun] = {}
        # events of these are in memory only, also after their ends
        self._behind: dict[str, PoolRun] = {}

    @property
    def going(self) -> list[PoolRun]:
        """Runs that are submitted and whose ranks are not gone."""
        return list(self._going.values())

    def get(self, run_id: str) -> PoolRun | None:
        return self._going.get(run_id)

    def speaker(self, run_id: str) -> PoolRun | None:
        """The run that an event is about, also after its ranks are gone."""
        return self._going.get(run_id) or self._copying.get(run_id) or self._behind.get(run_id)

    def log_of(self, run_id: str) -> RunLog | None:
        run = self.speaker(run_id)
        return None if run is None else run.log

    def directory(self, run_id: str) -> Path:
        return self._runs_path / run_id

    def add(self, run: PoolRun) -> None:
        self._going[run.run_id] = run

    def forget(self, run_id: str) -> None:
        run = self._going.pop(run_id, None)
        if run is not None:
            run.let_payload_go()
            self.on_forgotten(run_id)

    def accept(self, run: PoolRun) -> str:
        """Write a new run down and tell its client. Once. Returns why it can't be recorded, "" when it is."""
        if run.log is not None:
            return ""
        log = RunLog(self.directory(run.run_id), run.run_id)
        known = bool(log.seq)
        submitted = None if known else log.append(Submitted(spec=run.spec), run.spec.submitted_at)
        if log.unwritten:
            why = why_no_run(self._runs_path, log.problem)
            # nothing of it stays where something can be removed
            shutil.rmtree(log.directory, ignore_errors=True)
            return why
        run.log = log
        if known and self._ledger.has(run.run_id):
            # submitted again to this service after the last one was killed with the run in its queue
            self._ledger.update(run.run_id, state=RunState.QUEUED)
        else:
            self._ledger.record(run.spec, RunState.QUEUED)
        if run.owner is not None:
            self._send(run.owner, Accepted(request=run.submit.request, run_id=run.run_id), ())
        if submitted is not None:
            self.feed.tell(run.followers, submitted, (), log.directory)
        return ""

    def tell(
        self,
        run: PoolRun,
        body: EventBody,
        at: float,
        frames: Sequence[bytes] = (),
        told: RunEvent | None = None,
    ) -> None:
        """Keep an event and send it to who follows the run. `told`: as an agent has told it."""
        if run.log is None:
            return
        if told is not None and not run.log.takes(body):
            run.log.skip(told)
            if not run.cut_short:
                run.cut_short = True
                self.tell(run, Noted(text=_CUT_SHORT), at)
            return
        event = run.log.append(body, at, frames, told)
        self.feed.tell(run.followers, event, frames, run.log.directory)
        self._look_after(run)

    def _look_after(self, run: PoolRun) -> None:
        """Write what the disk has not taken as soon as it does; say so when that begins and when it is over."""
        log = run.log
        if log is None or not log.unwritten or run.run_id in self._behind:
            return
        self._behind[run.run_id] = run
        room = ""
        with contextlib.suppress(OSError):
            words = str(disk_room(self._runs_path))
            room = f"{words[0].upper()}{words[1:]}."
        text = (
            f"the events of this run can't be written to {log.directory}: {log.problem}. They are kept in memory until "
            f"the disk takes them again, and the run goes on. {room}"
        )
        self.tell(run, Noted(text=text), time.time())
        if len(self._behind) == 1:
            asyncio.get_running_loop().call_later(_WRITE_AGAIN_S, self._write_again)

    def _write_again(self) -> None:
        for run in list(self._behind.values()):
            if run.log is not None and run.log.write():
                del self._behind[run.run_id]
                run.cut_short = False
                if not run.ended:
                    self.tell(run, Noted(text="the disk takes the events of this run again"), time.time())
                self.on_written(run)
        if self._behind:
            asyncio.get_running_loop().call_later(_WRITE_AGAIN_S, self._write_again)

    def move(self, run: PoolRun, state: RunState) -> None:
        """Write down a state that the scheduler moved the run to."""
        meter = self.billing.begun(run, state, time.time(), time.monotonic())
        self._ledger.update(run.run_id, state=state, meter=meter)

    def placed(self, run: PoolRun, lease: Lease, host: str, labels: tuple[str, ...]) -> None:
        """Write down which devices the run has and what they cost, and tell it."""
        self._ledger.update(run.run_id, lease=lease, meter=self.billing.placed(run, lease))
        self.tell(run, self.billing.told(lease, host, labels), time.time())

    def end_without_ranks(
        self, run: PoolRun, state: RunState, reason: str, kind: FailureKind, failure: Failure | None = None
    ) -> None:
        """Say the last word of a run that no agent will speak for.

        Args:
            failure: What it failed of, when that is known; else made of `kind` and `reason`.
        """
        now, clock = time.time(), time.monotonic()
        cancelled = state is RunState.CANCELLED
        total_s = clock - run.submitted_at
        running_s = 0.0 if run.placed_at is None else clock - run.placed_at
        if cancelled:
            failure = None
        elif failure is None:
            failure = Failure(kind=kind, message=reason, at=now)
        ended = RunEnded(
            state=state,
            failure=failure,
            reason=reason if cancelled else "",
            queued_s=total_s - running_s,
            running_s=running_s,
            total_s=total_s,
        )
        run.ended_as = state
        ended, meter = self.billing.ended(run, ended, clock)
        self.tell(run, ended, now)
        self._ledger.update(run.run_id, state=state, ended_at=now, failure=reason or None, meter=meter)
        self._close_log(run)

    def ranks_gone(self, run: PoolRun) -> None:
        """Keep its log open for `PayloadReleased`, the one event that may still come."""
        self.forget(run.run_id)
        if run.payload_over or isinstance(run.submit.payload.source, InlinePayload):
            self._close_log(run)
        else:
            self._copying[run.run_id] = run

    def payload_released(self, run: PoolRun) -> None:
        """Nobody reads its payload's memory any more, which a notebook in a hurry may have asked for."""
        run.payload_over = True
        if self._copying.pop(run.run_id, None) is not None:
            self._close_log(run)

    def memory_lost(self, why: str) -> None:
        """The agent that copied payloads is dead: nobody reads their memory any more."""
        for run in list(self._copying.values()):
            self.tell(run, PayloadReleased(kept=False, reason=why), time.time())
            self.payload_released(run)

    def client_gone(self, client: ConnectedClient) -> list[PoolRun]:
        """Nobody sends to a dead client. Returns the runs that were to end with it."""
        lost: list[PoolRun] = []
        self.feed.forget(client)
        for run in [*self._going.values(), *self._copying.values()]:
            if client in run.watchers:
                run.watchers.remove(client)
            if run.owner is client:
                run.owner = None
                if not run.spec.detach:
                    lost.append(run)
        return lost

    def _close_log(self, run: PoolRun) -> None:
        if run.log is not None:
            run.log.close()
