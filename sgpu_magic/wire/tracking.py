"""A run's MLflow target, and the messages between the pool service and its tracking process.

pool -> tracker     ToTracker       socketpair
tracker -> pool     FromTracker     socketpair
"""

from __future__ import annotations

import posixpath
import re

from sgpu_magic.wire.base import OfRun, Record

STORE_VARIABLES = (
    "MLFLOW_",
    "AWS_",
    "AZURE_",
    "AZUREML_",
    "GOOGLE_",
    "GCLOUD_",
    "DATABRICKS_",
    "HADOOP_",
    "R2_",
    "B2_",
    "ALIBABA_",
    "OSS_",
)
"""Prefixes of the environment variables that MLflow's clients and artifact stores read."""

# stores that MLflow accepts although they are neither a URI nor a path
_NAMES = ("databricks", "databricks-uc", "uc")
# mlflow.store.db.db_types.DATABASE_ENGINES
_DATABASES = ("sqlite", "mysql", "postgresql", "mssql")
_USER = re.compile(r"(?<=://)[^/]*@")


def is_store_variable(name: str) -> bool:
    """Whether MLflow's client or an artifact store may read the variable, which may be a token."""
    return name.startswith(STORE_VARIABLES)


def without_user(uri: str) -> str:
    """Return the URI without user name and password."""
    return _USER.sub("", uri)


def is_database(uri: str) -> bool:
    """Whether the store is a database that MLflow's client uses without a server."""
    return uri.partition(":")[0].partition("+")[0] in _DATABASES


def absolute_uri(uri: str, directory: str) -> str:
    """Return a store's URI in a form that is valid in another directory.

    Args:
        uri: As MLflow accepts it, including a path, `file:` with a path, or SQLite with a relative file.
        directory: Directory that relative paths refer to.
    """
    if uri in _NAMES:
        return uri
    if ":" not in uri:
        return f"file://{posixpath.normpath(posixpath.join(directory, uri))}"
    scheme, _, path = uri.partition(":")
    if scheme == "file" and not path.startswith("/"):
        return f"file://{posixpath.normpath(posixpath.join(directory, path))}"
    if scheme.startswith("sqlite") and path.startswith("///") and not path.startswith("////"):
        return f"{scheme}:///{posixpath.normpath(posixpath.join(directory, path[3:]))}"
    return uri


class Tracking(Record, frozen=True, kw_only=True):
    """Where a run is tracked. Held in memory only, because the variables may contain credentials.

    Args:
        uri: URI of the tracking store; "" for the pool's default store.
        registry_uri: URI of the model registry if the notebook has set one, else "".
        experiment: Name of the experiment, which is created if needed; "" if `experiment_id` is given.
        experiment_id: Id of the experiment, if the notebook's own MLflow reports it.
        parent: Id of the parent MLflow run; "" for none.
        variables: `MLFLOW_*` and the artifact store's variables, for the tracking process.
        directory: The notebook's working directory if the store is a database, else "". MLflow's client keeps the
            artifacts of such a store below it.
        if_it_matters: Track only if the run lasts over 5 s, fails, is profiled, uses MLflow or is requested
            (`track = "auto"`).
    """

    uri: str = ""
    registry_uri: str = ""
    experiment: str = ""
    experiment_id: str = ""
    parent: str = ""
    variables: dict[str, str] = {}
    directory: str = ""
    if_it_matters: bool = False


class MetricPoint(Record, frozen=True, array_like=True):
    """One value of a metric. `at_ms` is wall-clock time in milliseconds since the epoch."""

    key: str
    value: float
    at_ms: int
    step: int = 0


class TrackedRun(Record, frozen=True, kw_only=True):
    """The MLflow run of a run.

    Args:
        uri: URI of the store, without user name and password.
        mlflow_run_id: Id of the MLflow run.
        experiment_id: Id of the experiment.
        experiment: Name of the experiment.
        artifact_uri: Where its artifacts are stored.
        url: A page that shows it; "" if the store has no server.
    """

    uri: str
    mlflow_run_id: str
    experiment_id: str
    experiment: str = ""
    artifact_uri: str = ""
    url: str = ""


# ---------------------------------------------------------------- pool -> tracker


class Track(OfRun, frozen=True, tag="track", kw_only=True):
    """Track this run in MLflow, from the event log in its directory.

    Args:
        run_dir: The run's directory.
        tracking: Where to track it.
        parent_run: Run id of the session whose MLflow run is the parent of this cell's; "" for none.
        urgent: A rank waits for the answer.
    """

    run_dir: str
    tracking: Tracking
    parent_run: str = ""
    urgent: bool = False


class Hurry(OfRun, frozen=True, tag="hurry", kw_only=True):
    """A rank waits for the run's `TrackingStarted`."""


class RunLogComplete(OfRun, frozen=True, tag="run-over", kw_only=True):
    """The run's ranks are gone and its event log no longer grows, whether or not it contains the run's end."""


class EndTracker(Record, frozen=True, tag="end-tracker", kw_only=True):
    """Write pending data within a few seconds, and exit."""


ToTracker = Track | Hurry | RunLogComplete | EndTracker

# ---------------------------------------------------------------- tracker -> pool


class TrackingStarted(OfRun, frozen=True, tag="tracking-started", kw_only=True):
    """The run is tracked in MLflow from now on."""

    tracked: TrackedRun


class TrackingTroubled(OfRun, frozen=True, tag="tracking-troubled", kw_only=True):
    """The store is unreachable or refuses requests; sent once per run. The run continues; `sgpu sync` uploads it."""

    text: str


class TrackingDone(OfRun, frozen=True, tag="tracking-done", kw_only=True):
    """Everything about the run is written, or kept for `sgpu sync` (`complete` is false)."""

    complete: bool


TrackingReport = TrackingStarted | TrackingTroubled | TrackingDone


class TrackerReady(Record, frozen=True, tag="tracker-ready", kw_only=True):
    """The process has imported MLflow. It must not be ended now for being slow: it may be creating a store's tables."""


class TrackerRests(Record, frozen=True, tag="tracker-rests", kw_only=True):
    """The process exits to free its memory. The next order needs a new process.

    Args:
        run_ids: The runs that it leaves, sessions that have been idle for some minutes.
    """

    run_ids: tuple[str, ...]


FromTracker = TrackingReport | TrackerReady | TrackerRests
