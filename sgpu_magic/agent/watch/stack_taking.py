"""Requests the stacks of a run's ranks and waits for the answers, at most half a second.

Each rank gets two requests: a signal, which faulthandler answers even while C code holds the GIL, and a message, which
the rank's helper thread answers from torch's flight recorder. If a rank does not answer the signal, for example after
SIGSTOP, py-spy reads its stack where it is installed and permitted.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil

from sgpu_magic.agent import faults
from sgpu_magic.agent.faults import call_in_background
from sgpu_magic.agent.ranks.group import RankProcess, RunRanks
from sgpu_magic.agent.ranks.rank_process import NotebookFrames, parse
from sgpu_magic.agent.ranks.stop import catches
from sgpu_magic.system import child_process
from sgpu_magic.wire.codec import STACK_SIGNAL
from sgpu_magic.wire.decoding import decode_json
from sgpu_magic.wire.rank import AskCollectives, Collectives
from sgpu_magic.wire.rank_events import Collective, RankStack, StackFrame

Done = Callable[[tuple[RankStack, ...]], None]
_POLL_S = 0.01
# wait at most this long for the ranks' answers
_PATIENCE_S = 0.25
_PY_SPY_TIMEOUT_S = 0.2


class StackTaker:
    """Takes the stacks of one run's ranks. Concurrent requests share one answer.

    Args:
        run_ranks: The ranks.
        notebook: Recognizes the cell's frames.
        has_reported: Returns whether a rank's cell has finished or failed.

    Attributes:
        entered_at: When each rank entered its last reported collective, seconds since the epoch.
    """

    def __init__(self, run_ranks: RunRanks, notebook: NotebookFrames, has_reported: Callable[[int], bool]) -> None:
        self._run_ranks = run_ranks
        self._notebook = notebook
        self.has_reported = has_reported
        self.entered_at: dict[int, float] = {}
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count(1)
        self._taking: _Taking | None = None
        self._next: list[Done] = []

    def take(self, done: Done, *, gently: bool = False) -> None:
        """Call `done` with one stack for each rank, within half a second.

        Args:
            done: Receives the stacks.
            gently: Send no signal, which may interrupt a wait in C code; use each rank's own last sample. While C code
                holds the GIL, that sample is outdated.
        """
        done = faults.bound(done)
        if self._taking is not None:
            if self._taking.gently and not gently:
                self._next.append(done)
            else:
                self._taking.listeners.append(done)
            return
        taking = self._taking = _Taking(next(self._numbers), self._loop.time() + _PATIENCE_S, [done], gently)
        with faults.guarded(functools.partial(self._faulted, taking)):
            for process in self._run_ranks.ranks:
                problem = self._ask(process, taking)
                if problem:
                    taking.problems[process.rank] = problem
            self._loop.call_later(_POLL_S, self._poll, taking)

    def _faulted(self, taking: _Taking, error: Exception) -> None:
        """Answer in any case: the end of the run may wait for the stacks."""
        problem = f"an internal error in the agent: {error!r}"
        self._answer(taking, tuple(RankStack(rank=rank, problem=problem) for rank in self._run_ranks.numbers))

    def answered(self, rank: int, message: Collectives) -> None:
        """Handle a rank's answer from its flight recorder."""
        if self._taking is not None and message.request == self._taking.request:
            self._taking.collectives[rank] = message.current
            self.entered_at[rank] = message.entered_at

    # ------------------------------------------------------------ internals

    def _ask(self, process: RankProcess, taking: _Taking) -> str:
        """Request a rank's stack; return why there is none, "" if it was requested."""
        if process.pid is None:
            return "it has not started yet"
        if process.exit_status is not None:
            return "its process has ended"
        if self.has_reported(process.rank):
            return "its cell has ended"
        if taking.gently:
            taking.frames[process.rank] = self._notebook.upwards(parse(process.stack_file.sampled()))
        else:
            self._signal(process)
        if process.stream is not None:
            process.stream.send(AskCollectives(request=taking.request))
        return ""

    def _signal(self, process: RankProcess) -> None:
        process.stack_file.forget()
        # without a handler the signal kills: just after the fork, or if the user's code has removed it
        if process.pid is not None and catches(process.pid, STACK_SIGNAL) is not False:
            process.signal(STACK_SIGNAL)

    def _poll(self, taking: _Taking) -> None:
        late = self._loop.time() >= taking.deadline
        missing: list[RankProcess] = []
        waiting = False
        for process in self._run_ranks.ranks:
            rank = process.rank
            if rank in taking.problems:
                continue
            if rank not in taking.frames:
                text = "" if process.stack_file.fd < 0 else process.stack_file.faulthandler_text()
                # faulthandler writes line by line; the text is complete when it has not grown
                if text and text == taking.texts.get(rank):
                    taking.frames[rank] = self._notebook.upwards(parse(text))
                else:
                    taking.texts[rank] = text
                    missing.append(process)
            waiting = waiting or rank not in taking.frames or rank not in taking.collectives
        if waiting and not late:
            self._loop.call_later(_POLL_S, self._poll, taking)
        elif missing and (py_spy := find_py_spy()):
            pids = {process.rank: process.pid for process in missing if process.pid is not None and process.alive}
            future = call_in_background(functools.partial(_ask_py_spy, py_spy, pids), "sgpu-py-spy")
            future.add_done_callback(lambda found: self._finish(taking, found.result()))
        else:
            self._finish(taking, {})

    def _finish(self, taking: _Taking, by_py_spy: dict[int, tuple[StackFrame, ...]]) -> None:
        stacks: list[RankStack] = []
        now = time.time()
        for process in self._run_ranks.ranks:
            rank = process.rank
            problem = taking.problems.get(rank)
            frames = taking.frames.get(rank)
            if frames is None:
                frames = self._notebook.upwards(by_py_spy.get(rank, ()))
                if not problem and not frames:
                    problem = _silence(process)
            elif not frames and not problem:
                problem = "it is not executing its cell: it is starting up or returning its result"
            collective = taking.collectives.get(rank)
            stacks.append(RankStack(rank=rank, frames=frames, collective=collective, problem=problem, taken_at=now))
        self._answer(taking, tuple(stacks))

    def _answer(self, taking: _Taking, stacks: tuple[RankStack, ...]) -> None:
        self._taking = None
        listeners, taking.listeners = taking.listeners, []
        for done in listeners:
            done(stacks)
        waiting, self._next = self._next, []
        for done in waiting:
            self.take(done)


