"""The process that writes a store's runs: it drops idle sessions and exits, and the pool starts it again on demand."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from sgpu_magic.config import Settings
from sgpu_magic.pool.tracker_process import TrackerProcess
from sgpu_magic.system import child_process
from sgpu_magic.wire.tracking import Track, Tracking, TrackingReport

# replies to each order; with run ids as arguments, rests and leaves those runs after the first order
_REPEATS = """
import socket, sys
from sgpu_magic.wire import codec
from sgpu_magic.wire.tracking import RunLogComplete, Track, TrackerRests, TrackingDone, TrackingTroubled
link = socket.socket(fileno=int(sys.argv[1]))
rests = sys.argv[2:]
reader = codec.FrameReader(codec.to_tracker)
while data := link.recv(4096):
    for message, _ in reader.feed(data):
        if isinstance(message, RunLogComplete):
            link.sendall(codec.frame(TrackingDone(run_id=message.run_id, complete=True)))
        elif isinstance(message, Track):
            how = "now" if message.urgent else "later"
            link.sendall(codec.frame(TrackingTroubled(run_id=message.run_id, text=how)))
        if rests:
            link.sendall(codec.frame(TrackerRests(run_ids=tuple(rests))))
            sys.exit()
"""


class Processes:
    """A tracker process whose first program rests.

    Attributes:
        sent: Run and text of each report.
        starts: The number of programs that were started.
        fails: The number of starts at first that the system refuses.
    """

    def __init__(self, rests: tuple[str, ...]) -> None:
        self.sent: list[tuple[str, str]] = []
        self.starts = 0
        self.fails = 0
        self._rests = rests
        self.process = TrackerProcess(Settings(), self._hear)

    def start(self, *_: object, **__: object) -> child_process.Started:
        self.starts += 1
        if self.starts <= self.fails:
            raise FileNotFoundError(2, "No such file or directory", "/gone/python")
        return _start([sys.executable, "-c", _REPEATS], self._rests if self.starts == 1 else ())

    async def until(self, condition: Callable[[], Any]) -> None:
        end = asyncio.get_running_loop().time() + 30
        while not condition():
            assert asyncio.get_running_loop().time() < end, (self.sent, self.starts)
            await asyncio.sleep(0.01)

    def _hear(self, message: TrackingReport) -> None:
        self.sent.append((message.run_id, getattr(message, "text", "done")))


_start = child_process.start


def order(run_id: str, *, urgent: bool = False) -> Track:
    return Track(run_id=run_id, run_dir=f"/runs/{run_id}", tracking=Tracking(), urgent=urgent)


def played(
    monkeypatch: pytest.MonkeyPatch, rests: tuple[str, ...], story: Callable[[Processes], Awaitable[None]]
) -> None:
    async def play() -> None:
        made = Processes(rests)
        monkeypatch.setattr(child_process, "start", made.start)
        try:
            await story(made)
        finally:
            made.process.close(5.0)

    asyncio.run(play())


async def resting(made: Processes) -> None:
    """Track the session `s` for a waiting rank, and let the process leave it."""
    made.process.track(order("s", urgent=True))
    await made.until(lambda: made.process.pid is None)
    assert (made.sent, made.starts) == ([("s", "now")], 1)


@pytest.mark.slow
def test_an_idle_session_that_ends_has_a_process_again(monkeypatch: pytest.MonkeyPatch):
    async def story(made: Processes) -> None:
        await resting(made)
        made.process.finish_run("s")
        # no rank waits for it any more
        await made.until(lambda: made.sent[1:] == [("s", "later"), ("s", "done")])
        assert made.starts == 2

    played(monkeypatch, ("s",), story)


@pytest.mark.slow
def test_the_next_run_has_a_process_that_also_knows_the_idle_session(monkeypatch: pytest.MonkeyPatch):
    async def story(made: Processes) -> None:
        await resting(made)
        made.process.track(order("r"))
        await made.until(lambda: sorted(made.sent[1:]) == [("r", "later"), ("s", "later")])
        made.process.hurry("r")
        assert made.starts == 2

    played(monkeypatch, ("s",), story)


def test_a_rank_that_waits_for_an_idle_session_has_a_process_at_once(monkeypatch: pytest.MonkeyPatch):
    async def story(made: Processes) -> None:
        await resting(made)
        made.process.hurry("s")
        await made.until(lambda: made.sent[1:] == [("s", "now")])

    played(monkeypatch, ("s",), story)


@pytest.mark.slow
def test_an_order_that_a_leaving_process_has_not_read_is_given_to_the_next(monkeypatch: pytest.MonkeyPatch):
    async def story(made: Processes) -> None:
        made.process.track(order("s"))
        made.process.finish_run("s")
        # it exited because of `s` alone, before it read that `s` is over
        await made.until(lambda: ("s", "done") in made.sent)
        assert made.starts == 2

    played(monkeypatch, ("s",), story)


@pytest.mark.slow
def test_where_the_process_can_not_be_started_the_runs_say_so_and_are_written_later(monkeypatch: pytest.MonkeyPatch):
    async def story(made: Processes) -> None:
        made.fails = 1
        made.process.track(order("r"))
        why = made.sent[0][1]
        assert "can't start the process that writes there (No such file or directory: /gone/python)" in why
        # a run that is tracked before the next attempt
        made.process.track(order("s"))
        assert made.sent == [("r", why), ("s", why)]
        await made.until(lambda: sorted(made.sent[2:]) == [("r", "later"), ("s", "later")])
        assert made.starts == 2

    played(monkeypatch, (), story)
