"""One order to execute: prepare, run, and what to tell of it."""

# IPython's own attributes are only partly typed
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from sgpu_magic.errors import SgpuError
from sgpu_magic.payload import unpack
from sgpu_magic.tracking import in_rank
from sgpu_magic.wire.rank import Execute, Joined, Remarked
from sgpu_magic.wire.record import Record
from sgpu_magic.wire.states import RunKind
from sgpu_magic.worker.cell import asking, execute, results
from sgpu_magic.worker.cell.asking import encodable
from sgpu_magic.worker.cell.results import Reply
from sgpu_magic.worker.cell.shell import hook_of
from sgpu_magic.worker.group import flight_recorder, rendezvous
from sgpu_magic.worker.process import interrupts
from sgpu_magic.worker.process.helper import Order
from sgpu_magic.worker.process.rank_context import Standing

# unpickling runs the user's own classes: what they raise is the user's error, told like any other
_PREPARATION_ERRORS = (SgpuError, OSError, ImportError, AttributeError, TypeError, ValueError, RuntimeError)


class CellRun:
    """Executes one `Execute` on the main thread; interrupts are allowed meanwhile.

    Args:
        standing: The rank's place, taken before in a session.
        message: The order.
        order: What came with it.
        say: Tells the agent something.
    """

    def __init__(self, standing: Standing, message: Execute, order: Order, say: Callable[[Record], None]) -> None:
        self._standing = standing
        self._shell = standing.shell
        self._rank = standing.rank
        self._message = message
        self._frames = order.frames
        self._payload_fd = -1 if message.inline else order.descriptors[0]
        self._say = say
        self.was_out_of_memory = False
        self.groups: list[object] = []
        whole = Path(message.run_dir, f"error-{self._rank}.txt")
        self._shell.begin_cell(self._rank == min(message.only, default=0), whole)

    def run(self) -> Reply:
        """Do it all; every error becomes the reply."""
        try:
            self._prepare()
        except _PREPARATION_ERRORS as error:
            self._shell.showtraceback((type(error), error, error.__traceback__))
            return self.failed(error)
        # a model's reducer that is the last to hold a destroyed group waits for gloo's threads with Python's lock held,
        # and those may want it (torch 2.13): the group is let go of after the cell, which gives the lock away
        self.groups = rendezvous.groups()
        try:
            self._look_at_modules()
        except (Exception, SystemExit) as error:  # noqa: BLE001  a module's first lines may raise anything
            self._shell.showtraceback((type(error), error, error.__traceback__))
            return self.failed(error)
        kind = self._message.kind
        seconds = 0.0
        if kind in (RunKind.CELL, RunKind.CALL):
            training = LoneTraining(self._rank, len(self._message.only) or self._standing.ranks)
            error, seconds = self._run_cell()
            if error is not None:
                return self.failed(error)
            remark = training.remark() if self._shell.is_first else ""
            if remark:
                self._say(Remarked(text=remark))
        elif kind is RunKind.PUSH:
            return self._finished(None, "", "", seconds)
        try:
            packed, problem = results.pack_result(self._shell, self._message, self._rank)
            hook = hook_of(self._shell)
            text = encodable(hook.last_text) if hook.last_value is not None else ""
            return self._finished(packed, text, problem, seconds)
        except SgpuError as error:
            return self.failed(error)

    def _run_cell(self) -> tuple[BaseException | None, float]:
        message = self._message
        if not message.profile:
            return execute.run_cell(self._shell, message)
        from sgpu_magic.worker.cell.profiling import CellTrace

        trace = CellTrace(message.run_dir, self._rank)
        trace.begin()
        try:
            error, seconds = execute.run_cell(self._shell, message)
        finally:
            # an interrupt, or a peer's failure, is not to cost the trace
            interrupts.refuse()
            self._say(Remarked(text=trace.end()))
        interrupts.allow()
        return error, seconds

    def failed(self, error: BaseException) -> Reply:
        """Tell of the error, and let go of all that hangs on it."""
        # to describe it takes a while, and the interrupt that a peer's failure brings must not take its place
        interrupts.refuse()
        # interrupted before it was looked at
        self.leave_payload()
        with asking.interruptible():
            failure = execute.describe(error, self._shell, self._rank)
            self.was_out_of_memory = failure.out_of_memory
            reply = results.failed(failure, error, self._shell, self._message.context.key)
        self._shell.forget_failure()
        if self._message.kind is RunKind.CALL:
            results.forget_call(self._shell, self._message)
        return reply

    def leave_payload(self) -> None:
        """Let go of a payload that nobody has looked at."""
        if self._payload_fd >= 0:
            os.close(self._payload_fd)
            self._payload_fd = -1

    def _look_at_modules(self) -> None:
        """Tell of modules that were edited since their import, or load them anew."""
        message, first = self._message, self._shell.is_first
        if not message.in_session or message.kind not in (RunKind.CELL, RunKind.CALL):
            return
        if not message.reload and not first:
            return
        modules = self._standing.modules
        edited = modules.find(message.context)
        if not edited:
            return
        if message.reload:
            remark = modules.reload(edited, message.context)
        else:
            remark = modules.remark(edited, message.context, self._rank)
        if remark and first:
            self._say(Remarked(text=remark))

    def _finished(self, packed: results.Packed | None, text: str, problem: str, seconds: float) -> Reply:
        reply = results.finished(packed, self._rank, self._message.run_dir, text=text, problem=problem, seconds=seconds)
        self._shell.forget_failure()
        return reply

    def _prepare(self) -> None:
        self._take_place()
        self._take_names()

    def _take_place(self) -> None:
        """Stand where the kernel stands."""
        message = self._message
        if message.in_session:
            self._standing.follow(message.context, message.rank_variables)
        else:
            self._standing.take(message.context, message.device, message.rank_variables)
            self._say(Joined())

    def _take_names(self) -> None:
        """Take what was shipped into the namespace."""
        message = self._message
        self._shell.show_sources(message.cell.linecache)
        if message.inline:
            data: bytearray | memoryview = bytearray(self._frames[0])
        else:
            fd, self._payload_fd = self._payload_fd, -1
            try:
                data = memoryview(unpack.map_private(fd, os.fstat(fd).st_size))
            finally:
                os.close(fd)
        if message.tracking is not None:
            in_rank.begin(message.run_id, message.tracking, self._rank, message.only, message.run_dir, self._say)
        unpack.unpack_namespace(data, message.layout, message.context.key, self._shell.user_ns)


class _Steps:
    """Steps that optimizers of this process have made."""

    count = 0


def count_optimizer_steps() -> None:
    """Count the steps of optimizers from now on. For the zygote."""
    register_optimizer_step_post_hook(_stepped)


def _stepped(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    # a compiled step would be compiled again for each number
    if not torch.compiler.is_compiling():
        _Steps.count += 1


class LoneTraining:
    """Says whether a rank of several has trained without the others, which is seldom meant and never an error.

    Watches one cell, from when it is made.

    Args:
        rank: This rank.
        ranks: How many run the cell.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank = rank
        self._ranks = ranks
        self._steps = _Steps.count
        self._began_at = time.time()

    def remark(self) -> str:
        """What the user is told, "" when this rank has trained nothing or has met the others."""
        if self._ranks == 1 or _Steps.count == self._steps or not flight_recorder.records_every_backend():
            return ""
        _, entered_at = flight_recorder.current()
        if entered_at >= self._began_at:
            return ""
        return (
            f"rank {self._rank} has trained by itself: an optimizer made steps there, and it called no collective. One "
            f"model on all {self._ranks} ranks needs DistributedDataParallel or a framework that knows of the ranks; "
            "accelerate on CPU ranks needs Accelerator(cpu=True)."
        )
