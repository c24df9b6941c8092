"""`python -m sgpu_magic.tracking FD`, with settings as JSON on stdin: writes the runs of one pool to one MLflow store.

The pool service starts it with the first tracked run of a store, and restarts it if it dies. It exits at end of file on
its socket. It reads the runs' event logs, so nothing is lost if it dies. The store's variables come with the first
message: runs with other credentials use another process.

`python -m sgpu_magic.tracking sync` is started by `sgpu sync`. It reads one encoded `Unsent` from standard input and
writes one encoded `Sent` per run to standard output, a line each.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from sgpu_magic.config import Settings
from sgpu_magic.files.tracking_progress import load_progress
from sgpu_magic.system.processes import yield_cores_to_ranks
from sgpu_magic.tracking import store
from sgpu_magic.tracking.store import SYNC, Sent, Unsent
from sgpu_magic.wire import codec
from sgpu_magic.wire.decoding import decode_json
from sgpu_magic.wire.tracking import (
    EndTracker,
    FromTracker,
    Hurry,
    RunLogComplete,
    ToTracker,
    Track,
    TrackerReady,
    Tracking,
    is_store_variable,
)

if TYPE_CHECKING:
    from sgpu_magic.tracking.writer_queue import WriterQueue

URGENT = "--urgent"
_NICE = 10
_END_S = 3.0
_CHUNK_BYTES = 1 << 16
# how long `sync` waits for a run that the pool is writing
_BUSY_S = 10.0
_POLL_S = 0.2


class Inbox:
    """Receives the pool's messages in a thread.

    Args:
        connection: The socket to the pool.

    Attributes:
        messages: What has arrived; None at the end.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.messages: queue.SimpleQueue[ToTracker | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="sgpu-inbox", daemon=True).start()

    def send(self, message: FromTracker) -> None:
        # if the pool is gone, `_read` sees the end of file
        with contextlib.suppress(OSError):
            self._connection.sendall(codec.frame(message))

    def _read(self) -> None:
        reader = codec.FrameReader(codec.to_tracker)
        with contextlib.suppress(OSError):
            while data := self._connection.recv(_CHUNK_BYTES):
                for message, _ in reader.feed(data):
                    if isinstance(message, EndTracker):
                        self._end()
                        return
                    self.messages.put(message)
        self._end()

    def _end(self) -> None:
        self.messages.put(None)
        # a store that hangs must not keep the process alive; unwritten events stay in the logs
        timer = threading.Timer(_END_S, os._exit, (0,))
        timer.daemon = True
        timer.start()


def main() -> None:
    # read from stdin, as every user of the machine can read a process's arguments
    settings = decode_json(sys.stdin.buffer.read(), type=Settings)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    inbox = Inbox(socket.socket(fileno=int(sys.argv[1])))
    with contextlib.suppress(OSError, AttributeError):
        # never preempt a rank that has just woken up
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    first = inbox.messages.get()
    if not isinstance(first, Track):
        return
    store.stand_in(first.tracking.variables)
    urgent = URGENT in sys.argv
    _import(urgent=urgent)
    from sgpu_magic.tracking.writer_queue import WriterQueue

    inbox.send(TrackerReady())
    writers = WriterQueue(settings, first.tracking, inbox.send)
    writers.track(first)
    if urgent:
        # create the run before lowering the priority: a rank waits for it, in a new store also for MLflow's migrations
        writers.step()
    os.nice(_NICE)
    _work(writers, inbox.messages)


def _work(writers: WriterQueue, messages: queue.SimpleQueue[ToTracker | None]) -> None:
    while not writers.idle:
        try:
            message = messages.get(timeout=writers.wait_s())
        except queue.Empty:
            writers.step()
            continue
        match message:
            case Track():
                writers.track(message)
            case Hurry(run_id=run_id):
                writers.hurry(run_id)
            case RunLogComplete(run_id=run_id):
                writers.finish_run(run_id)
            case _:
                writers.close()
                return
    writers.rest()


def sync() -> None:
    """Write the unsent events of some runs to one store, with this process's variables."""
    order = decode_json(sys.stdin.buffer.read(), type=Unsent)
    variables = {name: value for name, value in os.environ.items() if is_store_variable(name)}
    store.stand_in(variables)
    from sgpu_magic.tracking.client import StoreTroubled, TrackingStore
    from sgpu_magic.tracking.writer import Busy, RunWriter

    progress = (load_progress(Path(directory)) for directory in order.directories)
    tracking = Tracking(
        uri=order.uri,
        variables=variables,
        directory=next((found.directory for found in progress if found is not None), ""),
    )
    target = TrackingStore(order.settings, tracking)
    down = ""
    for directory in order.directories:
        writer = RunWriter(order.settings, target, Path(directory), tracking)
        # the run is over: its event log is final
        writer.log_complete = True
        problem = down
        until = time.monotonic() + _BUSY_S
        while not problem and not writer.progress.complete:
            try:
                writer.step()
            except Busy:
                if time.monotonic() > until:
                    problem = "the pool is writing it"
                time.sleep(_POLL_S)
            except StoreTroubled as trouble:
                problem = str(trouble)
                down = problem if trouble.unreachable else ""
                writer.trouble(problem)
            except OSError as error:
                problem = f"{error.strerror or error}"
        problem = problem or writer.progress.problem
        sys.stdout.write(msgspec.json.encode(Sent(run_id=Path(directory).name, problem=problem)).decode() + "\n")
        sys.stdout.flush()


def _import(*, urgent: bool) -> None:
    """Import MLflow, which takes seconds, at idle priority unless urgent, so that it does not slow down the run.

    Does so in a thread, because a process could not leave idle priority again.
    """

    def work() -> None:
        if not urgent:
            yield_cores_to_ranks()
        import sgpu_magic.tracking.writer_queue  # pyright: ignore[reportUnusedImport]  # noqa: F401

    thread = threading.Thread(target=work, name="sgpu-import", daemon=True)
    thread.start()
    thread.join()


if __name__ == "__main__":
    sync() if sys.argv[1:] == [SYNC] else main()
