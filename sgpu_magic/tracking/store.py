"""The default store of tracked runs on this machine, and the messages of `sgpu sync` to the process that sends.

The store is a SQLite database in the state directory, with artifacts next to it. MLflow's migrations take some
seconds for a new database. It is created under a temporary name and renamed when it is complete, by one process at a
time. WAL mode lets notebooks, ranks and the writer use it concurrently.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sgpu_magic.config import Settings, load_settings, private_dir
from sgpu_magic.errors import PoolError
from sgpu_magic.files.atomic_file import write_whole
from sgpu_magic.files.locks import LOCK_FILE, locked
from sgpu_magic.wire.base import Record
from sgpu_magic.wire.tracking import is_store_variable

_SCHEME = "sqlite:///"
_MAKE_S = 120.0
# MLflow's migrations write to a new database without such a pause
_BEING_MADE_S = 10.0
_POLL_S = 0.1
# as SQLite creates a database with the usual umask
_OWN_MODE = 0o644
REQUEST_TIMEOUT_S = 5
SYNC = "sync"
"""Argument of the tracking process: send what is unsent, and exit."""


def store_file(settings: Settings) -> Path:
    return Path(settings.default_store_uri.removeprefix(_SCHEME))


def artifacts_path(settings: Settings) -> Path:
    return store_file(settings).parent / "artifacts"


def tracking_uri() -> str:
    """Return the URI of the store for runs whose notebook names none, for `mlflow.set_tracking_uri(...)`.

    Creates the default store if it does not exist, which takes some seconds once.

    Raises:
        PoolError: The store can't be created.
    """
    settings = load_settings()
    if settings.tracking_uri:
        return settings.tracking_uri
    if not store_file(settings).exists():
        environ = {name: value for name, value in os.environ.items() if not is_store_variable(name)}
        environ |= {"SGPU_STATE_DIR": str(settings.state_path), "PYTHONSAFEPATH": "1"}
        made = subprocess.run(
            [sys.executable, "-m", "sgpu_magic.tracking.store"],
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_MAKE_S,
        )
        if made.returncode:
            raise PoolError(
                f"the store of tracked runs {store_file(settings)} can't be created: {made.stderr.strip()[-500:]}"
            )
    return settings.default_store_uri


def quiet() -> None:
    """Silence logging, warnings and telemetry of MLflow and its libraries. Call it before importing MLflow."""
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    os.environ["DO_NOT_TRACK"] = "true"
    os.environ["MLFLOW_ENABLE_ASYNC_LOGGING"] = "false"
    os.environ["MLFLOW_CONFIGURE_LOGGING"] = "false"
    os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"
    warnings.simplefilter("ignore")
    for name in ("mlflow", "alembic", "sqlalchemy", "urllib3", "git"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


def stand_in(variables: Mapping[str, str]) -> None:
    """Replace this process's store variables by those of one store. Call it before importing MLflow."""
    for name in list(os.environ):
        if is_store_variable(name):
            del os.environ[name]
    os.environ.update(variables)
    quiet()
    # an automatic retry could create a second run; the writer searches for the run before it retries
    os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = "0"
    os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] = str(REQUEST_TIMEOUT_S)
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    for name in ("RUN_ID", "EXPERIMENT_ID", "EXPERIMENT_NAME", "TRACKING_URI", "REGISTRY_URI"):
        os.environ.pop(f"MLFLOW_{name}", None)


def make(settings: Settings) -> None:
    """Create the default store if it does not exist. Imports MLflow.

    Raises:
        OSError: The disk is full or not writable.
    """
    file = store_file(settings)
    if file.exists():
        return
    with _only_maker(settings) as folder:
        if not file.exists():
            part = folder / f".{file.name}.part"
            _create_tables(part, private_dir(artifacts_path(settings)))
            with contextlib.closing(sqlite3.connect(part)) as database:
                database.execute("PRAGMA journal_mode=WAL").fetchone()
            os.chmod(part, 0o600)
            os.replace(part, file)


def make_own(settings: Settings, file: Path, directory: Path) -> None:
    """Create a notebook's own SQLite store if it does not exist, as MLflow in the notebook would. Imports MLflow.

    MLflow's migrations take seconds, and neither an interrupted one nor two at a time leave a database that works. So
    the tables are made in the state directory, and the complete file is copied; if another process is creating the
    store, it is awaited.

    Args:
        settings: Gives the state directory.
        file: The store's database.
        directory: The notebook's working directory: MLflow keeps artifacts in its folder `mlruns`.

    Raises:
        OSError: The disk is full or not writable, or the database's folder does not exist.
    """
    if not file.exists():
        with _only_maker(settings) as folder, tempfile.TemporaryDirectory(prefix=".own-", dir=folder) as scratch:
            made = Path(scratch) / file.name
            _create_tables(made, directory / "mlruns")
            with contextlib.suppress(FileExistsError):
                write_whole(file, made.read_bytes(), _OWN_MODE, replace=False)
    until = time.monotonic() + _MAKE_S
    while _is_being_made(file) and time.monotonic() < until:
        time.sleep(_POLL_S)


def remove_runs(settings: Settings, artifacts: Mapping[str, Path]) -> None:
    """Permanently remove runs from the default store, as `mlflow gc` does, which takes seconds to import.

    Args:
        settings: Gives the location of the store.
        artifacts: Artifact directories by MLflow run id.
    """
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    database: Any = SqlAlchemyStore(settings.default_store_uri, artifacts_path(settings).as_uri())
    try:
        for mlflow_run_id, folder in artifacts.items():
            database.delete_run(mlflow_run_id)
            database._hard_delete_run(mlflow_run_id)
            if folder.is_relative_to(artifacts_path(settings)):
                shutil.rmtree(folder.parent, ignore_errors=True)
    finally:
        database.engine.dispose()


@contextlib.contextmanager
def _only_maker(settings: Settings) -> Generator[Path]:
    """Let one process at a time create stores; gives the folder for unfinished ones, without earlier remains."""
    private_dir(settings.state_path)
    folder = private_dir(store_file(settings).parent)
    with locked(folder / ".making", flags=LOCK_FILE):
        for leftover in folder.glob(".own-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        for leftover in folder.glob(".*.part*"):
            leftover.unlink(missing_ok=True)
        yield folder


def _create_tables(file: Path, artifacts: Path) -> None:
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    # MLflow caches the connection by path, and this path will not exist later
    store: Any = SqlAlchemyStore.__new__(SqlAlchemyStore)
    try:
        store.__init__(f"{_SCHEME}{file}", artifacts.as_uri())
    finally:
        if hasattr(store, "engine"):
            store.engine.dispose()


def _is_being_made(file: Path) -> bool:
    """Whether the database has no complete MLflow schema of this version, and was written to a moment ago."""
    from mlflow.store.db.utils import _get_latest_schema_revision  # pyright: ignore[reportPrivateUsage]

    version = None
    # a database without tables yet
    with (
        contextlib.suppress(sqlite3.Error),
        contextlib.closing(sqlite3.connect(f"file:{quote(str(file))}?mode=ro", uri=True)) as database,
    ):
        version = database.execute("SELECT version_num FROM alembic_version").fetchone()
    written_s = time.time() - file.stat().st_mtime
    return version != (_get_latest_schema_revision(),) and written_s < _BEING_MADE_S


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


if __name__ == "__main__":
    quiet()
    make(load_settings())
