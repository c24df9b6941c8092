"""Events of runs for the pool service, kept until it has written them to disk; requests for files at the pool.

A pool service can be killed after it has read an event and before the event is on disk. Events are therefore numbered
per run and kept here until the service confirms them; those that it lacks are sent again to the next service.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from sgpu_magic.wire.base import Record
from sgpu_magic.wire.events import EventBody, PayloadReleased, RunEnded
from sgpu_magic.wire.files import NodeFileReply, NodeFileRequest
from sgpu_magic.wire.node import DevicesFree, MasterBound, PartEnded, RanksGone, RunEvent, TrackingAsked
from sgpu_magic.wire.rank_events import CommsMoved, DisplayPublished, OutputWritten

# limit for output, displays and widget data, of all runs together, that is kept for the next service; text beyond it is
# still in the ranks' logs
_KEPT_BYTES = 64 << 20
# a smaller display or message of widgets is always kept
_SMALL_BYTES = 512


FileAnswer = tuple[str | None, Sequence[bytes]]
"""Why a `NodeFileRequest` failed, None for success, and the raw frames of the answer."""


class Send(Protocol):
    """Sends to the pool service, or does nothing while there is none."""

    def __call__(self, message: Record, frames: Sequence[bytes] = (), descriptors: Sequence[int] = (), /) -> None: ...


_Event = tuple[RunEvent, Sequence[bytes]]

OnEvent = Callable[[RunEvent, Sequence[bytes]], None]
"""Takes an event of a run, with its raw frames."""


class _ReportedRun(msgspec.Struct):
    """What was reported about one run.

    Args:
        number: The number of its newest event.
        unkept: Events that no service has confirmed, oldest first.
        adopted: Whether the current service knows the run, so that events are sent at once.
        on_event: Gets each event too; None for a run that the service has launched.
        ended: Whether its `RunEnded` was reported.
        part: The report that this node's part of a multi-node run has ended; None before.
        ranks: The report that its processes are gone: `DevicesFree` while files are still being sent to the pool, then
            `RanksGone`; None before.
    """

    number: int = 0
    unkept: deque[_Event] = msgspec.field(default_factory=deque[_Event])
    adopted: bool = True
    on_event: OnEvent | None = None
    ended: bool = False
    part: PartEnded | None = None
    ranks: DevicesFree | RanksGone | None = None


class EventReports:
    """Reports events to the pool service.

    Args:
        send: Sends to the current service.
        kept_bytes: Size of the events that are kept while there is no service; output beyond it is dropped.
    """

    def __init__(self, send: Send, kept_bytes: int = _KEPT_BYTES) -> None:
        self._send = send
        self._kept_bytes = kept_bytes
        self._runs: dict[str, _ReportedRun] = {}
        self._bytes = 0

    def report(self, run_id: str, body: EventBody, frames: Sequence[bytes]) -> None:
        """Number, keep and send an event."""
        reported = self._runs.setdefault(run_id, _ReportedRun())
        reported.number += 1
        reported.ended = reported.ended or isinstance(body, RunEnded)
        event = RunEvent(run_id=run_id, number=reported.number, at=time.time(), body=body)
        self._bytes += _size(event, frames)
        if self._bytes > self._kept_bytes:
            self._drop_output()
        reported.unkept.append((event, frames))
        if reported.on_event is not None:
            reported.on_event(event, frames)
        if reported.adopted:
            self._send(event, frames)

    def begin(self, run_id: str, number: int) -> None:
        """Prepare for a run that the service has launched, or launched again.

        Args:
            run_id: The run.
            number: The number of its newest event, which may have come from another agent.
        """
        reported = self._runs.setdefault(run_id, _ReportedRun())
        reported.ended, reported.part, reported.ranks = False, None, None
        reported.number = max(reported.number, number)

    def begin_unknown(self, run_id: str, on_event: OnEvent) -> None:
        """Prepare for a run that the service does not know yet: its events are kept until `adopt`.

        Args:
            run_id: The run.
            on_event: Gets each event at once.
        """
        self._runs[run_id] = _ReportedRun(adopted=False, on_event=on_event)

    def part_ended(self, run_id: str) -> None:
        """Report that this node's part of a multi-node run has ended; `RunEnded` follows its results to the pool."""
        reported = self._runs.setdefault(run_id, _ReportedRun())
        reported.part = PartEnded(run_id=run_id)
        if reported.adopted:
            self._send(reported.part)

    def devices_free(self, run_id: str) -> None:
        """Report that every process of the run is dead and reaped; `ranks_exited` follows when its files are sent."""
        self._ranks_are(DevicesFree(run_id=run_id))

    def ranks_exited(self, run_id: str) -> None:
        """Report that every process of the run is dead and reaped, and that its files are at the pool."""
        self._ranks_are(RanksGone(run_id=run_id))

    def ask(self, message: TrackingAsked | MasterBound) -> None:
        """Ask for a run's MLflow target, or report its rendezvous address.

        Dropped while no service has adopted the run; ask again after adoption.
        """
        reported = self._runs.get(message.run_id)
        if reported is not None and reported.adopted:
            self._send(message)

    def confirmed(self, run_id: str, number: int) -> None:
        """Drop the run's events up to `number`: the service has them on disk."""
        reported = self._runs.get(run_id)
        if reported is None:
            return
        while reported.unkept and reported.unkept[0][0].number <= number:
            self._bytes -= _size(*reported.unkept.popleft())

    def service_lost(self) -> None:
        """Hold all events back until the next service has adopted the runs."""
        for reported in self._runs.values():
            reported.adopted = False

    def adopt(self, run_id: str, number: int) -> None:
        """Send the events after `number`: the current service has taken the run over."""
        reported = self._runs.get(run_id)
        if reported is None:
            # dropped since the introduction, because its ranks exited a while ago
            self._send(RanksGone(run_id=run_id))
            return
        self.confirmed(run_id, number)
        reported.adopted = True
        if reported.part is not None:
            self._send(reported.part)
        for event, frames in reported.unkept:
            self._send(event, frames)
        if reported.ranks is not None:
            self._send(reported.ranks)

    def has_unkept(self, run_id: str) -> bool:
        """Whether a service still needs events of the run, other than `PayloadReleased`.

        True at least until `ranks_exited`, that is until the run's files are at the pool.
        """
        reported = self._runs.get(run_id)
        if reported is None:
            return False
        have_exited = isinstance(reported.ranks, RanksGone)
        return not have_exited or any(not isinstance(event.body, PayloadReleased) for event, _ in reported.unkept)

    def has_ended(self, run_id: str) -> bool:
        """Whether the run's `RunEnded` was reported, or the run is unknown."""
        reported = self._runs.get(run_id)
        return reported is None or reported.ended

    def have_ranks_exited(self, run_id: str) -> bool:
        """Whether the run's ranks are gone, or the run is unknown."""
        reported = self._runs.get(run_id)
        return reported is None or isinstance(reported.ranks, RanksGone)

    def forget(self, run_id: str) -> None:
        """Forget the run: nothing more will happen to it."""
        reported = self._runs.pop(run_id, None)
        if reported is not None:
            self._bytes -= sum(_size(event, frames) for event, frames in reported.unkept)

    def _ranks_are(self, word: DevicesFree | RanksGone) -> None:
        reported = self._runs.setdefault(word.run_id, _ReportedRun())
        reported.ranks = word
        if reported.adopted:
            self._send(word)

    def _drop_output(self) -> None:
        """Drop the output that kept events carry; the events themselves stay, since they are numbered."""
        for reported in self._runs.values():
            for at, (event, frames) in enumerate(reported.unkept):
                if size := _size(event, frames):
                    self._bytes -= size
                    reported.unkept[at] = msgspec.structs.replace(event, body=_without_output(event.body, size)), ()


