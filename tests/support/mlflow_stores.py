"""Default MLflow stores without MLflow's migrations: one is made as a user's first one is, all others are copies of it.

Making one takes four seconds of CPU time. `empty_store` in tests/conftest.py has a test run's store.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

_MAKE = "import sgpu_magic; sgpu_magic.tracking_uri()"


def make_store(state: Path) -> Path:
    """Make the default store of a state directory unless another test process has; return its database."""
    database = _database(state)
    state.mkdir(mode=0o700, exist_ok=True)
    with open(state.with_name(f"{state.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not database.exists():
            environ = {name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW_", "SGPU_"))}
            environ |= {"SGPU_STATE_DIR": str(state), "SGPU_CONFIG": str(state / "no-config.toml")}
            subprocess.run([sys.executable, "-c", _MAKE], env=environ, check=True, timeout=150)
    return database


def lay_store(made: Path, state: Path) -> Path:
    """Copy an empty default store into a state directory; return its database."""
    database = _database(state)
    artifacts = database.parent / "artifacts"
    for folder in (state, database.parent, artifacts):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    copy_store(made, database, artifacts.as_uri())
    return database


def copy_store(made: Path, database: Path, artifacts: str) -> None:
    """Copy an empty store, with another location for artifacts.

    Args:
        made: The database of the empty store; not written to.
        database: The path of the copy.
        artifacts: The URI below which the copy's artifacts are.
    """
    shutil.copy(made, database)
    database.chmod(0o600)
    with contextlib.closing(sqlite3.connect(database)) as copy:
        copy.execute("UPDATE experiments SET artifact_location = ? || '/' || experiment_id", (artifacts,))
        copy.commit()


def _database(state: Path) -> Path:
    return state / "mlflow" / "mlflow.db"
