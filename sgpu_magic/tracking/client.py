"""The writer's client of one MLflow store. Imports MLflow, in a process whose environment belongs to this store.

Every error becomes one of three: the store is unreachable or failing (`StoreTroubled`), it refuses the data
(`Rejected`), or the run or experiment was deleted (`DeletedFromStore`).
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import requests
from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag, ViewType
from mlflow.exceptions import MlflowException
from sqlalchemy.engine import make_url

from sgpu_magic.config import Settings
from sgpu_magic.packages.secrets import find_secrets, without_secrets
from sgpu_magic.tracking import store
from sgpu_magic.tracking.runs import LOGGED_TAG, RUN_TAG, Batch
from sgpu_magic.wire.base import is_valid_id
from sgpu_magic.wire.tracking import Tracking, without_user

# per request: MLflow's servers accept up to 1,000 entities and a megabyte (mlflow.utils.validation)
_METRICS, _NAMES = 800, 50
_OLD_PARAM_LENGTH = 250
Item = Metric | Param | RunTag
_DELETED = "must be in the 'active' state"
_TEXT_LENGTH = 400

PLAIN_FILES = ("cell.py", "requirements.txt", "pylock.toml")
"""Files of a run's directory that are logged to MLflow as they are."""
OWN_NAMES = frozenset((*PLAIN_FILES, "run.json", "run.html", "logs", "profile"))
"""Names of sgpu-magic's own files at the top of a run's artifacts; all others are the user's."""


class StoreTroubled(Exception):
    """The store does not work now.

    Args:
        text: The reason, without secrets.
        unreachable: The store did not answer at all.
    """

    def __init__(self, text: str, *, unreachable: bool = False) -> None:
        super().__init__(text)
        self.unreachable = unreachable


class Rejected(Exception):
    """The store refuses the data permanently."""


class DeletedFromStore(Exception):
    """The run or experiment was deleted from the store."""


