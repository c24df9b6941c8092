"""A rank's main loop: join the group, execute an order, report, wait for the next order, exit.

A fresh rank gets one `Execute`, then `Leave`. A session's rank gets `Prepare`, then any number of orders.
"""

# IPython's own attributes are only partly typed
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import threading
import time

import torch

from sgpu_magic import extensions
from sgpu_magic.errors import EnvironmentFailed
from sgpu_magic.system import processes
from sgpu_magic.system.message_stream import StreamConnection
from sgpu_magic.wire import codec
from sgpu_magic.wire.base import FailureKind, Record
from sgpu_magic.wire.rank import (
    AnswerQuestion,
    CellFailed,
    CommsFromFrontEnd,
    Execute,
    Exit,
    Finish,
    Finishing,
    Fork,
    HeavyImported,
    Joined,
    Prepare,
    QuestionAnswered,
    Raised,
    Renew,
    Renewed,
    StandsBy,
    ToRank,
)
from sgpu_magic.wire.rank_events import Failure
from sgpu_magic.worker.cell import diagnosis, interrupted_imports, results, widgets
from sgpu_magic.worker.cell.cell_run import CellRun, warm_up
from sgpu_magic.worker.cell.displays import RankDisplayPublisher
from sgpu_magic.worker.cell.event_loop import cell_loop
from sgpu_magic.worker.cell.results import Reply
from sgpu_magic.worker.cell.shell import RankShell
from sgpu_magic.worker.group import rendezvous, renewal
from sgpu_magic.worker.preload.heavy_imports import heavy_imports
from sgpu_magic.worker.process import position, terminal, user_code
from sgpu_magic.worker.process.helper import Helper, Order
from sgpu_magic.worker.process.leaving import Leaving
from sgpu_magic.worker.process.rank_context import RankState, reseed

# an agent that is busy with a flood of output answers later; a misplaced display is better than a blocked rank
_DISPLAY_TIMEOUT_S = 1.0
# the nice value of a rank that finishes and ends
_LEAVING_PRIORITY = 19


def live(order: Fork, descriptors: list[int]) -> int:
    """Run as a rank until the agent sends `Leave` or is gone. Returns the exit status.

    Args:
        order: The group and this rank's place in it.
        descriptors: Control socket, output pipe, error pipe, stack file, and the store's memory file unless the store
            has a path.
    """
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    # only until there is work: a cell's tensors are faster with huge pages
    processes.allow_huge_pages(False)
    terminal.install(descriptors[1], descriptors[2])
    sampler = position.install_stack_file(descriptors[3])
    link = StreamConnection(socket.socket(fileno=descriptors[0]), codec.to_rank)
    store_path = order.store_path or f"/proc/self/fd/{descriptors[4]}"
    reseed()
    # gloo's and torch's own pools: a fork is safe only when the first parallel operation finds a fresh setting
    torch.set_num_threads(1)
    join_error: RuntimeError | None = None
    if order.join_early:
        try:
            rendezvous.join(order.rank, order.ranks, store_path, cuda=False)
        except RuntimeError as error:
            # a peer is gone already; reported with the first run
            join_error = error
    shell = RankShell.instance()
    terminal.refusals.rank = order.rank
    rehearsed = order.warm_up and join_error is None
    leaving = Leaving(shell.user_ns, sampler, link.send)
    if rehearsed:
        warm_up(shell)
    if order.announce:
        link.send(StandsBy())
        rendezvous.let_loops_sleep()
    received = link.receive()
    if received is None or not isinstance(received[0], Execute | Prepare):
        return 0
    processes.allow_huge_pages(True)
    helper = Helper(link, shell, sampler, order.rank, int(rehearsed), leaving)
    first = helper.order_of(received[0], received[1])
    try:
        _Life(link, helper, RankState(order, store_path, join_error), leaving).run(first)
    except ConnectionError:
        # the agent is gone
        return 1
    except Exception as error:
        # for example, the system refused a thread: report it as an internal failure, not as an exit of the cell
        text = f"it could not go on: {type(error).__name__}: {error}"
        failure = Failure(kind=FailureKind.INTERNAL, message=text, rank=order.rank, at=time.time())
        link.send(CellFailed(failure=failure, grouped=False))
        raise
    return 0


