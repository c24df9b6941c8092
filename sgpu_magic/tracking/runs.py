"""Converts a run's events to MLflow's parameters, tags, metrics, system metrics and final status. Pure functions.

Names and values are cut to MLflow's limits, so that no run is refused for a long name.
"""

from __future__ import annotations

import msgspec

from sgpu_magic.tracking.keys import mlflow_key
from sgpu_magic.tracking.system_metrics import SystemMetrics
from sgpu_magic.views.run_notes import run_name
from sgpu_magic.wire.base import RunKind, RunState
from sgpu_magic.wire.events import (
    AttemptFailed,
    Described,
    Event,
    Placed,
    RanksRestarted,
    RunEnded,
    StateChanged,
    Submitted,
)
from sgpu_magic.wire.rank_events import MetricsLogged, Sampled
from sgpu_magic.wire.run import RunSpec
from sgpu_magic.wire.tracking import MetricPoint

RUN_TAG = "sgpu.run_id"
LOGGED_TAG = "sgpu.logged"
"""Set once user code has logged something."""
NAME_TAG = "mlflow.runName"
PARENT_TAG = "mlflow.parentRunId"

_PARAM_LENGTH = 6000
_TAG_LENGTH = 8000
# length of a failure message in the table of runs
_FAILURE_LENGTH = 1000
_STATUS: dict[RunState, str] = {
    RunState.SUCCEEDED: "FINISHED",
    RunState.FAILED: "FAILED",
    RunState.TIMED_OUT: "FAILED",
    RunState.CANCELLED: "KILLED",
}


class Batch(msgspec.Struct):
    """Data to write to an MLflow run.

    Args:
        metrics: Metrics in order.
        params: Parameters by key; the first value counts.
        tags: Tags by key; the newest value counts.
        seq: Number of the last event included.
    """

    metrics: list[MetricPoint] = msgspec.field(default_factory=list[MetricPoint])
    params: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    tags: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    seq: int = 0

    @property
    def empty(self) -> bool:
        return not (self.metrics or self.params or self.tags)


class RunFold:
    """Folds one run's events.

    Args:
        pool: The pool's name.
        cores: Number of the node's CPU cores; None if unknown.
        written: Number of the last event already written. Events up to it restore the state and add nothing to a batch.

    Attributes:
        spec: The run's spec; None until its first event.
        ended: The run's final event; None until it ends.
        ended_at: Time of the final event, seconds since the epoch.
        name: Name of the MLflow run.
        batch: The next batch.
    """

    def __init__(self, pool: str, cores: int | None, written: int = 0) -> None:
        self.spec: RunSpec | None = None
        self.ended: RunEnded | None = None
        self.ended_at = 0.0
        self.name = ""
        self.batch = Batch()
        self._pool = pool
        self._system = SystemMetrics(cores)
        self._written = written
        self._params: dict[str, str] = {}

    def apply(self, event: Event) -> None:
        """Fold one event."""
        self._apply(event)
        if event.seq <= self._written:
            # already written, like all events before it
            self.batch = Batch()
        self.batch.seq = event.seq

    def pop_batch(self) -> Batch:
        """Return the batch, and begin the next one."""
        taken, self.batch = self.batch, Batch(seq=self.batch.seq)
        return taken

    def _apply(self, event: Event) -> None:
        match event.body:
            case Submitted(spec=spec):
                self._submitted(spec)
            case Placed(lease=lease, host=host, labels=labels):
                self._system.set_devices(lease.uuids)
                self._param("gpu_type", lease.device_type)
                self._tags({"sgpu.host": host, "sgpu.devices": ", ".join(labels)})
                if lease.simulated or lease.device_type == "cpu":
                    # the device metrics are then the ranks' own CPU use
                    self._tags({"sgpu.simulated": "true" if lease.simulated else "", "sgpu.devices_measured": "cpu"})
            case StateChanged(state=state) if not state.is_final:
                self._tags({"sgpu.state": str(state)})
            case Described(tags=tags):
                self._tags({name if "." in name else f"sgpu.{name}": value for name, value in tags})
            case MetricsLogged() as body:
                self._logged(body)
            case Sampled() as body:
                self.batch.metrics += self._system.add(body, event.at)
            case AttemptFailed(attempt=attempt, attempts=attempts):
                self._system.started_again()
                self._tags({"sgpu.attempts": f"{attempt + 1} of {attempts}"})
            case RanksRestarted():
                self._system.started_again()
            case RunEnded() as body:
                self._ended(body, event.at)
            case _:
                pass

    def _submitted(self, spec: RunSpec) -> None:
        self.spec, self.name = spec, run_name(spec)
        if spec.kind is RunKind.SESSION:
            # its cells have points of their own
            self._system.each_s = 0.0
        for name, value in spec.parameters:
            self._param(name, value)
        self._param("gpus", str(spec.placement.ranks))
        if spec.retries:
            self._param("retries", str(spec.retries))
        self._tags(opening_tags(spec, self._pool))

    def _logged(self, body: MetricsLogged) -> None:
        self._tags({LOGGED_TAG: "true"})
        self.batch.metrics += [
            MetricPoint(mlflow_key(point.key), point.value, point.at_ms, point.step) for point in body.metrics
        ]
        for name, value in body.params:
            self._param(name, value)
            if self._params[mlflow_key(name)] != value[:_PARAM_LENGTH]:
                self._tags({f"sgpu.param.{name}": value})
        for name, value in body.tags:
            if name == NAME_TAG:
                self.name = value
            self._tags({name: value})

    def _ended(self, body: RunEnded, at: float) -> None:
        self.ended, self.ended_at = body, at
        self.batch.metrics += self._system.rest()
        at_ms = int(at * 1000)
        numbers = {
            "sgpu/gpu_seconds": body.gpu_s,
            "sgpu/cost": body.cost,
            "sgpu/queued_seconds": body.queued_s,
            "sgpu/starting_seconds": body.starting_s,
            "sgpu/running_seconds": body.running_s,
            "sgpu/total_seconds": body.total_s,
        }
        self.batch.metrics += [
            MetricPoint(name, value, at_ms, 0) for name, value in numbers.items() if value is not None
        ]
        if self.spec is not None:
            # for a run that was never placed
            self._param("gpu_type", self.spec.placement.device_type)
        self._tags(closing_tags(body))

    def _param(self, name: str, value: str) -> None:
        """Set a parameter, once: MLflow does not allow another value later."""
        name = mlflow_key(name)
        if name not in self._params:
            self._params[name] = self.batch.params[name] = value[:_PARAM_LENGTH]

    def _tags(self, tags: dict[str, str]) -> None:
        self.batch.tags.update({mlflow_key(name): value[:_TAG_LENGTH] for name, value in tags.items() if value})


