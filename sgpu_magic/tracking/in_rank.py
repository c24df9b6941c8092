"""A tracked run in one of its ranks: what the user's code does with MLflow reaches the run's own MLflow run.

Nothing of MLflow is imported before user code imports it. A hook on that import changes two places of MLflow:

    start_run, log_metric, active_run ...      in_rank_fluent    the run is active from the start, and nobody ends it
    the store behind them and MlflowClient     in_rank_store     what is logged to the run goes to the agent

The agent makes an event of it, and the pool's one writer sends it (`sgpu_magic.tracking`). So `log_metric` never waits
for a server, on no rank, and what could not be sent is kept. Only who asks for the run's id, or reads, waits.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

from sgpu_magic.tracking.in_rank_cell import CellHere, Reports, current, hold
from sgpu_magic.wire.rank import TrackingAnswered
from sgpu_magic.wire.record import Record
from sgpu_magic.wire.tracking import Tracking

# MLflow's own take 8 minutes and more with a server that is gone
_HTTP = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}

# ---------------------------------------------------------------- its beginning and end

_reports: Reports | None = None


def begin(
    run_id: str,
    tracking: Tracking,
    rank: int,
    only: Sequence[int],
    run_dir: str,
    say: Callable[[Record], None],
) -> None:
    """A tracked cell begins; the rank stands in its place already.

    Args:
        run_id: The run.
        tracking: Where it is tracked.
        rank: This rank.
        only: The ranks that take part; empty means all.
        run_dir: The run's directory.
        say: Tells the agent something.
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
    # in the notebook it names this run's parent
    os.environ.pop("MLFLOW_RUN_ID", None)
    module = sys.modules.get("mlflow")
    if module is None:
        _watch_import()
    elif not getattr(getattr(module, "__spec__", None), "_initializing", False):
        _change(module)


def end() -> None:
    """The cell is over: all that it has logged is on its way before its last word."""
    cell = current()
    if cell is None:
        return
    try:
        cell.reports.end()
    finally:
        cell.over = True
        hold(None)


def answered(message: TrackingAnswered) -> None:
    """The agent has answered `AskTracking`."""
    cell = current()
    if cell is not None:
        cell.take(message)


# ---------------------------------------------------------------- the hook on `import mlflow`


class _Watch(importlib.abc.MetaPathFinder):
    """Stands first among the finders until MLflow has been imported."""

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


def _watch_import() -> None:
    if _watch not in sys.meta_path:
        sys.meta_path.insert(0, _watch)


def _change_after(loader: importlib.abc.Loader) -> None:
    """Have MLflow changed when `loader` has executed it. Meanwhile the run's place is asked for."""
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
        # another MLflow than those that have these places: the user's import is not to fail for it
        cell = current()
        if cell is not None:
            version = getattr(module, "__version__", "of unknown version")
            cell.remark(
                "unknown-mlflow",
                f"MLflow {version} has not what sgpu-magic changes in it ({error}): what the cell logs goes where "
                "MLflow itself sends it, a run for each rank. MLflow 3.5 and newer are known to work.",
            )
