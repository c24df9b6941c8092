"""The tracking writer's process without a pool, run directories with a test's events, and MLflow's view of the runs."""

from __future__ import annotations

import contextlib
import functools
import os
import select
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from waiting import eventually

from sgpu_magic.config import Settings
from sgpu_magic.files.tracking_progress import Progress, load_progress
from sgpu_magic.pool.run_log import RunLog
from sgpu_magic.wire import codec, rank_events
from sgpu_magic.wire import events as ev
from sgpu_magic.wire.base import RunState, new_id
from sgpu_magic.wire.devices import Lease, Placement
from sgpu_magic.wire.run import CellSource, Owner, RunSpec
from sgpu_magic.wire.tracking import (
    FromTracker,
    MetricPoint,
    RunLogComplete,
    Track,
    Tracking,
    TrackingDone,
    TrackingStarted,
    TrackingTroubled,
)

PATIENCE_S = 60.0


@contextmanager
def quiet_mlflow() -> Iterator[Any]:
    """Import MLflow without its own warnings."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import mlflow

        _configure_mappers()
        yield mlflow


@functools.cache
def _configure_mappers() -> None:
    """Make SQLAlchemy configure the models of MLflow's store while warnings are ignored.

    It does so once per process, when the first model is used. One of them causes a warning; where warnings are errors,
    all models would remain unusable.
    """
    import sqlalchemy.orm
    from mlflow.store.model_registry.dbmodels import models as _registry  # noqa: F401
    from mlflow.store.tracking.dbmodels import models as _tracking  # noqa: F401

    sqlalchemy.orm.configure_mappers()


class Runs:
    """The runs in a store.

    Args:
        uri: The store's URI.
    """

    def __init__(self, uri: str) -> None:
        self.uri = uri

    def of(self, run_id: str, experiment: str = "nb") -> list[Any]:
        """Return the MLflow runs with this run's id, without deleted ones."""
        return [run for run in self.all(experiment) if run.data.tags.get("sgpu.run_id") == run_id]

    def one(self, run_id: str, experiment: str = "nb") -> Any:
        found = self.of(run_id, experiment)
        assert len(found) == 1, found
        return found[0]

    def get(self, mlflow_run_id: str) -> Any:
        """Return the MLflow run, None while the store has none; its id is known earlier."""
        with quiet_mlflow() as mlflow:
            try:
                return mlflow.MlflowClient(self.uri).get_run(mlflow_run_id)
            except mlflow.MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
                return None

    def all(self, experiment: str = "nb") -> list[Any]:
        with quiet_mlflow() as mlflow:
            client = mlflow.MlflowClient(self.uri)
            found = client.get_experiment_by_name(experiment)
            if found is None:
                return []
            runs: list[Any] = []
            page = client.search_runs([found.experiment_id], max_results=1000)
            while page:
                runs += page
                page = page.token and client.search_runs([found.experiment_id], max_results=1000, page_token=page.token)
            return runs

    def history(self, mlflow_run_id: str, key: str) -> list[tuple[int, float]]:
        """Return (step, value) of every point of a metric."""
        with quiet_mlflow() as mlflow:
            points = mlflow.MlflowClient(self.uri).get_metric_history(mlflow_run_id, key)
        return sorted((point.step, point.value) for point in points)

    def artifacts(self, mlflow_run_id: str, folder: str = "") -> set[str]:
        with quiet_mlflow() as mlflow:
            return {file.path for file in mlflow.MlflowClient(self.uri).list_artifacts(mlflow_run_id, folder or None)}

    def text(self, mlflow_run_id: str, path: str) -> str:
        with quiet_mlflow() as mlflow:
            uri = f"runs:/{mlflow_run_id}/{path}"
            local = mlflow.artifacts.download_artifacts(artifact_uri=uri, tracking_uri=self.uri)
        return Path(local).read_text()


class ToldRun:
    """A run whose events a test writes.

    Args:
        settings: The pool's settings.
        fields: Fields of its `RunSpec`.
    """

    def __init__(self, settings: Settings, **fields: Any) -> None:
        self.run_id: str = fields.pop("run_id", "") or new_id()
        self.directory = settings.runs_path / self.run_id
        ranks = fields.pop("ranks", 2)
        self.spec = RunSpec(
            run_id=self.run_id,
            name=fields.pop("name", "train"),
            cell=fields.pop("cell", CellSource(body="print(1)", execution_count=7)),
            placement=Placement(ranks=ranks),
            outputs=(),
            owner=fields.pop("owner", Owner(pid=1, host="laptop", user="ann", notebook="nb.ipynb", cell="c1")),
            timeout_s=60.0,
            submitted_at=time.time(),
            tracked=True,
            **fields,
        )
        self.log = RunLog(self.directory, self.run_id)
        (self.directory / "run.json").write_text("{}")
        self.apply(ev.Submitted(spec=self.spec))

    def apply(self, *bodies: ev.EventBody) -> None:
        for body in bodies:
            self.log.append(body, time.time())

    def start(self, device_type: str = "cpu", uuids: Sequence[str] = ()) -> None:
        ranks = self.spec.placement.ranks
        lease = Lease(lease_id="l", device_type=device_type, ranks=ranks, uuids=tuple(uuids))
        self.apply(
            ev.Placed(lease=lease, host="node7"),
            ev.StateChanged(state=RunState.STARTING),
            ev.RanksStarted(pids=tuple(range(ranks)), warm="standby"),
            ev.StateChanged(state=RunState.RUNNING),
        )
        (self.directory / "cell.py").write_text(self.spec.cell.body)
        for rank in range(ranks):
            (self.directory / f"rank-{rank}.log").write_text(f"rank {rank}\n")

    def metric(self, rank: int, key: str, *values: float, step: int = 0) -> None:
        """Log a rank's values at the steps from `step` on."""
        at_ms = int(time.time() * 1000)
        points = tuple(MetricPoint(key, value, at_ms, step + number) for number, value in enumerate(values))
        self.apply(rank_events.MetricsLogged(rank=rank, metrics=points))

    def end(self, state: RunState = RunState.SUCCEEDED, **fields: Any) -> None:
        self.apply(ev.RunEnded(state=state, **fields))
        self.log.close()

    @property
    def progress(self) -> Progress | None:
        return load_progress(self.directory)

    @property
    def complete(self) -> bool:
        return self.progress is not None and self.progress.complete