class _Taking(msgspec.Struct):
    """A pending request, with the answers by rank."""

    request: int
    deadline: float
    listeners: list[Done]
    gently: bool
    problems: dict[int, str] = msgspec.field(default_factory=dict[int, str])
    texts: dict[int, str] = msgspec.field(default_factory=dict[int, str])
    frames: dict[int, tuple[StackFrame, ...]] = msgspec.field(default_factory=dict[int, tuple[StackFrame, ...]])
    collectives: dict[int, Collective | None] = msgspec.field(default_factory=dict[int, Collective | None])


def _silence(process: RankProcess) -> str:
    """Return why a rank did not answer, as far as the system can tell."""
    if not process.alive:
        return "its process has ended"
    try:
        state = psutil.Process(process.pid).status()
    except psutil.Error:
        state = ""
    if state in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
        return "its process is stopped (SIGSTOP or a debugger)"
    if state == psutil.STATUS_DISK_SLEEP:
        return "its process is blocked in the system, for example on a disk, and can't answer"
    return "it did not answer"


def find_py_spy() -> str:
    """Return the path of py-spy, beside this Python or on `PATH`; "" if it is not installed."""
    beside = Path(sys.executable).parent / "py-spy"
    return str(beside) if beside.exists() else shutil.which("py-spy") or ""


def _ask_py_spy(command: str, pids: dict[int, int]) -> dict[int, tuple[StackFrame, ...]]:
    """Dump the processes in parallel; leave out those that time out or can't be inspected."""
    arguments = [command, "dump", "--json", "--nonblocking", "--pid"]
    running: dict[int, subprocess.Popen[bytes]] = {}
    found: dict[int, tuple[StackFrame, ...]] = {}
    for rank, pid in pids.items():
        try:
            pipe = subprocess.PIPE
            running[rank] = child_process.popen([*arguments, str(pid)], stdout=pipe, stderr=subprocess.DEVNULL)
        except OSError:
            return found
    deadline = time.monotonic() + _PY_SPY_TIMEOUT_S
    for rank, process in running.items():
        try:
            text = process.communicate(timeout=max(0.0, deadline - time.monotonic()))[0]
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            continue
        found[rank] = parse_py_spy(text, pids[rank])
    return found


class _SpyFrame(msgspec.Struct):
    name: str
    filename: str
    line: int = 0


class _SpyThread(msgspec.Struct):
    frames: list[_SpyFrame]
    os_thread_id: int | None = None


def parse_py_spy(text: bytes, pid: int) -> tuple[StackFrame, ...]:
    """Parse `py-spy dump --json`: return the main thread's frames, innermost first; none for invalid output."""
    try:
        threads = decode_json(text, type=list[_SpyThread])
    except msgspec.DecodeError:
        return ()
    main = next((thread for thread in threads if thread.os_thread_id == pid), None)
    return tuple(StackFrame(frame.filename, frame.line, frame.name) for frame in main.frames) if main else ()
