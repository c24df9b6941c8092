"""The handle of a submitted run: its events, cancellation and results; the attachments of a submission."""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from sgpu_magic.client.link import PoolLink
from sgpu_magic.client.mirror import Mirror
from sgpu_magic.client.send_queue import EventQueue
from sgpu_magic.client.session_line import SessionLine
from sgpu_magic.config import host_name
from sgpu_magic.errors import PoolError, RunFileUnknown, SerializationError
from sgpu_magic.formatting import format_bytes
from sgpu_magic.payload import unpack
from sgpu_magic.wire.attachments import (
    CodeBundle,
    Environment,
    FilePayload,
    InlinePayload,
    PackedLayout,
    Payload,
    SharedPayload,
    Upload,
)
from sgpu_magic.wire.base import Record, RunState, short
from sgpu_magic.wire.client import Cancel, ResultsReceived, SendComms, Submit, Unfollow
from sgpu_magic.wire.events import Event, Placed, RunEnded
from sgpu_magic.wire.run import CellSource, Interpreter, RunSpec
from sgpu_magic.wire.tracking import Tracking

# errors of opening or mapping a file that are due to this process's limits
_OUT_OF = (errno.ENOMEM, errno.EMFILE, errno.ENFILE)


class WorkingContext(msgspec.Struct, frozen=True):
    """Working directory and `sys.path` of ranks, where they differ from this process's."""

    cwd: str
    sys_path: tuple[str, ...]


class Attachments(msgspec.Struct, frozen=True):
    """What is submitted with a run: packages, code, uploads and the MLflow target, as in `wire.client.Submit`.

    Args:
        environment: The packages.
        code: Bundles of local code.
        tracking: Where the run is tracked.
        interpreter: The ranks' Python; None means this process's.
        working_context: The ranks' working directory and `sys.path`; None means this process's.
        is_remote: The pool's nodes do not see this machine's files.
        cell: As `RankContext.cell`.
        uploads: Folders and files of this machine.
    """

    environment: Environment | None = None
    code: tuple[CodeBundle, ...] = ()
    tracking: Tracking | None = None
    interpreter: Interpreter | None = None
    working_context: WorkingContext | None = None
    is_remote: bool = False
    cell: CellSource | None = None
    uploads: tuple[Upload, ...] = ()


Submitted = tuple[Submit, Sequence[bytes]]
"""The message and frames that a run was submitted with."""


