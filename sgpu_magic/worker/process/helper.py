"""The thread beside a rank's main thread: receives, flushes the output, samples the stack, does what can't wait."""

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
from collections.abc import Sequence
from typing import NamedTuple

from sgpu_magic.system.message_stream import Link
from sgpu_magic.tracking import in_rank
from sgpu_magic.wire.rank import (
    AnswerQuestion,
    Collectives,
    CommsHeard,
    Execute,
    InPlace,
    Leave,
    Prepare,
    Release,
    Renew,
    TellCollectives,
    ToRank,
    TrackingAnswered,
)
from sgpu_magic.worker.cell import widgets
from sgpu_magic.worker.cell.shell import RankShell
from sgpu_magic.worker.group import flight_recorder, rendezvous, renewal
from sgpu_magic.worker.process import terminal
from sgpu_magic.worker.process.trace import Sampler

_INTERVAL_S = 0.05

OrderMessage = Prepare | Renew | Execute | AnswerQuestion | CommsHeard | Leave


class Order(NamedTuple):
    """What the main thread is to do.

    Args:
        message: The agent's word.
        frames: Its raw frames.
        descriptors: What came along; the main thread owns them.
    """

    message: OrderMessage
    frames: Sequence[bytes] = ()
    descriptors: Sequence[int] = ()


class Helper:
    """Started with the rank's first order, and there until the process ends.

    While the main thread works it wakes 20 times a second; while that waits, only for messages.

    Args:
        link: To the agent; from `start` on only this thread receives.
        shell: Told when its rank is released.
        sampler: Where the main thread's stack is kept.
        rank: Rank 0 gets one descriptor more than the others.
        rehearsed: Collectives that this rank has made before its run.
    """

    def __init__(self, link: Link[ToRank], shell: RankShell, sampler: Sampler, rank: int, rehearsed: int) -> None:
        self.orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self.in_place = threading.Event()
        self._link = link
        self._shell = shell
        self._sampler = sampler
        self._rank = rank
        self._rehearsed = rehearsed
        self._prepared = False
        # Prepare, Execute and CommsHeard that the main thread has not ended; the first came before the thread
        self._unended = 1
        self._count_lock = threading.Lock()
        self._receives = False
        self.stays = False

    def order_of(self, message: OrderMessage, frames: Sequence[bytes]) -> Order:
        """Put a message and its descriptors together. Called by who receives, in the order of arrival."""
        match message:
            case Prepare():
                count = int(self._rank == 0)
                self._prepared = True
                self.stays = message.stays
            case Renew():
                count = int(not message.store_path)
            case Execute():
                with_socket = self._rank == 0 and not self._prepared and not message.in_session
                count = int(not message.inline) + int(with_socket)
            case _:
                count = 0
        return Order(message, frames, self._link.take_descriptors(count))

    @property
    def is_busy(self) -> bool:
        """The main thread has an order that it has not ended."""
        return self._unended > 0

    def has_order(self) -> bool:
        """Whether something was sent that the main thread has not begun, or not ended."""
        waiting = array.array("i", [0])
        fcntl.ioctl(self._link.fileno(), termios.FIONREAD, waiting)
        # in the order of its way: the other thread may take it from one place to the next meanwhile
        return waiting[0] > 0 or self._receives or self.is_busy

    def start(self) -> None:
        """From now on this thread is the only one that receives."""
        # not a `threading.Thread`: its start waits until it runs, milliseconds on a busy machine, and user code that
        # lists threads need not see it
        _thread.start_new_thread(self._help, ())

    def rest(self) -> None:
        """The main thread is done with its order. Called before it says so: the next one may come right after."""
        with self._count_lock:
            self._unended -= 1

    def _help(self) -> None:
        while True:
            ready, _, _ = select.select([self._link], [], [], _INTERVAL_S if self.is_busy else None)
            if self.is_busy or not ready:
                self._sampler.sample()
            if not ready:
                terminal.flush()
                widgets.tick()
                continue
            self._receives = True
            while True:
                received = self._link.receive()
                if received is None:
                    os._exit(1)  # the agent is gone
                self._obey(*received)
                if not self._link.has_message():
                    break
            self._receives = False

    def _obey(self, message: ToRank, frames: Sequence[bytes]) -> None:
        match message:
            case Release(fds=fds):
                self._shell.released = True
                for fd in fds:
                    _shut_down(fd)
                rendezvous.revoke_store()
                renewal.abort_nccl(stays=self.stays)
            case InPlace():
                self.in_place.set()
            case TrackingAnswered():
                in_rank.answered(message)
            case TellCollectives(request=request):
                current, entered_at = flight_recorder.current(self._rehearsed)
                answer = Collectives(request=request, current=current, entered_at=entered_at)
                # the agent's end is noticed by who reads
                with contextlib.suppress(OSError):
                    self._link.send(answer)
            case Execute() | Prepare():
                # here and not by the main thread: a release that follows is one of this cell's
                self._shell.released = False
                self._put(self.order_of(message, frames))
            case CommsHeard():
                widgets.heard(message.messages, frames)
                # taken between two orders what the running cell has not taken before
                self._put(Order(message))
            case Renew() | AnswerQuestion() | Leave():
                self.orders.put(self.order_of(message, frames))

    def _put(self, order: Order) -> None:
        with self._count_lock:
            self._unended += 1
        self.orders.put(order)


def _shut_down(fd: int) -> None:
    """End a connection without closing its number, which its owner still holds."""
    try:
        with socket.socket(fileno=os.dup(fd)) as sock:
            sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return
