"""Has the pool's runs written to MLflow: chooses the runs, and reports the outcome to their ranks and notebooks.

Tracking delays no run: writer processes are started a moment after the first tracked run, or at once when a rank waits
for its MLflow run. They read the runs' event logs themselves, so the pool only sends them orders.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from sgpu_magic.config import Settings
from sgpu_magic.files.run_directory import read_spec
from sgpu_magic.files.tracking_progress import Progress, load_progress, opening, save_progress, unsent
from sgpu_magic.nodes.engine import Engine
from sgpu_magic.pool.active_runs import ActiveRuns
from sgpu_magic.pool.pool_run import PoolRun
from sgpu_magic.pool.tracker_process import TrackerProcess
from sgpu_magic.system.processes import write_log
from sgpu_magic.wire.base import RunState, is_valid_id, short
from sgpu_magic.wire.events import Noted, Tracked
from sgpu_magic.wire.node import TrackingKnown
from sgpu_magic.wire.tracking import (
    Track,
    TrackedRun,
    Tracking,
    TrackingDone,
    TrackingReport,
    TrackingStarted,
    TrackingTroubled,
    without_user,
)

# delay after the first run that needs a writer: launches come in bursts, and their results take precedence
_LATER_S = 1.0
_LEFTOVERS_S = 15.0
# with `track = "auto"`, runs that end sooner without failing are not tracked
_MATTERS_S = 5.0
_CLOSE_S = 1.5
# variables that select the MLflow run and experiment, not the store or the user
_OF_A_RUN = {"MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_RUN_NAME"}
NOT_TRACKED = "the run is not tracked"

_Key = tuple[str, str, str, tuple[tuple[str, str], ...]]


class _Entry(msgspec.Struct):
    """A tracked run.

    Args:
        order: The message to its writer.
        sent: Whether the order was sent.
        asked: Whether a rank waits for its MLflow run.
        known: Its MLflow run, None until known.
        problem: Why it has no MLflow run; "" while there is no problem.
        done: Whether it is completely written.
        maybe: The run, until it is decided whether to track it (`track = "auto"`).
        begun: Monotonic time at which it was first seen running, None before.
    """

    order: Track
    sent: bool = False
    asked: bool = False
    known: TrackedRun | None = None
    problem: str | None = None
    done: bool = False
    maybe: PoolRun | None = None
    begun: float | None = None


class Tracker:
    """All tracked runs of the service, with one writer process for each store. Used from the loop's thread only.

    Args:
        settings: The pool's settings.
        active: The active runs.
        engine: Where their ranks run.
        is_live: Returns whether a run is active, or waits for its notebook to reconnect.
    """

    def __init__(self, settings: Settings, active: ActiveRuns, engine: Engine, is_live: Callable[[str], bool]) -> None:
        self._settings = settings
        self._active = active
        self._engine = engine
        self._is_live = is_live
        self._loop = asyncio.get_running_loop()
        self._entries: dict[str, _Entry] = {}
        self._processes: dict[_Key, TrackerProcess] = {}
        # problems of runs that had already ended, by store: the next run for the same store reports them
        self._pending_report: dict[_Key, str] = {}
        # runs that an earlier service did not finish writing, by store
        self._leftovers: dict[str, list[tuple[Path, Progress]]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._search: asyncio.TimerHandle | None = None

    def follow(self, run: PoolRun) -> None:
        """Track an accepted run, if it is to be tracked. Further calls do nothing."""
        if (tracking := run.submit.tracking) is None or not run.spec.tracked or run.run_id in self._entries:
            return
        directory = self._active.directory(run.run_id)
        parent = run.spec.session
        order = Track(run_id=run.run_id, run_dir=str(directory), tracking=tracking, parent_run=parent)
        decided = not tracking.if_it_matters or run.spec.profile
        self._entries[run.run_id] = _Entry(order, maybe=None if decided else run)
        if untold := self._pending_report.pop(_key(tracking), "") or self._unreported(run, tracking):
            self._active.publish(run, Noted(text=untold), time.time())
        self._send_later()

    def track(self, run_id: str, tracking: Tracking) -> None:
        """Write a run to MLflow in any case, because a client asked for its MLflow run ID."""
        entry, directory = self._entries.get(run_id), self._active.directory(run_id)
        if entry is None and is_valid_id(run_id) and directory.is_dir() and load_progress(directory) is None:
            # the run ended earlier and was not tracked
            entry = self._entries[run_id] = _Entry(Track(run_id=run_id, run_dir=str(directory), tracking=tracking))
        if entry is not None and not entry.sent:
            self._send(entry)

    def report_run(self, run_id: str) -> None:
        """Report the run's MLflow run to a rank that waits for it, now or once it is known."""
        if (entry := self._entries.get(run_id)) is None:
            self._engine.order(TrackingKnown(run_id=run_id, tracked=None, problem=NOT_TRACKED))
        elif entry.known is not None or entry.problem:
            self._engine.order(TrackingKnown(run_id=run_id, tracked=entry.known, problem=entry.problem))
        elif not entry.asked:
            entry.asked = True
            if entry.sent:
                process = self._process(entry.order.tracking)
                if entry.order.parent_run:
                    process.hurry(entry.order.parent_run)
                process.hurry(run_id)
            else:
                entry.order = msgspec.structs.replace(entry.order, urgent=True)
                self._send(entry)

    def run_ended(self, run_id: str) -> None:
        """Finish the tracking of a run whose ranks are gone."""
        if (entry := self._entries.get(run_id)) is None:
            return
        if entry.done or (not entry.sent and not self._matters(entry, ended=True)):
            del self._entries[run_id]
        elif entry.sent:
            self._process(entry.order.tracking).finish_run(run_id)

    def find_leftovers(self) -> None:
        """Schedule the writing of what an earlier service left. Call it once the active runs are known."""
        if self._search is None:
            self._search = self._loop.call_later(_LEFTOVERS_S, self._check)

    def close(self) -> None:
        """End the processes; what they have not written stays on disk."""
        for timer in (self._timer, self._search):
            if timer is not None:
                timer.cancel()
        for entry in self._entries.values():
            if not entry.sent and entry.maybe is None:
                self._write_opening(entry)
        until = time.monotonic() + _CLOSE_S
        for process in self._processes.values():
            process.close(max(0.0, until - time.monotonic()))
        self._processes.clear()

    # ------------------------------------------------------------ to the writers

    def _send_later(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(_LATER_S, self._send_all)

    def _send_all(self) -> None:
        self._timer = None
        for entry in list(self._entries.values()):
            if entry.sent:
                continue
            if self._matters(entry):
                self._send(entry)
            else:
                self._send_later()

    def _matters(self, entry: _Entry, *, ended: bool = False) -> bool:
        """Whether the run is to be tracked by now: it has run for a while, or it has failed."""
        if (run := entry.maybe) is None:
            return True
        now = self._loop.time()
        if entry.begun is None and run.state is RunState.RUNNING:
            entry.begun = now
        lasts = entry.begun is not None and now - entry.begun >= _MATTERS_S
        failed = ended and run.placed_at is not None and run.state not in (RunState.SUCCEEDED, RunState.CANCELLED)
        if lasts or failed or run.state in (RunState.FAILED, RunState.TIMED_OUT):
            entry.maybe = None
            self._send_later()
        return entry.maybe is None

    def _send(self, entry: _Entry) -> None:
        entry.sent, entry.maybe = True, None
        if (session := self._entries.get(entry.order.parent_run)) is not None and not session.sent:
            # the session's MLflow run is the parent: a cell may need it before the session is sent
            session.order = msgspec.structs.replace(session.order, urgent=entry.order.urgent)
            self._send(session)
        self._write_opening(entry)
        process = self._process(entry.order.tracking)
        process.track(entry.order)
        if self._active.get(entry.order.run_id) is None:
            process.finish_run(entry.order.run_id)
        for directory, left in self._leftovers.pop(without_user(entry.order.tracking.uri), ()):
            self._resume(directory, left, entry.order.tracking)

    def _write_opening(self, entry: _Entry) -> None:
        """Save in the run's directory what is to be sent where, in case all processes are killed."""
        directory = Path(entry.order.run_dir)
        if load_progress(directory) is None:
            # a full disk is already reported by the run's event log
            with contextlib.suppress(OSError):
                save_progress(directory, opening(entry.order.tracking, entry.order.parent_run))

    def _process(self, tracking: Tracking) -> TrackerProcess:
        key = _key(tracking)
        if (process := self._processes.get(key)) is None:
            process = self._processes[key] = TrackerProcess(self._settings, self._on_report)
        return process

    # ------------------------------------------------------------ runs of an earlier service

    def _check(self) -> None:
        self._search = None
        try:
            search = self._loop.run_in_executor(None, lambda: list(unsent(self._settings.runs_path)))
        except RuntimeError as error:
            # no thread can be started now
            write_log("the search for runs that are not in MLflow is repeated later: ", error)
            self.find_leftovers()
            return
        search.add_done_callback(self._on_search_done)

    def _on_search_done(self, search: asyncio.Future[list[tuple[Path, Progress]]]) -> None:
        if search.cancelled():
            return
        if (error := search.exception()) is not None:
            write_log("runs that are not in MLflow can't be found: ", error)
            return
        for directory, left in search.result():
            if directory.name not in self._entries and not self._is_live(directory.name):
                self._leftovers.setdefault(left.uri, []).append((directory, left))
        # the rest is resumed by a run with the credentials for the store, or by `sgpu sync`
        for directory, left in self._leftovers.pop("", ()):
            self._resume(directory, left, Tracking())

    def _unreported(self, run: PoolRun, tracking: Tracking) -> str:
        """Return why an earlier service could not write a run of the same user to the same store, or ""."""
        for directory, left in self._leftovers.get(without_user(tracking.uri), ()):
            spec = read_spec(directory) if left.problem else None
            if spec is not None and spec.owner.user == run.spec.owner.user:
                name = short(directory.name)
                why = left.problem.rstrip(".")
                return f"the earlier run {name} is not in MLflow: {why}. `sgpu sync {name}` sends it"
        return ""

    def _resume(self, directory: Path, left: Progress, tracking: Tracking) -> None:
        tracking = msgspec.structs.replace(
            tracking,
            experiment=left.experiment,
            experiment_id=left.experiment_id,
            parent=left.parent,
            directory=left.directory,
        )
        order = Track(run_id=directory.name, run_dir=str(directory), tracking=tracking, parent_run=left.parent_run)
        self._entries[directory.name] = _Entry(order, sent=True)
        process = self._process(tracking)
        process.track(order)
        process.finish_run(directory.name)

    # ------------------------------------------------------------ from the writers

    def _on_report(self, message: TrackingReport) -> None:
        if (entry := self._entries.get(message.run_id)) is None:
            return
        run = self._active.get(message.run_id)
        match message:
            case TrackingStarted(tracked=tracked) if entry.known is None:
                entry.known, entry.problem = tracked, None
                self._pending_report.pop(_key(entry.order.tracking), None)
                if run is not None:
                    self._engine.order(TrackingKnown(run_id=message.run_id, tracked=tracked))
                    if not run.ended:
                        self._active.publish(run, Tracked(tracked=tracked), time.time())
            case TrackingTroubled(text=text) if not entry.problem:
                entry.problem = text
                if run is not None and entry.asked and entry.known is None:
                    self._engine.order(TrackingKnown(run_id=message.run_id, tracked=None, problem=text))
                if run is not None and not run.ended:
                    self._active.publish(run, Noted(text=text), time.time())
                else:
                    self._pending_report[_key(entry.order.tracking)] = f"earlier run {short(message.run_id)}: {text}"
            case TrackingDone():
                entry.done = True
                if run is None:
                    del self._entries[message.run_id]
            case _:
                pass


def _key(tracking: Tracking) -> _Key:
    """Return the key of the process that writes a run: runs with the same key share one."""
    # the default store needs no variables
    needed = tracking.variables if tracking.uri else {}
    variables = sorted(item for item in needed.items() if item[0] not in _OF_A_RUN)
    return tracking.uri, tracking.registry_uri, tracking.directory, tuple(variables)