class TrackingStore:
    """Client of one store.

    Args:
        settings: The pool's settings, for the default store.
        tracking: The store's URI and variables.
    """

    def __init__(self, settings: Settings, tracking: Tracking) -> None:
        self.is_default = not tracking.uri
        self.uri = without_user(tracking.uri)
        self._settings = settings
        self._secrets = [tracking.variables[name] for name in find_secrets(tracking.variables)]
        self._uri = tracking.uri or settings.default_store_uri
        self._directory = tracking.directory
        self._experiments: dict[str, str] = {}

    @functools.cached_property
    def client(self) -> Any:
        """MLflow's own client, which is only partly typed."""
        if self.is_default:
            store.make(self._settings)
        elif self._directory and os.path.isdir(self._directory):
            # MLflow's paths of new artifacts are relative to it
            os.chdir(self._directory)
            if (file := _database_file(self._uri)) is not None:
                store.make_own(self._settings, file, Path(self._directory))
        return MlflowClient(self._uri)

    def find_experiment(self, name: str) -> str:
        """Return the id of the experiment of this name, created if necessary.

        Raises:
            StoreTroubled: The store does not work.
            DeletedFromStore: The experiment was deleted.
        """
        if name in self._experiments:
            return self._experiments[name]
        with self._translated():
            found = self.client.get_experiment_by_name(name)
            if found is None:
                try:
                    self.client.create_experiment(name, self._artifact_location())
                except MlflowException as error:
                    # another pool created it first
                    if error.error_code != "RESOURCE_ALREADY_EXISTS":
                        raise
                found = self.client.get_experiment_by_name(name)
        if found is None or found.lifecycle_stage != "active":
            raise DeletedFromStore(f"the experiment {name!r} was deleted there; restore it, or name another one")
        self._experiments[name] = str(found.experiment_id)
        return self._experiments[name]

    def create_run(self, experiment_id: str, experiment: str, name: str, began_ms: int, tags: Mapping[str, str]) -> Any:
        """Create the MLflow run.

        Raises:
            StoreTroubled: The store does not work. It may have created the run nevertheless.
            DeletedFromStore: The experiment was deleted.
            Rejected: The store refuses the run.
        """
        try:
            with self._translated():
                return self.client.create_run(experiment_id, start_time=began_ms, tags=dict(tags), run_name=name)
        except (DeletedFromStore, Rejected):
            self._experiments.pop(experiment, None)
            raise

    def find_runs(self, experiment_id: str, run_id: str) -> list[Any]:
        """Return the MLflow runs that were created for this run, sorted by their MLflow id.

        Raises:
            StoreTroubled: The store does not work.
        """
        with self._translated():
            found = self.client.search_runs(
                [experiment_id],
                f"tags.`{RUN_TAG}` = '{run_id}'",
                ViewType.ACTIVE_ONLY,
                order_by=["attributes.start_time ASC"],
            )
        return sorted(found, key=lambda run: run.info.run_id)

    def delete_run(self, mlflow_run_id: str) -> None:
        with self._translated():
            self.client.delete_run(mlflow_run_id)

    def prune(self) -> int:
        """Delete the default store's runs whose directories are gone, and return their number.

        Keeps runs to which the user's code has logged anything, including models and other artifacts.

        Raises:
            StoreTroubled: The store does not work.
        """
        with self._translated():
            experiments = [found.experiment_id for found in self.client.search_experiments(ViewType.ACTIVE_ONLY)]
            removed: dict[str, Path] = {}
            token: str | None = None
            while experiments and token != "":
                page = self.client.search_runs(experiments, "", ViewType.ACTIVE_ONLY, page_token=token)
                removed |= {run.info.run_id: _artifacts(run) for run in page if self._holds_nothing_more(run)}
                token = page.token or ""
            if removed:
                store.remove_runs(self._settings, removed)
            return len(removed)

    def _holds_nothing_more(self, run: Any) -> bool:
        """Whether the run's directory is gone and the user's code has logged nothing to it."""
        run_id, tags = run.data.tags.get(RUN_TAG, ""), run.data.tags
        if not is_valid_id(run_id) or LOGGED_TAG in tags or run.info.end_time is None:
            return False
        artifacts = _artifacts(run)
        there = {entry.name for entry in artifacts.iterdir()} if artifacts.is_dir() else set[str]()
        return not (self._settings.runs_path / run_id).exists() and there <= OWN_NAMES

    def where(self, made: Any) -> dict[str, str]:
        """Return the fields of `Progress` that say where a run is in MLflow."""
        info = made.info
        url = f"{self.uri.rstrip('/')}/#/experiments/{info.experiment_id}/runs/{info.run_id}"
        return {
            "mlflow_run_id": info.run_id,
            "experiment_id": str(info.experiment_id),
            "artifact_uri": without_user(info.artifact_uri or ""),
            "url": url if self.uri.startswith(("http:", "https:")) else "",
        }

    def write(self, mlflow_run_id: str, batch: Batch) -> list[str]:
        """Write a batch, leaving out what the store refuses. Returns the names of what was left out.

        Raises:
            StoreTroubled: The store does not work. The whole batch may be written again.
            DeletedFromStore: The run was deleted.
        """
        return [name for items in in_requests(batch) for name in self._write(mlflow_run_id, items)]

    def rename(self, mlflow_run_id: str, name: str) -> None:
        with self._translated():
            self.client.update_run(mlflow_run_id, name=name)

    def close_run(self, mlflow_run_id: str, status: str, at_ms: int) -> None:
        with self._translated():
            self.client.set_terminated(mlflow_run_id, status, at_ms)

    def log_file(self, mlflow_run_id: str, file: Path, folder: str) -> None:
        with self._translated(artifacts=True):
            self.client.log_artifact(mlflow_run_id, str(file), folder or None)

    def _artifact_location(self) -> str | None:
        """Return the artifact location of a new experiment in the default store; None lets a server choose."""
        if not self.is_default:
            return None
        return (store.artifacts_path(self._settings) / os.urandom(6).hex()).as_uri()

    def _write(self, mlflow_run_id: str, items: Sequence[Item]) -> list[str]:
        try:
            with self._translated():
                self.client.log_batch(
                    mlflow_run_id,
                    metrics=[item for item in items if isinstance(item, Metric)],
                    params=[item for item in items if isinstance(item, Param)],
                    tags=[item for item in items if isinstance(item, RunTag)],
                    synchronous=True,
                )
        except Rejected:
            if not (parts := smaller(items)):
                return [item.key for item in items]
            return [name for part in parts for name in self._write(mlflow_run_id, part)]
        return []

    @contextlib.contextmanager
    def _translated(self, *, artifacts: bool = False) -> Generator[None]:
        try:
            yield
        except MlflowException as error:
            self._raise(error, str(error), artifacts=artifacts)
        except requests.RequestException as error:
            raise StoreTroubled(self._without_secrets(str(error)), unreachable=not artifacts) from None
        except Exception as error:  # noqa: BLE001  a store's plug-in raises what it likes, and must not end the writer
            raise StoreTroubled(self._without_secrets(f"{type(error).__name__}: {error}")) from None

    def _raise(self, error: MlflowException, text: str, *, artifacts: bool) -> None:
        # a reply that is not MLflow's comes from a proxy or another program and implies nothing about the run
        answered = "failed with error code" not in text
        if _DELETED in text or (answered and error.error_code == "RESOURCE_DOES_NOT_EXIST"):
            raise DeletedFromStore(self._without_secrets(text)) from None
        if answered and error.error_code == "INVALID_PARAMETER_VALUE":
            raise Rejected(self._without_secrets(text)) from None
        unanswered = "failed with exception" in text or "failed with timeout" in text
        # artifacts may be stored elsewhere, and a problem with one file does not affect all runs
        raise StoreTroubled(_plain(self._without_secrets(text)), unreachable=unanswered and not artifacts) from None

    def _without_secrets(self, text: str) -> str:
        # SQLAlchemy appends the statement, which may be very long
        plain = " ".join(text.partition("[SQL: ")[0].split())
        return without_secrets(plain, self._secrets)[:_TEXT_LENGTH]


