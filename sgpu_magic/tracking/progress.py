"""`tracking.json` in a run's directory: its MLflow run, and how far its events have been written to it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from sgpu_magic.config import Settings
from sgpu_magic.files.whole_file import write_whole
from sgpu_magic.wire.files import TRACKING
from sgpu_magic.wire.record import Record, is_valid_id
from sgpu_magic.wire.tracking import TrackedRun, Tracking

SYNC = "sync"
"""Argument of the tracking process: send what is unsent, and exit."""

_USER = re.compile(r"(?<=://)[^/]*@")


class Progress(Record, frozen=True, kw_only=True):
    """A run's state in MLflow. Contains no credentials.

    Args:
        uri: URI of the store, without user name and password; "" is the default store.
        registry_uri: URI of the model registry, likewise.
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
        if not self.mlflow_run_id:
            return None
        return TrackedRun(
            uri=self.uri,
            mlflow_run_id=self.mlflow_run_id,
            experiment_id=self.experiment_id,
            experiment=self.experiment,
            artifact_uri=self.artifact_uri,
            url=self.url,
        )


def opening(tracking: Tracking, parent_run: str = "") -> Progress:
    """Return the initial state of a run that is to be tracked."""
    return Progress(
        uri=without_user(tracking.uri),
        registry_uri=without_user(tracking.registry_uri),
        experiment=tracking.experiment,
        experiment_id=tracking.experiment_id,
        parent=tracking.parent,
        parent_run=parent_run,
    )


def load(directory: Path) -> Progress | None:
    """Read a run's state from its directory, None if there is none or it can't be read."""
    try:
        return msgspec.json.decode((directory / TRACKING).read_bytes(), type=Progress)
    except (OSError, msgspec.DecodeError):
        return None


def save(directory: Path, progress: Progress) -> None:
    """Write the file atomically.

    Raises:
        OSError: The disk is full, or the directory is gone.
    """
    write_whole(directory / TRACKING, msgspec.json.format(msgspec.json.encode(progress), indent=2))


def is_unsent(directory: Path) -> bool:
    """Whether the run is tracked but not completely written to its store."""
    found = load(directory)
    return found is not None and not found.complete


def unsent(runs_path: Path) -> Iterator[tuple[Path, Progress]]:
    """Yield the directories and states of runs that are not completely written, sorted by id."""
    try:
        names = sorted(name for name in os.listdir(runs_path) if is_valid_id(name))
    except OSError:
        return
    for name in names:
        found = load(runs_path / name)
        if found is not None and not found.complete:
            yield runs_path / name, found


def without_user(uri: str) -> str:
    """Return the URI without user name and password."""
    return _USER.sub("", uri)


# ---------------------------------------------------------------- messages between `sgpu sync` and its process


class Unsent(Record, frozen=True):
    """Request to send runs to one store.

    Args:
        settings: The settings.
        uri: URI of the store, with user name and password if the shell's variable has them; "" is the default store.
        directories: The runs' directories.
    """

    settings: Settings
    uri: str
    directories: tuple[str, ...]


class Sent(Record, frozen=True):
    """The result for one run; `problem` says why it was not sent, "" if it was."""

    run_id: str
    problem: str = ""