class WriterProcess:
    """`python -m sgpu_magic.tracking`, and the pool's side of its socket.

    Args:
        settings: The pool's settings.
        environ: The process's environment.

    Attributes:
        received: Messages from the process.
    """

    def __init__(self, settings: Settings, environ: dict[str, str] | None = None) -> None:
        self._settings = settings
        self._environ = environ
        self.received: list[FromTracker] = []
        # by run, the orders that the next process gets again
        self._orders: dict[str, list[Track | RunLogComplete]] = {}
        self.start()

    def start(self) -> None:
        self._socket, theirs = socket.socketpair()
        self._reader = codec.FrameReader(codec.from_tracker)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "sgpu_magic.tracking", str(theirs.fileno()), "--urgent"],
                pass_fds=(theirs.fileno(),),
                env=self._environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        assert self._process.stdin is not None
        with self._process.stdin as stdin:
            stdin.write(msgspec.json.encode(self._settings))

    @property
    def pid(self) -> int:
        return self._process.pid

    def start_if_ended(self) -> None:
        """Start a new process if the last one has ended silently, as after a minute without work."""
        if self._process.poll() is not None:
            assert self.sent() == ""
            self.start()

    def track(self, run: ToldRun, tracking: Tracking | None = None, parent_run: str = "") -> None:
        context = Tracking(experiment="nb") if tracking is None else tracking
        order = Track(run_id=run.run_id, run_dir=str(run.directory), tracking=context, parent_run=parent_run)
        self._send(order)

    def over(self, run: ToldRun) -> None:
        self._send(RunLogComplete(run_id=run.run_id))

    def _send(self, order: Track | RunLogComplete) -> None:
        self._orders.setdefault(order.run_id, []).append(order)
        # the process may be about to end after a minute without work; `take` handles that
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._socket.sendall(codec.frame(order))

    def take(self, timeout_s: float = 0.0) -> None:
        """Read the received messages. Replace a process that has ended because it had no work, as the pool does."""
        while select.select([self._socket], [], [], timeout_s)[0]:
            timeout_s, data = 0.0, b""
            # the process's end is a reset if it left an order unread
            with contextlib.suppress(ConnectionResetError):
                data = self._socket.recv(1 << 16)
            if not data:
                status = self._process.wait(PATIENCE_S)
                sent = self.sent()
                assert (status, sent) == (0, ""), f"the writer ended: {status} {sent}"
                self.start()
                for order in [order for orders in self._orders.values() for order in orders]:
                    self._socket.sendall(codec.frame(order))
                return
            self.received += [message for message, _ in self._reader.feed(data)]
            for message in self.received:
                if isinstance(message, TrackingDone):
                    self._orders.pop(message.run_id, None)

    def until(self, condition: Callable[[], object], what: str = "") -> None:
        """Read messages until a condition holds."""

        def holds() -> bool:
            self.take()
            return bool(condition())

        eventually(holds, PATIENCE_S, lambda: f"{what}: {self.received[-5:]}")

    def until_done(self, *runs: ToldRun) -> None:
        wanted = {run.run_id for run in runs}
        self.until(lambda: wanted <= {sent.run_id for sent in self.of(TrackingDone)}, "done")

    def of(self, kind: type[Any], run: ToldRun | None = None) -> list[Any]:
        """Return the messages of a kind."""
        return [sent for sent in self.received if isinstance(sent, kind) and (run is None or sent.run_id == run.run_id)]

    def started(self, run: ToldRun) -> list[TrackingStarted]:
        return self.of(TrackingStarted, run)

    def troubles(self, run: ToldRun) -> list[TrackingTroubled]:
        return self.of(TrackingTroubled, run)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self._process.wait(10)
        self._close()

    def end(self) -> str:
        """Close this side of the socket; return what the process has printed."""
        # it may have ended by itself
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._process.wait(PATIENCE_S)
        return self.sent()

    def sent(self) -> str:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            printed = output.read().decode()
        self._close()
        return printed

    def close(self) -> None:
        if self._process.poll() is None:
            self.kill()
        self._close()

    def _close(self) -> None:
        self._socket.close()
        if self._process.stdout is not None:
            self._process.stdout.close()
