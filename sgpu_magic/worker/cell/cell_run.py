"""One `Execute` order: prepare, run the cell in the shell, with a trace of it if requested, make the reply."""

# IPython's own attributes are only partly typed
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from IPython.core.inputtransformer2 import leading_indent

from sgpu_magic import extensions
from sgpu_magic.errors import SgpuError
from sgpu_magic.payload import unpack
from sgpu_magic.wire.base import Record, RunKind
from sgpu_magic.wire.events import as_warning
from sgpu_magic.wire.rank import Execute, Joined, Remarked
from sgpu_magic.wire.run import CellSource
from sgpu_magic.worker.cell import diagnosis, lone_training, results
from sgpu_magic.worker.cell.cell_trace import CellTrace
from sgpu_magic.worker.cell.displays import hook_of
from sgpu_magic.worker.cell.results import Reply, pack_names
from sgpu_magic.worker.cell.shell import RankShell, Script, enter_script
from sgpu_magic.worker.group import rendezvous
from sgpu_magic.worker.process import position, user_code
from sgpu_magic.worker.process.helper import Order
from sgpu_magic.worker.process.rank_context import RankState, results_received
from sgpu_magic.worker.process.user_code import encodable


def warm_up(shell: RankShell) -> None:
    """Go through a cell's steps once while the rank is idle: the first write to each page after a fork copies it.

    A standby rank does this before its first cell, which is shorter by the time. Leaves nothing in the namespace.
    """
    before = set(shell.user_ns)
    shell.run_cell("1 + 1", store_history=False)
    for name in set(shell.user_ns) - before:
        del shell.user_ns[name]
    hook = hook_of(shell)
    hook.last_value, hook.last_text = None, ""
    key = bytes(32)
    packed = pack_names({}, 2, 0, key)
    unpack.unpack(bytearray(packed.to_bytes()), packed.layout, key, {})
    if dist.is_initialized():
        dist.all_reduce(torch.zeros(1))


def source_of(cell: CellSource) -> str:
    """Return the cell with its magic's line as a comment, so that line numbers match the editor's.

    A body that itself begins with a cell magic is returned without that comment: IPython expects the magic in the
    first line.
    """
    lines = cell.body.splitlines(keepends=True)
    is_indented = next((line for line in lines if line.strip()), "")[:1].isspace()
    # as IPython does with a plain cell
    body = "".join(leading_indent(lines)) if is_indented else cell.body
    if cell.file:
        return f"{cell.body.rstrip()}\n"
    if not cell.magic_line or body.lstrip().startswith("%%"):
        return body
    return f"# {cell.magic_line}\n{body}"


def run_cell(shell: RankShell, order: Execute) -> tuple[BaseException | None, float]:
    """Run the cell in the shell's namespace. Return the exception it raised, if any, and its time in seconds."""
    hook = hook_of(shell)
    hook.last_value, hook.is_displayed = None, False
    hook.source = order.cell.body
    shell.execution_count = order.cell.execution_count or 1
    # `__future__` imports of the notebook's earlier cells, and in a session of the rank's own
    shell.compile.flags |= order.cell.future_flags
    source = source_of(order.cell)
    shell.has_loop = order.kind is RunKind.CELL and not order.cell.file
    if order.cell.file:
        enter_script(order.cell, shell.user_ns)
        shell.compile.script = Script(order.cell.file, source)
        # its last expression is not a result
        shell.ast_node_interactivity = "none"
        position.script = order.cell.file
    begin = time.perf_counter()
    outcome = shell.run_cell(source, store_history=False)
    seconds = time.perf_counter() - begin
    error = outcome.error_in_exec if outcome.error_before_exec is None else outcome.error_before_exec
    if shell.failure is not None:
        error = shell.failure.error
    return (None if error is not None and user_code.is_exit(error) else error), seconds


