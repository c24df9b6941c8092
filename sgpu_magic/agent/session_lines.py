"""Lines of sessions: connections over which notebooks send cells to the agent without the pool service.

The agent starts such a cell at once if its session is idle; otherwise the notebook submits it to the pool service. It
reports the cell to the service when the notebook has its end, or while it runs if it takes longer: from then on the
service holds it like any other run. What was not reported when a service ended is among the runs that the agent holds,
so that the next service takes it over.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Sequence
from pathlib import Path
from socket import socket as Socket

import msgspec
from msgspec.structs import replace

from sgpu_magic.agent import faults
from sgpu_magic.agent.launch import RunLauncher
from sgpu_magic.agent.reports import EventReports, Send
from sgpu_magic.agent.run_registry import RunRegistry
from sgpu_magic.agent.timers import PutOff
from sgpu_magic.config import Settings
from sgpu_magic.config.submission_checks import unfit, unstartable
from sgpu_magic.files.run_directory import why_no_run
from sgpu_magic.system.message_stream import Limits, MessageStream
from sgpu_magic.system.processes import write_log
from sgpu_magic.wire import codec
from sgpu_magic.wire.attachments import InlinePayload
from sgpu_magic.wire.base import RunState, is_valid_id
from sgpu_magic.wire.client import Cancel, ResultsReceived, SendComms, Submit
from sgpu_magic.wire.events import RanksStarted, RunEnded, StateChanged
from sgpu_magic.wire.node import Adopt, CellTaken, KillRanks, Launch, OfferLine, RunEvent
from sgpu_magic.wire.session_line import CellRefused, EnterLine, ToLine

# a cell that takes longer is reported to the pool service while it runs
_QUICK_S = 0.03
# an ended cell is reported when its front end has had time to send another one: the pool service then competes with
# nobody
_AFTER_END_S = 0.015
# cells that follow each other without a pause are reported together at last
_MOST_S = 0.1
# the notebook of a quick cell needs no event before its end
_STARTED_LATER_S = 0.02
# a connection has this long to present a token, and the token to arrive from the pool service
_ENTER_S = 5.0
# cells with larger payloads go through the pool service
_LIMITS = Limits(message_bytes=1 << 20, descriptors=0)


class _Unreported(msgspec.Struct, frozen=True):
    """A cell that the pool service does not know yet.

    Args:
        launch: What the agent has made of its submission.
        launched_at: When it was launched, on the loop's clock.
    """

    launch: Launch
    launched_at: float


class SessionLines:
    """The lines of an agent's sessions.

    Args:
        settings: The pool's settings.
        runs: The runs that the agent holds.
        launches: Starts the cells.
        reports: Numbers and keeps the cells' events.
        send: Sends to the current pool service.
    """

    def __init__(
        self, settings: Settings, runs: RunRegistry, launches: RunLauncher, reports: EventReports, send: Send
    ) -> None:
        self._settings = settings
        self._runs = runs
        self._launches = launches
        self._reports = reports
        self._send = send
        self._loop = asyncio.get_running_loop()
        # the session that a token leads to; each admits one connection
        self._offers: dict[bytes, str] = {}
        self._lines: set[_Line] = set()
        # the cells that the service does not know yet, by run id
        self._unreported: dict[str, _Unreported] = {}
        self._reporting = PutOff(self.report_now, _MOST_S)
        # whether the current service knows what the agent held when it connected
        self._is_introduced = False

    # ------------------------------------------------------------ from the agent

    def offer(self, order: OfferLine) -> None:
        """Admit a connection with this token, perhaps one that waits already."""
        self._offers[order.token] = order.session
        for line in list(self._lines):
            line.find_session()

    def accept(self, connection: Socket) -> None:
        """Take a connection, which then has a while to present its token."""
        self._lines.add(_Line(connection, self))

    def introduced(self) -> None:
        """Note that the service has been told of all runs that the agent holds: it takes over the unreported ones."""
        self._is_introduced = True
        # those that are left could not even be started
        self._unreported = {run_id: cell for run_id, cell in self._unreported.items() if self._runs.get(run_id) is None}
        self.report_now()

    def service_lost(self) -> None:
        """Note that the service is gone: what it does not know waits for the next one."""
        self._is_introduced = False

    def session_gone(self, run_id: str) -> None:
        """Close the session's lines, if the run is a session: its ranks are gone."""
        self._offers = {token: session for token, session in self._offers.items() if session != run_id}
        for line in [line for line in self._lines if line.session == run_id]:
            line.close()

    def close(self) -> None:
        """Close all lines: the agent ends."""
        self._reporting.cancel()
        for line in list(self._lines):
            line.close()

    def report_now(self) -> None:
        """Report the cells that the service does not know yet."""
        if not self._is_introduced:
            return
        for run_id, cell in list(self._unreported.items()):
            with faults.guarded(functools.partial(self._runs.faulted, run_id)):
                self._send(CellTaken(launch=cell.launch, started_s=self._loop.time() - cell.launched_at))
                self._reports.adopt(run_id, 0)
                # kept until here: after a fault it is reported again, which the service ignores
                del self._unreported[run_id]
                if (run := self._runs.get(run_id)) is not None:
                    run.on_order(Adopt(run_id=run_id, number=0), ())

    # ------------------------------------------------------------ from the lines

    def session_of(self, token: bytes) -> str:
        """Return the session that a token leads to, which admits no other connection then; "" for none so far."""
        return self._offers.pop(token, "")

    def closed(self, line: _Line) -> None:
        self._lines.discard(line)

    def submit(self, line: _Line, submit: Submit, frames: Sequence[bytes]) -> None:
        """Start a cell if its session is idle and takes it; otherwise refuse it."""
        run_id = submit.spec.run_id
        if (launch := self._launch_of(line.session, submit)) is None:
            line.send(CellRefused(run_id=run_id))
            return
        self._reports.begin_unknown(run_id, line.on_event)
        self._unreported[run_id] = _Unreported(launch, self._loop.time())
        with faults.guarded(functools.partial(self._runs.faulted, run_id)):
            self._launches.launch(launch, frames)
        self._reporting.put_off(_QUICK_S)

    def cell_ended(self) -> None:
        """Note that a line has sent a cell's end."""
        if self._unreported:
            self._reporting.put_off(_AFTER_END_S)

    def cancel(self, line: _Line, message: Cancel) -> None:
        """Stop a cell of the line's session, as the pool service would."""
        run = self._runs.get(message.run)
        if run is None or run.launch.spec.session != line.session:
            return
        with faults.guarded(functools.partial(self._runs.faulted, run.run_id)):
            if message.kill:
                run.on_order(KillRanks(run_id=run.run_id), ())
            elif not run.ended:
                self._reports.report(run.run_id, StateChanged(state=RunState.CANCELLING, reason=message.reason), ())
                self._runs.end(run, RunState.CANCELLED, message.reason)

    def order(self, line: _Line, message: SendComms | ResultsReceived, frames: Sequence[bytes]) -> None:
        """Pass a message on to a cell of the line's session, or to the session."""
        run = self._runs.get(message.run_id)
        if run is not None and line.session in (run.run_id, run.launch.spec.session):
            with faults.guarded(functools.partial(self._runs.faulted, run.run_id)):
                run.on_order(message, frames)

    # ------------------------------------------------------------ internals

    def _launch_of(self, session_id: str, submit: Submit) -> Launch | None:
        """Return how to launch a cell; None if it has to go through the pool service."""
        spec, session = submit.spec, self._runs.session(session_id)
        if session is None or not session.is_idle or not spec.in_session or spec.session != session_id:
            return None
        if not is_valid_id(spec.run_id) or self._runs.get(spec.run_id) is not None or unfit(spec):
            return None
        if spec.detach or spec.owner.process != session.launch.spec.owner.process or unstartable(submit):
            return None
        if submit.environment is not None or submit.code or submit.uploads:
            return None
        run_dir = self._settings.runs_path / spec.run_id
        if not isinstance(submit.payload.source, InlinePayload) or not _can_record(run_dir):
            return None
        return Launch(
            spec=replace(spec, submitted_at=time.time()),
            interpreter=submit.interpreter,
            context=submit.context,
            payload=submit.payload,
            tracking=submit.tracking,
            lease=session.launch.lease,
            run_dir=str(run_dir),
            over_line=True,
        )


