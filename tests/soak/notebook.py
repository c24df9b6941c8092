"""One notebook of a soak: runs its plans one after the other and checks how each ended."""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from kernels import Cell, Home, Kernel, Reply, level
from process_table import descriptors, memory_files, no_more
from strikes import command, events_of, kill, ranks_of
from waiting import eventually

from sgpu_magic.wire.events import RunEnded
from soak.plans import Plan
from soak.pool import Pool

_HANG_S = 90.0
# a notebook keeps the memory of its payloads for a minute, for reuse
_UPLOADS_KEPT_S = 80.0
_FINAL = {"succeeded", "failed", "cancelled", "timed out"}
_WARM = """\
%%distributed -n 2 --ui none --out answer
answer = len(big)"""


@dataclass
class Results:
    """What all notebooks have found."""

    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    done: int = 0
    extra_runs: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


class Notebook(threading.Thread):
    """A kernel, and another one whenever it was killed.

    Args:
        home: Where the pool lives.
        pool: To strike.
        plans: Shared with the other notebooks.
        results: Where what was found goes.
        progress: Called after each run.

    Attributes:
        is_done: Its runs are over, its kernel is still there.
        may_close: To be set then.
    """

    def __init__(
        self, home: Home, pool: Pool, plans: queue.SimpleQueue[Plan], results: Results, progress: Callable[[], None]
    ) -> None:
        super().__init__(daemon=True)
        self._home = home
        self._pool = pool
        self._plans = plans
        self._results = results
        self._progress = progress
        self._kernel: Kernel | None = None
        self._level: dict[str, int] = {}
        self.is_done = threading.Event()
        self.may_close = threading.Event()

    def run(self) -> None:
        try:
            while True:
                try:
                    plan = self._plans.get_nowait()
                except queue.Empty:
                    break
                self._try(plan)
            self._check_level()
        except Exception:
            self._problem(f"the notebook's thread ended: {traceback.format_exc()}")
        finally:
            self.is_done.set()
            self.may_close.wait()
            if self._kernel is not None:
                self._kernel.close()

    # ------------------------------------------------------------ its kernel

    @property
    def kernel(self) -> Kernel:
        if self._kernel is None:
            self._kernel = Kernel(self._home)
            self._kernel.check("import numpy; big = numpy.ones(300_000)\nprint('x' * 200_000)")
            self._warm()
            self._level = level(self._kernel.pid)
        return self._kernel

    def _warm(self) -> None:
        """Run once, so that what a notebook needs for its first run is there. Strikes may hit this run too."""
        assert self._kernel is not None
        for _ in range(5):
            with self._results.lock:
                self._results.extra_runs += 1
            if self._kernel.run(_WARM, _HANG_S).status == "ok":
                return
        raise AssertionError("a new notebook has no run that succeeds")

    def _check_level(self) -> None:
        """A notebook that has lived through all of it holds no more than at its beginning."""
        if self._kernel is None:
            return
        # results lie in memory files while a variable refers to them
        self._kernel.check("back = answer = None")
        pid, before = self._kernel.pid, {name: self._level[name] for name in ("fds", "most fds", "threads")}
        try:
            eventually(lambda: no_more(level(pid), before), 15, lambda: f"{before} -> {level(pid)}")
            eventually(
                lambda: memory_files(pid) == 0, _UPLOADS_KEPT_S, lambda: f"memory files stay: {descriptors(pid)}"
            )
        except AssertionError as error:
            self._problem(f"a kernel has grown: {error}")

    # ------------------------------------------------------------ one run

    def _try(self, plan: Plan) -> None:
        try:
            self._one(plan)
        except Exception:
            self._problem(f"run {plan.number} ({plan.kind}): {traceback.format_exc()}")
            if self._kernel is not None:
                self._kernel.kill()
                self._kernel.close()
                self._kernel = None
        with self._results.lock:
            self._results.done += 1
        self._progress()

    def _one(self, plan: Plan) -> None:
        kernel = self.kernel
        kernel.check(plan.setup)
        began = time.monotonic()
        cell = kernel.start(plan.cell)
        if "--detach" in plan.how.options:
            # the end of a detached run is reported on attach
            left = cell.wait(_HANG_S)
            assert left.status == "ok", left.story
        run_id = eventually(lambda: self._home.run_named(plan.name), _HANG_S, "the pool's taking of the run")
        reply = self._strike(plan, cell, run_id)
        if reply is None and self._kernel is kernel:
            reply = cell.wait(_HANG_S)
        row = eventually(
            lambda: (found := self._home.ledger()[run_id]).state in _FINAL and found, _HANG_S, "a last row"
        )
        allowed = plan.endings(self._pool.strikes_between(began, time.monotonic()))
        ending = (row.state, reply.ename if reply is not None else plan.how.error)
        story = reply.story if reply is not None else row.failure
        assert ending in allowed, f"{ending} is none of {allowed}\n{story}"
        if row.state == "succeeded" and reply is not None:
            self._check_success(plan, reply)
        with self._results.lock:
            self._results.outcomes[plan.kind, row.state] += 1

    def _check_success(self, plan: Plan, reply: Reply) -> None:
        assert reply.status == "ok", reply.story
        numbers = [f"line {number}" for number in range(plan.lines)]
        for rank in range(plan.ranks):
            lines = [line for line in reply.lines(rank) if line.startswith("line ")]
            # failed attempts have printed lines, too
            assert lines[-plan.lines :] == numbers if plan.lines else not lines, reply.story
        if plan.answer is not None:
            assert self.kernel.value("answer") == plan.answer
        if plan.kind == "array":
            last = plan.number + plan.ranks - 1
            assert self.kernel.value("[len(back), int(back[-1][0])]") == [plan.ranks, last]

    # ------------------------------------------------------------ strikes

    def _strike(self, plan: Plan, cell: Cell, run_id: str) -> Reply | None:
        """Do what the plan says once the run has begun; return what an attached notebook shows."""
        if not plan.how.strike or not self._has_begun(plan, cell, run_id):
            return self._attach(run_id) if "attach" in plan.how.strike else None
        match plan.how.strike:
            case "interrupt":
                self.kernel.interrupt()
            case "cancel":
                eventually(lambda: self._is_cancelled(run_id), 30, "the cancel", poll_s=0.2)
            case "rank":
                kill(self._pool.choose(ranks_of(self._home, run_id)))
            case "kernel":
                self._lose_kernel()
            case "attach":
                return self._attach(run_id)
            case "kernel, attach":
                self._lose_kernel()
                return self._attach(run_id)
            case roles:
                self._pool.strike(roles)
        return None

    def _has_begun(self, plan: Plan, cell: Cell, run_id: str) -> bool:
        """Wait until all ranks are at work, and known. False when the run was over before: a strike hit it."""

        def looked() -> str:
            # ranks may print while their pool service is being replaced
            is_known = bool(ranks_of(self._home, run_id))
            if is_known and all("begun" in self._home.log(run_id, rank) for rank in range(plan.ranks)):
                return "begun"
            over = any(isinstance(event, RunEnded) for event in events_of(self._home, run_id))
            return "over" if over else ""

        found = eventually(looked, _HANG_S, "the run's beginning")
        return found == "begun" and (not cell.idle or "--detach" in plan.how.options)

    def _is_cancelled(self, run_id: str) -> bool:
        try:
            command(self._home, "cancel", run_id)
        except AssertionError:
            # no pool just now, or the run is over
            return self._home.ledger()[run_id].state in _FINAL
        return True

    def _lose_kernel(self) -> None:
        assert self._kernel is not None
        self._kernel.kill()
        self._kernel.close()
        self._kernel = None

    def _attach(self, run_id: str) -> Reply:
        reply = self.kernel.run(f"%sgpu_attach {run_id}", _HANG_S)
        for _ in range(3):
            if reply.ename != "PoolError":
                break
            reply = self.kernel.run(f"%sgpu_attach {run_id}", _HANG_S)
        return reply

    def _problem(self, text: str) -> None:
        with self._results.lock:
            self._results.problems.append(text)
        print(f"soak: problem: {text}", flush=True)
