"""What the agent tells the pool service of its runs: numbered by run, and kept until the service has written it down.

A pool service can be killed between the moment it reads an event and the moment it has it on disk. So events are
kept here until it says that it has them, and those that it lacks are sent again to the service that comes next.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import msgspec

from sgpu_magic.wire.events import EventBody, PayloadReleased, RunEnded
from sgpu_magic.wire.node import DevicesFree, MasterBound, PartEnded, RanksGone, RunEvent, TrackingAsked
from sgpu_magic.wire.rank_events import OutputWritten
from sgpu_magic.wire.record import Record

# output beyond this, of all runs together, is not kept for the next service: it lies in the ranks' logs
_KEPT_BYTES = 64 << 20


class Send(Protocol):
    """Sends to the pool service, or does nothing while there is none."""

    def __call__(self, message: Record, frames: Sequence[bytes] = (), descriptors: Sequence[int] = (), /) -> None: ...


class _Told(msgspec.Struct):
    """One run.

    Args:
        number: Of its newest event.
        unkept: Events that no service has confirmed, oldest first.
        adopted: The service of now knows the run, so events go on at once.
        ended: Its last word was said.
        part: Its last word waits for its results.
        ranks: Its processes are gone, and all that is to come has come; or files of it are not at the pool yet.
    """

    number: int = 0
    unkept: deque[tuple[RunEvent, Sequence[bytes]]] = msgspec.field(
        default_factory=deque[tuple[RunEvent, Sequence[bytes]]]
    )
    adopted: bool = True
    ended: bool = False
    part: PartEnded | None = None
    ranks: DevicesFree | RanksGone | None = None


class Reports:
    """Events on their way to the pool service.

    Args:
        send: Sends to the service of now.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._runs: dict[str, _Told] = {}
        self._bytes = 0

    def happened(self, run_id: str, body: EventBody, frames: Sequence[bytes]) -> None:
        """Number an event, keep it, send it."""
        told = self._runs.setdefault(run_id, _Told())
        told.number += 1
        told.ended = told.ended or isinstance(body, RunEnded)
        event = RunEvent(run_id=run_id, number=told.number, at=time.time(), body=body)
        self._bytes += _size(event)
        if self._bytes > _KEPT_BYTES:
            self._drop_text()
        told.unkept.append((event, frames))
        if told.adopted:
            self._send(event, frames)

    def begin(self, run_id: str, number: int) -> None:
        """The service has ordered the run, or ordered it again.

        Args:
            number: Of its newest event, which may have been another agent's.
        """
        told = self._runs.setdefault(run_id, _Told())
        told.ended, told.part, told.ranks = False, None, None
        told.number = max(told.number, number)

    def part_ended(self, run_id: str) -> None:
        """The part of a run of several nodes has ended here; its last word is said when its results are at the pool."""
        told = self._runs.setdefault(run_id, _Told())
        told.part = PartEnded(run_id=run_id)
        if told.adopted:
            self._send(told.part)

    def devices_free(self, run_id: str) -> None:
        """Every process of the run is dead and reaped; `gone` is said when its files are at the pool."""
        self._ranks_are(DevicesFree(run_id=run_id))

    def gone(self, run_id: str) -> None:
        """Every process of the run is dead and reaped, and nothing of it is on its way any more."""
        self._ranks_are(RanksGone(run_id=run_id))

    def ask(self, message: TrackingAsked | MasterBound) -> None:
        """Ask for a run's place in MLflow, or say where its ranks meet.

        A service that comes later is asked when it has adopted the run.
        """
        told = self._runs.get(message.run_id)
        if told is not None and told.adopted:
            self._send(message)

    def kept(self, run_id: str, number: int) -> None:
        """The service has the run's events up to `number` on disk."""
        told = self._runs.get(run_id)
        if told is None:
            return
        while told.unkept and told.unkept[0][0].number <= number:
            self._bytes -= _size(told.unkept.popleft()[0])

    def service_lost(self) -> None:
        """Nobody listens: hold everything back until the next service has adopted the runs."""
        for told in self._runs.values():
            told.adopted = False

    def adopt(self, run_id: str, number: int) -> None:
        """The service of now takes the run over and has its events up to `number`."""
        told = self._runs.get(run_id)
        if told is None:
            # forgotten since the service was told of it: its ranks have long been gone
            self._send(RanksGone(run_id=run_id))
            return
        self.kept(run_id, number)
        told.adopted = True
        if told.part is not None:
            self._send(told.part)
        for event, frames in told.unkept:
            self._send(event, frames)
        if told.ranks is not None:
            self._send(told.ranks)

    def has_unkept(self, run_id: str) -> bool:
        """Whether a service has yet to hear something of the run, other than what became of its payload.

        Until its files are at the pool there is at least that they are.
        """
        told = self._runs.get(run_id)
        if told is None:
            return False
        is_gone = isinstance(told.ranks, RanksGone)
        return not is_gone or any(not isinstance(event.body, PayloadReleased) for event, _ in told.unkept)

    def has_ended(self, run_id: str) -> bool:
        """Whether the run's last word was said, or nothing is known of the run."""
        told = self._runs.get(run_id)
        return told is None or told.ended

    def is_gone(self, run_id: str) -> bool:
        """Whether its ranks are gone, or nothing is known of the run."""
        told = self._runs.get(run_id)
        return told is None or isinstance(told.ranks, RanksGone)

    def forget(self, run_id: str) -> None:
        """Nothing more will happen to the run."""
        told = self._runs.pop(run_id, None)
        if told is not None:
            self._bytes -= sum(_size(event) for event, _ in told.unkept)

    def _ranks_are(self, word: DevicesFree | RanksGone) -> None:
        told = self._runs.setdefault(word.run_id, _Told())
        told.ranks = word
        if told.adopted:
            self._send(word)

    def _drop_text(self) -> None:
        for told in self._runs.values():
            for at, (event, frames) in enumerate(told.unkept):
                body = event.body
                if isinstance(body, OutputWritten) and body.text:
                    self._bytes -= _size(event)
                    skipped = msgspec.structs.replace(
                        body,
                        text="",
                        skipped_bytes=body.end - body.start,
                        skipped_lines=body.skipped_lines + body.text.count("\n"),
                    )
                    told.unkept[at] = (msgspec.structs.replace(event, body=skipped), frames)


def _size(event: RunEvent) -> int:
    return len(event.body.text) if isinstance(event.body, OutputWritten) else 0
