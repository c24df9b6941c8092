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
import threading
import uuid
from collections.abc import Callable, Sequence
from types import ModuleType

from sgpu_magic.tracking.in_rank_reports import Reports
from sgpu_magic.wire.rank import AskTracking, Remarked, TrackingAnswered
from sgpu_magic.wire.record import Record
from sgpu_magic.wire.tracking import TrackedRun, Tracking

# MLflow's own take 8 minutes and more with a server that is gone
_HTTP = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}
# the store that has to be made first takes seconds; a server that does not answer is given up sooner
_PATIENCE_S = 20.0


class CellHere:
    """One tracked cell on this rank.

    Args:
        run_id: The run.
        tracking: Where it is tracked; its URI is never "".
        leads: It is the first of those that run the cell: children, models and autolog are its affair.
        run_dir: Where artifacts stay that no store takes.
        say: Tells the agent something.
        reports: Takes what is logged.

    Attributes:
        alias: Stands for the MLflow run's id until that is known, or for good.
        own: The user's code has chosen another store or experiment: MLflow does as it says.
        over: The cell has ended.
    """

    def __init__(
        self,
        run_id: str,
        tracking: Tracking,
        *,
        leads: bool,
        run_dir: str,
        say: Callable[[Record], None],
        reports: Reports,
    ) -> None:
        self.run_id = run_id
        self.tracking = tracking
        self.leads = leads
        self.run_dir = run_dir
        self.reports = reports
        self.alias = uuid.uuid4().hex
        self.own = False
        self.over = False
        self._say = say
        self._pid = os.getpid()
        self._answer: TrackingAnswered | None = None
        self._answered = threading.Event()
        self._asked = False
        self._ask_lock = threading.Lock()
        self._joined = False

    # ------------------------------------------------------------ the run's place in MLflow

    def ask(self) -> None:
        """Ask for the run's place in MLflow, once."""
        with self._ask_lock:
            if self._asked or self.over or os.getpid() != self._pid:
                return
            self._asked = True
        self._say(AskTracking())

    def take(self, answer: TrackingAnswered) -> None:
        """The answer has come (in the helper's thread)."""
        if answer.run_id == self.run_id:
            self._answer = answer
            self._answered.set()

    @property
    def known(self) -> TrackedRun | None:
        """The run's place as far as it is known, without waiting."""
        return self._answer.tracked if self._answer is not None else None

    def wait(self) -> TrackedRun | None:
        """Return the run's place; None when it has none, which the user is told once."""
        if self._answer is None and os.getpid() == self._pid and not self.over:
            self.ask()
            self._answered.wait(_PATIENCE_S)
            if self._answer is None:
                problem = f"the pool has not told the run's MLflow id within {_PATIENCE_S:g} s"
                self._answer = TrackingAnswered(run_id=self.run_id, problem=problem)
        if self._answer is None:
            # a forked child has no thread that would hear the answer
            return None
        if self._answer.tracked is None:
            self.remark(
                "no-store",
                f"MLflow: {self._answer.problem.rstrip('.')}. The run goes on; its metrics, parameters and tags are "
                f"kept for `sgpu sync`, artifacts in {self.kept_artifacts}. Models, child runs and what reads from "
                "MLflow are not available.",
            )
        return self._answer.tracked

    def is_this(self, run_id: object) -> bool:
        """Whether this is the id of the run in MLflow."""
        if self.over or not run_id:
            return False
        return run_id == self.alias or (self.known is not None and run_id == self.known.mlflow_run_id)

    @property
    def true_id(self) -> str:
        """The MLflow run's id; its stand-in where there is none."""
        tracked = self.wait()
        return tracked.mlflow_run_id if tracked is not None else self.alias

    @property
    def kept_artifacts(self) -> str:
        return os.path.join(self.run_dir, "artifacts")

    def may_join_once(self) -> bool:
        """True for the first caller: a logger that makes a run of its own gets this one."""
        joined, self._joined = self._joined, True
        return not joined

    # ------------------------------------------------------------ words

    def remark(self, about: str, text: str) -> None:
        """Tell the user, once for each subject in this process."""
        if about in _remarked or self.over or os.getpid() != self._pid:
            return
        _remarked.add(about)
        self._say(Remarked(text=text))

    def begin_own(self, what: str) -> None:
        """The user's code has chosen another store or experiment."""
        if self.own:
            return
        self.own = True
        self.remark(
            "own",
            f"the cell has set {what}: from then on MLflow does as the cell says, and runs that it starts are its own, "
            "one for each rank that starts one. The run's own MLflow run keeps the rest.",
        )


_remarked: set[str] = set()
_current: CellHere | None = None


def current() -> CellHere | None:
    """The tracked cell that runs, None while none does."""
    return _current if _current is not None and not _current.over else None


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
    global _reports, _current
    if _reports is None:
        _reports = Reports(say)
    _reports.begin()
    leads = rank == min(only, default=0)
    _current = CellHere(run_id, tracking, leads=leads, run_dir=run_dir, say=say, reports=_reports)
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
    global _current
    cell = current()
    if cell is None:
        return
    try:
        cell.reports.end()
    finally:
        cell.over = True
        _current = None


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
