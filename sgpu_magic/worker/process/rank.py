"""One rank's life: join the group, do what the agent orders, report, wait for the next order, leave.

A fresh rank gets one `Execute`, then `Leave`. One of a session gets `Prepare`, and then orders without end.
"""

# IPython's own attributes are only partly typed
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import signal
import socket
import threading

import torch

from sgpu_magic.system import processes
from sgpu_magic.system.message_stream import Link
from sgpu_magic.tracking import in_rank
from sgpu_magic.wire import codec
from sgpu_magic.wire.rank import (
    AnswerQuestion,
    CommsHeard,
    Execute,
    Failed,
    Joined,
    Leave,
    Prepare,
    QuestionAnswered,
    Raised,
    Renew,
    Renewed,
    ToRank,
)
from sgpu_magic.wire.record import Record
from sgpu_magic.wire.zygote import Fork
from sgpu_magic.worker.cell import diagnosis, questions, widgets
from sgpu_magic.worker.cell import shell as rank_shell
from sgpu_magic.worker.cell.cell_run import CellRun, rehearse
from sgpu_magic.worker.cell.results import Reply
from sgpu_magic.worker.group import rendezvous, renewal
from sgpu_magic.worker.process import interrupts, terminal, trace
from sgpu_magic.worker.process.helper import Helper, Order
from sgpu_magic.worker.process.rank_context import Standing, reseed

# an agent that is busy with a flood answers later; a display out of place is better than a rank that waits
_DISPLAY_TIMEOUT_S = 1.0


def live(order: Fork, descriptors: list[int]) -> int:
    """Be a rank until the agent says `Leave` or goes away. Returns the exit status.

    Args:
        order: The group and this rank's place in it.
        descriptors: Control socket, output pipe, error pipe, stack file, and the store's memory file unless it has
            a path.
    """
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    # until it has work: a cell's tensors are faster with them
    processes.allow_huge_pages(False)
    terminal.install(descriptors[1], descriptors[2])
    sampler = trace.install(descriptors[3])
    link = Link(socket.socket(fileno=descriptors[0]), codec.to_rank)
    store_path = order.store_path or f"/proc/self/fd/{descriptors[4]}"
    reseed()
    # gloo's and torch's own pools: a fork is safe only when the first parallel operation finds a fresh setting
    torch.set_num_threads(1)
    join_error: RuntimeError | None = None
    if order.join_early:
        try:
            rendezvous.join(order.rank, order.ranks, store_path, cuda=False)
        except RuntimeError as error:
            # a peer is gone already; told once there is a run to tell it of
            join_error = error
    shell = rank_shell.RankShell.instance()
    terminal.refuse_input(shell, order.rank)
    rehearsed = order.rehearse and join_error is None
    if rehearsed:
        rehearse(shell)
    received = link.receive()
    if received is None or not isinstance(received[0], Execute | Prepare):
        return 0
    processes.allow_huge_pages(True)
    helper = Helper(link, shell, sampler, order.rank, int(rehearsed))
    first = helper.order_of(received[0], received[1])
    try:
        _Life(link, helper, Standing(order, store_path, join_error)).go_on(first)
    except ConnectionError:
        # the agent is gone; there is nobody left to tell
        return 1
    return 0


