"""Groups that are started again: after a worker's or a node's failure, as often as the run allows."""

from __future__ import annotations

import os
from collections.abc import Callable

import msgspec

from sgpu_magic.pool.run_book import PoolRun, RunBook
from sgpu_magic.wire.events import AttemptFailed, RunEnded
from sgpu_magic.wire.payloads import FilePayload, InlinePayload, SharedPayload, StoredPayload
from sgpu_magic.wire.records import Failure
from sgpu_magic.wire.run_files import PAYLOAD
from sgpu_magic.wire.states import FailureKind, RunState

_NOT_USERS_FAULT = (FailureKind.WORKER_DIED, FailureKind.NODE_LOST)


class Restarts:
    """Decides whether a failed group is started again, and does so once its ranks are gone.

    Args:
        book: Says a run's last word when it can't be.
        relaunch: Starts the group on the lease it has; returns why it could not, "" when it did.
        requeue: Lets it wait for another lease, given why.
    """

    def __init__(
        self, book: RunBook, relaunch: Callable[[PoolRun], str], requeue: Callable[[PoolRun, str], None]
    ) -> None:
        self._book = book
        self._relaunch = relaunch
        self._requeue = requeue
        self._failures: dict[str, Failure] = {}

    def instead_of(self, run: PoolRun, ended: RunEnded) -> AttemptFailed | None:
        """What to tell in place of this end: that the group is started again. None when the end stands."""
        spec, failure = run.spec, ended.failure
        if ended.state is not RunState.FAILED or failure is None or run.attempt >= spec.retries:
            return None
        if run.state is RunState.CANCELLING or not (spec.retry_any or failure.kind in _NOT_USERS_FAULT):
            return None
        run.attempt += 1
        run.restarting = True
        self._failures[run.run_id] = failure = msgspec.structs.replace(failure, exception=None)
        return AttemptFailed(attempt=run.attempt, attempts=spec.retries + 1, failure=failure)

    def resume(self, run: PoolRun, failed: AttemptFailed) -> None:
        """An earlier service was killed between the end of one group and the start of the next."""
        run.attempt = failed.attempt
        run.restarting = True
        self._failures[run.run_id] = failed.failure

    def give_up(self, run: PoolRun) -> None:
        """It is not started again after all."""
        run.restarting = False
        self._failures.pop(run.run_id, None)

    def ranks_gone(self, run: PoolRun, stopping_as: RunState | None) -> bool:
        """The failed group is gone. True when its successor was started, so the run goes on.

        Args:
            stopping_as: What the run was told to end as; None when it was not.
        """
        if not run.restarting:
            return False
        run.restarting = False
        failure = self._failures.pop(run.run_id)
        if stopping_as is not None:
            self._book.end_without_ranks(run, stopping_as, "it was stopped between two attempts", FailureKind.TIMEOUT)
            run.state = stopping_as
            return False
        if run.lost_node:
            why = self._find_payload(run)
            if not why:
                self._requeue(run, run.lost_node)
                run.lost_node = ""
        else:
            why = self._find_payload(run) or self._relaunch(run)
        if not why:
            return True
        failure = msgspec.structs.replace(failure, message=f"{failure.message}\nIt was not started again: {why}.")
        self._book.end_without_ranks(run, RunState.FAILED, failure.message, failure.kind, failure)
        run.state = RunState.FAILED
        return False

    def _find_payload(self, run: PoolRun) -> str:
        """See that a new agent can have the run's variables. Returns why not, "" when it can."""
        source = run.submit.payload.source
        match source:
            case InlinePayload():
                lost = not run.frames
            case SharedPayload(pid=pid, fd=fd):
                lost = not os.path.exists(f"/proc/{pid}/fd/{fd}")
            case FilePayload(path=path):
                lost = not os.path.exists(path)
            case StoredPayload():
                # the store keeps it as long as the run goes on
                lost = False
        if not lost:
            return ""
        kept = self._book.directory(run.run_id) / PAYLOAD
        if not kept.is_file():
            return "its variables were in the memory of processes that are gone"
        file = FilePayload(path=str(kept), size=kept.stat().st_size)
        run.submit = msgspec.structs.replace(
            run.submit, payload=msgspec.structs.replace(run.submit.payload, source=file)
        )
        return ""
