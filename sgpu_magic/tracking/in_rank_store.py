"""The tracking store that a rank's MLflow uses for the URI where the run is tracked.

What is logged to the run is sent to the agent. Everything else goes to the real store, which is opened on first use:
opening takes most of a second, and a server may be slow.
"""

# MLflow's stores are only partly typed
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportUnknownParameterType=false, reportMissingParameterType=false

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mlflow.entities import Metric, Param, Run, RunData, RunInfo, RunStatus, RunTag
from mlflow.exceptions import MlflowException
from mlflow.store.tracking.abstract_store import AbstractStore
from mlflow.tracking._tracking_service import utils
from mlflow.utils.async_logging.run_operations import RunOperations
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID, MLFLOW_RUN_NAME
from mlflow.utils.validation import (
    _validate_metric,  # pyright: ignore[reportPrivateUsage]
    _validate_param,  # pyright: ignore[reportPrivateUsage]
    _validate_tag,  # pyright: ignore[reportPrivateUsage]
)

from sgpu_magic.tracking.in_rank_cell import CellHere, current
from sgpu_magic.wire.tracking import MetricPoint, absolute_uri, without_user

# tags that MLflow sets on every run it creates; the writer has set them on this run
_SET_BY_WRITER = ("mlflow.source.", "mlflow.user")
_NO_NAME = "lightning_logs"
_NOT_CREATED = (
    "MlflowClient.create_run creates further runs on the first rank only: what the other ranks log in them goes to the "
    "run itself."
)
# a time this close to now is the current time that MLflow itself passes
_NOW_MS = 60_000
# no-ops while nothing was logged to the real store
_ASYNC_ENDS = ("flush_async_logging", "shut_down_async_logging", "end_async_logging")


