"""Replacements for `mlflow.start_run`, `active_run`, `end_run` and the like on a rank of a tracked run.

The run's own MLflow run is active in every thread of every rank, from the start of the cell to its end:

    log_metric(...)              logs to it, without `start_run`
    start_run()                  joins it, any number of times
    end_run()                    leaves it without ending it
    start_run(nested=True)       creates a child run on the first rank; the others join the run itself, with a note
                                 (so does a start with another experiment or parent)
    set_experiment, set_tracking_uri with another place: from then on MLflow behaves as usual
"""

# MLflow is only partly typed
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportPrivateUsage=false

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

from mlflow.entities import Experiment, RunData, RunInfo
from mlflow.exceptions import MlflowException
from mlflow.models.model import Model
from mlflow.tracking import fluent
from mlflow.tracking._model_registry import fluent as registry
from mlflow.tracking._tracking_service import utils
from mlflow.utils import autologging_utils
from mlflow.utils.mlflow_tags import MLFLOW_RUN_NAME, MLFLOW_RUN_NOTE

from sgpu_magic.tracking import in_rank_store
from sgpu_magic.tracking.in_rank_cell import CellHere, current

_NO_MODEL = (
    "models are logged and registered for the run by the first rank: on the other ranks these calls do nothing and "
    "return None."
)
_NESTED = (
    "start_run with nested=True, a parent or another experiment creates a run on the first rank only: what the other "
    "ranks log in it goes to the run itself."
)
_NO_SYSTEM_METRICS = (
    "log_system_metrics has no effect here: the pool itself logs what the run's processes and devices use, as "
    "system/nodeN/... in the MLflow run."
)
# `cell`: the cell whose run this thread has left with `end_run`
_left = threading.local()
# tracking URI of the previous cell
_store_uri = ""
# experiment chosen by user code, other than the run's
_chosen_experiment = ""


def install() -> None:
    """Patch MLflow, once, and set it up for the current cell."""
    _change()
    _begin_cell()


@functools.cache
def _change() -> None:
    in_rank_store.install()
    for module, name, made in (
        (fluent, "start_run", _start_run),
        (fluent, "end_run", _end_run),
        (fluent, "active_run", _active_run),
        (fluent, "_get_or_start_run", _get_or_start_run),
        (fluent, "_get_experiment_id", _get_experiment_id),
        (fluent, "set_experiment", _set_experiment),
        (utils, "set_tracking_uri", _set_tracking_uri),
        (registry, "register_model", _register_model),
    ):
        original = getattr(module, name)
        _replace(original, _instead_of(original, made))
    log: Any = Model.__dict__["log"].__func__
    setattr(Model, "log", classmethod(_instead_of(log, _log_model)))  # noqa: B010  a checker knows it as a method


def _instead_of(original: Callable[..., Any], made: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return made(original, *args, **kwargs)

    return call


def _replace(original: Any, replacement: Any) -> None:
    """Replace the original in all of MLflow's modules that have imported it by name."""
    name = original.__name__
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] == "mlflow" and getattr(module, "__dict__", {}).get(name) is original:
            setattr(module, name, replacement)


def _begin_cell() -> None:
    global _store_uri
    cell = current()
    if cell is None:
        return
    if cell.tracking.uri != _store_uri:
        # MLflow caches the stores that it has opened
        _store_uri = cell.tracking.uri
        in_rank_store.forget()
    cell.reports.listen_to_children()
    # the choice of an earlier cell in the session remains valid
    uri: Any = utils._tracking_uri
    if uri is not None and not in_rank_store.is_own_store(uri):
        cell.begin_own("MLflow's tracking URI")
    elif _chosen_experiment and fluent._active_experiment_id == _chosen_experiment:
        cell.begin_own("MLflow's experiment")
    # the other ranks would log the same values again
    autologging_utils._AUTOLOGGING_GLOBALLY_DISABLED = not (cell.leads or cell.own)


def _active_cell() -> CellHere | None:
    """Return the tracked cell; None if user code has chosen another place."""
    cell = current()
    return None if cell is None or cell.own else cell


class RunInfoHere(RunInfo):
    """Info of the cell's own MLflow run. Reading an id waits for it.

    Args:
        cell: The cell.
        waits: False returns the placeholder for the run's id at once, which is enough for logging.
    """

    def __init__(self, cell: CellHere, *, waits: bool) -> None:
        super().__init__(cell.alias, "", **in_rank_store.running_status())
        self._cell = cell
        self._waits = waits

    @property
    def run_id(self) -> str:
        return self._cell.true_id if self._waits else self._cell.alias

    @property
    def experiment_id(self) -> str:
        tracked = self._cell.wait()
        return tracked.experiment_id if tracked is not None else ""

    @property
    def artifact_uri(self) -> str | None:
        tracked = self._cell.wait()
        return tracked.artifact_uri if tracked is not None else f"file://{self._cell.kept_artifacts}"


class CellsActiveRun(fluent.ActiveRun):
    """The cell's own MLflow run as an active run."""

    def __init__(self, cell: CellHere, *, waits: bool = True) -> None:
        self._info = RunInfoHere(cell, waits=waits)
        self._data = RunData()
        self._inputs = None
        self._outputs = None
        self.cell = cell

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> bool:
        stack = _stack()
        if stack and stack[-1] is self:
            fluent.end_run()
        return exc_type is None


