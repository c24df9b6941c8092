"""Records of a run's place in MLflow, and what the pool service and its tracking process tell each other.

pool -> tracker     ToTracker       socketpair
tracker -> pool     FromTracker     socketpair
"""

from __future__ import annotations

import posixpath

from sgpu_magic.wire.record import Record

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
"""How the variables begin that MLflow's clients and its artifact stores read."""

# what MLflow takes for a store without being a URI or a path
_NAMES = ("databricks", "databricks-uc", "uc")


def is_store_variable(name: str) -> bool:
    """Whether MLflow's client or an artifact store may read the variable, such as a token."""
    return name.startswith(STORE_VARIABLES)


def absolute_uri(uri: str, directory: str) -> str:
    """Return a store's URI as a process in another directory has to have it.

    Args:
        uri: As MLflow takes it: also a path, `file:` with one, or SQLite with a file that is not absolute.
        directory: Where the one who has given it stands.
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
    """Where a run is tracked. Held in memory only: the variables may hold credentials.

    Args:
        uri: Of the tracking store; "" is the pool's default store.
        registry_uri: Of the model registry where the notebook has set one, else "".
        experiment: Its name; made if need be. "" when `experiment_id` is given.
        experiment_id: Its id, where the notebook's own MLflow tells it.
        parent: The MLflow run that is the parent, "" for none.
        variables: `MLFLOW_*` and what the artifact store needs, for the tracking process.
        if_it_matters: Only when the run lasts over 5 s, fails, is profiled, uses MLflow or is asked for
            (`track = "auto"`).
    """

    uri: str = ""
    registry_uri: str = ""
    experiment: str = ""
    experiment_id: str = ""
    parent: str = ""
    variables: dict[str, str] = {}
    if_it_matters: bool = False


class MetricPoint(Record, frozen=True, array_like=True):
    """One value of a metric. `at_ms` is wall-clock time in milliseconds since the epoch."""

    key: str
    value: float
    at_ms: int
    step: int = 0


class TrackedRun(Record, frozen=True, kw_only=True):
    """The MLflow run that a run has become.

    Args:
        uri: The store's, without user name and password.
        mlflow_run_id: Its id there.
        experiment_id: The experiment's.
        experiment: Its name.
        artifact_uri: Where its artifacts lie.
        url: A page that shows it, "" where the store has no server.
    """

    uri: str
    mlflow_run_id: str
    experiment_id: str
    experiment: str = ""
    artifact_uri: str = ""
    url: str = ""


# ---------------------------------------------------------------- pool -> tracker


class Track(Record, frozen=True, tag="track", kw_only=True):
    """Keep this run in MLflow: what happens in it stands in its directory's event log.

    Args:
        run_dir: The run's directory.
        tracking: Where.
        parent_run: The session's run id: its MLflow run is the parent of a cell's. "" for none.
        urgent: A rank waits for the answer.
    """

    run_id: str
    run_dir: str
    tracking: Tracking
    parent_run: str = ""
    urgent: bool = False


class Hurry(Record, frozen=True, tag="hurry", kw_only=True):
    """A rank waits for the run's `TrackingStarted`."""

    run_id: str


class RunOver(Record, frozen=True, tag="run-over", kw_only=True):
    """The run's ranks are gone and its event log does not grow any more, whether or not it tells the run's end."""

    run_id: str


class EndTracker(Record, frozen=True, tag="end-tracker", kw_only=True):
    """Write what there is within a few seconds, and exit."""


ToTracker = Track | Hurry | RunOver | EndTracker

# ---------------------------------------------------------------- tracker -> pool


class TrackingStarted(Record, frozen=True, tag="tracking-started", kw_only=True):
    """The run is in MLflow from now on."""

    run_id: str
    tracked: TrackedRun


class TrackingTroubled(Record, frozen=True, tag="tracking-troubled", kw_only=True):
    """The store can't be reached or refuses; told once for each run. The run goes on, and `sgpu sync` sends it."""

    run_id: str
    text: str


class TrackingDone(Record, frozen=True, tag="tracking-done", kw_only=True):
    """Everything of the run is written, or kept for `sgpu sync` (`complete` false)."""

    run_id: str
    complete: bool


FromTracker = TrackingStarted | TrackingTroubled | TrackingDone
