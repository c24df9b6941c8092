"""Lines of sessions: connections to the agent of a session's ranks, over which cells start without the pool service."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Sequence

import msgspec

from sgpu_magic.client.connector import ask
from sgpu_magic.client.link import PoolLink, PoolLost
from sgpu_magic.client.send_queue import EventQueue
from sgpu_magic.errors import SgpuError
from sgpu_magic.system.message_stream import StreamConnection
from sgpu_magic.wire import codec
from sgpu_magic.wire.base import Record, RunState
from sgpu_magic.wire.client import LineOpened, OpenLine, Submit
from sgpu_magic.wire.events import Event, EventBody, Placed, RanksStarted, RunEnded, StateChanged
from sgpu_magic.wire.node import RunEvent
from sgpu_magic.wire.session_line import CellRefused, EnterLine, FromLine

_ANSWER_TIMEOUT_S = 2.0
# a larger message may fill the socket's buffer, and its sending could be interrupted in the middle
_MOST_BYTES = 1 << 17


class SessionLine:
    """The connection to the agent of one session. Methods are thread-safe.

    Args:
        opened: Where the agent listens, and the token that it admits.

    Attributes:
        lost: Set when the agent has closed the connection, or died.

    Raises:
        OSError: The agent can't be reached.
    """

    def __init__(self, opened: LineOpened) -> None:
        self.lost = threading.Event()
        self._followed: dict[str, _Followed] = {}
        self._lock = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._stream = StreamConnection[FromLine](self._socket, codec.from_line)
        try:
            self._socket.connect(opened.path)
            self._stream.send(EnterLine(token=opened.token))
        except BaseException:
            self._stream.close()
            raise
        self._thread = threading.Thread(target=self._work, name="sgpu-line", daemon=True)
        self._thread.start()

    def submit(self, message: Submit, frames: Sequence[bytes], placed: Placed, events: EventQueue) -> bool:
        """Send a cell. Its events, or `CellRefused`, follow.

        Args:
            message: The submission, with an inline payload.
            frames: Its raw frames.
            placed: The devices that the cell has.
            events: Receives the cell's events, numbered by the agent.

        Returns:
            Whether it was sent; False if it is too large or the agent is gone.
        """
        if len(framed := codec.frame(message, frames)) > _MOST_BYTES:
            return False
        run_id = message.spec.run_id
        with self._lock:
            if self.lost.is_set():
                return False
            self._followed[run_id] = _Followed(events, placed)
        try:
            self._stream.send_frame(framed)
        except OSError:
            self.unfollow(run_id)
            return False
        return True

    def send(self, message: Record, frames: Sequence[bytes] = ()) -> bool:
        """Send a message. Returns whether it was sent; False if the agent is gone."""
        try:
            self._stream.send(message, frames)
        except OSError:
            return False
        return True

    def unfollow(self, run_id: str) -> None:
        """Stop receiving a cell's events."""
        with self._lock:
            self._followed.pop(run_id, None)

    def close(self) -> None:
        """Close the connection and end its thread."""
        # the agent may have closed it
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        if self._thread is not threading.current_thread():
            self._thread.join(5.0)

    def _work(self) -> None:
        try:
            while (received := self._stream.receive()) is not None:
                self._dispatch(*received)
        except (OSError, ValueError, msgspec.DecodeError):
            # an agent of another version: the pool has the run's events
            pass
        finally:
            with self._lock:
                self.lost.set()
                followed, self._followed = list(self._followed.values()), {}
            self._stream.close()
            for each in followed:
                each.events.put(None)

    def _dispatch(self, message: FromLine, frames: Sequence[bytes]) -> None:
        with self._lock:
            followed = self._followed.get(message.run_id)
        if followed is None:
            return
        if isinstance(message, CellRefused):
            self.unfollow(message.run_id)
            followed.events.is_refused = True
            followed.events.put(None)
            return
        has_started = isinstance(message.body, RanksStarted)
        if has_started:
            # the pool reports these to the others that follow the run
            followed.put(message, followed.placed)
        followed.put(message, message.body, message.number, frames)
        if has_started:
            followed.put(message, StateChanged(state=RunState.RUNNING))
        elif isinstance(message.body, RunEnded):
            self.unfollow(message.run_id)


class _Followed(msgspec.Struct, frozen=True):
    """A cell whose events come over the line.

    Args:
        events: Where they are put.
        placed: The devices that it has.
    """

    events: EventQueue
    placed: Placed

    def put(self, message: RunEvent, body: EventBody, number: int = 0, frames: Sequence[bytes] = ()) -> None:
        """Put an event at the time of the agent's message; without a number, it is none of the agent's."""
        self.events.put((Event(run_id=message.run_id, seq=0, at=message.at, body=body, number=number), frames))


class SessionLines:
    """The lines of this process's sessions. Thread-safe.

    A cell may go over its session's line only if no other run of the session is under way here: a run that waits at the
    pool service was submitted before it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pid = os.getpid()
        # by session; None where the pool service has no line for it
        self._lines: dict[str, SessionLine | None] = {}
        # the runs that have not ended, by session
        self._under_way: dict[str, set[str]] = {}

    def begin(self, session: str, run_id: str) -> bool:
        """Note a run of a session. Returns whether it is the only one under way."""
        with self._lock:
            runs = self._under_way.setdefault(session, set())
            runs.add(run_id)
            return len(runs) == 1

    def end(self, session: str, run_id: str) -> None:
        """Note that a run has ended, or is not followed any more."""
        with self._lock:
            runs = self._under_way.get(session, set())
            runs.discard(run_id)
            if not runs:
                self._under_way.pop(session, None)

    def get(self, session: str) -> SessionLine | None:
        """Return the session's line if it is open."""
        line = self._lines.get(session)
        return line if line is not None and not line.lost.is_set() and os.getpid() == self._pid else None

    def opened(self, session: str, link: PoolLink) -> SessionLine | None:
        """Return the session's line, opened if needed; None if there is none."""
        if (line := self.get(session)) is not None or not link.welcome.near:
            return line
        with self._lock:
            if session in self._lines and self._lines[session] is None:
                return None
            try:
                line = SessionLine(ask(link, OpenLine(request=0, session=session), LineOpened, _ANSWER_TIMEOUT_S))
            except PoolLost:
                return None
            except (OSError, SgpuError):
                line = None
            self._lines = {one: kept for one, kept in self._lines.items() if kept is None or not kept.lost.is_set()}
            self._lines[session] = line
            return line

    def close(self) -> None:
        """Close all lines; a no-op in a fork, which shares their sockets."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            lines, self._lines = list(self._lines.values()), {}
        for line in lines:
            if line is not None:
                line.close()