class _Life:
    """The main thread's loop.

    Args:
        link: Connection to the agent.
        helper: Receives the orders.
        state: The rank's state between cells.
        leaving: Finishes what cells have started.
    """

    def __init__(self, link: StreamConnection[ToRank], helper: Helper, state: RankState, leaving: Leaving) -> None:
        self._link = link
        self._leaving = leaving
        self._helper = helper
        self._state = state
        self._shell = state.shell
        self._display_lock = threading.RLock()
        self._pid = os.getpid()
        # a fresh rank keeps its last result until it exits: releasing the pages takes time
        self._last: Reply | None = None

    def run(self, order: Order) -> None:
        """Execute orders until the agent sends `Leave`."""
        self._shell.report_raised = self._report_raised
        publisher = self._shell.display_pub
        if isinstance(publisher, RankDisplayPublisher):
            publisher.report = self._report_display
        user_code.early.is_order_waiting = self._helper.has_order
        self._helper.start()
        self._handle(order)
        while not isinstance(order.message, Exit):
            cell_loop.run_until_order(self._helper.orders)
            order = self._helper.orders.get()
            self._handle(order)

    def _handle(self, order: Order) -> None:
        match order.message:
            case Execute() as message:
                self._execute(message, order)
            case Prepare() as message:
                self._prepare(message, order)
            case Renew() as message:
                self._renew(message, order)
            case AnswerQuestion() as message:
                self._answer(message)
            case CommsFromFrontEnd():
                self._deliver_comms()
            case Finish():
                self._finish()
            case Exit():
                self._finish_at_low_priority()

    def _execute(self, message: Execute, order: Order) -> None:
        if len(order.descriptors) > int(not message.inline) + len(message.mapped):
            rendezvous.late_store.listening_fd = order.descriptors[-1]
        terminal.write_each_line(False)
        widgets.comms.begin(self._link.send, lambda: self._helper.is_busy)
        run = self._cell_run(message, order)
        try:
            try:
                user_code.allow_interrupts()
                reply = run.run()
            finally:
                user_code.refuse_interrupts()
        except KeyboardInterrupt as error:
            user_code.refuse_interrupts()
            # the cell may have failed before the interrupt
            failure = self._shell.failure
            reply = run.failed(error if failure is None else failure.error)
        if modules := heavy_imports.take():
            self._link.send(HeavyImported(modules=modules))
        finishes = not self._helper.stays and self._leaving.has_work()
        if finishes:
            self._leaving.announce()
            extensions.tracking_in_rank().flush()
        else:
            extensions.tracking_in_rank().end()
        self._reply(reply, rests=not finishes)
        if run.was_out_of_memory:
            diagnosis.free()
        elif isinstance(reply.message, CellFailed):
            # collect the objects that drew the traceback
            gc.collect(1)
        if self._helper.stays and isinstance(reply.message, CellFailed):
            interrupted_imports.complete_interrupted_imports()
            # if all ranks failed alike, nothing is reconnected, but models may be in the middle of an iteration
            renewal.mend_models()
        if self._helper.stays:
            if reply.buffer is not None:
                reply.buffer.close()
        else:
            self._last = reply
        if finishes:
            self._finish()

    def _cell_run(self, message: Execute, order: Order) -> CellRun:
        if message.ray is None:
            return CellRun(self._state, message, order, self._link.send)
        return extensions.ray_run(self._state, message, order, self._link.send, message.ray)

    def _prepare(self, message: Prepare, order: Order) -> None:
        if order.descriptors:
            rendezvous.late_store.listening_fd = order.descriptors[0]
        try:
            try:
                user_code.allow_interrupts()
                self._state.enter(message.context, message.device, message.rank_variables, renewal=message.renewal)
                if self._state.cuda and torch.cuda.is_available():
                    # creates the CUDA context, which takes half a second, before the first cell
                    torch.cuda.synchronize()
                rendezvous.let_loops_sleep()
                reply = Reply(Joined())
            finally:
                user_code.refuse_interrupts()
        except (KeyboardInterrupt, OSError, RuntimeError, ValueError, EnvironmentFailed) as error:
            user_code.refuse_interrupts()
            self._shell.showtraceback((type(error), error, error.__traceback__))
            reply = Reply(CellFailed(failure=diagnosis.describe(error, self._shell, self._state.rank), grouped=False))
        self._reply(reply)

    def _renew(self, message: Renew, order: Order) -> None:
        # an interrupt since the last cell belongs to no cell
        user_code.early.came = False
        store_path = message.store_path or f"/proc/self/fd/{order.descriptors[0]}"
        try:
            state = self._state
            lost = renewal.renew(state.rank, state.ranks, store_path, message.replaced, cuda=state.uses_nccl)
            rendezvous.let_loops_sleep()
            renewed = Renewed(lost=lost)
        except (RuntimeError, OSError, ValueError) as error:
            renewed = Renewed(problem=f"rank {self._state.rank}: {error}")
        self._link.send(renewed)

    def _answer(self, message: AnswerQuestion) -> None:
        user_code.early.came = False
        answer = results.answer(self._shell, message.question)
        self._link.send(QuestionAnswered(request=message.request, answer=answer))

    def _deliver_comms(self) -> None:
        """Deliver the front end's messages to widgets between cells."""
        if self._helper.stays:
            try:
                try:
                    signal.signal(signal.SIGINT, signal.default_int_handler)
                    widgets.comms.deliver()
                finally:
                    user_code.refuse_interrupts()
            except KeyboardInterrupt:
                user_code.refuse_interrupts()
                if not self._helper.orders.empty():
                    # it was meant for the waiting cell
                    signal.raise_signal(signal.SIGINT)
            terminal.flush()
            widgets.comms.flush()
        self._helper.rest()

    def _finish(self) -> None:
        """Finish what cells have started, and report the end of it. The group's other ranks may still need this one."""
        self._leaving.finish()
        extensions.tracking_in_rank().end()
        widgets.comms.flush()
        self._helper.rest()
        self._link.send(Finishing(leaves_processes=processes.has_children()))

    def _reply(self, reply: Reply, *, rests: bool = True) -> None:
        """Send the reply to an order.

        Args:
            reply: The reply.
            rests: Whether the main thread is idle afterwards.
        """
        terminal.flush()
        widgets.comms.flush()
        terminal.write_each_line()
        if rests:
            # before the reply: the next order may come right after it
            self._helper.rest()
        user_code.early.came = False
        self._link.send(reply.message, reply.blobs, [] if reply.buffer is None else [reply.buffer.fd])

    def _report_display(self, message: Record) -> None:
        """Send a display and wait until the agent has placed it among the output.

        Output and messages travel separately: without the wait, later output could overtake the display.
        """
        # a widget must arrive before its display
        widgets.comms.flush()
        if os.getpid() != self._pid:
            # a forked child has no helper thread to receive the answer
            self._link.send(message)
            return
        with self._display_lock:
            self._helper.installed.clear()
            self._link.send(message)
            self._helper.installed.wait(_DISPLAY_TIMEOUT_S)

    def _report_raised(self) -> None:
        if os.getpid() == self._pid:
            self._link.send(Raised())

    def _finish_at_low_priority(self) -> None:
        """Finish remaining work, with all threads at the lowest priority so that it does not delay the run's result.

        The caller then ends the process without the interpreter's own exit, which takes 0.4 s after an import of
        torch.
        """
        with contextlib.suppress(OSError):
            # of every thread in this process's group: the last one to end frees the memory, and it may be one of gloo's
            os.setpriority(os.PRIO_PGRP, 0, _LEAVING_PRIORITY)
        self._leaving.finish()
        terminal.flush()
