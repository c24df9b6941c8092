"""The pool's active runs, with their followers, event logs and ledger rows."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from sgpu_magic.files.run_directory import disk_room, why_no_run
from sgpu_magic.pool.billing import Billing
from sgpu_magic.pool.event_feed import EventFeed, Offer
from sgpu_magic.pool.ledger import Ledger
from sgpu_magic.pool.pool_run import PoolRun
from sgpu_magic.pool.run_log import RunLog
from sgpu_magic.pool.server import ConnectedClient
from sgpu_magic.wire.attachments import InlinePayload
from sgpu_magic.wire.base import FailureKind, Record, RunState
from sgpu_magic.wire.client import Accepted
from sgpu_magic.wire.devices import Lease
from sgpu_magic.wire.events import EventBody, Noted, PayloadReleased, Placed, RunEnded, StateChanged, Submitted
from sgpu_magic.wire.node import RunEvent
from sgpu_magic.wire.option_text import Text, TextWithOptions
from sgpu_magic.wire.rank_events import Failure
from sgpu_magic.wire.run import RunSpec

_OUTPUT_DROPPED = (
    "the disk has accepted no events for too long: output, displays and samples are left out until it does; the ranks' "
    "logs have the output if they could be written"
)
# interval between retries of failed writes
_WRITE_AGAIN_S = 1.0

Send = Callable[[ConnectedClient, Record, Sequence[bytes]], None]


class ActiveRuns:
    """All active runs of the service.

    Args:
        ledger: Holds each run's row.
        runs_path: Holds each run's directory.
        send: Sends a reply to a client.
        offer: Sends an event to a client, if its connection accepts it now.
        billing: Computes what runs cost.
        on_end: Called with each run's spec and its final event.
        on_forgotten: Called with the ID of each run that is no longer active.
        on_written: Called with the ID of each run whose events are on disk again after write errors.

    Attributes:
        event_feed: Sends events to the runs' followers.
        settled: Whether the runs of an earlier service have been adopted or recorded as lost.
        resubmittable: Runs queued in an earlier service, until their notebooks submit them again.
    """

    def __init__(
        self,
        *,
        ledger: Ledger,
        runs_path: Path,
        send: Send,
        offer: Offer,
        billing: Billing,
        on_end: Callable[[RunSpec, RunEnded], None],
        on_forgotten: Callable[[str], None],
        on_written: Callable[[str], None],
    ) -> None:
        self._ledger = ledger
        self.billing = billing
        self._runs_path = runs_path
        self._send = send
        self._on_end = on_end
        self._on_forgotten = on_forgotten
        self._on_written = on_written
        self.event_feed = EventFeed(offer, self.log_of)
        self.settled = False
        self.resubmittable: dict[str, RunSpec] = {}
        self._going: dict[str, PoolRun] = {}
        # runs whose ranks are gone, but whose payload memory is still being copied
        self._copying: dict[str, PoolRun] = {}
        # runs with events that are only in memory; they may have ended
        self._behind: dict[str, PoolRun] = {}

    @property
    def going(self) -> list[PoolRun]:
        """Submitted runs whose ranks are not gone."""
        return list(self._going.values())

    def get(self, run_id: str) -> PoolRun | None:
        return self._going.get(run_id)

    def speaker(self, run_id: str) -> PoolRun | None:
        """Return the run that an event is about, even after its ranks are gone."""
        return self._going.get(run_id) or self._copying.get(run_id) or self._behind.get(run_id)

    def log_of(self, run_id: str) -> RunLog | None:
        run = self.speaker(run_id)
        return None if run is None else run.log

    def directory(self, run_id: str) -> Path:
        return self._runs_path / run_id

    def add(self, run: PoolRun) -> None:
        self._going[run.run_id] = run

    def forget(self, run_id: str) -> None:
        if (run := self._going.pop(run_id, None)) is not None:
            run.release_payload()
            self._on_forgotten(run_id)

    def accept(self, run: PoolRun) -> str | None:
        """Record a new run and tell its client; later calls do nothing. Returns why it can't be recorded, or None."""
        if run.log is not None:
            return None
        log = RunLog(self.directory(run.run_id), run.run_id)
        known = bool(log.seq)
        submitted = None if known else log.append(Submitted(spec=run.spec), run.spec.submitted_at)
        if log.unwritten:
            why = why_no_run(self._runs_path, log.problem)
            # remove what was written, as far as possible
            shutil.rmtree(log.directory, ignore_errors=True)
            return why
        run.log = log
        if known and self._ledger.has(run.run_id):
            # resubmitted: the previous service was killed while the run was in its queue
            self._ledger.update(run.run_id, state=RunState.QUEUED)
        else:
            self._ledger.record(run.spec, RunState.QUEUED)
        if run.owner is not None:
            self._send(run.owner, Accepted(request=run.submit.request, run_id=run.run_id), ())
        if submitted is not None:
            self.event_feed.publish(run.followers, submitted, (), log.directory)
        return None

    def publish(
        self, run: PoolRun, body: EventBody, at: float, frames: Sequence[bytes] = (), report: RunEvent | None = None
    ) -> None:
        """Log an event and send it to the run's followers. `report` is the agent's report of it, if any."""
        if run.log is None:
            return
        if report is not None and not run.log.takes(body):
            run.log.skip(report)
            if not run.drops_output:
                run.drops_output = True
                self.publish(run, Noted(text=_OUTPUT_DROPPED), at)
            return
        event = run.log.append(body, at, frames, report)
        followers = run.watchers if run.is_on_line and _is_known_on_line(body, report) else run.followers
        self.event_feed.publish(followers, event, frames, run.log.directory)
        self._retry_writes(run)
        if isinstance(body, RunEnded):
            self._on_end(run.spec, body)

    def _retry_writes(self, run: PoolRun) -> None:
        """Retry failed writes until the disk accepts them; note the beginning and the end in the run's events."""
        if (log := run.log) is None or not log.unwritten or run.run_id in self._behind:
            return
        self._behind[run.run_id] = run
        room = ""
        with contextlib.suppress(OSError):
            words = str(disk_room(self._runs_path))
            room = f"{words[0].upper()}{words[1:]}."
        text = (
            f"the events of this run can't be written to {log.directory}: {log.problem}. They are kept in memory until "
            f"the disk accepts them again, and the run continues. {room}"
        )
        self.publish(run, Noted(text=text), time.time())
        if len(self._behind) == 1:
            asyncio.get_running_loop().call_later(_WRITE_AGAIN_S, self._write_again)

    def _write_again(self) -> None:
        # schedule the next attempt first, so that a fault below does not end the retries
        next_turn = asyncio.get_running_loop().call_later(_WRITE_AGAIN_S, self._write_again)
        for run in list(self._behind.values()):
            if run.log is not None and run.log.write():
                del self._behind[run.run_id]
                run.drops_output = False
                if not run.ended:
                    self.publish(run, Noted(text="the disk accepts the events of this run again"), time.time())
                self._on_written(run.run_id)
        if not self._behind:
            next_turn.cancel()

    def move(self, run: PoolRun, state: RunState) -> None:
        """Record a state that the scheduler moved the run to."""
        meter = self.billing.start_meter(run.scheduled, state, time.time(), time.monotonic())
        self._ledger.update(run.run_id, state=state, meter=meter)

    def record_placed(self, run: PoolRun, lease: Lease, host: str, labels: tuple[str, ...]) -> None:
        """Record the run's devices and their price, and report them to its followers."""
        self._ledger.update(run.run_id, lease=lease, meter=self.billing.price_lease(run.scheduled, lease))
        self.publish(run, self.billing.placed_event(lease, host, labels), time.time())

    def end_without_ranks(
        self, run: PoolRun, state: RunState, reason: Text, kind: FailureKind, failure: Failure | None = None
    ) -> None:
        """Write the final event of a run that no agent will report on.

        Args:
            run: The run.
            state: Its final state.
            reason: Why it ended, a sentence.
            kind: The kind of its failure.
            failure: The failure, if known; otherwise it is built from `kind` and `reason`.
        """
        now, clock, message = time.time(), time.monotonic(), str(reason)
        cancelled = state is RunState.CANCELLED
        total_s = clock - run.submitted_at
        running_s = 0.0 if run.placed_at is None else clock - run.placed_at
        if cancelled:
            failure = None
        elif failure is None:
            text = reason if isinstance(reason, TextWithOptions) else None
            failure = Failure(kind=kind, message=message, text=text, at=now)
        ended = RunEnded(
            state=state,
            failure=failure,
            reason=message if cancelled else "",
            limit=run.scheduled.limit if state is RunState.TIMED_OUT else None,
            queued_s=total_s - running_s,
            running_s=running_s,
            total_s=total_s,
        )
        run.ended_as = state
        ended, meter = self.billing.ended(run.scheduled, ended, clock)
        self.publish(run, ended, now)
        self._ledger.update(run.run_id, state=state, ended_at=now, failure=message or None, meter=meter)
        self._close_log(run)

    def ranks_exited(self, run: PoolRun) -> None:
        """Forget the run, but keep its log open for `PayloadReleased`, the only event that may still come."""
        self.forget(run.run_id)
        if run.payload_released or isinstance(run.submit.payload.source, InlinePayload):
            self._close_log(run)
        else:
            self._copying[run.run_id] = run

    def payload_released(self, run: PoolRun) -> None:
        """Record that the payload's memory is no longer read, and close the log if it was open only for that."""
        run.payload_released = True
        if self._copying.pop(run.run_id, None) is not None:
            self._close_log(run)

    def memory_lost(self, why: str) -> None:
        """Release the payloads that a dead agent was copying."""
        for run in list(self._copying.values()):
            self.publish(run, PayloadReleased(kept=False, reason=why), time.time())
            self.payload_released(run)

    def on_client_disconnect(self, client: ConnectedClient) -> list[PoolRun]:
        """Stop sending to a dead client. Returns the runs that end with it."""
        lost: list[PoolRun] = []
        self.event_feed.forget(client)
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


def _is_known_on_line(body: EventBody, report: RunEvent | None) -> bool:
    """Whether the owner of a cell that came over its session's line knows an event without the pool."""
    if report is not None or isinstance(body, Submitted | Placed):
        return True
    return isinstance(body, StateChanged) and (body.state is RunState.RUNNING or body.state.is_final)