def wrapped(builder: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a store builder: it returns a `RunStore` for the URI where the cell is tracked."""

    # keep `__module__`, by which MLflow distinguishes its own stores from plug-ins
    @functools.wraps(builder)
    def build(store_uri: str | None = None, artifact_uri: str | None = None) -> Any:
        open_store = functools.partial(builder, store_uri=store_uri, artifact_uri=artifact_uri)
        return RunStore(store_uri, open_store) if is_own_store(store_uri) else open_store()

    build.__dict__["_sgpu_wraps"] = builder
    return build


def is_own_store(uri: object) -> bool:
    """Whether the current cell is tracked at this URI."""
    cell = current()
    if cell is None or not isinstance(uri, str):
        return False
    uri = absolute_uri(uri, os.getcwd())
    return uri == cell.tracking.uri or (cell.known_run is not None and uri == cell.known_run.uri)


def install() -> None:
    """Wrap the store builders in MLflow's registry."""
    registry = utils._tracking_store_registry  # pyright: ignore[reportPrivateUsage]
    for scheme, builder in list(registry._registry.items()):  # pyright: ignore[reportPrivateUsage]
        if not hasattr(builder, "_sgpu_wraps"):
            registry.register(scheme, wrapped(builder))


def forget() -> None:
    """Clear MLflow's cache of stores, after the tracking URI has changed."""
    type(utils._tracking_store_registry)._get_store_with_resolved_uri.cache_clear()  # pyright: ignore[reportPrivateUsage]


class RunStore:
    """A tracking store for MLflow that sends what is logged to the run to the agent.

    Args:
        uri: The store's URI.
        open_store: Opens the real store.
    """

    def __init__(self, uri: str | None, open_store: Callable[[], Any]) -> None:
        self._uri = uri
        self._open_store = open_store
        self._opened: Any = None
        self._opening = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        """Forward everything else to the real store, replacing the placeholder of the run's id by the id."""
        if name in _ASYNC_ENDS and self._opened is None:
            return lambda: None
        attribute = getattr(self._real, name)
        if not callable(attribute):
            return attribute

        @functools.wraps(attribute)
        def call(*args: Any, **kwargs: Any) -> Any:
            cell = current()
            if cell is not None:
                args = tuple(_in_truth(cell, value) for value in args)
                kwargs = {key: _in_truth(cell, value) for key, value in kwargs.items()}
            return attribute(*args, **kwargs)

        return call

    @property
    def _real(self) -> Any:
        with self._opening:
            if self._opened is None:
                cell = current()
                if cell is not None and cell.wait() is None and is_own_store(self._uri):
                    raise MlflowException(
                        f"the tracking store {without_user(self._uri or '')} of this run is not available."
                    )
                self._opened = self._open_store()
            return self._opened

    # ------------------------------------------------------------ logging

    def log_batch(
        self, run_id: str, metrics: Sequence[Metric], params: Sequence[Param], tags: Sequence[RunTag]
    ) -> None:
        cell = _cell_of(run_id)
        if cell is None:
            self._real.log_batch(run_id=run_id, metrics=metrics, params=params, tags=tags)
            return
        pairs = [_validate_param(param.key, param.value) for param in params]
        marks = [_validate_tag(tag.key, tag.value) for tag in tags]
        for metric in metrics:
            _validate_metric(metric.key, metric.value, metric.timestamp, metric.step)
        if of_models := [metric for metric in metrics if _belongs_to_model(metric)]:
            # only the real store records the model or the dataset of a metric
            try:
                self._real.log_batch(run_id=cell.true_id, metrics=of_models, params=[], tags=[])
                metrics = [metric for metric in metrics if not _belongs_to_model(metric)]
            except MlflowException as error:
                cell.remark("models", f"metrics were logged for the run only, not for their model: {error.message}")
        points = [MetricPoint(m.key, float(m.value), int(m.timestamp), int(m.step)) for m in metrics]
        cell.reports.add(points, _pairs(pairs), _pairs(marks))

    def log_batch_async(
        self, run_id: str, metrics: Sequence[Metric], params: Sequence[Param], tags: Sequence[RunTag]
    ) -> RunOperations:
        if _cell_of(run_id) is None:
            return self._real.log_batch_async(run_id=run_id, metrics=metrics, params=params, tags=tags)
        self.log_batch(run_id, metrics, params, tags)
        return RunOperations(operation_futures=[])

    # these call the two above
    log_metric, log_metric_async = AbstractStore.log_metric, AbstractStore.log_metric_async
    log_param, log_param_async = AbstractStore.log_param, AbstractStore.log_param_async
    set_tag, set_tag_async = AbstractStore.set_tag, AbstractStore.set_tag_async

    # ------------------------------------------------------------ the run itself

    def create_run(
        self, experiment_id: str, user_id: str, start_time: int, tags: Sequence[RunTag], run_name: str | None
    ) -> Run:
        """Return the run itself to the first logger that creates a run in its experiment. Later runs become children.

        Lightning's and other loggers create runs through `MlflowClient`.
        """
        cell = current()
        parent = next((tag.value for tag in tags if tag.key == MLFLOW_PARENT_RUN_ID), "")
        tracked = cell.wait() if cell is not None and not cell.own and is_own_store(self._uri) else None
        if cell is not None and not cell.own and (tracked is None or str(experiment_id) == tracked.experiment_id):
            if not cell.leads or tracked is None or (not parent and cell.may_join_once()):
                remark_times(cell, started_ms=start_time)
                if cell.leads or (not parent and cell.may_join_once()):
                    self._take_over(cell, tags, run_name)
                elif tracked is not None:
                    cell.remark("created", _NOT_CREATED)
                return self._own_run(cell)
            if not parent or cell.is_this(parent):
                others = [tag for tag in tags if tag.key != MLFLOW_PARENT_RUN_ID]
                tags = [*others, RunTag(MLFLOW_PARENT_RUN_ID, tracked.mlflow_run_id)]
        return self._real.create_run(
            experiment_id=experiment_id, user_id=user_id, start_time=start_time, tags=tags, run_name=run_name
        )

    def get_experiment_by_name(self, experiment_name: str) -> Any:
        """Return an experiment. The default name of Lightning's logger means the run's own experiment."""
        cell = current()
        tracked = cell.wait() if cell is not None and not cell.own and experiment_name == _NO_NAME else None
        if tracked is not None and is_own_store(self._uri):
            return self._real.get_experiment(tracked.experiment_id)
        return self._real.get_experiment_by_name(experiment_name)

    def _take_over(self, cell: CellHere, tags: Iterable[RunTag], run_name: str | None) -> None:
        own = [
            tag
            for tag in tags
            if not tag.key.startswith(_SET_BY_WRITER) and tag.key not in (MLFLOW_RUN_NAME, MLFLOW_PARENT_RUN_ID)
        ]
        if run_name and cell.leads:
            own.append(RunTag(MLFLOW_RUN_NAME, run_name))
        cell.reports.add(tags=_pairs(own))

    def update_run_info(self, run_id: str, run_status: Any, end_time: Any, run_name: str | None) -> Any:
        """Rename the run. Only the writer ends it, so another status or end time has no effect."""
        cell = _cell_of(run_id)
        if cell is None:
            return self._real.update_run_info(run_id, run_status, end_time, run_name)
        remark_status(cell, run_status)
        remark_times(cell, ended_ms=end_time)
        if run_name:
            cell.reports.add(tags=[(MLFLOW_RUN_NAME, run_name)])
        cell.reports.flush()
        return described(cell).info

    def get_run(self, run_id: str) -> Run:
        cell = _cell_of(run_id)
        return self._real.get_run(run_id) if cell is None else self._own_run(cell)

    def _own_run(self, cell: CellHere) -> Run:
        """Return the run as in the real store, or what is known of it if the store can't be read.

        What was just logged appears there about a second later.
        """
        if cell.wait() is not None:
            try:
                cell.reports.flush()
                return self._real.get_run(cell.true_id)
            except MlflowException as error:
                cell.remark(
                    "unread",
                    f"the MLflow run can't be read ({error.message.splitlines()[0]}). Metrics are still logged; "
                    f"artifacts are kept in {cell.kept_artifacts}.",
                )
        os.makedirs(cell.kept_artifacts, mode=0o700, exist_ok=True)
        return described(cell, artifact_uri=f"file://{cell.kept_artifacts}")

    def delete_run(self, run_id: str) -> None:
        cell = _cell_of(run_id)
        if cell is not None:
            raise MlflowException("this is the MLflow run of the cell itself, which can't be deleted while it runs.")
        self._real.delete_run(run_id)


def described(cell: CellHere, artifact_uri: str | None = None) -> Run:
    """Return the run as far as it is known without the store."""
    experiment_id, known_uri = (
        ("", None) if cell.known_run is None else (cell.known_run.experiment_id, cell.known_run.artifact_uri)
    )
    return Run(
        RunInfo(cell.known_id, experiment_id, artifact_uri=artifact_uri or known_uri, **running_status()), RunData()
    )


def running_status() -> dict[str, Any]:
    """Return the fields of a `RunInfo` that are the same for every active run."""
    started_ms = int(time.time() * 1000)
    return {"user_id": "", "status": "RUNNING", "start_time": started_ms, "end_time": None, "lifecycle_stage": "active"}


def remark_status(cell: CellHere, status: str | int | None) -> None:
    """Tell the user that a status other than the cell's has no effect."""
    name = RunStatus.to_string(status) if isinstance(status, int) else status
    if name is not None and name.upper() not in ("FINISHED", "RUNNING"):
        cell.remark(
            "status",
            f"the status {name} is not set: the MLflow run gets the status with which the cell ends. Raise an error "
            "for FAILED.",
        )


def remark_times(cell: CellHere, started_ms: int | None = None, ended_ms: int | None = None) -> None:
    """Tell the user that a start or end time has no effect. MLflow itself passes the current time."""
    now_ms = time.time() * 1000
    if any(abs(now_ms - at_ms) > _NOW_MS for at_ms in (started_ms, ended_ms) if at_ms):
        cell.remark("times", "start and end times are not set: those of the MLflow run are the times of the cell.")


def _cell_of(run_id: object) -> CellHere | None:
    cell = current()
    return cell if cell is not None and cell.is_this(run_id) else None


def _in_truth(cell: CellHere, value: Any) -> Any:
    return cell.true_id if isinstance(value, str) and value == cell.alias else value


def _belongs_to_model(metric: Metric) -> bool:
    return bool(metric.model_id or metric.dataset_name)


def _pairs(items: Iterable[Param | RunTag]) -> list[tuple[str, str]]:
    return [(str(item.key), str(item.value)) for item in items]