def _database_file(uri: str) -> Path | None:
    """Return the file of an SQLite store, None for other stores."""
    url = make_url(uri) if uri.startswith("sqlite") else None
    return Path(url.database) if url is not None and url.database and not url.query else None


def _artifacts(run: Any) -> Path:
    """Return the artifact directory of a run in the default store."""
    return Path(unquote(urlsplit(run.info.artifact_uri or "").path))


def _plain(text: str) -> str:
    """Explain the most common errors."""
    if "Detected out-of-date database schema" in text:
        found = text.partition("found version ")[2].partition(",")[0]
        return (
            f"its database has the schema of another version of MLflow ({found or 'unknown'}). `mlflow db upgrade` "
            "brings an older one up to date; a newer one needs that newer MLflow in the pool's Python"
        )
    if "error code 401" in text or "error code 403" in text or "UNAUTHENTICATED" in text or "PERMISSION" in text:
        return f"it refuses the credentials of the notebook (MLFLOW_TRACKING_USERNAME, _PASSWORD or _TOKEN): {text}"
    return text


def in_requests(batch: Batch) -> Iterator[Sequence[Item]]:
    """Yield what is in the batch, in parts that fit into one request each."""
    metrics = [Metric(point.key, point.value, point.at_ms, point.step) for point in batch.metrics]
    params = [Param(*pair) for pair in batch.params.items()]
    tags = [RunTag(*pair) for pair in batch.tags.items()]
    for part in range(math.ceil(max(len(metrics) / _METRICS, len(params) / _NAMES, len(tags) / _NAMES))):
        names = slice(part * _NAMES, (part + 1) * _NAMES)
        yield [*metrics[part * _METRICS : (part + 1) * _METRICS], *params[names], *tags[names]]


def smaller(items: Sequence[Item]) -> list[Sequence[Item]]:
    """Split refused items, or shorten a single parameter; [] if it is a single item that can't be shortened."""
    if len(items) > 1:
        half = len(items) // 2
        return [items[:half], items[half:]]
    (item,) = items
    if isinstance(item, Param) and len(item.value) > _OLD_PARAM_LENGTH:
        return [[Param(item.key, item.value[:_OLD_PARAM_LENGTH])]]
    return []