class ClientRun:
    """A run that a pool has accepted.

    Args:
        spec: What was submitted.
        key: The run's HMAC key; empty if it is no longer known.
        link: The link to its pool.
        events: The queue of its events.
        directory: The run's directory.
        submission: The message and frames that resubmit the run if its pool dies before placing it; None for a run
            that this process attached to.

    Attributes:
        last_seq: Sequence number of the last event returned.
        link: The link to its pool.
        owned: Whether this process submitted the run.
        pool: Name of its pool.
        ask_tracked: Asks the pool to create the MLflow run; None if the run is not to be tracked.
        on_done: Called when its last event was returned, or it is not followed any more; maybe more than once.
        mirror: Copies files of the run's directory from a pool on another machine; None for a pool on this machine.
    """

    def __init__(
        self,
        spec: RunSpec,
        key: bytes,
        link: PoolLink,
        events: EventQueue,
        directory: Path,
        submission: Submitted | None = None,
    ) -> None:
        self.spec = spec
        self.run_id = spec.run_id
        self.directory = directory
        self.last_seq = 0
        self.owned = submission is not None
        self.submission = submission
        self.pool = "local"
        self.ask_tracked: Callable[[], None] | None = None
        self.mirror = None if link.welcome.same_host else Mirror(directory, spec.run_id, lambda: self.link)
        self.on_done: Callable[[], None] | None = None
        self._key = key
        self.link = link
        self._line: SessionLine | None = None
        self._events = events
        self._woken: Callable[[], None] | None = None
        # the agent's number of the last event that came over the session's line
        self._number = 0
        self._resubmit: Callable[[], None] | None = None
        self._cancelled = ""

    def wake(self, woken: Callable[[], None]) -> None:
        """Call `woken` after every event, in the link's thread; it must only wake another thread."""
        self._woken = woken
        self._events.woken = woken
        woken()

    def next_event(self, timeout_s: float) -> tuple[Event, Sequence[bytes]] | None:
        """Return the next event and its raw frames, or None on timeout or when the pool is lost."""
        with contextlib.suppress(queue.Empty):
            while (item := self._events.get(timeout=timeout_s)) is not None or self._is_submitted_again():
                if item is None or self._is_known(item[0]):
                    continue
                if isinstance(item[0].body, Placed):
                    # a placed run must not be submitted a second time
                    self.submission = None
                elif isinstance(item[0].body, RunEnded) and self.on_done is not None:
                    self.on_done()
                return item
        return None

    def _is_known(self, event: Event) -> bool:
        """Whether the event was returned before: after a request to resend, some events arrive twice."""
        if event.number and event.number <= self._number:
            return True
        if self._line is not None:
            self._number = event.number or self._number
            return False
        if event.seq <= self.last_seq:
            return True
        self.last_seq = event.seq
        return False

    # ------------------------------------------------------------ a cell that goes over its session's line

    def go_over(self, line: SessionLine, resubmit: Callable[[], None]) -> None:
        """Note that the run was sent over its session's line.

        Args:
            line: The line.
            resubmit: Submits the run to the pool, if the agent does not start it.
        """
        self._line, self._resubmit = line, resubmit
        self.owned, self.submission = True, None

    @property
    def events(self) -> EventQueue:
        """The queue of its events."""
        return self._events

    def _is_submitted_again(self) -> bool:
        """Submit the run to the pool if its session's agent has refused it. Returns whether it has.

        Raises:
            SgpuError: The pool refuses it too.
        """
        if not self._events.is_refused or self._resubmit is None:
            return False
        self._events.is_refused, self._line = False, None
        if self._cancelled:
            ended = RunEnded(state=RunState.CANCELLED, reason=self._cancelled)
            self._events.put((Event(run_id=self.run_id, seq=1, at=time.time(), body=ended), ()))
        else:
            self._resubmit()
        return True

    @property
    def is_lost(self) -> bool:
        """Whether no more events arrive: what sends them has ended."""
        return self.link.lost.is_set() if self._line is None else self._line.lost.is_set()

    @property
    def source(self) -> str:
        """What sends its events, for messages."""
        return self.link.title if self._line is None else "the agent of its session's ranks"

    def _send(self, message: Record, frames: Sequence[bytes] = ()) -> None:
        if self._line is None or not self._line.send(message, frames):
            self.link.send(message, frames)

    def move_to(self, link: PoolLink, events: EventQueue, *, from_start: bool = False) -> None:
        """Switch to another pool service that now has the run.

        Args:
            link: The link to it.
            events: The queue of the run's events.
            from_start: Whether the run was submitted again, so its events are numbered from the start.
        """
        self.link, self._events, self._line = link, events, None
        if from_start:
            self.last_seq = 0
        if self._woken is not None:
            self.wake(self._woken)

    def cancel(self, reason: str, kill: bool = False) -> None:
        """Ask the pool to stop the run; its events report when it has stopped.

        Args:
            reason: Who or what cancels it.
            kill: Send SIGKILL to ranks that were asked before and have not stopped, even after the run's end.
        """
        message = Cancel(request=0, run=self.run_id, reason=reason, kill=kill)
        self._cancelled = reason
        if self._line is None or not self._line.send(message):
            self.link.ask(message)

    def send_comms(self, message: SendComms, frames: Sequence[bytes]) -> None:
        """Forward a front-end message to a rank's widgets, without waiting for a reply."""
        self._send(message, frames)

    def load_results(self, ended: RunEnded, frames: Sequence[bytes], namespace: dict[str, object]) -> list[RankValues]:
        """Unpack the ranks' results, in order of rank, then let the pool free its copies.

        Raises:
            SerializationError: A value can't be rebuilt in the notebook, or no copy of it is left.
        """
        inline = iter(frames)
        received = True
        try:
            return [
                RankValues({}, None)
                if result.payload is None
                else RankValues.from_content(
                    self._unpack_result(result.rank, result.payload, inline, namespace), result.rank
                )
                for result in ended.results
            ]
        except PoolError:
            # the results can be fetched later
            received = False
            raise
        except (MemoryError, SerializationError) as error:
            cause = error if isinstance(error, MemoryError) else error.__cause__
            if not isinstance(cause, MemoryError):
                raise
            received = False
            raise self._no_memory(ended, str(cause) or "its memory is used up") from error
        finally:
            if received and any(result.payload is not None for result in ended.results):
                self._send(ResultsReceived(run_id=self.run_id))

    def _no_memory(self, ended: RunEnded, why: str) -> SerializationError:
        sizes = [_size(result.payload.layout) for result in ended.results if result.payload is not None]
        return SerializationError(
            f"this notebook (process {os.getpid()} on {host_name()}) can't take the results of run "
            f"{short(self.run_id)}, {format_bytes(sum(sizes))} from {len(sizes)} ranks: {why}. The run itself "
            "succeeded. Free some memory, for example with `del` of large variables, then `%sgpu_attach "
            f"{short(self.run_id)}` fetches them."
        )

    def _unpack_result(
        self, rank: int, payload: Payload, inline: Iterator[bytes], namespace: dict[str, object]
    ) -> object:
        if not self._key:
            raise SerializationError(
                f"the results of run {short(self.run_id)} can no longer be verified: its key was removed with its "
                f"directory {self.directory}. Run the cell again."
            )
        source = payload.source
        if isinstance(source, InlinePayload):
            if (data := next(inline, None)) is None:
                raise self._results_lost(rank)
            return unpack.unpack(memoryview(bytearray(data)), payload.layout, self._key, namespace)
        if self.mirror is not None:
            return unpack.unpack(self._brought(rank, self.mirror), payload.layout, self._key, namespace)
        kept = str(self.directory / f"result-{rank}.bin")
        in_memory, inode = "", 0
        if isinstance(source, FilePayload):
            in_memory = source.path
        elif isinstance(source, SharedPayload):
            in_memory, inode = f"/proc/{source.pid}/fd/{source.fd}", source.inode
        # the descriptor of a run that ended long ago may belong to another file by now, so the copy on disk is tried
        # first (and once more at the end: the memory is freed as soon as the copy is written)
        for path in (in_memory, kept) if self.owned else (kept, in_memory, kept):
            try:
                data = map_file(path, inode if path == in_memory else 0)
            except (OSError, ValueError) as error:
                if isinstance(error, OSError) and error.errno in _OUT_OF:
                    # this process's limit, which says nothing about the file
                    raise MemoryError(error.strerror) from error
                continue
            if self.owned or _is_signed(data, payload.layout, self._key):
                return unpack.unpack(data, payload.layout, self._key, namespace)
        raise self._results_lost(rank)

    def _brought(self, rank: int, mirror: Mirror) -> memoryview:
        """Fetch a rank's result from a pool on another machine."""
        try:
            descriptor = mirror.in_memory(f"result-{rank}.bin")
        except RunFileUnknown:
            raise self._results_lost(rank) from None
        except OSError as error:
            raise SerializationError(
                f"there is no room here for the result of rank {rank} of run {short(self.run_id)}: {error.strerror}. "
                "Free some memory or disk; `%sgpu_attach` fetches it again."
            ) from error
        try:
            return memoryview(unpack.map_private(descriptor, os.fstat(descriptor).st_size))
        finally:
            os.close(descriptor)

    def _results_lost(self, rank: int) -> SerializationError:
        return SerializationError(
            f"the result of rank {rank} of run {short(self.run_id)} is no longer available: it was fetched by another "
            f"notebook or its pool was stopped, and {self.directory} has no copy (the setting keep_results limits what "
            "is kept). Its output is above; run the cell again for its values."
        )

    def load_exception(
        self, layout: PackedLayout | None, frames: Sequence[bytes], namespace: dict[str, object]
    ) -> BaseException | None:
        """Unpack the exception of the rank that failed first; None if it was not sent or can't be rebuilt here."""
        if layout is None or not frames or not self._key:
            return None
        try:
            error = unpack.unpack(memoryview(bytearray(frames[0])), layout, self._key, namespace)
        except (SerializationError, SystemExit):
            # rebuilding an exception runs code of its class
            return None
        return error if isinstance(error, BaseException) else None

    def close(self) -> None:
        """Stop receiving events. The pool keeps sending the run's owner the events that it needs."""
        if self.on_done is not None:
            self.on_done()
        if self._line is not None:
            self._line.unfollow(self.run_id)
        last = self.link.unfollow(self.run_id, self._events)
        if last and not self.owned and not self.link.lost.is_set():
            self.link.send(Unfollow(run_id=self.run_id))