def opening_tags(spec: RunSpec, pool: str) -> dict[str, str]:
    """Return the tags that a run has from the start."""
    owner = spec.owner
    notebook = owner.notebook
    is_notebook = bool(notebook) and (notebook.endswith(".ipynb") or bool(owner.kernel))
    tags = {
        RUN_TAG: spec.run_id,
        "sgpu.kind": str(spec.kind),
        "sgpu.pool": pool,
        "sgpu.client_host": owner.host,
        "sgpu.notebook": notebook,
        "sgpu.cell": owner.cell,
        "sgpu.cell_number": "" if spec.cell.execution_count is None else str(spec.cell.execution_count),
        "sgpu.environment": spec.environment,
        "sgpu.environment_label": spec.environment_label,
        "sgpu.session": spec.session,
        "sgpu.session_name": spec.session_name,
        "sgpu.replay_of": spec.replay_of,
        "mlflow.user": owner.user,
        "mlflow.source.name": notebook,
        "mlflow.source.type": "NOTEBOOK" if is_notebook else "LOCAL",
    }
    return {name: value for name, value in tags.items() if value}


def closing_tags(ended: RunEnded) -> dict[str, str]:
    """Return the tags that are added when a run ends."""
    tags = {"sgpu.state": str(ended.state), "sgpu.reason": ended.reason, "sgpu.currency": ended.currency}
    failure = ended.failure
    if failure is not None:
        headline = failure.message.strip()[:_FAILURE_LENGTH]
        name = failure.type_name.removeprefix("builtins.")
        tags |= {
            "sgpu.failure_kind": str(failure.kind),
            "sgpu.failure": f"{name}: {headline}" if name else headline,
            "sgpu.failed_rank": "" if failure.rank is None else str(failure.rank),
        }
    return tags


def status_of(spec: RunSpec | None, state: RunState) -> str:
    """Return MLflow's status for a final state. A disconnected session counts as finished."""
    if spec is not None and spec.kind is RunKind.SESSION and state is RunState.CANCELLED:
        return "FINISHED"
    return _STATUS.get(state, "FAILED")


# ---------------------------------------------------------------- system metrics

# Uses the keys of MLflow's own system metrics:
#     system/node0/gpu_0_utilization_percentage     the run's first device, in rank order
#     system/node0/gpu_0_memory_usage_megabytes
#     system/node0/gpu_0_memory_usage_percentage
#     system/node0/gpu_0_power_usage_watts
#     system/node0/cpu_utilization_percentage       all processes of the run, as a share of all cores of the node
#     system/node0/system_memory_usage_megabytes    all processes of the run
#     system/node0/rank_0_cpu_utilization_percentage, rank_0_memory_usage_megabytes      each rank; 100 is one core
#
# In the first minute each sample is a point; later, samples are averaged over ten seconds, MLflow's own sampling
# interval. The same events always give the same points, so nothing is written twice.
