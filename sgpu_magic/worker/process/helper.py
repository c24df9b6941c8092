"""A rank's helper thread: receives messages, flushes output, samples the stack, handles what can't wait."""

from __future__ import annotations

import _thread
import array
import contextlib
import fcntl
import os
import queue
import select
import socket
import termios
import threading
import traceback
from collections.abc import Sequence
from typing import NamedTuple

from sgpu_magic import extensions
from sgpu_magic.system.message_stream import StreamConnection
from sgpu_magic.wire.rank import (
    AnswerQuestion,
    AskCollectives,
    Collectives,
    CommsFromFrontEnd,
    Execute,
    Exit,
    Finish,
    InPlace,
    Prepare,
    Release,
    Renew,
    ToRank,
    TrackingAnswered,
)
from sgpu_magic.worker.cell import widgets
from sgpu_magic.worker.cell.event_loop import cell_loop
from sgpu_magic.worker.cell.shell import RankShell
from sgpu_magic.worker.group import rendezvous, renewal
from sgpu_magic.worker.process import orphans, position, terminal
from sgpu_magic.worker.process.leaving import Leaving
from sgpu_magic.worker.process.position import Sampler

_INTERVAL_S = 0.05

OrderMessage = Prepare | Renew | Execute | AnswerQuestion | CommsFromFrontEnd | Finish | Exit


class Order(NamedTuple):
    """An order for the main thread.

    Args:
        message: The agent's message.
        frames: Its raw frames.
        descriptors: The descriptors that came with it; the main thread owns them.
    """

    message: OrderMessage
    frames: Sequence[bytes] = ()
    descriptors: Sequence[int] = ()


class Helper:
    """The helper thread, which runs from the rank's first order until the process ends.

    It wakes 20 times a second while the main thread works, and only for messages while the main thread is idle.

    Args:
        link: Connection to the agent; after `start` only this thread receives.
        shell: The rank's shell, whose `released` is set by a `Release`.
        sampler: Records the main thread's stack.
        rank: Global rank; rank 0 gets one descriptor more than the others.
        rehearsed: Number of collectives that this rank called before its run.
        leaving: Finishes what cells have started.

    Attributes:
        orders: The orders for the main thread.
        installed: Set when the agent has placed a display.
        stays: Whether the rank belongs to a session.
    """

    def __init__(
        self,
        link: StreamConnection[ToRank],
        shell: RankShell,
        sampler: Sampler,
        rank: int,
        rehearsed: int,
        leaving: Leaving,
    ) -> None:
        self.orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self.installed = threading.Event()
        self._link = link
        self._shell = shell
        self._sampler = sampler
        self._rank = rank
        self._rehearsed = rehearsed
        self._leaving = leaving
        self._prepared = False
        # unfinished orders of `_put`; the first came before the thread started
        self._unended = 1
        self._count_lock = threading.Lock()
        self._receives = False
        self.stays = False

    def order_of(self, message: OrderMessage, frames: Sequence[bytes]) -> Order:
        """Combine a message with its descriptors. Called by the receiving thread, in the order of arrival."""
        match message:
            case Prepare():
                count = int(self._rank == 0)
                self._prepared = True
                self.stays = message.stays
            case Renew():
                count = int(not message.store_path)
            case Execute():
                with_socket = self._rank == 0 and not self._prepared and not message.in_session
                count = int(not message.inline) + len(message.mapped) + int(with_socket)
            case _:
                count = 0
        return Order(message, frames, self._link.take_descriptors(count))

    @property
    def is_busy(self) -> bool:
        """Whether the main thread has an unfinished order."""
        return self._unended > 0

    def has_order(self) -> bool:
        """Whether the agent has sent something that the main thread has not begun or not finished."""
        waiting = array.array("i", [0])
        fcntl.ioctl(self._link.fileno(), termios.FIONREAD, waiting)
        # checked in the order in which a message passes through them, since the helper thread may move it on meanwhile
        return waiting[0] > 0 or self._receives or self.is_busy

    def start(self) -> None:
        """Start the thread, which is the only one that receives from now on."""
        # not a `threading.Thread`: `start` waits until the thread runs, milliseconds on a busy machine, and user code
        # that lists threads need not see this one
        _thread.start_new_thread(self._work, ())

    def rest(self) -> None:
        """Mark the main thread's order as finished. Called before its reply: the next order may come right after."""
        with self._count_lock:
            self._unended -= 1

    def _work(self) -> None:
        try:
            self._help()
        except BaseException:  # noqa: BLE001  a thread's top: the process ends
            # without this thread, the rank would receive nothing any more
            traceback.print_exc()
            terminal.flush()
            os._exit(1)

    def _help(self) -> None:
        while True:
            ready, _, _ = select.select([self._link], [], [], _INTERVAL_S if self.is_busy else None)
            if self.is_busy or not ready:
                self._sampler.sample()
            if not ready:
                terminal.flush()
                widgets.comms.tick()
                self._leaving.tick()
                orphans.reap()
                continue
            self._receives = True
            while self._receives:
                received = self._link.receive()
                if received is None:
                    os._exit(1)  # the agent is gone
                self._execute(*received)
                self._receives = self._link.has_message()

    def _execute(self, message: ToRank, frames: Sequence[bytes]) -> None:
        match message:
            case Release(fds=fds, interrupt=interrupt):
                self._shell.released.set()
                if interrupt and renewal.ends_without_error():
                    # set before the collective ends, so that no line after it runs
                    _thread.interrupt_main()
                for fd in fds:
                    # shuts the connection down, and leaves its descriptor to the owner
                    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as sock:
                        sock.shutdown(socket.SHUT_RDWR)
                rendezvous.file_stores.revoke()
                renewal.abort(stays=self.stays)
            case InPlace():
                self.installed.set()
            case TrackingAnswered():
                extensions.tracking_in_rank().answered(message)
            case AskCollectives(request=request):
                current, entered_at = position.current_collective(self._rehearsed)
                answer = Collectives(request=request, current=current, entered_at=entered_at)
                # the receiving loop notices that the agent is gone
                with contextlib.suppress(OSError):
                    self._link.send(answer)
            case Execute() | Prepare():
                # here and not in the main thread: a `Release` that follows belongs to this cell
                self._shell.released.clear()
                self._put(self.order_of(message, frames))
            case Finish():
                self._put(Order(message))
            case CommsFromFrontEnd():
                widgets.comms.on_messages(message.messages, frames)
                # messages that the running cell has not handled are handled before the next order
                self._put(Order(message))
            case Renew():
                # a `Release` that follows frees the rank, though it may not wait for its peers yet
                rendezvous.file_stores.announce()
                self._wake(self.order_of(message, frames))
            case AnswerQuestion() | Exit():
                self._wake(self.order_of(message, frames))

    def _put(self, order: Order) -> None:
        with self._count_lock:
            self._unended += 1
        self._wake(order)

    def _wake(self, order: Order) -> None:
        self.orders.put(order)
        cell_loop.wake()