def _size(layout: PackedLayout) -> int:
    """Return the size of a packed object in bytes."""
    return max((offset + size for offset, size in layout.buffers), default=layout.pickle_size)


class RankValues(msgspec.Struct):
    """What one rank returned: the names of `--out` and the last expression's value."""

    names: dict[str, object]
    value: object

    @classmethod
    def from_content(cls, content: object, rank: int) -> RankValues:
        """Build it from the dict that a rank sends: `{"names": {...}, "value": ...}`."""
        if not isinstance(content, dict):
            raise SerializationError(f"rank {rank} sent a malformed result.")
        parts = cast("dict[str, Any]", content)
        return cls(parts["names"], parts["value"])


def _is_signed(data: memoryview, layout: PackedLayout, key: bytes) -> bool:
    """Whether these bytes are signed by the run: its descriptor's number may have been reused for another file."""
    if layout.pickle_size > data.nbytes:
        return False
    return hmac.compare_digest(unpack.compute_mac(key, data[: layout.pickle_size], layout.buffers), layout.mac)


def map_file(path: str, inode: int = 0) -> memoryview:
    """Map a file of packed bytes privately: the caller's changes do not reach the file.

    Args:
        path: The file, or `/proc/PID/fd/N` of another process.
        inode: Inode that an unlinked memory file must have; 0 accepts any file.

    Raises:
        OSError: The file is gone, or the descriptor belongs to another file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if inode and (status.st_ino, status.st_nlink) != (inode, 0):
            raise FileNotFoundError(path)
        return memoryview(unpack.map_private(descriptor, status.st_size))
    finally:
        os.close(descriptor)