class _Life:
    """The main thread's loop.

    Args:
        link: To the agent.
        helper: Hands the orders over.
        standing: The rank's place.
    """

    def __init__(self, link: Link[ToRank], helper: Helper, standing: Standing) -> None:
        self._link = link
        self._helper = helper
        self._standing = standing
        self._shell = standing.shell
        self._display_lock = threading.RLock()
        self._pid = os.getpid()
        # a fresh rank's last result stays until it leaves: to give its pages back takes time
        self._last: Reply | None = None

    def go_on(self, order: Order) -> None:
        """Obey until the agent says `Leave`."""
        rank_shell.report_to(self._shell, self._report_display, self._report_raised)
        interrupts.look_for_orders(self._helper.has_order)
        self._helper.start()
        self._obey(order)
        while not isinstance(order.message, Leave):
            order = self._helper.orders.get()
            self._obey(order)

    def _obey(self, order: Order) -> None:
        match order.message:
            case Execute() as message:
                self._execute(message, order)
            case Prepare() as message:
                self._prepare(message, order)
            case Renew() as message:
                self._renew(message, order)
            case AnswerQuestion() as message:
                self._answer(message)
            case CommsHeard():
                self._hear()
            case Leave():
                self._leave()

    def _execute(self, message: Execute, order: Order) -> None:
        if len(order.descriptors) > int(not message.inline):
            rendezvous.keep_listening_socket(order.descriptors[-1])
        terminal.write_each_line(False)
        widgets.begin(self._link.send if message.context.widgets else None, lambda: self._helper.is_busy)
        run = self._cell_run(message, order)
        try:
            try:
                interrupts.allow()
                reply = run.run()
            finally:
                interrupts.refuse()
        except KeyboardInterrupt as error:
            interrupts.refuse()
            # it may have failed already
            shown = self._shell.shown
            reply = run.failed(error if shown is None else shown.error)
        in_rank.end()
        self._tell(reply)
        if run.was_out_of_memory:
            diagnosis.free()
        elif isinstance(reply.message, Failed):
            # what drew its traceback
            gc.collect(1)
        if self._helper.stays and isinstance(reply.message, Failed):
            # where all ranks failed alike nothing is connected anew, and models may still be half way
            renewal.mend_models()
        if self._helper.stays:
            if reply.buffer is not None:
                reply.buffer.close()
        else:
            self._last = reply

    def _cell_run(self, message: Execute, order: Order) -> CellRun:
        if message.ray is None:
            return CellRun(self._standing, message, order, self._link.send)
        # a plain cell has no use for it
        from sgpu_magic.worker.ray.ray_run import RayRun

        return RayRun(self._standing, message, order, self._link.send, message.ray)

    def _prepare(self, message: Prepare, order: Order) -> None:
        if order.descriptors:
            rendezvous.keep_listening_socket(order.descriptors[0])
        try:
            try:
                interrupts.allow()
                self._standing.take(message.context, message.device, message.rank_variables, renewal=message.renewal)
                if self._standing.cuda and torch.cuda.is_available():
                    # makes the context: half a second that no cell is to wait for
                    torch.cuda.synchronize()
                reply = Reply(Joined())
            finally:
                interrupts.refuse()
        except (KeyboardInterrupt, OSError, RuntimeError, ValueError) as error:
            interrupts.refuse()
            self._shell.showtraceback((type(error), error, error.__traceback__))
            reply = Reply(Failed(failure=diagnosis.describe(error, self._shell, self._standing.rank), grouped=False))
        self._tell(reply)

    def _renew(self, message: Renew, order: Order) -> None:
        # one that came meanwhile was no cell's
        interrupts.forget()
        store_path = message.store_path or f"/proc/self/fd/{order.descriptors[0]}"
        try:
            standing = self._standing
            lost = renewal.renew(standing.rank, standing.ranks, store_path, message.replaced, cuda=standing.cuda)
            renewed = Renewed(lost=lost)
        except (RuntimeError, OSError, ValueError) as error:
            renewed = Renewed(problem=f"rank {self._standing.rank}: {error}")
        self._link.send(renewed)

    def _answer(self, message: AnswerQuestion) -> None:
        interrupts.forget()
        answer = questions.answer(self._shell, message.question)
        self._link.send(QuestionAnswered(request=message.request, answer=answer))

    def _hear(self) -> None:
        """Let widgets hear what the front end has said to them while no cell ran."""
        if self._helper.stays:
            try:
                try:
                    signal.signal(signal.SIGINT, signal.default_int_handler)
                    widgets.hear()
                finally:
                    interrupts.refuse()
            except KeyboardInterrupt:
                interrupts.refuse()
                if not self._helper.orders.empty():
                    # it was meant for the cell that waits
                    signal.raise_signal(signal.SIGINT)
            terminal.flush()
            widgets.flush()
        self._helper.rest()

    def _tell(self, reply: Reply) -> None:
        terminal.flush()
        widgets.end_cell()
        terminal.write_each_line()
        # before the last word: the next order may come right after
        self._helper.rest()
        interrupts.forget()
        self._link.send(reply.message, reply.blobs, reply.descriptors)

    def _report_display(self, message: Record) -> None:
        """Send a display and wait until it has its place.

        Output goes another way than messages: what is printed next could overtake the display otherwise.
        """
        # a display of a widget comes after the widget
        widgets.flush()
        if os.getpid() != self._pid:
            # a forked child has no helper thread that would hear the answer
            self._link.send(message)
            return
        with self._display_lock:
            self._helper.in_place.clear()
            self._link.send(message)
            self._helper.in_place.wait(_DISPLAY_TIMEOUT_S)

    def _report_raised(self) -> None:
        if os.getpid() == self._pid:
            self._link.send(Raised())

    def _leave(self) -> None:
        """Run what user code registered for the interpreter's exit, then exit at idle priority.

        The interpreter's own exit takes 0.4 s after an import of torch and is not worth it; the caller ends the
        process without it.
        """
        with contextlib.suppress(OSError, AttributeError):
            # every thread: the last one to end takes the memory down, and that may be one of gloo's
            for thread in os.listdir("/proc/self/task"):
                os.sched_setscheduler(int(thread), os.SCHED_IDLE, os.sched_param(0))
        atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
        terminal.flush()
