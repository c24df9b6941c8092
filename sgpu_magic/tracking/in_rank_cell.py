"""The tracked cell that runs on this rank: its place in MLflow, asked for once, and what the user is told of it."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable

from sgpu_magic.tracking.in_rank_reports import Reports
from sgpu_magic.wire.rank_messages import AskTracking, Remarked, TrackingAnswered
from sgpu_magic.wire.record import Record
from sgpu_magic.wire.tracking import TrackedRun, Tracking

# the store that has to be made first takes seconds; a server that does not answer is given up sooner
_PATIENCE_S = 20.0


class CellHere:
    """One tracked cell on this rank.

    Args:
        run_id: The run.
        tracking: Where it is tracked; its URI is never "".
        rank: This rank.
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
        rank: int,
        *,
        leads: bool,
        run_dir: str,
        say: Callable[[Record], None],
        reports: Reports,
    ) -> None:
        self.run_id = run_id
        self.tracking = tracking
        self.rank = rank
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


def hold(cell: CellHere | None) -> None:
    """This cell runs from now on, or none."""
    global _current
    _current = cell
