"""The thread beside a rank's cell: flushes the output, samples the stack, and does what the agent asks meanwhile."""

from __future__ import annotations

import _thread
import contextlib
import os
import select
import socket
import threading

from sgpu_magic.protocol.node_messages import (
    Collectives,
    Execute,
    InPlace,
    Leave,
    Release,
    TellCollectives,
    ToRank,
)
from sgpu_magic.worker import flight_recorder, output, rendezvous
from sgpu_magic.worker.link import Link
from sgpu_magic.worker.shell import RankShell
from sgpu_magic.worker.trace import Sampler

_INTERVAL_S = 0.05


class Helper:
    """Started with the cell, and there until the process ends.

    Args:
        link: To the agent; only this thread receives.
        shell: Told when its rank is released.
        sampler: Where the main thread's stack is kept.
        rehearsed: Collectives that this rank has made before its run.
    """

    def __init__(self, link: Link[ToRank], shell: RankShell, sampler: Sampler, rehearsed: int) -> None:
        self.may_leave = threading.Event()
        self.in_place = threading.Event()
        self._link = link
        self._shell = shell
        self._sampler = sampler
        self._rehearsed = rehearsed

    def start(self) -> None:
        # not a `threading.Thread`: its start waits until it runs, milliseconds on a busy machine, and user code that
        # lists threads need not see it
        _thread.start_new_thread(self._help, ())

    def _help(self) -> None:
        while True:
            ready, _, _ = select.select([self._link], [], [], _INTERVAL_S)
            self._sampler.sample()
            if not ready:
                output.flush()
                continue
            while True:
                received = self._link.receive()
                if received is None:
                    os._exit(1)  # the agent is gone
                self._obey(received[0])
                if not self._link.has_message():
                    break

    def _obey(self, message: ToRank) -> None:
        match message:
            case Release(fds=fds):
                self._shell.released = True
                for fd in fds:
                    _shut_down(fd)
                rendezvous.abort_nccl()
            case Leave():
                self.may_leave.set()
            case InPlace():
                self.in_place.set()
            case TellCollectives(request=request):
                current, entered_at = flight_recorder.current(self._rehearsed)
                answer = Collectives(request=request, current=current, entered_at=entered_at)
                # the agent's end is noticed by who reads
                with contextlib.suppress(OSError):
                    self._link.send(answer)
            case Execute():
                raise ValueError("a fresh rank executes one cell")


def _shut_down(fd: int) -> None:
    """End a connection without closing its number, which its owner still holds."""
    try:
        with socket.socket(fileno=os.dup(fd)) as sock:
            sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return