@functools.lru_cache(maxsize=1)
def _run_of(cell: CellHere) -> CellsActiveRun:
    """Return the run shared by all threads: logged models are recorded in it."""
    return CellsActiveRun(cell)


def _stack() -> list[Any]:
    """Return this thread's active runs, without those of cells that have ended or have chosen another place."""
    stack: list[Any] = fluent._active_run_stack.get()
    cell = _active_cell()
    stack[:] = [run for run in stack if not isinstance(run, CellsActiveRun) or run.cell is cell]
    return stack


# ------------------------------------------------------------ replacements; the first argument is the original


def _start_run(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    options = inspect.signature(original).bind(*args, **kwargs).arguments
    run_id, parent, experiment = (options.get(name) for name in ("run_id", "parent_run_id", "experiment_id"))
    nested = options.get("nested", False)
    stack = _stack()
    cell = _active_cell()
    _left.cell = None
    if cell is None or not (nested or all(isinstance(run, CellsActiveRun) for run in stack)):
        return original(**options)
    # MLflow refuses a second active run unless it is nested
    options["nested"] = True
    if run_id and not cell.is_this(run_id):
        return original(**options)
    in_other_experiment = experiment is not None and not _is_its_experiment(cell, experiment)
    if not run_id and cell.leads and (nested or parent or in_other_experiment) and cell.wait() is not None:
        try:
            if not stack and parent in (None, cell.alias):
                options["parent_run_id"] = cell.true_id
            return original(**options)
        except MlflowException as error:
            cell.remark(
                "child", f"MLflow could not create a child run ({error.message}); the run itself is used instead."
            )
    if not cell.leads and not run_id and (nested or parent or in_other_experiment):
        cell.remark("nested", _NESTED)
    else:
        _describe(cell, options)
    if options.get("log_system_metrics") is not None:
        cell.remark("system-metrics", _NO_SYSTEM_METRICS)
    run = CellsActiveRun(cell) if stack and stack[-1] is _run_of(cell) else _run_of(cell)
    stack.append(run)
    return run


def _describe(cell: CellHere, options: Mapping[str, Any]) -> None:
    """Report tags of every rank, as `set_tag` does, and the name and description that the first rank gives."""
    named = {MLFLOW_RUN_NOTE: options.get("description"), MLFLOW_RUN_NAME: options.get("run_name")}
    tags = (options.get("tags") or {}) | {key: text for key, text in named.items() if text and cell.leads}
    if tags:
        cell.reports.add(tags=[(str(key), str(value)) for key, value in tags.items()])


def _end_run(original: Callable[..., Any], status: str = "FINISHED") -> None:
    stack = _stack()
    if stack and isinstance(stack[-1], CellsActiveRun):
        cell = stack.pop().cell
        in_rank_store.remark_status(cell, status)
        fluent._last_active_run_id.set(cell.known_id)
    elif stack:
        original(status)
    # as in MLflow, no run is active now until something is logged
    _left.cell = None if stack else _active_cell()


def _active_run(original: Callable[..., Any]) -> Any:
    stack = _stack()
    cell = _active_cell()
    if stack or cell is None or getattr(_left, "cell", None) is cell:
        return original()
    return _run_of(cell)


def _get_or_start_run(original: Callable[..., Any]) -> Any:
    """Return the active run for MLflow's logging functions, without waiting for its id."""
    stack = _stack()
    cell = _active_cell()
    if cell is None or (stack and not isinstance(stack[-1], CellsActiveRun)):
        return original()
    _left.cell = None
    if not stack:
        stack.append(_run_of(cell))
    if cell.known_run is not None:
        return _run_of(cell)
    cell.ask()
    return CellsActiveRun(cell, waits=False)


def _get_experiment_id(original: Callable[..., Any]) -> Any:
    cell = _active_cell()
    tracked = cell.wait() if cell is not None else None
    return tracked.experiment_id if tracked is not None else original()


def _set_experiment(
    original: Callable[..., Any], experiment_name: str | None = None, experiment_id: str | None = None, **further: Any
) -> Any:
    cell = _active_cell()
    if cell is not None and cell.wait() is None:
        # there is no store to ask; what is logged still belongs to the run
        return Experiment(experiment_id or "", experiment_name or "", f"file://{cell.kept_artifacts}", "active")
    global _chosen_experiment
    experiment = original(experiment_name, experiment_id, **further)
    if cell is not None and not _is_its_experiment(cell, experiment.experiment_id):
        _chosen_experiment = experiment.experiment_id
        cell.begin_own("MLflow's experiment")
        autologging_utils._AUTOLOGGING_GLOBALLY_DISABLED = False
    return experiment


def _set_tracking_uri(original: Callable[..., Any], uri: Any) -> None:
    original(uri)
    cell = _active_cell()
    if cell is not None and not in_rank_store.is_own_store(utils._tracking_uri):
        cell.begin_own("MLflow's tracking URI")
        autologging_utils._AUTOLOGGING_GLOBALLY_DISABLED = False


def _is_its_experiment(cell: CellHere, experiment_id: object) -> bool:
    tracked = cell.wait()
    return tracked is None or str(experiment_id) == tracked.experiment_id


def _log_model(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    cell = _active_cell()
    if cell is not None and cell.leads and cell.wait() is None:
        return None
    return _register_model(original, *args, **kwargs)


def _register_model(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    cell = _active_cell()
    if cell is not None and not cell.leads:
        cell.remark("model", _NO_MODEL)
        return None
    return original(*args, **kwargs)
