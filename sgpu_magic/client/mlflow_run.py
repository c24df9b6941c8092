"""Which MLflow run a run has become, as its directory tells."""

from __future__ import annotations

from pathlib import Path

import msgspec

from sgpu_magic.wire.run_files import TRACKING


class _Written(msgspec.Struct):
    mlflow_run_id: str = ""


def mlflow_run_id(directory: Path) -> str:
    """Return the id of the run in MLflow, "" while it has none there.

    A run of milliseconds is over before the writer has looked at it, so that none of its events says it.

    Args:
        directory: The run's.
    """
    try:
        return msgspec.json.decode((directory / TRACKING).read_bytes(), type=_Written).mlflow_run_id
    except (OSError, msgspec.DecodeError):
        return ""
