"""The runs that the pool holds: each one's followers, event log and ledger row, written in one place."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sgpu_magic.pool.ledger import Ledger
from sgpu_magic.pool.run_log import RunLog
from sgpu_magic.pool.server import ConnectedClient
from sgpu_magic.protocol.events import EventBody, Noted, RunEnded
from sgpu_magic.protocol.messages import Accepted, Submit
from sgpu_magic.protocol.records import Failure, InlinePayload, Record
from sgpu_magic.protocol.states import FailureKind, RunState

Send = Callable[[ConnectedClient, Record, Sequence[bytes]], None]


@dataclass(eq=False, slots=True)
class PoolRun:
    """A run as the service holds it, from its submission until its ranks are gone.

    Args:
        submit: What the client sent.
        frames: Its raw frames; emptied once launched.
        client: Who follows it; None when that process is dead.
        log: None until the run is accepted.
        state: What the scheduler moved it to.
        placed_at: Wall-clock time of its lease; None before.
        ended: Its last word was said.
    """

    submit: Submit
    frames: Sequence[bytes]
    client: ConnectedClient | None
    log: RunLog | None = None
    state: RunState = RunState.QUEUED
    placed_at: float | None = None
    ended: bool = False

    @property
    def run_id(self) -> str:
        return self.submit.spec.run_id


class RunBook:
    """All runs of the service.

    Args:
        ledger: Where each has its row.
        runs_path: Where each has its directory.
        send: Sends to a client.
    """

    def __init__(self, ledger: Ledger, runs_path: Path, send: Send) -> None:
        self._ledger = ledger
        self._runs_path = runs_path
        self._send = send
        self._going: dict[str, PoolRun] = {}
        # the ranks are gone, but the payload's memory is still being copied
        self._copying: dict[str, PoolRun] = {}

    @property
    def going(self) -> list[PoolRun]:
        """Runs that are submitted and whose ranks are not gone."""
        return list(self._going.values())

    def get(self, run_id: str) -> PoolRun | None:
        return self._going.get(run_id)

    def speaker(self, run_id: str) -> PoolRun | None:
        """The run that an event is about, also after its ranks are gone."""
        return self._going.get(run_id) or self._copying.get(run_id)

    def directory(self, run_id: str) -> Path:
        return self._runs_path / run_id

    def add(self, run: PoolRun) -> None:
        self._going[run.run_id] = run

    def forget(self, run_id: str) -> None:
        self._going.pop(run_id, None)

    def accept(self, run: PoolRun) -> None:
        """Write a new run down and tell its client. Once."""
        if run.log is not None:
            return
        run.log = RunLog(self.directory(run.run_id), run.run_id)
        self._ledger.record(run.submit.spec, RunState.QUEUED)
        if run.client is not None:
            self._send(run.client, Accepted(request=run.submit.request, run_id=run.run_id), ())

    def tell(self, run: PoolRun, body: EventBody, at: float, frames: Sequence[bytes] = ()) -> None:
        """Keep an event and send it to who follows the run."""
        if run.log is None:
            return
        event = run.log.append(body, at, frames)
        if run.log.problem:
            problem, run.log.problem = run.log.problem, ""
            self.tell(run, Noted(text=problem), at)
        if run.client is not None:
            self._send(run.client, event, frames)

    def move(self, run: PoolRun, state: RunState) -> None:
        run.state = state
        self._ledger.update(run.run_id, state=state)

    def end_without_ranks(self, run: PoolRun, state: RunState, reason: str, kind: FailureKind) -> None:
        """Say the last word of a run that no agent will speak for."""
        now = time.time()
        cancelled = state is RunState.CANCELLED
        waited = now - run.submit.spec.submitted_at
        ended = RunEnded(
            state=state,
            failure=None if cancelled else Failure(kind=kind, message=reason, at=now),
            reason=reason if cancelled else "",
            queued_s=waited if run.placed_at is None else run.placed_at - run.submit.spec.submitted_at,
            running_s=0.0 if run.placed_at is None else now - run.placed_at,
            total_s=waited,
        )
        run.ended = True
        self.tell(run, ended, now)
        self._ledger.update(run.run_id, state=state, ended_at=now, failure=reason)
        self._close_log(run)

    def ranks_gone(self, run: PoolRun) -> None:
        """Keep its log open for `PayloadReleased`, the one event that may still come."""
        self.forget(run.run_id)
        if isinstance(run.submit.payload.source, InlinePayload):
            self._close_log(run)
        else:
            self._copying[run.run_id] = run

    def payload_released(self, run: PoolRun) -> None:
        if self._copying.pop(run.run_id, None) is not None:
            self._close_log(run)

    def _close_log(self, run: PoolRun) -> None:
        if run.log is not None:
            run.log.close()