class _Line:
    """One connection.

    Args:
        connection: The connected socket.
        lines: The lines of the agent.

    Attributes:
        session: Its session's run id; "" until the connection has presented a valid token.
    """

    def __init__(self, connection: Socket, lines: SessionLines) -> None:
        self.session = ""
        self._lines = lines
        self._token = b""
        self._stream = MessageStream[ToLine](
            connection,
            codec.to_line,
            self._on_message,
            lambda: lines.closed(self),
            gathers=True,
            limits=_LIMITS,
            on_damaged=lambda why: write_log(f"a connection to a session's line is closed: {why}\n"),
        )
        self._loop = asyncio.get_running_loop()
        self._late = self._loop.call_later(_ENTER_S, self._close_unless_entered)
        # the start of a cell, which is sent with the next event
        self._started: tuple[RunEvent, Sequence[bytes]] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def send(self, message: CellRefused | RunEvent, frames: Sequence[bytes] = ()) -> None:
        self._stream.send(message, frames)

    def on_event(self, event: RunEvent, frames: Sequence[bytes]) -> None:
        """Send an event of a cell that came over this line."""
        if isinstance(event.body, RanksStarted):
            self._started = event, frames
            self._timer = self._loop.call_later(_STARTED_LATER_S, self._send_started)
            return
        self._send_started()
        if isinstance(event.body, RunEnded):
            # the pool service computes its own times
            total_s = event.body.starting_s + event.body.running_s
            event = replace(event, body=replace(event.body, total_s=total_s))
            self._lines.cell_ended()
        self.send(event, frames)

    def find_session(self) -> None:
        """Find the session that the connection's token leads to, if it was offered by now."""
        if self._token and not self.session:
            self.session = self._lines.session_of(self._token)

    def close(self) -> None:
        self._late.cancel()
        self._stream.close()
        self._lines.closed(self)

    def _send_started(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (started := self._started) is not None:
            self._started = None
            self.send(*started)

    def _refuse(self, submit: Submit, _: Exception) -> None:
        """Leave a cell to the pool service, as a fault has kept it from being started here."""
        self.send(CellRefused(run_id=submit.spec.run_id))

    def _close_unless_entered(self) -> None:
        if not self.session:
            self.close()

    def _on_message(self, message: ToLine, frames: Sequence[bytes]) -> None:
        match message:
            case EnterLine(token=token) if not self._token:
                self._token = token
                self.find_session()
            case Submit():
                refuse = functools.partial(self._refuse, message)
                with faults.guarded(refuse):
                    self._lines.submit(self, message, frames)
            case Cancel():
                self._lines.cancel(self, message)
            case SendComms() | ResultsReceived():
                self._lines.order(self, message, frames)
            case EnterLine():
                pass


def _can_record(run_dir: Path) -> bool:
    """Whether the disk takes a run. Makes its directory."""
    try:
        run_dir.mkdir(mode=0o700, parents=True)
    except OSError:
        return False
    if why_no_run(run_dir.parent):
        with contextlib.suppress(OSError):
            run_dir.rmdir()
        return False
    return True
