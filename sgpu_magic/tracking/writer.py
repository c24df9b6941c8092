"""Writes one run to its MLflow store step by step, and records the progress in the run's directory.

Every step can be repeated: MLflow stores equal metrics, tags and parameters once, and the writer searches for a run
that may have been created without an answer before it creates another.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import msgspec

from sgpu_magic.config import Settings
from sgpu_magic.files.locks import locked
from sgpu_magic.files.run_directory import EventFile
from sgpu_magic.files.tracking_progress import load_progress, opening, save_progress
from sgpu_magic.tracking.artifacts import files_of
from sgpu_magic.tracking.client import DeletedFromStore, Rejected, StoreTroubled, TrackingStore
from sgpu_magic.tracking.runs import NAME_TAG, PARENT_TAG, Batch, RunFold, closing_tags, opening_tags, status_of
from sgpu_magic.wire.base import FailureKind, RunKind, RunState, short
from sgpu_magic.wire.events import RunEnded
from sgpu_magic.wire.rank_events import Failure
from sgpu_magic.wire.run import RUN_RECORD, RunSpec
from sgpu_magic.wire.tracking import Tracking

# maximum per step, so that one run does not delay the others
_STEP_METRICS = 5000
# how long to wait after the end for the lock file of new packages and for traces of the profiler
_LATE_S = 15.0
# how long to wait for the record after the writer has seen the end, which may be late: importing MLflow takes seconds
_RECORD_S = 5.0
_END_UNKNOWN = "its pool ended before the run did"
MAX_BYTES = 200_000_000
"""Larger files are not logged."""


class Busy(Exception):
    """Another process is writing this run, or its directory is gone."""


class RunWriter:
    """Writes one run.

    Args:
        settings: The pool's settings.
        store: The store to write to.
        directory: The run's directory.
        tracking: The experiment and parent in the store.
        parent_run: Run id of the session, "" for none.

    Attributes:
        progress: The run's state in MLflow.
        log_complete: Its event log is final.
        due: Monotonic time of its next step.
        failures: Number of consecutive failed steps.
        announced: The pool was sent the MLflow run's id.
        trouble_reported: The pool was told that the store does not work.
    """

    def __init__(
        self, settings: Settings, store: TrackingStore, directory: Path, tracking: Tracking, parent_run: str = ""
    ) -> None:
        self.directory = directory
        self.run_id = directory.name
        self.log_complete = False
        self.due = time.monotonic()
        self.failures = 0
        self.announced = False
        self.trouble_reported = False
        self.progress = load_progress(directory) or opening(tracking, parent_run)
        self._settings = settings
        self._store = store
        self._record_until: float | None = None
        self._begin_again()

    def _begin_again(self) -> None:
        self._events = EventFile(self.directory)
        self._fold = RunFold(self._settings.pool or "local", os.cpu_count(), self.progress.seq)
        self._batch: Batch | None = None

    @property
    def rests(self) -> bool:
        """Whether it is an open session that the pool knows to be in the store: between its cells, it only samples."""
        spec, ends = self._fold.spec, self.log_complete or self._fold.ended is not None
        return spec is not None and spec.kind is RunKind.SESSION and self.announced and not (ends or self.failures)

    def step(self) -> bool:
        """Write new events. Returns whether there is more to write immediately.

        Raises:
            StoreTroubled: The store does not work. The next step repeats this one.
            Busy: Another process is writing the run.
        """
        with locked(self.directory, wait=False) as held:
            if not held:
                raise Busy
            on_disk = load_progress(self.directory)
            if on_disk is not None and on_disk != self.progress:
                # another process has continued it
                self.progress = on_disk
                self._begin_again()
            if self.progress.complete:
                return False
            try:
                return self._step()
            except DeletedFromStore as gone:
                self._keep(complete=True, problem=f"{gone}")
                return False

    def trouble(self, text: str) -> None:
        """Record why the run can't be written."""
        if text != self.progress.problem:
            with locked(self.directory, wait=False) as held:
                on_disk = load_progress(self.directory)
                if held and (on_disk is None or on_disk == self.progress):
                    self._keep(problem=text)

    def _step(self) -> bool:
        self._read()
        if self._fold.spec is None:
            if self.log_complete:
                self._keep(complete=True, problem="its directory has no events")
            return False
        if not self.progress.mlflow_run_id:
            self._create(self._fold.spec)
        batch = self._batch
        if batch is not None:
            self._write(batch)
            self._batch = None
            if not batch.empty:
                self._keep(seq=batch.seq, problem="")
        if self._fold.ended is None and self.log_complete and not self._read():
            self._end_unknown()
            return True
        if self._batch is not None:
            return True
        if self._fold.ended is None:
            return False
        self._finish(self._fold.spec, self._fold.ended)
        return False

    def _read(self) -> bool:
        """Fold new events unless a batch is waiting. Returns whether there is a batch to write."""
        if self._batch is not None:
            return True
        before = self._fold.batch.seq
        try:
            for event, _ in self._events.new_events():
                self._fold.apply(event)
                if len(self._fold.batch.metrics) >= _STEP_METRICS:
                    break
        except FileNotFoundError:
            return False
        except (ValueError, OSError):
            # a damaged log: only the events before the damage are written
            self.log_complete = True
        if self._fold.batch.seq > max(before, self.progress.seq) or not self._fold.batch.empty:
            self._batch = self._fold.pop_batch()
        return self._batch is not None

    # ------------------------------------------------------------ writing

    def _create(self, spec: RunSpec) -> None:
        now = self.progress
        experiment_id = now.experiment_id or self._store.find_experiment(now.experiment or "sgpu-magic")
        tags = opening_tags(spec, self._settings.pool or "local")
        parent = now.parent or self._session(now.parent_run)
        if parent:
            tags[PARENT_TAG] = parent
        found = self._store.find_runs(experiment_id, spec.run_id) if now.creating else []
        made = next(iter(found), None)
        if made is None:
            self._keep(creating=True)
            began_ms = int(spec.submitted_at * 1000)
            try:
                made = self._store.create_run(experiment_id, now.experiment, self._fold.name, began_ms, tags)
            except Rejected as refused:
                raise DeletedFromStore(f"the store rejects the run: {refused}") from None
        self._keep(**self._store.where(made), creating=now.creating, problem="")

    def _session(self, run_id: str) -> str:
        """Return the MLflow run id of the run's session, "" if it has none in this store."""
        if not run_id:
            return ""
        found = load_progress(self.directory.parent / run_id)
        if found is None or found.uri != self.progress.uri:
            return ""
        if not found.mlflow_run_id and not found.complete:
            raise StoreTroubled(f"its session {short(run_id)} is not in the store yet")
        return found.mlflow_run_id

    def _write(self, batch: Batch) -> None:
        # keep the batch unchanged: if the store fails midway, it is written again
        tags = {key: value for key, value in batch.tags.items() if key != NAME_TAG}
        name = batch.tags.get(NAME_TAG, "")
        refused = self._store.write(self.progress.mlflow_run_id, msgspec.structs.replace(batch, tags=tags))
        if name:
            self._store.rename(self.progress.mlflow_run_id, name)
        if refused:
            names = ", ".join(dict.fromkeys(refused))
            self._store.write(self.progress.mlflow_run_id, Batch(tags={"sgpu.refused": names[:500]}))

    def _end_unknown(self) -> None:
        """End a run whose log has no final event, because the pool was killed or the disk was full."""
        failure = Failure(kind=FailureKind.NODE_LOST, message=_END_UNKNOWN)
        ended = RunEnded(state=RunState.FAILED, failure=failure)
        self._fold.ended, self._fold.ended_at = ended, (self.directory / "events.msgpack").stat().st_mtime
        self._store.write(self.progress.mlflow_run_id, Batch(tags=closing_tags(ended)))

    def _finish(self, spec: RunSpec, ended: RunEnded) -> None:
        mlflow_run_id = self.progress.mlflow_run_id
        if not self.progress.closed:
            if self.progress.creating:
                self._drop_doubles(spec)
            self._store.close_run(mlflow_run_id, status_of(spec, ended.state), int(self._fold.ended_at * 1000))
            self._keep(closed=True, problem="")
        waits = self._waits_for_files(spec, ended)
        if waits and self.progress.artifacts:
            return
        left_out: list[str] = []
        with tempfile.TemporaryDirectory(prefix="sgpu-tracking-") as scratch:
            for name, path in files_of(self.directory, Path(scratch), self._settings.pool or "local"):
                if name in self.progress.artifacts:
                    continue
                if path.stat().st_size > MAX_BYTES:
                    left_out.append(name)
                    continue
                self._store.log_file(mlflow_run_id, path, name.rpartition("/")[0])
                self._keep(artifacts=(*self.progress.artifacts, name))
        if left_out:
            text = f"{', '.join(left_out)}: larger than {MAX_BYTES // 1_000_000} MB, in {self.directory}"
            self._store.write(mlflow_run_id, Batch(tags={"sgpu.left_out": text}))
        if not waits:
            self._keep(complete=True, problem="")

    def _waits_for_files(self, spec: RunSpec, ended: RunEnded) -> bool:
        """Whether files may appear that are made after the end: a session cell's record, a lock file, traces."""
        here, past_s = self.directory, time.time() - self._fold.ended_at
        if self._record_until is None:
            self._record_until = time.monotonic() + _RECORD_S
        record = not (here / RUN_RECORD).exists() and time.monotonic() < self._record_until
        lock = spec.environment and self._settings.lock_environments and not (here / "pylock.toml").exists()
        # ranks ended by an interrupt or by a peer's failure write their traces afterwards
        traces = spec.profile and ended.state is not RunState.SUCCEEDED
        traces = traces and len(list((here / "profile").glob("rank-*"))) < spec.placement.ranks
        return record or ((bool(lock) or traces) and past_s < _LATE_S)

    def _drop_doubles(self, spec: RunSpec) -> None:
        """Delete duplicate MLflow runs, created by a request whose answer was lost."""
        for double in self._store.find_runs(self.progress.experiment_id, spec.run_id):
            if double.info.run_id != self.progress.mlflow_run_id:
                self._store.delete_run(double.info.run_id)

    def _keep(self, **changes: object) -> None:
        self.progress = msgspec.structs.replace(self.progress, **changes)
        save_progress(self.directory, self.progress)
