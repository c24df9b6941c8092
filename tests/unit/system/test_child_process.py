"""Child processes connected by a socket: real programs that are started, lost, restarted and ended."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sgpu_magic.system import child_process
from sgpu_magic.system.child_process import ChildProcess
from sgpu_magic.wire import codec
from sgpu_magic.wire.tracking import EndTracker, FromTracker, TrackingDone

# reports its working directory and arguments, then runs until its socket ends, or ends at once
_SAYS = """
import os, socket, sys
from sgpu_magic.wire.codec import frame
from sgpu_magic.wire.tracking import TrackingDone
link = socket.socket(fileno=int(sys.argv[1]))
link.sendall(frame(TrackingDone(run_id=" ".join([os.getcwd(), sys.stdin.read(), *sys.argv[2:]]), complete=True)))
print("words", flush=True)
if "leaves" not in sys.argv:
    while link.recv(4096) and "stubborn" in sys.argv:
        pass
    if "stubborn" in sys.argv:
        import time
        time.sleep(60)
"""
_COMMAND = [sys.executable, "-c", _SAYS]


async def until(condition: Callable[[], object], deadline_s: float = 30.0) -> None:
    end = asyncio.get_running_loop().time() + deadline_s
    while not condition():
        assert asyncio.get_running_loop().time() < end
        await asyncio.sleep(0.01)


def test_a_program_has_its_order_its_log_and_a_session_of_its_own(tmp_path: Path):
    log = tmp_path / "words.log"
    ours, child = child_process.start(_COMMAND, ["further"], log=log, order=b"secret")
    with ours:
        reader = codec.FrameReader(codec.from_tracker)
        ((sent, _),) = reader.feed(ours.recv(4096))
        assert sent == TrackingDone(run_id="/ secret further", complete=True)
        assert os.getsid(child.pid) == child.pid
    assert child.wait(10) == 0
    assert log.read_text() == "words\n"
    assert stat.S_IMODE(log.stat().st_mode) == 0o600


def test_what_cannot_be_started_leaves_no_descriptor():
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(FileNotFoundError):
        child_process.start(["/no/such/program"])
    assert set(os.listdir("/proc/self/fd")) == before


class Kept:
    """A child process and its messages."""

    def __init__(self, *arguments: str, pauses_s: tuple[float, ...] = (0.01, 30.0)) -> None:
        self.sent: list[FromTracker] = []
        self.begun = 0
        self.wanted = True
        self.started: list[subprocess.Popen[bytes]] = []
        self._arguments = arguments
        self.process = ChildProcess(
            self._start,
            codec.from_tracker,
            self.sent.append,
            pauses_s=pauses_s,
            wanted=lambda: self.wanted,
            begun=self._begun,
        )

    def _start(self) -> child_process.Started:
        ours, child = child_process.start(_COMMAND, self._arguments)
        self.started.append(child)
        return ours, child

    def _begun(self) -> None:
        self.begun += 1


def test_one_that_ends_is_started_again_after_growing_pauses():
    async def story() -> None:
        kept = Kept("leaves")
        kept.process.begin()
        # the second pause is longer than the test
        await until(lambda: kept.process.ends == 2)
        assert kept.begun == len(kept.started) == 2
        assert kept.process.pid is None
        kept.process.begin()
        assert kept.begun == 2, "it waits for its time"
        kept.process.well()
        kept.process.begin_again()
        assert kept.process.pid == kept.started[2].pid
        await until(lambda: len(kept.sent) == 3)
        kept.process.end(EndTracker(), 10.0)
        # a child that has ended by itself is reaped soon
        await until(lambda: all(child.poll() is not None for child in kept.started))

    asyncio.run(story())


def test_one_that_nobody_wants_is_not_started_again():
    async def story() -> None:
        kept = Kept()
        kept.process.begin()
        await until(lambda: kept.sent)
        kept.wanted = False
        os.kill(kept.started[0].pid, signal.SIGKILL)
        await until(lambda: kept.process.pid is None and kept.started[0].poll() is not None)
        assert (kept.begun, kept.process.ends) == (1, 0)

    asyncio.run(story())


def test_the_end_is_said_and_waited_for():
    async def story() -> None:
        obeys, stays = Kept(), Kept("stubborn")
        for kept in (obeys, stays):
            kept.process.begin()
            await until(lambda kept=kept: kept.sent)
        obeys.process.end(EndTracker(), 10.0)
        stays.process.end(EndTracker(), 0.05)
        assert obeys.started[0].returncode == 0
        assert stays.started[0].returncode == -signal.SIGKILL

    asyncio.run(story())


def test_one_that_can_not_be_started_is_tried_again():
    async def story() -> None:
        failed: list[OSError] = []
        kept = Kept()
        kept.process.failed = failed.append
        real, kept.process.start = kept.process.start, lambda: child_process.start(["/no/such/program"])
        kept.process.begin()
        assert [error.filename for error in failed] == ["/no/such/program"]
        assert (kept.process.pid, kept.begun) == (None, 0)
        kept.process.start = real
        await until(lambda: kept.sent)
        assert kept.begun == 1
        kept.process.end(EndTracker(), 10.0)

    asyncio.run(story())
