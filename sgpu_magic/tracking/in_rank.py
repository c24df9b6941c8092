"""A tracked run in one of its ranks: what user code logs with MLflow goes to the run's own MLflow run.

MLflow is not imported before user code imports it. A hook on that import patches two places in MLflow:

    start_run, log_metric, active_run ...      in_rank_fluent    the run is active from the start, and never ended here
    the store behind them and MlflowClient     in_rank_store     what is logged to the run is sent to the agent

The agent turns it into events, which the pool's writer process sends to the store (`sgpu_magic.tracking`). So
`log_metric` never waits for a server, on any rank, and what could not be sent is kept. Only calls that read from MLflow
or need the run's id wait.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

from sgpu_magic.tracking.in_rank_cell import CellHere, Reports, current, hold
from sgpu_magic.wire.base import Record
from sgpu_magic.wire.rank import TrackingAnswered
from sgpu_magic.wire.tracking import Tracking

# with MLflow's defaults, calls to a dead server take 8 minutes or more
_HTTP = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}

# ---------------------------------------------------------------- start and end of a cell

_reports: Reports | None = None


def begin(
    run_id: str,
    tracking: Tracking,
    rank: int,
    only: Sequence[int],
    run_dir: str,
    say: Callable[[Record], None],
) -> None:
    """Start a tracked cell in this rank.

    Args:
        run_id: The run's id.
        tracking: Where the run is tracked.
        rank: This rank.
        only: The ranks that run the cell; empty means all.
        run_dir: The run's directory.
        say: Sends a message to the agent.
    """
    global _reports
    if _reports is None:
        _reports = Reports(say)
    _reports.begin()
    leads = rank == min(only, default=0)
    hold(CellHere(run_id, tracking, leads=leads, run_dir=run_dir, say=say, reports=_reports))
    os.environ["MLFLOW_TRACKING_URI"] = tracking.uri
    if tracking.registry_uri:
        os.environ["MLFLOW_REGISTRY_URI"] = tracking.registry_uri
    for name, value in (tracking.variables | _HTTP).items():
        os.environ.setdefault(name, value)
    # in the notebook this names the parent of the run
    os.environ.pop("MLFLOW_RUN_ID", None)
    module = sys.modules.get("mlflow")
    if module is None and _watch not in sys.meta_path:
        sys.meta_path.insert(0, _watch)
    elif module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
        _change(module)


def end() -> None:
    """End the cell. Everything it has logged is sent before its final message."""
    cell = current()
    if cell is None:
        return
    try:
        cell.reports.end()
    finally:
        cell.over = True
        hold(None)


def answered(message: TrackingAnswered) -> None:
    """Take the agent's answer to `AskTracking`."""
    cell = current()
    if cell is not None:
        cell.take(message)


# ---------------------------------------------------------------- the hook on `import mlflow`


class _Watch(importlib.abc.MetaPathFinder):
    """The first finder on `sys.meta_path` until MLflow has been imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None, /
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "mlflow":
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            if finder is self or find is None:
                continue
            spec: importlib.machinery.ModuleSpec | None = find(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    _change_after(spec.loader)
                return spec
        return None


_watch = _Watch()


def _change_after(loader: importlib.abc.Loader) -> None:
    """Patch MLflow after `loader` has executed it. Meanwhile, ask for the run's MLflow id."""
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        cell = current()
        if cell is not None:
            cell.ask()
        execute(module)
        if _watch in sys.meta_path:
            sys.meta_path.remove(_watch)
        _change(module)

    loader.exec_module = exec_module


def _change(module: ModuleType) -> None:
    try:
        from sgpu_magic.tracking import in_rank_fluent

        in_rank_fluent.install()
    except (ImportError, AttributeError) as error:
        # an MLflow version without these places: the user's import must not fail
        cell = current()
        if cell is not None:
            version = getattr(module, "__version__", "of unknown version")
            cell.remark(
                "unknown-mlflow",
                f"MLflow {version} lacks what sgpu-magic changes in it ({error}): what the cell logs goes where "
                "MLflow itself sends it, in one run per rank. MLflow 3.5 and newer are known to work.",
            )