class FileRequests:
    """The agent's requests for parts of files at the pool, sent again to each new service until they are answered.

    Args:
        send: Sends to the current service.
        kept_bytes: Size of the events that are kept while there is no service; output beyond it is dropped.
    """

    def __init__(self, send: Send, kept_bytes: int = _KEPT_BYTES) -> None:
        self._send = send
        self._kept_bytes = kept_bytes
        self._numbers = itertools.count(1)
        self._asked: dict[int, tuple[NodeFileRequest, Sequence[bytes], asyncio.Future[FileAnswer]]] = {}

    def ask(self, request: NodeFileRequest, frames: Sequence[bytes] = ()) -> asyncio.Future[FileAnswer]:
        """Number and send a request. Cancel the future if the answer is no longer needed."""
        number = next(self._numbers)
        request = msgspec.structs.replace(request, request=number)
        answer: asyncio.Future[FileAnswer] = asyncio.get_running_loop().create_future()
        answer.add_done_callback(lambda _: self._asked.pop(number, None))
        self._asked[number] = request, frames, answer
        self._send(request, frames)
        return answer

    def answered(self, answer: NodeFileReply, frames: Sequence[bytes]) -> None:
        """Handle the pool's answer."""
        asked = self._asked.pop(answer.request, None)
        if asked is not None and not asked[2].done():
            asked[2].set_result((answer.problem, frames))

    def on_service_connected(self) -> None:
        """Send all unanswered requests to the new service."""
        for request, frames, _ in list(self._asked.values()):
            self._send(request, frames)


def _size(event: RunEvent, frames: Sequence[bytes]) -> int:
    """Return the number of bytes that `_without_output` would save, 0 for an event that is kept as it is."""
    body = event.body
    match body:
        case OutputWritten():
            return len(body.text)
        case DisplayPublished():
            size = len(body.bundle) + len(body.metadata)
        case CommsMoved():
            size = sum(len(each.data) + len(each.metadata) for each in body.messages) + sum(map(len, frames))
        case _:
            return 0
    return size if size > _SMALL_BYTES else 0


def _without_output(body: EventBody, size: int) -> EventBody:
    match body:
        case OutputWritten():
            skipped_lines = body.skipped_lines + body.text.count("\n")
            return msgspec.structs.replace(
                body, text="", skipped_bytes=body.end - body.start, skipped_lines=skipped_lines
            )
        case DisplayPublished():
            text = f"[a display of {size:,} bytes was left out: no pool service came to take it in time]"
            return msgspec.structs.replace(body, bundle=msgspec.json.encode({"text/plain": text}), metadata=b"{}")
        case CommsMoved():
            return msgspec.structs.replace(body, messages=tuple(each for each in body.messages if each.kind == "close"))
        case _:
            return body