class CellRun:
    """Executes one `Execute` on the main thread, with interrupts allowed.

    Args:
        state: The rank's state between cells; already set up in a session.
        message: The agent's message.
        order: The message with its frames and descriptors.
        say: Sends a message to the agent.
    """

    def __init__(self, state: RankState, message: Execute, order: Order, say: Callable[[Record], None]) -> None:
        self._state = state
        self._shell = state.shell
        self._rank = state.rank
        self._message = message
        self._frames = order.frames
        # the payload's, and those of its mapped ranges
        self._payload_fds = [] if message.inline else [*order.descriptors[: 1 + len(message.mapped)]]
        self._say = say
        self.was_out_of_memory = False
        self.groups: list[object] = []
        whole = Path(message.run_dir, f"error-{self._rank}.txt")
        self._shell.begin_cell(self._rank == min(message.only, default=0), whole)
        rendezvous.described.remark = self._remark

    def run(self) -> Reply:
        """Execute the order. Every error becomes a reply."""
        try:
            self._prepare()
            # a model's reducer that holds the last reference to a destroyed group waits for gloo's threads with the GIL
            # held, and those may need it (torch 2.13): this reference is dropped after the cell, which releases the GIL
            self.groups = rendezvous.groups()
            self._check_modules()
        except (Exception, SystemExit) as error:  # noqa: BLE001  the user's classes and modules may raise anything
            self._shell.showtraceback((type(error), error, error.__traceback__))
            return self.failed(error)
        kind = self._message.kind
        seconds = 0.0
        if kind in (RunKind.CELL, RunKind.CALL):
            training = lone_training.LoneTraining(self._rank, len(self._message.only) or self._state.ranks)
            if self._shell.is_first and self._state.stand_in_note:
                self._say(Remarked(text=self._state.stand_in_note))
            error, seconds = self._run_cell()
            if error is not None:
                return self.failed(error)
            says = self._shell.is_first and self._message.context.lone_training
            remark = training.remark() if says else ""
            if remark:
                self._say(Remarked(text=remark))
        try:
            packed, problem = results.pack_result(self._shell, self._message, self._rank)
            remark = results.parts_remark(packed, self._shell, self._message)
            if remark:
                self._say(Remarked(text=remark))
            hook = hook_of(self._shell)
            text = encodable(hook.last_text) if hook.last_value is not None else ""
            return self._finished(packed, text, problem, seconds)
        except SgpuError as error:
            return self.failed(error)

    def _run_cell(self) -> tuple[BaseException | None, float]:
        message = self._message
        if not message.profile:
            return run_cell(self._shell, message)
        trace = CellTrace(message.run_dir, self._rank)
        try:
            error, seconds = run_cell(self._shell, message)
        finally:
            # an interrupt, or a peer's failure, must not lose the trace
            user_code.refuse_interrupts()
            self._say(Remarked(text=trace.end()))
        user_code.allow_interrupts()
        return error, seconds

    def failed(self, error: BaseException) -> Reply:
        """Return the reply that describes the error, and free what the error holds."""
        # describing takes a while, and the interrupt that follows a peer's failure must not replace this error
        user_code.refuse_interrupts()
        # still open if the rank was interrupted before it read the payload
        self.close_payload()
        with user_code.interruptible():
            failure = diagnosis.describe(error, self._shell, self._rank)
            self.was_out_of_memory = failure.out_of_memory
            reply = results.failed(failure, error, self._shell, self._message.context.key)
        self._shell.forget_failure()
        if self._message.kind is RunKind.CALL:
            results.forget_call(self._shell, self._message)
        return reply

    def _remark(self, text: str) -> None:
        """Show the user a note that is the same on all ranks: only the first one sends it."""
        if self._shell.is_first:
            self._say(Remarked(text=text))

    def close_payload(self) -> None:
        """Close the descriptors of a payload that was not read."""
        fds, self._payload_fds = self._payload_fds, []
        for fd in fds:
            os.close(fd)

    def _check_modules(self) -> None:
        """Report modules that were edited since their import, or reload them if the order requests it."""
        message, first = self._message, self._shell.is_first
        is_cell = message.in_session and message.kind in (RunKind.CELL, RunKind.CALL)
        if not is_cell or not (message.reload or first):
            return
        modules = self._state.modules
        edited = modules.find(message.context)
        if not edited:
            return
        context = message.context
        remark = modules.reload(edited, context) if message.reload else modules.remark(edited, context, self._rank)
        if remark and first:
            self._say(Remarked(text=remark))

    def _finished(self, packed: results.Packed | None, text: str, problem: str | None, seconds: float) -> Reply:
        reply = results.finished(
            packed,
            self._rank,
            self._message.run_dir,
            text=text,
            is_displayed=hook_of(self._shell).is_displayed,
            problem=problem,
            seconds=seconds,
        )
        self._shell.forget_failure()
        return reply

    def _prepare(self) -> None:
        self._enter_context()
        self._take_names()

    def _enter_context(self) -> None:
        """Take over the kernel's context."""
        message = self._message
        if message.in_session:
            self._state.follow(message.context, message.rank_variables)
        else:
            self._state.enter(message.context, message.device, message.rank_variables)
            self._say(Joined())
        if self._shell.is_first:
            for problem in self._state.settings_refused:
                self._say(Remarked(text=as_warning(problem)))

    def _take_names(self) -> None:
        """Unpack the payload into the namespace."""
        message = self._message
        self._shell.show_sources(message.cell.linecache)
        if message.inline:
            data: bytearray | memoryview = bytearray(self._frames[0])
        else:
            try:
                fd, *mapped = self._payload_fds
                mapping = unpack.map_private(fd, os.fstat(fd).st_size)
                for (offset, size), part in zip(message.mapped, mapped, strict=True):
                    unpack.map_over(mapping, offset, part, size)
                data = memoryview(mapping)
            finally:
                self.close_payload()
        if message.tracking is not None:
            extensions.tracking_in_rank().begin(message, message.tracking, self._rank, self._say)
        with results_received(self._shell):
            unpack.unpack_namespace(data, message.layout, message.context.key, self._shell.user_ns)
