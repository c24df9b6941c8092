"""A tracked run in one of its ranks: what user code logs with MLflow goes to the run's own MLflow run.

MLflow is not imported before user code imports it. `around_import`, which the worker calls then, patches two places:

    start_run, log_metric, active_run ...      in_rank_fluent    the run is active from the start, and never ended here
    the store behind them and MlflowClient     in_rank_store     what is logged to the run is sent to the agent

The agent turns it into events, which the pool's writer process sends to the store (`sgpu_magic.tracking`). So
`log_metric` never waits for a server, on any rank, and what could not be sent is kept. Only calls that read from MLflow
or need the run's id wait.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import ModuleType

from sgpu_magic.tracking.in_rank_cell import CellHere, LogCollector, current, hold
from sgpu_magic.wire.base import Record
from sgpu_magic.wire.rank import Execute, TrackingAnswered
from sgpu_magic.wire.tracking import Tracking

# with MLflow's defaults, calls to a dead server take 8 minutes or more
_HTTP = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}

# ---------------------------------------------------------------- start and end of a cell

_reports: LogCollector | None = None


def begin(order: Execute, tracking: Tracking, rank: int, say: Callable[[Record], None]) -> None:
    """Start a tracked cell in this rank.

    Args:
        order: The agent's order.
        tracking: Where the run is tracked.
        rank: This rank.
        say: Sends a message to the agent.
    """
    global _reports
    _reports = _reports or LogCollector(say)
    _reports.begin()
    leads = rank == min(order.only, default=0)
    cell = CellHere(order.run_id, tracking, leads=leads, run_dir=order.run_dir, say=say, reports=_reports)
    hold(cell)
    os.environ["MLFLOW_TRACKING_URI"] = tracking.uri
    if tracking.registry_uri:
        os.environ["MLFLOW_REGISTRY_URI"] = tracking.registry_uri
    for name, value in (tracking.variables | _HTTP).items():
        os.environ.setdefault(name, value)
    # in the notebook this names the parent of the run
    os.environ.pop("MLFLOW_RUN_ID", None)
    module = sys.modules.get("mlflow")
    if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
        _change(module, cell)


def flush() -> None:
    """Send what the cell has logged, before its final message: a failed run's end may follow at once.

    The cell goes on logging: its threads and exit functions are still to be finished.
    """
    if (cell := current()) is not None:
        cell.reports.flush()


def end() -> None:
    """End the cell. Everything it has logged is sent before its final message."""
    if (cell := current()) is None:
        return
    try:
        cell.reports.end()
    finally:
        cell.has_ended = True
        hold(None)


def answered(message: TrackingAnswered) -> None:
    """Take the agent's answer to `AskTracking`."""
    if (cell := current()) is not None:
        cell.on_answer(message)


# ---------------------------------------------------------------- the import of MLflow


def around_import(execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    """Import MLflow, and patch it if a cell is tracked. Meanwhile, ask for the run's MLflow id."""
    if (cell := current()) is not None:
        cell.ask()
    execute(module)
    if (cell := current()) is not None:
        _change(module, cell)


def _change(module: ModuleType, cell: CellHere) -> None:
    try:
        from sgpu_magic.tracking import in_rank_fluent

        in_rank_fluent.install()
    except (ImportError, AttributeError) as error:
        # an MLflow version without these places: the user's import must not fail
        version = getattr(module, "__version__", "of unknown version")
        cell.remark(
            "unknown-mlflow",
            f"MLflow {version} lacks what sgpu-magic changes in it ({error}): what the cell logs goes where "
            "MLflow itself sends it, in one run per rank. MLflow 3.5 and newer are known to work.",
        )
