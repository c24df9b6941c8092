"""How far a run's events have been written to MLflow: the file `tracking.json` in the run's directory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from sgpu_magic.files.atomic_file import read_json, write_whole
from sgpu_magic.wire.base import Record, is_valid_id
from sgpu_magic.wire.decoding import convert
from sgpu_magic.wire.files import TRACKING
from sgpu_magic.wire.tracking import TrackedRun, Tracking, without_user


class Progress(Record, frozen=True, kw_only=True):
    """A run's state in MLflow. Contains no credentials.

    Args:
        uri: URI of the store, without user name and password; "" is the default store.
        registry_uri: URI of the model registry, likewise.
        directory: The notebook's working directory, as in `Tracking`.
        experiment: Name of the experiment, "" if `experiment_id` is given.
        experiment_id: Id of the experiment, "" until known.
        parent: Id of the parent MLflow run, "" for none.
        parent_run: Run id of the session, "" for none.
        creating: The store was asked to create the MLflow run, and may have done so even without an answer.
        mlflow_run_id: Id of the MLflow run, "" until it exists.
        artifact_uri: URI of its artifacts.
        url: Web page of the MLflow run, "" if the store has no server.
        seq: Number of the last event up to which all are written.
        closed: The MLflow run has its final status.
        artifacts: Files that have been logged.
        complete: Nothing is left to write.
        problem: Why the run could not be written, "" if there is no problem.
    """

    uri: str = ""
    registry_uri: str = ""
    directory: str = ""
    experiment: str = ""
    experiment_id: str = ""
    parent: str = ""
    parent_run: str = ""
    creating: bool = False
    mlflow_run_id: str = ""
    artifact_uri: str = ""
    url: str = ""
    seq: int = 0
    closed: bool = False
    artifacts: tuple[str, ...] = ()
    complete: bool = False
    problem: str = ""

    @property
    def tracked(self) -> TrackedRun | None:
        """The MLflow run, None until it exists."""
        return convert(self, TrackedRun, from_attributes=True) if self.mlflow_run_id else None


def opening(tracking: Tracking, parent_run: str = "") -> Progress:
    """Return the initial state of a run that is to be tracked."""
    return Progress(
        uri=without_user(tracking.uri),
        registry_uri=without_user(tracking.registry_uri),
        directory=tracking.directory,
        experiment=tracking.experiment,
        experiment_id=tracking.experiment_id,
        parent=tracking.parent,
        parent_run=parent_run,
    )


def load_progress(directory: Path) -> Progress | None:
    """Read a run's state from its directory, None if there is none or it can't be read."""
    return read_json(directory / TRACKING, Progress)


def save_progress(directory: Path, progress: Progress) -> None:
    """Write the file atomically.

    Raises:
        OSError: The disk is full, or the directory is gone.
    """
    write_whole(directory / TRACKING, msgspec.json.format(msgspec.json.encode(progress), indent=2))


def is_unsent(directory: Path) -> bool:
    """Whether the run is tracked but not completely written to its store."""
    found = load_progress(directory)
    return found is not None and not found.complete


def unsent(runs_path: Path) -> Iterator[tuple[Path, Progress]]:
    """Yield the directories and states of runs that are not completely written, sorted by id."""
    try:
        names = sorted(name for name in os.listdir(runs_path) if is_valid_id(name))
    except OSError:
        return
    for name in names:
        found = load_progress(runs_path / name)
        if found is not None and not found.complete:
            yield runs_path / name, found
