"""`tracking.json` in a run's directory: which MLflow run it is, and how far its events are written there."""

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
"""Of the tracking process: it sends what is unsent, and ends."""

_USER = re.compile(r"(?<=://)[^/]*@")


class Progress(Record, frozen=True, kw_only=True):
    """How far a run is in MLflow. No credentials stand here.

    Args:
        uri: The store's, without user name and password; "" is the default store.
        registry_uri: The registry's, the same way.
        experiment: Its name, "" where `experiment_id` is given.
        experiment_id: Its id, "" until known.
        parent: The MLflow run that is the parent, "" for none.
        parent_run: The session's run id, "" for none.
        creating: The store was asked to make the MLflow run; it may have made one although nobody heard of it.
        mlflow_run_id: Its id, "" until it is there.
        artifact_uri: Where its artifacts lie.
        url: A page that shows it, "" where the store has no server.
        seq: Number of the newest event that is written with all before it.
        closed: The MLflow run has its final status.
        artifacts: Files that are there.
        complete: All of it is there.
        problem: Why it is not, a sentence; "" while nothing is in the way.
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
        """Its place, None while it has none."""
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
    """Return what is known of a run's place before its store was asked."""
    return Progress(
        uri=without_user(tracking.uri),
        registry_uri=without_user(tracking.registry_uri),
        experiment=tracking.experiment,
        experiment_id=tracking.experiment_id,
        parent=tracking.parent,
        parent_run=parent_run,
    )


def load(directory: Path) -> Progress | None:
    """Return what the directory's file says, None where there is none or it can't be read."""
    try:
        return msgspec.json.decode((directory / TRACKING).read_bytes(), type=Progress)
    except (OSError, msgspec.DecodeError):
        return None


def save(directory: Path, progress: Progress) -> None:
    """Write the file; a reader sees the old one or the new one.

    Raises:
        OSError: The disk is full, or the directory is gone.
    """
    write_whole(directory / TRACKING, msgspec.json.format(msgspec.json.encode(progress), indent=2))


def is_unsent(directory: Path) -> bool:
    """Whether the run is tracked and not all of it is in its store."""
    found = load(directory)
    return found is not None and not found.complete


def unsent(runs_path: Path) -> Iterator[tuple[Path, Progress]]:
    """Yield the directories of runs of which not all is in their stores, by their ids."""
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


# ---------------------------------------------------------------- what `sgpu sync` and its process tell each other


class Unsent(Record, frozen=True):
    """What is to be sent.

    Args:
        settings: The pool's.
        uri: The store's, with user name and password where the shell has it so; "" is the default store.
        directories: The runs'.
    """

    settings: Settings
    uri: str
    directories: tuple[str, ...]


class Sent(Record, frozen=True):
    """What became of a run; `problem` says why it is not there, "" when it is."""

    run_id: str
    problem: str = ""
